"""Getting a service of ours to answer on a node: one exec of ``python3``; its stub asks for the runtime if it is missing."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from distflow.backends.machines.bundles import RUNTIME, Bundle
from distflow.backends.machines.link import AgentLink, Event
from distflow.backends.machines.remedies import after_exit, after_report
from distflow.errors import BootstrapFailed, NodeUnreachable
from distflow.runtime.untrusted import decode_object
from distflow.transports.base import Channel, Transport

__all__ = ["STUB", "Opened", "connect", "open_service", "service_argv"]

# Everything before `import` must parse on any Python there ever was, so that an old one can say that it is old.
STUB: Final = r"""
import gc,os,signal,sys
gc.disable()
want,root,nonce,service=sys.argv[1:5]
umask=os.umask(0o77)
new=None
def say(text): os.write(1,(nonce+" "+text+"\n").encode())
try:
 if sys.version_info<(3,8): raise RuntimeError("Python 3.8 or newer is needed; this is "+sys.version.split()[0])
 root=os.path.realpath(os.path.expanduser(root))
 top=os.path.join(root,"runtime")
 home=os.path.join(top,want)
 os.makedirs(top,exist_ok=True)
 if os.path.isdir(home): say("have")
 else:
  say("need")
  import hashlib,io,shutil,tempfile,zipfile
  line=b""
  signal.alarm(30)
  while line[-1:]!=b"\n":
   line+=os.read(0,1) or sys.exit(1)
  data=bytearray()
  while len(data)<int(line):
   signal.alarm(30)
   data+=os.read(0,min(1<<20,int(line)-len(data))) or sys.exit(1)
  signal.alarm(0)
  if hashlib.sha256(data).hexdigest()!=want: raise RuntimeError("the runtime arrived damaged")
  new=tempfile.mkdtemp(dir=top)
  zipfile.ZipFile(io.BytesIO(bytes(data))).extractall(new)
  try: os.rename(new,home)
  except OSError:
   if not os.path.isdir(home): raise
   shutil.rmtree(new)
  new=None
 sys.path.insert(0,home)
 serve=__import__(service,fromlist=["serve"]).serve
 say("ready")
except Exception as error:
 import json
 if new:
  import shutil
  shutil.rmtree(new,True)
 told={"text":type(error).__name__+": "+str(error),"errno":getattr(error,"errno",None),"root":root,
 "path":str(getattr(error,"filename",None) or root),"python":sys.executable,"version":sys.version.split()[0]}
 at=told["path"]
 while not os.path.lexists(at) and at!=os.path.dirname(at): at=os.path.dirname(at)
 def name(uid):
  try:
   import pwd
   return pwd.getpwuid(uid)[0]
  except Exception: return str(uid)
 home=os.path.expanduser("~")
 told.update(at=at,user=name(os.getuid()),home=home,has_home=os.path.isdir(home))
 try:
  seen=os.stat(at)
  told.update(owner=name(seen.st_uid),mode="%o"%(seen.st_mode&0o7777))
 except OSError: pass
 say("error "+json.dumps(told))
 sys.exit(1)
gc.freeze()
gc.enable()
serve(root,umask)
"""

_LONGEST_WORDS: Final = 4096
_NOISE: Final = 16 * 1024
_MOST_NOISE: Final = 4 * 1024 * 1024


def service_argv(root: str, python: str, nonce: str, service: str, bundle: Bundle = RUNTIME) -> list[str]:
    """The command that is executed on a node. ``service``: a module of the bundle's package with a ``serve(root, umask)``."""
    return [python, "-I", "-S", "-c", STUB, bundle.digest, root, nonce, f"{bundle.package}.{service}"]


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
    """Start an agent on the node; ``open_service`` says how, and what it raises."""
    opened = open_service(transport, root, python, "agent", timeout_s=timeout_s)
    return AgentLink(
        opened.channel,
        transport.name,
        noise=opened.noise,
        received=opened.received,
        ping_s=ping_s,
        on_event=on_event,
        on_close=on_close,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A service that answers."""

    channel: Channel
    noise: str
    """What a login script printed before it spoke."""
    received: bytes
    """What it has said already."""


def open_service(
    transport: Transport, root: str, python: str, service: str, *, timeout_s: float, bundle: Bundle = RUNTIME
) -> Opened:
    """Start a service on the node, or raise ``NodeUnreachable`` or ``BootstrapFailed`` with what the node said.

    ``~`` in ``root`` is the node's user's home. ``python`` is found in the node's PATH or is a path there.
    """
    nonce = f"distflow-{secrets.token_hex(12)}"
    channel = transport.open(service_argv(root, python, nonce, service, bundle))
    try:
        greeting = _Greeting(transport.name, channel, nonce, timeout_s, python)
        with greeting:
            word, detail = greeting.next_word()
            if word == "need":
                greeting.write(b"%d\n" % len(bundle.archive) + bundle.archive)
            if word != "error":
                word, detail = greeting.next_word()
        if word == "error":
            report = _report(transport.name, detail)
            what, remedy = after_report(report)
            # What the system refuses there is about the directory; the rest is about the interpreter.
            about: Literal["python", "root"] = "python" if report.get("errno") is None else "root"
            raise BootstrapFailed(transport.name, what, hint=remedy or greeting.heard(), about=about)
    except BaseException:
        channel.close()
        raise
    return Opened(channel=channel, noise=greeting.noise, received=greeting.rest)


def _report(node: str, text: str) -> dict[str, Any]:
    """Return what the stub says of its failure, with every field in its form; the node is not trusted."""
    try:
        said: dict[str, Any] = decode_object(text)
    except ValueError as error:
        raise BootstrapFailed(node, f"the node's report of a failure is malformed: {error}") from None
    return {
        key: value if isinstance(value, bool | int | None) else str(value)[:_LONGEST_WORDS]
        for key, value in said.items()
        if key != "errno" or isinstance(value, int)
    }


class _Greeting:
    """What comes before the messages: noise, and the stub's words behind the nonce. Bounded by one deadline."""

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

    def next_word(self) -> tuple[str, str]:
        """The stub's next word, and what follows it on its line."""
        while True:
            line, newline, rest = self.rest.partition(b"\n")
            if newline:
                self.rest = rest
                before, mark, said = line.rpartition(self._nonce + b" ")
                word, _, detail = said.strip().decode("utf-8", "replace").partition(" ")
                # A shell that traces its commands prints the nonce as well, but not with one of these words behind it.
                if mark and word in ("have", "need", "ready", "error"):
                    self._add_noise(before)
                    return word, detail
                self._add_noise(line + newline)
                continue
            data = self._channel.read()
            if not data or len(self.rest) > _MOST_NOISE:
                self._add_noise(self.rest)
                raise self._failure()
            self.rest += data

    def heard(self) -> str:
        """What the node printed besides, for a message."""
        said = "\n".join(part.strip() for part in (self.noise, self._channel.stderr_tail()) if part.strip())
        return f"It printed:\n{said[-2000:]}" if said else ""

    def _add_noise(self, text: bytes) -> None:
        self.noise = (self.noise + text.decode("utf-8", "replace"))[-_NOISE:]

    def _failure(self) -> NodeUnreachable | BootstrapFailed:
        if self._is_late:
            return NodeUnreachable(self._node, f"the agent did not answer within {self._timeout_s:g} s", hint=self.heard())
        code, printed = self._channel.exit_code, self.heard()
        if code is None and "[ssh] " in printed:
            return NodeUnreachable(self._node, "the connection broke before the agent answered", hint=printed)
        what, remedy = after_exit(code, self._python, printed)
        return BootstrapFailed(self._node, what, hint="\n".join(filter(None, [remedy, printed])))
