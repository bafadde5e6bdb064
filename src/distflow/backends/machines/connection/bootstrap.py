"""Start a distflow service on a node, by one exec of the node's Python.

``STUB`` is the program that this Python runs. It requests an archive of distflow's sources (``RUNTIME`` or ``STORAGE``) if the
node's copy is missing or damaged. Archives are named by a BLAKE2b hash of their files, and each is unpacked to its own
directory. ``explain_report`` and ``explain_exit`` return the message and the remedy if the service does not start.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.resources
import io
import secrets
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, Literal

from msgspec import Struct

from distflow.backends.machines.connection.link import AgentLink, Event
from distflow.errors import BootstrapFailed, NodeUnreachable
from distflow.runtime.files.root_directory import MARKER, MARKER_TEXT, PRIVATE
from distflow.runtime.untrusted import decode_object
from distflow.transports.base import Channel, Transport, is_cut_off

__all__ = [
    "RUNTIME",
    "STORAGE",
    "STUB",
    "Opened",
    "SourceArchive",
    "connect",
    "explain_exit",
    "explain_report",
    "open_service",
    "python_argv",
    "service_argv",
]

_STORAGE: Final = (
    "documents/__init__", "documents/text", "documents/urls", "errors", "shell", "storage/__init__",
    "storage/base", "storage/credentials", "storage/datasets", "storage/failures", "storage/files", "storage/node_service",
    "storage/objects", "storage/task_data", "storage/transfers",
)  # fmt: skip
"""Modules that ``storage.node_service`` needs in addition to the node runtime. A test runs it with only these."""


class SourceArchive(Struct, frozen=True, kw_only=True, dict=True):
    """An archive of sources for nodes."""

    package: str
    """Package of its services."""
    modules: tuple[str, ...] = ()
    """Its modules in addition to the node runtime."""

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        """Return the files of the archive by name, sorted."""
        sources = {"distflow/__init__.py": b""}
        top = importlib.resources.files("distflow")
        packages = [("protocol", top.joinpath("protocol")), ("runtime", top.joinpath("runtime"))]
        for name, package in packages:
            for file in package.iterdir():
                if file.name.endswith(".py"):
                    sources[f"distflow/{name}/{file.name}"] = file.read_bytes()
                elif file.is_dir():
                    packages.append((f"{name}/{file.name}", file))
        for name in self.modules:
            sources[f"distflow/{name}.py"] = top.joinpath(f"{name}.py").read_bytes()
        return dict(sorted(sources.items()))

    @cached_property
    def archive(self) -> bytes:
        """Return the zip archive, without the times and modes of the files."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in self._sources.items():
                entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.create_system = 3
                entry.external_attr = 0o600 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)
        return buffer.getvalue()

    @cached_property
    def digest(self) -> str:
        """Return the name of the archive's directory on a node: the hash of all files (BLAKE2b, RFC 7693, 32 bytes).

        Each file is hashed as a line with name and size, then its content. The stub computes the same digest from the unpacked
        directory before it imports a source file from there.
        """
        digest = hashlib.blake2b(digest_size=32)
        for name, data in self._sources.items():
            digest.update(b"%s %d\n" % (name.encode(), len(data)) + data)
        return digest.hexdigest()


RUNTIME: Final = SourceArchive(package="distflow.runtime")
STORAGE: Final = SourceArchive(package="distflow.storage", modules=_STORAGE)


# The whole stub must parse on old versions of Python, so that they can report their version. The stub imports nothing from a
# directory that another user could change. It imports a source file only if its content is what was sent. The first start of a
# service also writes its modules, compiled, into one file with a checksum (CRC-32), from which later starts read them: reading
# one file is faster than reading and checking dozens, above all over NFS.
STUB: Final = (
    r"""
import gc,marshal,os,signal,sys
from binascii import crc32
gc.disable()
want,root,nonce,service=sys.argv[1:5]
umask=os.umask(0o77)
refused=new=None
modules,checked={},False # the modules in the file, and whether the sources were checked
def send(text): os.write(1,(nonce+" "+text+"\n").encode())
def refuse(why,path):
 global refused
 refused=why
 raise PermissionError(1,why,path)
def content(path):
 with open(path,"rb") as file: return file.read()
def digest(top):
 try: from _blake2 import blake2b # hashlib would load OpenSSL
 except ImportError: from hashlib import blake2b
 paths=[]
 for folder,folders,files in os.walk(top):
  if "__pycache__" in folders: folders.remove("__pycache__")
  paths+=[folder+"/"+name for name in files if name.endswith(".py")]
 total=blake2b(digest_size=32)
 for path in sorted(paths):
  data=content(path)
  total.update((path[len(top)+1:]+" "+str(len(data))+"\n").encode()+data)
 return total.hexdigest()
def load():
 try:
  data=b"" if access_by_others(home) else content(compiled)
 except OSError: return {}
 intact=len(data)>4 and int.from_bytes(data[:4],"big")==crc32(memoryview(data)[4:])
 return marshal.loads(memoryview(data)[4:]) if intact else {}
def store():
 found=[module for name,module in sys.modules.items() if name.split(".")[0]=="distflow"]
 code=lambda module: marshal.dumps(module.__loader__.get_code(module.__name__))
 part=compiled+"."+nonce
 try: # the service works without the file
  data=marshal.dumps({module.__name__:(hasattr(module,"__path__"),code(module)) for module in found})
  with open(part,"wb") as file: file.write(crc32(data).to_bytes(4,"big")+data)
  os.rename(part,compiled)
 except OSError:
  try: os.unlink(part)
  except OSError: pass
class Compiled: # the importer of the modules in the file
 def find_spec(name,path=None,target=None):
  if name in modules:
   at=home+"/"+name.replace(".","/")
   package=modules[name][0]
   spec=ModuleSpec(name,Compiled,origin=at+("/__init__.py" if package else ".py"),is_package=package)
   if package: spec.submodule_search_locations.append(at)
   return spec
  global checked
  if not checked and name.startswith("distflow."):
   checked=digest(home)==want
   if checked: return None
   if os.path.exists(compiled): os.unlink(compiled) # so that the next start checks the sources and requests the archive
   raise RuntimeError("files below "+home+" are damaged; they are replaced at the next connection")
 def create_module(spec): pass
 def exec_module(module):
  module.__file__=module.__spec__.origin
  exec(marshal.loads(modules[module.__name__][1]),module.__dict__)
def make(path):
 try:
  os.mkdir(path)
  os.chmod(path,0o700) # an inherited ACL may have given more
 except FileExistsError:
  if not os.path.isdir(path) or os.path.islink(path): raise NotADirectoryError(20,"Not a directory",path)
def access_by_others(path): # how other users could change it
 seen=os.lstat(path)
 return "owner" if seen.st_uid!=os.getuid() else "writable" if seen.st_mode&0o22 else None
def require_private(path):
 why=access_by_others(path)
 if why: refuse(why,path)
try:
 if sys.version_info<(3,8): raise RuntimeError("Python 3.8 or newer is needed; this is "+sys.version.split()[0])
 from _frozen_importlib import ModuleSpec
 from _frozen_importlib_external import MAGIC_NUMBER
 root=os.path.realpath(os.path.expanduser(root))
 os.makedirs(root,exist_ok=True)
 seen=os.stat(root)
 if seen.st_uid not in (0,os.getuid()): refuse("owner",root)
 at=root
 while not os.environ.get("DISTFLOW_POD"): # users who can rename a parent directory can replace the root
  if os.stat(at).st_mode&0o1002==2: refuse("writable",at)
  if at==os.path.dirname(at): break
  at=os.path.dirname(at)
 root=os.path.join(root,"@PRIVATE@")
 make(root)
 require_private(root)
 mark=os.path.join(root,"@MARKER@")
 def is_marked():
  try: return content(mark).split(b"\n")[0]==b"@SIGNATURE@"
  except FileNotFoundError: return False
 if not is_marked():
  # If another connection has created these files in the meantime, it wrote the marker first.
  if [name for name in os.listdir(root) if not name.startswith("@MARKER@")] and not is_marked(): refuse("unmarked",root)
  part=mark+"."+nonce
  with open(part,"wb") as file:
   file.write(b"@TEXT@")
   file.flush()
   os.fsync(file.fileno())
  os.rename(part,mark)
 top=os.path.join(root,"runtime")
 home=os.path.join(top,want)
 make(top)
 require_private(top)
 compiled=home+"/"+service+"."+MAGIC_NUMBER.hex() # the format of compiled code depends on the version of Python
 modules=load()
 checked=not modules and os.path.isdir(home) and digest(home)==want
 if modules or checked:
  require_private(home)
  send("have")
 else:
  send("need")
  import fcntl,io,shutil,tempfile,zipfile
  line=b""
  signal.alarm(30)
  while line[-1:]!=b"\n":
   line+=os.read(0,1) or sys.exit(1)
  data=bytearray()
  while len(data)<int(line):
   signal.alarm(30)
   data+=os.read(0,min(1<<20,int(line)-len(data))) or sys.exit(1)
  signal.alarm(0)
  new=tempfile.mkdtemp(dir=top)
  zipfile.ZipFile(io.BytesIO(bytes(data))).extractall(new)
  if digest(new)!=want: raise RuntimeError("the checksum of the received runtime is wrong; try again")
  lock=os.open(top,os.O_RDONLY)
  fcntl.flock(lock,fcntl.LOCK_EX)
  if not os.path.lexists(home): os.rename(new,home)
  elif not os.path.isdir(home): raise NotADirectoryError(20,"Not a directory",home)
  elif digest(home)!=want:
   old=tempfile.mkdtemp(dir=top)
   os.rename(home,os.path.join(old,want))
   os.rename(new,home)
   shutil.rmtree(old,True)
  else: shutil.rmtree(new)
  os.close(lock)
  new,checked=None,True
  require_private(home)
 sys.path.insert(0,home)
 sys.meta_path.insert(0,Compiled)
 serve=__import__(service,fromlist=["serve"]).serve
 send("ready")
 if not modules: store()
except Exception as error:
 import json
 if new:
  import shutil
  shutil.rmtree(new,True)
 failure={"text":type(error).__name__+": "+str(error),"errno":getattr(error,"errno",None),"root":root,"refused":refused,
 "path":str(getattr(error,"filename",None) or root),"python":sys.executable,"version":sys.version.split()[0]}
 at=failure["path"]
 while not os.path.lexists(at) and at!=os.path.dirname(at): at=os.path.dirname(at)
 def name(uid):
  try:
   import pwd
   return pwd.getpwuid(uid)[0]
  except Exception: return str(uid)
 home=os.path.expanduser("~")
 failure.update(at=at,user=name(os.getuid()),home=home,has_home=os.path.isdir(home))
 try:
  seen=os.stat(at)
  failure.update(owner=name(seen.st_uid),mode="%o"%(seen.st_mode&0o7777))
 except OSError: pass
 send("error "+json.dumps(failure))
 sys.exit(1)
gc.freeze()
gc.enable()
serve(root,umask)
""".replace("@PRIVATE@", PRIVATE)
    .replace("@MARKER@", MARKER)
    .replace("@SIGNATURE@", MARKER_TEXT.split("\n", 1)[0])
    .replace("@TEXT@", MARKER_TEXT.replace("\n", "\\n"))
)

_MAX_FIELD: Final = 4096
_KEPT_OUTPUT: Final = 16 * 1024
"""Characters at the end of the login's own output that are kept for messages."""
_MAX_LINE: Final = 4 * 1024 * 1024
"""Maximum bytes of one line that login scripts may print. With a longer line, the connection fails."""


def service_argv(root: str, python: str, nonce: str, service: str, bundle: SourceArchive = RUNTIME) -> list[str]:
    """Return the command that is executed on a node.

    ``service`` is a module of ``bundle.package`` that has a function ``serve(root, umask)``.
    """
    return [*python_argv(python), "-I", "-S", "-c", STUB, bundle.digest, root, nonce, f"{bundle.package}.{service}"]


def python_argv(python: str) -> list[str]:
    """Return the command for a node's Python. ``~/`` is the home of the node's user."""
    return ["sh", "-c", 'exec "$HOME/$0" "$@"', python[2:]] if python.startswith("~/") else [python]


def connect(
    transport: Transport,
    root: str,
    python: str = "python3",
    *,
    timeout_s: float = 20.0,
    ping_s: float = 5.0,
    on_event: Callable[[Event], None] | None = None,
    on_close: Callable[[NodeUnreachable], None] | None = None,
) -> AgentLink:
    """Start an agent on the node. Raises the errors of ``open_service``."""
    opened = open_service(transport, root, python, "agent.server", timeout_s=timeout_s)
    return AgentLink(
        opened.channel,
        transport.name,
        noise=opened.noise,
        received=opened.received,
        ping_s=ping_s,
        on_event=on_event,
        on_close=on_close,
    )


class Opened(Struct, frozen=True, kw_only=True):
    """A started service."""

    channel: Channel
    noise: str
    """Output of login scripts before the service's first message."""
    received: bytes
    """Data that the service has already sent."""


def open_service(
    transport: Transport, root: str, python: str, service: str, *, timeout_s: float, bundle: SourceArchive = RUNTIME
) -> Opened:
    """Start a service on the node. Raises ``NodeUnreachable``, or ``BootstrapFailed`` if it does not start there.

    ``~`` in ``root`` and ``python`` is the home of the node's user. ``python`` is a name in the node's PATH, or a path.
    """
    nonce = f"distflow-{secrets.token_hex(12)}"
    channel = transport.open(service_argv(root, python, nonce, service, bundle))
    try:
        greeting = _Greeting(transport.name, channel, nonce, timeout_s, python)
        with greeting:
            status, detail = greeting.next_status()
            if status == "need":
                greeting.write(b"%d\n" % len(bundle.archive) + bundle.archive)
            if status != "error":
                status, detail = greeting.next_status()
        if status == "error":
            report = _report(transport.name, detail)
            what, remedy = explain_report(report)
            # System errors are about the directory, others about the interpreter.
            about: Literal["python", "root"] = "python" if report.get("errno") is None else "root"
            raise BootstrapFailed(transport.name, what, hint=remedy or greeting.other_output(), about=about)
    except BaseException:
        channel.close()
        raise
    return Opened(channel=channel, noise=greeting.noise, received=greeting.rest)


def _report(node: str, text: str) -> dict[str, Any]:
    """Return the stub's error report. The node is not trusted, so check the type of a field before you use it.

    ``errno`` is an integer or missing. Every other value is a bool, an integer, None or a short string. Raises
    ``BootstrapFailed`` if the report is malformed.
    """
    try:
        fields: dict[str, Any] = decode_object(text)
    except ValueError as error:
        raise BootstrapFailed(node, f"the node's report of a failure is malformed: {error}") from None
    return {
        key: value if isinstance(value, bool | int | None) else str(value)[:_MAX_FIELD]
        for key, value in fields.items()
        if key != "errno" or isinstance(value, int)
    }


class _Greeting:
    """The start of a connection: output of login scripts, then status lines of the stub, which begin with the nonce.

    All of it must arrive within ``timeout_s``.
    """

    def __init__(self, node: str, channel: Channel, nonce: str, timeout_s: float, python: str) -> None:
        self._node = node
        self._python = python
        self._channel = channel
        self._nonce = nonce.encode()
        self._timeout_s = timeout_s
        self._is_late = False
        self._timer = threading.Timer(timeout_s, self._expire)
        self._timer.daemon = True
        self._started = time.monotonic()
        self.noise = ""
        self.rest = b""

    def __enter__(self) -> _Greeting:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self._is_late = True
        self._channel.close()

    def write(self, data: bytes) -> None:
        try:
            self._channel.write(data)
        except NodeUnreachable as error:
            raise self._failure() from error

    def next_status(self) -> tuple[str, str]:
        """Return the stub's next status (``have``, ``need``, ``ready`` or ``error``), and the rest of its line."""
        while True:
            line, newline, rest = self.rest.partition(b"\n")
            if newline:
                self.rest = rest
                before, mark, text = line.rpartition(self._nonce + b" ")
                status, _, detail = text.strip().decode("utf-8", "replace").partition(" ")
                # A shell that traces its commands also prints the nonce, but not followed by one of these words.
                if mark and status in ("have", "need", "ready", "error"):
                    self._add_noise(before)
                    return status, detail
                self._add_noise(line + newline)
                continue
            data = self._channel.read()
            if not data or len(self.rest) > _MAX_LINE:
                self._add_noise(self.rest)
                raise self._failure() if not data else self._too_noisy()
            self.rest += data

    def other_output(self) -> str:
        """Return other output of the node, for a message."""
        printed = "\n".join(part.strip() for part in (self.noise, self._channel.stderr_tail()) if part.strip())
        return f"The node printed:\n{printed[-2000:]}" if printed else ""

    def _add_noise(self, text: bytes) -> None:
        self.noise = (self.noise + text.decode("utf-8", "replace"))[-_KEPT_OUTPUT:]

    def _too_noisy(self) -> BootstrapFailed:
        what = f"the login printed a line of more than {_MAX_LINE >> 20} MiB before `{self._python}` answered"
        return BootstrapFailed(self._node, what, hint=f"correct the startup files of the login's shell.\n{self.other_output()}")

    def _failure(self) -> NodeUnreachable | BootstrapFailed:
        if self._is_late:
            remedy = "check the load of the node and the startup files of the shell, or increase `connect_timeout` of the pool"
            return NodeUnreachable(
                self._node,
                f"distflow's process did not answer within {self._timeout_s:g} s",
                hint=self.other_output() or remedy,
            )
        printed = self.other_output()
        if is_cut_off(self._channel):
            return NodeUnreachable(self._node, "the connection broke before distflow's process answered", hint=printed)
        what, remedy = explain_exit(self._channel.exit_code, self._python, printed)
        # The period separates the lines where they are shown as one line.
        return BootstrapFailed(self._node, what, hint=f"{remedy}.\n{printed}" if printed else remedy)


_OTHER_PYTHON = "name the interpreter with `--python`, `python=` of the hostfile, or `python:` of the node or its pool"
_OTHER_ROOT = "set `root:` of the node or its pool to another directory"
_OWN_ROOT = "set `root:` of the node or its pool to a directory of your own"
_REFUSED = {
    "owner": (
        "{at} belongs to {owner} (mode {mode}), who could replace {user}'s programs there",
        f"{_OWN_ROOT}, or ask an administrator to run `chown -R {{user}} {{at}}`",
    ),
    "writable": (
        "{at} is writable by other users (mode {mode}), who could replace {user}'s programs there",
        f"run `chmod go-w {{at}}` on the node, or {_OWN_ROOT}",
    ),
    "unmarked": (
        "{at} contains files of other programs, and distflow removes files in this directory",
        f"move them away, or {_OTHER_ROOT}",
    ),
}
"""Reason for which the stub refuses a directory → message and remedy."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
_IN_THE_WAY = {
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "is not a directory, but distflow needs one there"),
    errno.EISDIR: "is a directory, but distflow needs a file there",
}


def explain_report(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return message and remedy for an error that the stub reported. The remedy may be empty.

    ``report``: ``text`` (the exception), ``errno``, ``path`` (the exception's path, or the root), ``at`` (that path, or
    its nearest parent that exists), ``owner`` and ``mode`` (octal) of ``at``, ``refused`` (a key of ``_REFUSED``), ``user``,
    ``root``, ``home``, ``has_home``, ``python``, ``version``. Any of them may be missing.
    """

    def field(name: str) -> str:
        return str(report.get(name) or "")

    root, at, owner, user = field("root"), field("at"), field("owner"), field("user")
    if _is_too_old(field("version")):
        return f"Python 3.8 or newer is needed; {field('python') or 'python'} is {field('version')}", _OTHER_PYTHON
    if field("refused") in _REFUSED:
        what, remedy = _REFUSED[field("refused")]
        fields = {"at": at, "owner": owner, "mode": field("mode"), "user": user}
        return what.format(**fields), remedy.format(**fields)
    number = report.get("errno")
    if number in _FULL:
        quota = "the disk quota is used up" if number == errno.EDQUOT else "its disk is full"
        return f"distflow's runtime has no room in {root}: {quota}", f"free some space (`df -h {at or root}`), or {_OTHER_ROOT}"
    if number == errno.EROFS:
        return f"distflow's directory {root} is on a read-only file system", _OTHER_ROOT
    if number in _DENIED and field("home") and not report.get("has_home", True) and root.startswith(field("home")):
        return f"{user} has no home directory on this node: {field('home')} does not exist", f"create it, or {_OTHER_ROOT}"
    if number in _DENIED:
        what = f"distflow's directory {root} cannot be used by {user or 'this user'}: {at or field('path')}"
        if owner and owner != user:
            remedy = f"ask an administrator to run `chown -R {user} {at}`" if at.startswith(root) else ""
            return f"{what} belongs to {owner} (mode {field('mode')})", " or ".join(filter(None, [_OTHER_ROOT, remedy]))
        return f"{what} is not writable (mode {field('mode')})", f"run `chmod u+rwx {at}` on the node, or {_OTHER_ROOT}"
    if number == errno.ENOENT:
        return f"distflow's directory {root} cannot be created on this node: {field('text')}", _OTHER_ROOT
    if number in _IN_THE_WAY:
        return f"{field('path') or root} {_IN_THE_WAY[number]}", f"remove it, or {_OTHER_ROOT}"
    # The stub reports damaged files of the runtime as a RuntimeError, so an ImportError is about the standard library.
    if field("text").startswith(("ImportError", "ModuleNotFoundError", "zipimport")):
        lacking = f"{field('python') or 'its python'} lacks a part of the standard library: {field('text')}"
        return lacking, f"install the missing part, or another Python; {_OTHER_PYTHON}"
    return f"distflow's runtime does not start: {field('text')}", ""


def explain_exit(exit_code: int | None, python: str, printed: str) -> tuple[str, str]:
    """Return message and remedy for a connection that ended with ``exit_code`` and the output ``printed``."""
    if exit_code == 127:
        return f"`{python}` is not on this node, or not in the PATH of a login without a terminal", _OTHER_PYTHON
    if exit_code == 126:
        return f"`{python}` cannot be executed on this node", _OTHER_PYTHON
    if "Unknown option: -I" in printed:
        return f"Python 3.8 or newer is needed; `{python}` is older than 3.4", _OTHER_PYTHON
    ended = "the connection ended" if exit_code is None else f"the connection ended with exit code {exit_code}"
    shell = "the login's shell runs commands (not nologin or false), and that no startup file or ForceCommand exits early"
    return f"{ended} before `{python}` answered", f"check that `{python}` is a Python interpreter, that {shell}"


def _is_too_old(version: str) -> bool:
    numbers = version.split(".")[:2]
    return len(numbers) == 2 and all(part.isdecimal() for part in numbers) and (int(numbers[0]), int(numbers[1])) < (3, 8)
