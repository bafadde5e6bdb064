"""Read a host's settings in the OpenSSH configuration with OpenSSH itself: ``ssh -G`` prints them.

``ssh -G`` takes about 5 ms of CPU time per host (OpenSSH 9.2). Every connection runs it again, so that an edited configuration
applies from the next connection on. If ``ssh`` is not installed, paramiko's smaller reader is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from distflow.structs import replace

__all__ = [
    "Hop",
    "HostKeyPolicy",
    "SshConfigError",
    "SshDestination",
    "SshHost",
    "pick_algorithms",
    "resolve_destination",
    "resolve_hop",
]

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 15.0
_READ_TIMEOUT_S = 10.0
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_USER = re.compile(r"""(?!-)[^'`"$;&<>|(){}\s\x00-\x1f\x7f]*[^'`"$;&<>|(){}\s\x00-\x1f\x7f\\]""")
_REMOVE = "remove a leading `-`, spaces, quotes and other characters that have a meaning in a shell"
_HOP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d+))?/?")
_LISTS = ("ciphers", "macs", "kexalgorithms", "hostkeyalgorithms")
_NEEDS_OPENSSH = re.compile(
    rf"\s*(?:include\b|match\b.*\b(?:exec|tagged|canonical|final|localnetwork)\b|(?:{'|'.join(_LISTS)})\b[\s=]*[-^]|[^#\s].*\s#)",
    re.IGNORECASE,
)

HostKeyPolicy = Literal["strict", "accept-new"]
"""``accept-new`` adds the key of an unknown host to known_hosts. Both policies refuse a changed key."""

Values = Mapping[str, Sequence[str]]
"""Lower-case keyword → its values. Defaults of OpenSSH are left out, except for ``hostname``, ``port`` and ``user``.

A list in one line is one value.
"""


class SshConfigError(ValueError):
    """The configuration is invalid or unreadable. The message has file and line if OpenSSH reports them."""


class SshDestination(Struct, frozen=True, kw_only=True):
    """A host to reach over SSH. The OpenSSH configuration, or else a default, fills in each field that is ``None``.

    ``port``, ``user`` and ``identity_file`` apply only to the destination, as with ``ssh -p -l -i``. The fields after those
    apply to jump hosts too.
    """

    host: str
    """An alias of the configuration, a name or an address."""
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    """A private key that is tried before those of the configuration; ``~`` is the home directory of this machine's user."""
    host_key_policy: HostKeyPolicy | None = None
    """``None``: the value of ``StrictHostKeyChecking`` (``no`` counts as ``accept-new``), else ``strict``."""
    connect_timeout_s: float | None = None
    """For connecting and logging in, name lookup and jump hosts included; ``None``: ``ConnectTimeout``, else 10."""
    keepalive_s: float | None = None
    """Seconds of silence after which a packet is sent; ``None``: ``ServerAliveInterval``, else 15."""
    config_file: str | None = None
    """Read instead of ``~/.ssh/config`` and ``/etc/ssh/ssh_config``, as with ``ssh -F``; ``none`` reads nothing."""
    known_hosts_files: tuple[str, ...] | None = None
    """Used instead of the user's and the global known_hosts; new keys go to the first."""


class Hop(Struct, frozen=True, kw_only=True):
    """A jump host, as in ``ProxyJump``."""

    host: str
    port: int | None = None
    user: str | None = None


class SshHost(Struct, frozen=True, kw_only=True):
    """A host with all of its settings."""

    alias: str
    """The name for which the settings were read."""
    hostname: str
    """The name or address to connect to."""
    port: int
    user: str
    identity_files: tuple[str, ...]
    has_own_identities: bool
    """Whether the destination or the configuration names identity files. Default ones need not exist."""
    certificate_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    """Path of the agent's socket; ``None``: use no agent."""
    proxy_jump: tuple[Hop, ...]
    proxy_command: str | None
    known_hosts_files: tuple[str, ...]
    """All known_hosts files; new keys go to the first."""
    revoked_host_keys: tuple[str, ...]
    """Files with keys that are refused for every host."""
    host_key_alias: str | None
    host_key_algorithms: str
    """As configured, separated by commas; empty: the default."""
    ciphers: str
    macs: str
    kex_algorithms: str
    host_key_policy: HostKeyPolicy
    hash_known_hosts: bool
    connect_timeout_s: float
    keepalive_s: float
    """0: send no keepalives."""
    keepalive_count: int
    address_family: str
    """``any``, ``inet`` or ``inet6``."""
    bind_address: str | None

    @property
    def endpoint(self) -> str:
        """``user@host:port``, for messages."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}:{self.port}"

    @property
    def key_name(self) -> str:
        """The host's name in known_hosts: ``HostKeyAlias``, else ``hostname``, or ``[hostname]:port`` if the port is not 22."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def resolve_destination(destination: SshDestination) -> SshHost:
    """Return the settings for ``destination``. Raises ``SshConfigError``."""
    host = resolve_hop(Hop(host=destination.host, port=destination.port, user=destination.user), destination)
    if destination.identity_file is None:
        return host
    named = os.path.expanduser(destination.identity_file)
    others = tuple(file for file in host.identity_files if file != named) if host.has_own_identities else ()
    return replace(host, identity_files=(named, *others), has_own_identities=True)


def resolve_hop(hop: Hop, destination: SshDestination) -> SshHost:
    """Return the settings for ``destination`` itself, or for a host on the way to it. Raises ``SshConfigError``."""
    # Check host and user first: they may become part of the shell command of a ProxyCommand or a `Match exec`.
    if hop.host.startswith("-") or re.search(r"""['`"$\\;&<>|(){}\s]""", hop.host) or not hop.host:
        raise SshConfigError(f"`{hop.host}` is not a valid host name: {_REMOVE}")
    if hop.user is not None and not _USER.fullmatch(hop.user):
        raise SshConfigError(f"`{hop.user}` is not a valid user name on {hop.host}: {_REMOVE}")
    if destination.config_file != "none" and shutil.which("ssh") is None:
        values = _read_with_paramiko(hop, destination.config_file)
    else:
        values = _read_with_openssh(hop, destination.config_file)
    found = _Settings(hop, values)
    known_hosts = destination.known_hosts_files
    if known_hosts is None:
        user_files = found.files("UserKnownHostsFile", ("~/.ssh/known_hosts", "~/.ssh/known_hosts2"))
        global_files = found.files("GlobalKnownHostsFile", ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"))
        known_hosts = user_files + global_files
    timeout_s = destination.connect_timeout_s
    keepalive_s = destination.keepalive_s
    return SshHost(
        alias=hop.host,
        hostname=found.hostname,
        port=found.port,
        user=found.user,
        identity_files=found.paths("IdentityFile", tuple(f"~/.ssh/{name}" for name in _KEYS)),
        has_own_identities="identityfile" in values,
        certificate_files=found.paths("CertificateFile", ()),
        identities_only=found.flag("IdentitiesOnly"),
        identity_agent=found.agent(),
        proxy_jump=found.jumps(),
        proxy_command=found.command(),
        known_hosts_files=tuple(os.path.expanduser(file) for file in known_hosts),
        revoked_host_keys=found.files("RevokedHostKeys", ()),
        host_key_alias=found.text("HostKeyAlias") or None,
        host_key_algorithms=found.text("HostKeyAlgorithms"),
        ciphers=found.text("Ciphers"),
        macs=found.text("MACs"),
        kex_algorithms=found.text("KexAlgorithms"),
        host_key_policy=destination.host_key_policy or found.policy(),
        hash_known_hosts=found.flag("HashKnownHosts"),
        connect_timeout_s=found.number("ConnectTimeout", CONNECT_TIMEOUT_S) if timeout_s is None else timeout_s,
        keepalive_s=found.number("ServerAliveInterval", KEEPALIVE_S) if keepalive_s is None else keepalive_s,
        keepalive_count=int(found.number("ServerAliveCountMax", 3)),
        address_family=found.text("AddressFamily").lower() or "any",
        bind_address=found.text("BindAddress") or None,
    )


def pick_algorithms(configured: str, supported: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms to offer, best first: the ``configured`` ones that are supported, or all if there are none.

    >>> pick_algorithms("x,c,a", ["a", "b", "c"]), pick_algorithms("", ["a", "b"])
    (('c', 'a'), ('a', 'b'))
    """
    return tuple(name for name in configured.split(",") if name in supported) or tuple(supported)


# Reading.

_defaults: dict[str, list[str]] = {}
_defaults_lock = threading.Lock()


def _read_with_openssh(hop: Hop, config_file: str | None) -> Values:
    options = [*(["-p", str(hop.port)] if hop.port is not None else []), *(["-l", hop.user] if hop.user is not None else [])]
    if config_file == "none":
        return _without_files(hop)
    with _defaults_lock:
        if not _defaults:
            _defaults.update(_run_ssh(["-F", "none", "localhost"]))
    found = _run_ssh([*_file_arguments(config_file), *options, "--", hop.host])
    always = ("hostname", "port", "user")
    return {key: values for key, values in found.items() if key in always or values != _defaults.get(key)}


def _without_files(hop: Hop) -> Values:
    values = {"hostname": hop.host, "port": str(hop.port or 22), "user": hop.user or _local_user()}
    return {key: [value] for key, value in values.items()}


def _file_arguments(config_file: str | None) -> list[str]:
    if config_file is not None:
        return ["-F", os.path.expanduser(config_file)]
    home = Path.home()
    with contextlib.suppress(KeyError, OSError):
        if home.samefile(pwd.getpwuid(os.getuid()).pw_dir):
            return []
    # OpenSSH ignores HOME. distflow follows HOME, as for its other files.
    files = (str(home / ".ssh" / "config"), _SYSTEM_CONFIG)
    return ["-F", next(filter(os.path.exists, files), "none")]


def _run_ssh(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return keyword → values, as printed by ``ssh -G``."""
    try:
        # In its own session, so that a command of `Match exec` can be killed with it.
        process = subprocess.Popen(
            ["ssh", "-G", "-T", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
    except OSError as error:
        raise SshConfigError(f"`ssh` did not start: {error.strerror}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=_READ_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise SshConfigError(
                f"`ssh -G {arguments[-1]}` did not finish within {_READ_TIMEOUT_S:g} s; a command of `Match exec` may hang"
            ) from None
    if process.returncode != 0:
        raise SshConfigError(errors.strip() or f"`ssh -G {arguments[-1]}` failed with exit code {process.returncode}")
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword.lower(), []).append(value)
    return found


def _read_with_paramiko(hop: Hop, config_file: str | None) -> Values:
    """Read one file without OpenSSH.

    Raises ``SshConfigError`` for a file that is invalid or cannot be read, and for lines that paramiko would skip or misread.
    """
    from paramiko.config import SSHConfig  # noqa: PLC0415  slow to import
    from paramiko.ssh_exception import ConfigParseError  # noqa: PLC0415

    path = Path(os.path.expanduser(config_file or "~/.ssh/config"))
    values = dict(_without_files(hop))
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError as error:
        if config_file is None:
            return values
        raise SshConfigError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise SshConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if _NEEDS_OPENSSH.match(line):
            raise SshConfigError(
                f"{path} line {number}: only OpenSSH understands `{line.strip()}`; install it (`ssh` is not in PATH)"
            )
    try:
        found: dict[str, Any] = dict(SSHConfig.from_text(text).lookup(hop.host))
    except (ConfigParseError, ValueError) as error:
        raise SshConfigError(f"{path}: {error}") from error
    from_hop = {"port": hop.port, "user": hop.user}
    for key, value in found.items():
        # A list that begins with `+` only adds algorithms, which distflow may not support.
        is_addition = key in _LISTS and value.startswith("+")
        if value is not None and from_hop.get(key) is None and not is_addition:
            values[key] = list(value) if isinstance(value, list) else [str(value)]
    return values


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


class _Settings:
    """The values for one host, read by type. Keywords are written as in ssh_config(5)."""

    def __init__(self, hop: Hop, values: Values) -> None:
        self._values = values
        self.hostname = self.text("HostName")
        self.port = int(self.number("Port", 22))
        self.user = self.text("User")
        local, user = os.uname().nodename, _local_user()
        everything = f"{local}{self.hostname}{self.port}{self.user}"
        self._tokens = {
            "d": os.path.expanduser("~"), "h": self.hostname, "i": str(os.getuid()), "k": self.text("HostKeyAlias") or hop.host,
            "L": local.partition(".")[0], "l": local, "n": hop.host, "p": str(self.port), "r": self.user, "u": user,
            "C": hashlib.sha1(everything.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest(),
        }  # fmt: skip
        if self.flag("ProxyUseFdpass"):
            raise SshConfigError("`ProxyUseFdpass yes` is not supported; use `ProxyJump`, or a `ProxyCommand` without it")

    def text(self, keyword: str) -> str:
        values = self._values.get(keyword.lower())
        return values[0] if values else ""

    def flag(self, keyword: str) -> bool:
        return self.text(keyword).lower() in ("yes", "true")

    def number(self, keyword: str, default: float) -> float:
        text = self.text(keyword)
        if text.lower() in ("", "none"):
            return default
        if not text.isdecimal():
            raise SshConfigError(f"`{keyword} {text}` in the SSH configuration: write a whole number, such as `{keyword} 30`")
        return float(text)

    def files(self, keyword: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the files of a keyword that takes several files in one line. OpenSSH prints them without quotes."""
        return self._paths(keyword, self.text(keyword).split(), default)

    def paths(self, keyword: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the files of a keyword that may be repeated."""
        return self._paths(keyword, self._values.get(keyword.lower(), ()), default)

    def _paths(self, keyword: str, named: Sequence[str], default: tuple[str, ...]) -> tuple[str, ...]:
        files = [file for file in named or default if file.lower() != "none"]
        return tuple(os.path.expanduser(self._expand(keyword, file)) for file in files)

    def agent(self) -> str | None:
        text = self.text("IdentityAgent")
        if text.lower() == "none":
            return None
        if text in ("", "SSH_AUTH_SOCK"):
            return os.environ.get("SSH_AUTH_SOCK") or None
        if re.fullmatch(r"\$\w+", text):
            return os.environ.get(text[1:]) or None
        return os.path.expanduser(self._expand("IdentityAgent", text))

    def jumps(self) -> tuple[Hop, ...]:
        text = self.text("ProxyJump")
        if text.lower() in ("", "none"):
            return ()
        hops = []
        for part in text.split(","):
            named = self._expand("ProxyJump", part.strip())
            parsed = _HOP.fullmatch(named)
            if parsed is None:
                raise SshConfigError(f"`ProxyJump {named}` is not `[user@]host[:port]`")
            port = int(parsed["port"]) if parsed["port"] else None
            hops.append(Hop(host=parsed["v6"] or parsed["host"], port=port, user=parsed["user"]))
        return tuple(hops)

    def command(self) -> str | None:
        text = self.text("ProxyCommand")
        return None if text.lower() in ("", "none") else self._expand("ProxyCommand", text, variables=False)

    def policy(self) -> HostKeyPolicy:
        # `no` would also accept a changed key, which distflow never does.
        return "accept-new" if self.text("StrictHostKeyChecking").lower() in ("accept-new", "no", "off", "false") else "strict"

    def _expand(self, keyword: str, text: str, *, variables: bool = True) -> str:
        """Replace ``%x`` and ``${NAME}``, because ``ssh -G`` prints most of them unexpanded."""

        def token(found: re.Match[str]) -> str:
            name = found[1]
            if name == "%":
                return "%"
            if name not in self._tokens:
                raise SshConfigError(f"`{keyword} {text}`: distflow does not support the token `%{name}`; write its value")
            return self._tokens[name]

        def variable(found: re.Match[str]) -> str:
            if found[1] not in os.environ:
                message = f"`{keyword} {text}`: the environment variable `{found[1]}` is not set; replace it by its value"
                raise SshConfigError(message)
            return os.environ[found[1]]

        expanded = re.sub("%(.?)", token, text, flags=re.DOTALL)
        return re.sub(r"\$\{(\w+)\}", variable, expanded) if variables else expanded
