"""Placing an attempt's files (text, blobs, archives and credentials). Only credentials may be outside its directory.

The files of all credentials are in one directory, with a numbered folder for each credential. The directory is in memory if
possible: ``/dev/shm/distflow-<uid>/<digest of the attempt's directory>/``, or else the attempt's ``credentials/``. Links lead
there from the paths that the task uses. Both locations follow from the attempt's directory, so that every process that ends
the attempt can remove the files: the keeper, the runner, or an agent after both have died.
"""

from __future__ import annotations

import binascii
import errno
import io
import json
import os
import stat

from distflow.protocol.light_typing import BinaryIO, Dict, List, Optional, Set
from distflow.runtime.files import log_files, masking
from distflow.runtime.files.blobs import is_complete, link_blob, path_of
from distflow.runtime.files.safe_files import check_mounts, path_inside
from distflow.runtime.guard import output
from distflow.runtime.hashing import sha256_hex
from distflow.runtime.untrusted import decode_object
from distflow.runtime.wire import MAX_LINE, Json, OpError

__all__ = [
    "LAUNCH",
    "MEMO",
    "SECRETS_ON_DISK",
    "can_place_in_agent",
    "checked",
    "memory_folder",
    "place",
    "place_secrets",
    "remove_secrets",
    "uses_secrets",
    "write_memo",
]


LAUNCH = "launch.json"
MEMO = "workflow.json"
"""A memo of the submitter about the attempt. The node does not interpret it."""
SECRETS_ON_DISK = "credentials"
"""Directory for files of credentials if they cannot be stored in memory."""
_RECORDS = {"launch.json", "workflow.json", "runner.json", "exit.json", ".exit.json", "error.json"}
_RESERVED = _RECORDS | {"placed", "control", "pair.log", "packed.json", "container.id", SECRETS_ON_DISK}
_RESERVED |= {output.RANKS, output.RANK_PYTHON}
_CHUNK = 1 << 30
_UNSUPPORTED = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}
"""Errors of ``copy_file_range`` if the file systems or the kernel do not support it."""


def can_place_in_agent(launch: Json) -> bool:
    """Return whether the files can be placed without a child process: no blobs, no archives and no mounted directories.

    A directory to mount may be on a file system that does not respond, which must not block the agent.
    """
    return not launch.get("mounts") and all(
        file.get("blob") is None and not file.get("is_tar") for file in launch.get("files") or []
    )


def checked(launch: Json) -> Json:
    """Return the launch. Raises ``bad_request`` if its command, variables or secrets are malformed."""
    argv = launch["argv"]
    if not isinstance(argv, list) or not argv or not all(isinstance(one, str) for one in argv):
        raise OpError("bad_request", "`argv` must be a list of strings with the program first")
    for name in ("env", "secret_env"):
        for key, value in (launch.get(name) or {}).items():
            if not isinstance(value, str) or not key or "=" in key or "\0" in key + value:
                raise OpError("bad_request", "`{}`: {!r} is not a valid environment variable".format(name, key))
    for entry in launch.get("secret_files") or []:
        for name, content in entry["files"].items():
            if not isinstance(content, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
                raise OpError("bad_request", "`secret_files`: the name or the content of {!r} is not valid".format(name))
    if len(masking.encoded(launch)) > masking.SECRET_BYTES:
        raise OpError("bad_request", "the task's secrets are larger than {} MiB".format(masking.SECRET_BYTES >> 20))
    if any("\0" in one for one in argv):
        raise OpError("bad_request", "an argument contains a NUL byte, which cannot be passed to a program")
    return launch


def place(root: str, directory: str, launch: Json) -> None:
    """Place all files of ``launch``, and write ``launch.json``. A repeated call is harmless.

    The caller must have replaced the placeholders of ``launch``.
    """
    check_mounts(launch.get("mounts") or [])
    link = launch.get("output_link")
    if link and os.path.islink(path_inside(directory, link)):
        os.unlink(path_inside(directory, link))  # from an earlier try: an archive must not unpack through it
    for file in launch.get("files") or []:
        _place(root, directory, file)
    place_secrets(directory, launch.get("secret_files") or [])
    for folder in (launch.get("cwd") or "work", *(launch.get("folders") or [])):
        os.makedirs(path_inside(directory, folder), exist_ok=True)
    if link:
        _link_output(directory, link)
    _write_launch(directory, launch)


def _link_output(directory: str, place: str) -> None:
    """Make ``place`` a link to the output directory. Files that were placed there are moved into the output."""
    link, output = path_inside(directory, place), path_inside(directory, "output")
    try:
        os.makedirs(output, exist_ok=True)
        os.makedirs(os.path.dirname(link), exist_ok=True)
        if os.path.isdir(link) and not os.path.islink(link):
            import shutil

            for name in os.listdir(link):
                target = os.path.join(output, name)
                if os.path.isdir(target) and not os.path.islink(target):
                    shutil.rmtree(target)  # an earlier call moved this directory
                os.rename(os.path.join(link, name), target)
            os.rmdir(link)
        elif os.path.islink(link):
            os.unlink(link)
        os.symlink(os.path.relpath(os.path.realpath(output), os.path.realpath(os.path.dirname(link))), link)
    except OSError as error:
        raise OpError.from_os(error, "cannot link `{}` to the output directory".format(place)) from error


def _write_launch(directory: str, launch: Json) -> None:
    """Write ``launch.json`` without the secrets and the gang link, which has a token."""
    path = os.path.join(directory, LAUNCH)
    public = {key: value for key, value in launch.items() if key not in ("secret_env", "secret_files", "gang")}
    public["secret_env_names"] = sorted(launch.get("secret_env") or {})
    public["secret_file_names"] = {entry["path"]: sorted(entry["files"]) for entry in launch.get("secret_files") or []}
    _rewrite(path, json.dumps(public, indent=1))


def write_memo(directory: str, memo: str) -> None:
    """Store the submitter's memo with the attempt."""
    _rewrite(os.path.join(directory, MEMO), memo)


def _rewrite(path: str, text: str) -> None:
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(path + ".new", path)


def uses_secrets(directory: str) -> bool:
    """Return whether the attempt's launch names secrets: False without ``launch.json``, True if it cannot be read."""
    try:
        with open(os.path.join(directory, LAUNCH), "rb") as file:
            launch = decode_object(file.read(MAX_LINE + 1), max_bytes=MAX_LINE)
        return bool(launch.get("secret_env_names") or launch.get("secret_file_names"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _place(root: str, directory: str, file: Json) -> None:
    relative = str(file["path"])
    first = os.path.normpath(relative).split("/")[0]
    if first in _RESERVED or log_files.is_output(first):
        raise OpError("bad_request", "{!r} is reserved for distflow's own files".format(relative))
    path = path_inside(directory, relative)
    try:
        if not file.get("is_tar") and _place_by_link(root, file, path):
            return
        if file.get("is_tar"):
            _place_tree(root, directory, file, path)
            return
        with _content(root, file) as source:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write(source, path, _mode_of(file))
            if file.get("blob") is not None and not is_complete(path_of(root, file["blob"])):
                raise _not_staged(file)  # the task that has a hard link to the blob changed it during the copy
    except OSError as error:
        raise OpError.from_os(error, "cannot place the file `{}`".format(relative)) from error


def _place_tree(root: str, directory: str, file: Json, path: str) -> None:
    """Unpack an archive.

    The plan makes an archive ``reusable`` if later attempts may take over its unpacked files (see ``placed_trees``). If it is
    ``reusable``, unpacked in full and not in the output, take over files of an ended attempt, and record the files for later
    attempts.
    """
    from distflow.runtime.files import placed_trees
    from distflow.runtime.files.unpacking import unpack

    is_reusable = bool(file.get("reusable") and file.get("blob")) and not file.get("only") and not file.get("within")
    is_reusable = is_reusable and not placed_trees.is_in_output(directory, path)
    present: Dict[str, Optional[str]] = {}
    missing: Optional[Set[str]] = None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if is_reusable:
        present, missing = placed_trees.take_over(root, file["blob"], path) or (present, missing)
    os.makedirs(path, exist_ok=True)
    names: Optional[List[str]] = []
    if missing is None or missing:
        with _content(root, file) as source:
            try:
                names = unpack(source, path, str(file.get("only") or ""), within=str(file.get("within") or ""), present=present)
            except OpError as error:
                raise OpError(error.kind, "cannot unpack `{}`: {}".format(file["path"], error.message)) from error
    if is_reusable and names is not None:
        placed_trees.record(
            root, directory, os.path.relpath(path, directory), file["blob"], {**present, **dict.fromkeys(names)}
        )


def _content(root: str, file: Json) -> BinaryIO:
    if file.get("text") is not None:
        return io.BytesIO(str(file["text"]).encode("utf-8", "surrogateescape"))
    if file.get("data") is not None:
        return io.BytesIO(binascii.a2b_base64(file["data"]))
    path = path_of(root, file.get("blob"))
    if not is_complete(path):
        raise _not_staged(file)
    return open(path, "rb")


def _not_staged(file: Json) -> OpError:
    text = "the blob `{}` of `{}` is not on this node, or a task changed it; send it again"
    return OpError("not_found", text.format(file.get("blob"), file["path"]))


def _place_by_link(root: str, file: Json, path: str) -> bool:
    """Place the blob itself as the file, by a hard link. Returns False if that is not possible."""
    if file.get("blob") is None or not is_complete(path_of(root, file["blob"])):
        return False
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = path + ".new"
    if os.path.lexists(new):
        os.unlink(new)
    if not link_blob(path_of(root, file["blob"]), new):
        return False
    os.chmod(new, _mode_of(file))
    os.rename(new, path)
    return True


def _mode_of(file: Json) -> int:
    return int(file.get("mode") or 0o600) & 0o777


def _write(source: BinaryIO, path: str, mode: int) -> None:
    new = path + ".new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as target:
        if isinstance(source, io.BytesIO):
            target.write(source.getbuffer())
        else:
            _copy(source, target)
        os.fchmod(target.fileno(), mode)
    os.rename(new, path)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file. Where the file system shares extents, no data is copied."""
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), _CHUNK):
            pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        while data := source.read(1 << 20):
            target.write(data)


_MEMORY = "/dev/shm"
_MEMORY_TRIES = 5
_OWNER = "attempt"
"""Name of the link to the attempt's directory, in each folder in memory."""


def place_secrets(directory: str, entries: List[Json]) -> None:
    """Write the files of every entry (``path``, ``files``: name → content), and the links that lead to them.

    Earlier files are removed.
    """
    remove_secrets(directory)
    if not entries:
        return
    contents = [entry["files"] for entry in entries]
    try:
        home = _fill_memory(directory, contents) or _fill_folder(os.path.join(directory, SECRETS_ON_DISK), contents)
        for position, entry in enumerate(entries):
            link = path_inside(directory, str(entry["path"]))
            os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
            if os.path.islink(link):
                os.unlink(link)
            os.symlink(os.path.join(home, str(position)), link)
    except OSError as error:
        raise OpError.from_os(error, "cannot place the files of the task's credentials") from error


def remove_secrets(directory: str) -> None:
    """Remove the files of the attempt's credentials; does nothing if there are none."""
    parent = _memory_parent()
    homes = [os.path.join(directory, SECRETS_ON_DISK)]
    if _is_private(parent):
        homes.append(_in_memory(directory))
    for home in homes:
        if os.path.isdir(home) and not os.path.islink(home):
            import shutil

            shutil.rmtree(home, ignore_errors=True)
    try:
        os.rmdir(parent)
    except OSError:
        pass  # it does not exist, or files of other attempts are in it


def memory_folder() -> Optional[str]:
    """Return a folder in memory that only this user can access, or None. While it is empty, other processes may remove it."""
    if not _has_memory():
        return None
    try:
        os.makedirs(_memory_parent(), mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _memory_parent() if _is_private(_memory_parent()) else None


def _memory_parent() -> str:
    return os.path.join(_MEMORY, "distflow-{}".format(os.getuid()))


def _in_memory(directory: str) -> str:
    return os.path.join(_memory_parent(), sha256_hex(os.fsencode(os.path.realpath(directory)))[:32])


def _is_private(path: str) -> bool:
    """Return whether this user owns the directory and its mode gives no other user access."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def _has_memory() -> bool:
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return False
    kinds = [fields[2] for fields in mounts if len(fields) > 2 and fields[1] == _MEMORY]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")


def _fill_memory(directory: str, contents: List[Dict[str, str]]) -> Optional[str]:
    """Write the files to memory. Returns their directory, or None if that is not possible."""
    if not _has_memory():
        return None
    home = _in_memory(directory)
    for _ in range(_MEMORY_TRIES):
        try:
            os.makedirs(_memory_parent(), mode=0o700, exist_ok=True)
            if not _is_private(_memory_parent()):
                return None
            _remove_old_secrets()
            _fill_folder(home, contents)
            os.symlink(os.path.realpath(directory), os.path.join(home, _OWNER))
            return home
        except FileNotFoundError:
            continue  # another process has just removed the empty parent
        except OSError:
            remove_secrets(directory)
            return None
    return None


def _remove_old_secrets() -> None:
    """Remove credentials of ended or missing attempts: their runner and keeper were killed, and no agent removed the files."""
    import shutil

    for name in os.listdir(_memory_parent()):
        home = os.path.join(_memory_parent(), name)
        try:
            owner = os.readlink(os.path.join(home, _OWNER))
        except OSError:
            continue  # another process is filling it, or it is a different directory
        if not os.path.isdir(owner) or os.path.exists(os.path.join(owner, "exit.json")):
            shutil.rmtree(home, ignore_errors=True)


def _fill_folder(home: str, contents: List[Dict[str, str]]) -> str:
    os.mkdir(home, 0o700)
    for position, files in enumerate(contents):
        folder = os.path.join(home, str(position))
        os.mkdir(folder, 0o700)
        for name, content in files.items():
            fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content.encode("utf-8", "surrogateescape"))
    return home
