"""What the OpenSSH configuration means for one host: names, files, algorithms and the way there, as values."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.transports.destination import HostKeyPolicy, SshDestination
from distflow.transports.sshconfig import Directive, SshConfigWrong, Values, local_user, matches_list, read_config

__all__ = ["Hop", "SshHost", "pick_algorithms", "resolve_destination", "resolve_hop"]

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 15.0
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_USER = re.compile(r"""(?!-)[^'`"$;&<>|(){}\s\x00-\x1f\x7f]*[^'`"$;&<>|(){}\s\x00-\x1f\x7f\\]""")
_HOP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>\d+))?/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A jump host as ``ProxyJump`` names it."""

    host: str
    port: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One host with everything that the configuration says of it."""

    alias: str
    """The name it was looked up by."""
    hostname: str
    """Where the connection goes."""
    port: int
    user: str
    identity_files: tuple[str, ...]
    has_own_identities: bool
    """Whether the identity files were named; those of the defaults need not exist."""
    certificate_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    """Path of the agent's socket; ``None``: there is none to ask."""
    proxy_jump: tuple[Hop, ...]
    proxy_command: str | None
    known_hosts_files: tuple[str, ...]
    """All of them; new keys go to the first."""
    revoked_host_keys: tuple[str, ...]
    """Files with keys that no host may show."""
    host_key_alias: str | None
    host_key_algorithms: str
    """As configured: a list, or one that changes the default list; empty: the default."""
    ciphers: str
    macs: str
    kex_algorithms: str
    host_key_policy: HostKeyPolicy
    hash_known_hosts: bool
    connect_timeout_s: float
    keepalive_s: float
    """0: none."""
    keepalive_count: int
    address_family: str
    """``any``, ``inet`` or ``inet6``."""
    bind_address: str | None

    @property
    def place(self) -> str:
        """``user@host:port``, for messages."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}:{self.port}"

    @property
    def key_name(self) -> str:
        """How known_hosts calls it: ``host``, or ``[host]:port`` when the port is another than 22, or its alias."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def resolve_destination(destination: SshDestination) -> SshHost:
    """Return what holds for ``destination``. Raises ``SshConfigWrong``."""
    host = resolve_hop(Hop(host=destination.host, port=destination.port, user=destination.user), destination)
    if destination.identity_file is None:
        return host
    named = os.path.expanduser(destination.identity_file)
    others = tuple(file for file in host.identity_files if file != named) if host.has_own_identities else ()
    return dataclasses.replace(host, identity_files=(named, *others), has_own_identities=True)


def resolve_hop(hop: Hop, destination: SshDestination) -> SshHost:
    """Return what holds for a host on the way to ``destination``. Raises ``SshConfigWrong``."""
    # Before anything is read: both may end in the shell command of a ProxyCommand or a `Match exec`.
    if hop.host.startswith("-") or re.search(r"""['`"$\\;&<>|(){}\s]""", hop.host):
        raise SshConfigWrong(f"this cannot be a host's name: {hop.host!r}")
    if hop.user is not None and not _USER.fullmatch(hop.user):
        raise SshConfigWrong(f"this cannot be a user's name: {hop.user!r}")
    given: Values = {}
    if hop.port is not None:
        given["port"] = [Directive((str(hop.port),), "the port of the node")]
    if hop.user is not None:
        given["user"] = [Directive((hop.user,), "the user of the node")]
    found = _Found(hop.host, read_config(hop.host, given, destination.config_file))
    known_hosts = destination.known_hosts_files
    if known_hosts is None:
        user_files = found.files("userknownhostsfile", ("~/.ssh/known_hosts", "~/.ssh/known_hosts2"))
        known_hosts = user_files + found.files(
            "globalknownhostsfile", ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
        )
    identities = found.files("identityfile", ())
    timeout_s = destination.connect_timeout_s
    if timeout_s is None:
        timeout_s = found.seconds("connecttimeout") or CONNECT_TIMEOUT_S
    keepalive_s = destination.keepalive_s
    if keepalive_s is None:
        keepalive_s = found.seconds("serveraliveinterval")
    return SshHost(
        alias=hop.host,
        hostname=found.hostname,
        port=found.port,
        user=found.user,
        identity_files=identities or tuple(os.path.expanduser(f"~/.ssh/{name}") for name in _KEYS),
        has_own_identities="identityfile" in found.values,
        certificate_files=found.files("certificatefile", ()),
        identities_only=found.flag("identitiesonly"),
        identity_agent=found.agent(),
        proxy_jump=found.jumps(),
        proxy_command=found.command(),
        known_hosts_files=tuple(os.path.expanduser(file) for file in known_hosts),
        revoked_host_keys=found.files("revokedhostkeys", ()),
        host_key_alias=found.text("hostkeyalias") or None,
        host_key_algorithms=found.text("hostkeyalgorithms"),
        ciphers=found.text("ciphers"),
        macs=found.text("macs"),
        kex_algorithms=found.text("kexalgorithms"),
        host_key_policy=destination.host_key_policy or found.policy(),
        hash_known_hosts=found.flag("hashknownhosts"),
        connect_timeout_s=timeout_s,
        keepalive_s=KEEPALIVE_S if keepalive_s is None else keepalive_s,
        keepalive_count=found.whole("serveralivecountmax", 3),
        address_family=found.text("addressfamily").lower() or "any",
        bind_address=found.text("bindaddress") or None,
    )


def pick_algorithms(configured: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms to offer, best first: ``known`` as the configuration changes it, without any that is not known.

    >>> pick_algorithms("^b", ["a", "b", "c"]), pick_algorithms("-a*", ["a", "b"]), pick_algorithms("x,b", ["a", "b"])
    (('b', 'a', 'c'), ('b',), ('b',))
    """
    if not configured:
        return tuple(known)
    sign, names = (configured[0], configured[1:]) if configured[0] in "+-^" else ("", configured)
    listed = names.split(",")
    if sign == "-":
        return tuple(name for name in known if not matches_list(name, listed))
    wanted = tuple(name for one in listed for name in known if matches_list(name, [one]))
    wanted = tuple(dict.fromkeys(wanted))
    if sign == "+":
        return tuple(known)
    return wanted + tuple(name for name in known if name not in wanted) if sign == "^" else wanted


class _Found:
    """The directives of one host, read by kind."""

    def __init__(self, alias: str, values: Values) -> None:
        self.values = values
        local = os.uname().nodename
        self.hostname = _expand(self.text("hostname") or alias, {"h": alias}, self._where("hostname"))
        self.port = self.whole("port", 22)
        if not 0 < self.port < 65536:
            # The system would take the rest of its division by 65536.
            raise SshConfigWrong(f"{self._where('port')}: this is no port: {self.port}")
        user = local_user()
        self.user = self.text("user") or user
        key_alias = self.text("hostkeyalias")
        everything = f"{local}{self.hostname}{self.port}{self.user}"
        self._tokens = {
            "d": os.path.expanduser("~"), "h": self.hostname, "i": str(os.getuid()), "k": key_alias or alias,
            "L": local.partition(".")[0], "l": local, "n": alias, "p": str(self.port), "r": self.user, "u": user,
            "C": hashlib.sha1(everything.encode(), usedforsecurity=False).hexdigest(),
        }  # fmt: skip
        if self.flag("proxyusefdpass"):
            raise SshConfigWrong(f"{self._where('proxyusefdpass')}: `ProxyUseFdpass` is not supported here")

    def _where(self, keyword: str) -> str:
        return self.values[keyword][0].where if keyword in self.values else ""

    def text(self, keyword: str) -> str:
        found = self.values.get(keyword)
        return found[0].words[0] if found else ""

    def flag(self, keyword: str) -> bool:
        return self.text(keyword).lower() in ("yes", "true")

    def whole(self, keyword: str, default: int) -> int:
        text = self.text(keyword)
        if text and not text.isdecimal():
            raise SshConfigWrong(f"{self._where(keyword)}: this is no number: {text}")
        return int(text) if text else default

    def seconds(self, keyword: str) -> float | None:
        """Seconds of a time such as ``90`` or ``1m30s``; ``None`` where there is none."""
        text = self.text(keyword).lower()
        if text in ("", "none"):
            return None
        parts = re.findall(r"(\d+)([smhdw]?)", text)
        if "".join(number + unit for number, unit in parts) != text:
            raise SshConfigWrong(f"{self._where(keyword)}: this is no time: {text}")
        return float(sum(int(number) * _UNITS[unit] for number, unit in parts))

    def files(self, keyword: str, default: tuple[str, ...]) -> tuple[str, ...]:
        found = self.values.get(keyword)
        if not found:
            return default
        # Several in one line for known_hosts, several lines for keys.
        named = [(word, one.where) for one in found for word in one.words if word.lower() != "none"]
        return tuple(os.path.expanduser(_expand(word, self._tokens, where)) for word, where in named)

    def agent(self) -> str | None:
        text = self.text("identityagent")
        if text.lower() == "none":
            return None
        if text in ("", "SSH_AUTH_SOCK"):
            return os.environ.get("SSH_AUTH_SOCK") or None
        if re.fullmatch(r"\$\w+", text):
            return os.environ.get(text[1:]) or None
        return os.path.expanduser(_expand(text, self._tokens, self._where("identityagent")))

    def jumps(self) -> tuple[Hop, ...]:
        text = self.text("proxyjump")
        if text.lower() in ("", "none"):
            return ()
        hops = []
        for part in text.split(","):
            named = _expand(part.strip(), self._tokens, self._where("proxyjump"))
            parsed = _HOP.fullmatch(named)
            if parsed is None:
                raise SshConfigWrong(f"{self._where('proxyjump')}: this is no `[user@]host[:port]`: {named}")
            port = int(parsed["port"]) if parsed["port"] else None
            hops.append(Hop(host=parsed["v6"] or parsed["host"], port=port, user=parsed["user"]))
        return tuple(hops)

    def command(self) -> str | None:
        text = self.text("proxycommand")
        if text.lower() in ("", "none"):
            return None
        return _expand(text, self._tokens, self._where("proxycommand"), variables=False)

    def policy(self) -> HostKeyPolicy:
        # `no` would accept a changed key, too: that is never done here.
        return "accept-new" if self.text("stricthostkeychecking").lower() in ("accept-new", "no", "off", "false") else "strict"


def _expand(text: str, tokens: Mapping[str, str], where: str, *, variables: bool = True) -> str:
    """Return ``text`` with its ``%x`` and, where OpenSSH allows it, its ``${NAME}`` replaced."""

    def token(found: re.Match[str]) -> str:
        name = found[1]
        if name == "%":
            return "%"
        if name not in tokens:
            raise SshConfigWrong(f"{where}: `%{name}` means nothing here")
        return tokens[name]

    def variable(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise SshConfigWrong(f"{where}: the variable {found[1]} is not set")
        return os.environ[found[1]]

    expanded = re.sub("%(.?)", token, text, flags=re.DOTALL)
    return re.sub(r"\$\{(\w+)\}", variable, expanded) if variables else expanded
