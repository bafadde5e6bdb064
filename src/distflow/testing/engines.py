"""Real container engines for tests: podman and dockerd, each with its own store and a generated image.

Both need root. No registry is used: the image has only empty directories, links to ``usr`` and a few files of ``/etc``. A test
mounts the machine's ``/usr`` into it.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import TracebackType

from distflow.testing.waiting import wait_until

__all__ = ["IMAGE", "ContainerEngine", "Dockerd", "Podman", "missing_dockerd", "missing_podman", "skeleton"]

IMAGE = "localhost/distflow-skeleton:1"
_EMPTY = ("usr", "etc", "tmp", "proc", "sys", "dev", "root", "var/tmp", "run", "home")
_FROM_ETC = ("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache", "alternatives")


def missing_podman() -> str:
    """Return the reason why podman cannot be tested here; empty if it can."""
    return _missing("podman", "runc")


def missing_dockerd() -> str:
    """Return the reason why dockerd cannot be tested here; empty if it can."""
    return _missing("dockerd", "docker", "containerd", "runc")


def _missing(*programs: str) -> str:
    if os.geteuid() != 0:
        return f"{programs[0]} with its own store needs root"
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"{lacking[0]} is not installed" if lacking else ""


class ContainerEngine:
    """A container engine that only this test uses."""

    program = ""

    def __init__(self, folder: Path) -> None:
        """Keep everything below ``folder``."""
        self.folder = folder
        self.environment: dict[str, str] = {}
        """Environment variables by which its command line finds it."""

    def run(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run its command line and return the output. Raises ``CalledProcessError``."""
        done = subprocess.run(
            [self.program, *arguments],
            env=os.environ | self.environment,
            input=stdin,
            capture_output=True,
            check=True,
            timeout=120,
        )
        return done.stdout.decode()

    def containers(self) -> list[str]:
        """Return the names of all containers, running or not."""
        return self.run("ps", "--all", "--format", "{{.Names}}").split()

    def import_image(self) -> None:
        """Create ``IMAGE``."""
        self.run("import", "-", IMAGE, stdin=skeleton())


class Podman(ContainerEngine):
    """podman with its own store."""

    program = "podman"

    def __init__(self, folder: Path) -> None:
        """Write its configuration."""
        super().__init__(folder)
        engine = folder / "containers.conf"
        # Inside other containers, crun fails on hybrid cgroups, and the default limits exceed the hard limits.
        engine.write_text(
            '[containers]\ndefault_ulimits=["nofile=20000:20000","nproc=32768:32768"]\n'
            '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
        )
        storage = folder / "storage.conf"
        storage.write_text(f'[storage]\ndriver="overlay"\nrunroot="{folder}/run"\ngraphroot="{folder}/graph"\n')
        self.environment = {"CONTAINERS_CONF": str(engine), "CONTAINERS_STORAGE_CONF": str(storage)}

    def __enter__(self) -> Podman:
        """Create the image."""
        self.import_image()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Remove all containers and images, and the mounts in the store, which would prevent the removal of the folder."""
        self.run("rm", "--force", "--all")
        self.run("rmi", "--force", "--all")
        _unmount(self.folder)


class Dockerd(ContainerEngine):
    """dockerd with its own socket, store and containerd."""

    program = "docker"

    def __init__(self, folder: Path) -> None:
        """Choose its paths."""
        super().__init__(folder)
        self._socket = folder / "docker.sock"
        self.environment = {"DOCKER_HOST": f"unix://{self._socket}", "DOCKER_CONFIG": str(folder / "client")}
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Dockerd:
        """Start the daemon and create the image."""
        with (self.folder / "dockerd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [
                    "dockerd", "--bridge=none", "--ip-forward=false", "--ip-masq=false",
                    "--iptables=false", "--ip6tables=false",
                    "--storage-driver", "overlay2", "--data-root", str(self.folder / "data"),
                    "--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "docker.pid"),
                    "--host", f"unix://{self._socket}",
                ],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, 60, "dockerd answers")
        self.import_image()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the daemon and its containers."""
        for name in self.containers():
            self.run("rm", "--force", name)
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(timeout=60)
        _unmount(self.folder)

    def _answers(self) -> bool:
        if self._daemon is not None and self._daemon.poll() is not None:
            raise RuntimeError((self.folder / "dockerd.log").read_text(errors="replace")[-2000:])
        done = subprocess.run([self.program, "version"], env=os.environ | self.environment, capture_output=True, check=False)
        return done.returncode == 0


def skeleton() -> bytes:
    """Return an image as a tar: empty directories, links to ``usr``, and the files of /etc that programs need."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _EMPTY:
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name in _FROM_ETC:
            if Path("/etc", name).exists():
                archive.add(Path("/etc", name), f"etc/{name}")
    return packed.getvalue()


def _unmount(folder: Path) -> None:
    """Remove the mounts that an engine leaves below its folder, because they prevent the removal of the folder."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in sorted((one for one in mounts if one.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True, timeout=30)
