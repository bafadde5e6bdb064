"""Parse hostfiles in the formats of Open MPI, DeepSpeed and MPICH, and choose the pool of a command.

A slot means a GPU. A host in several equal lines without slots has as many slots as lines, as in the machine files of batch
systems. All other repeated lines of a host are errors, as in DeepSpeed, because one line must be wrong.
``python=PATH`` is an addition that only distflow reads.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distflow.documents.problems import Mark, Problem
from distflow.documents.text import did_you_mean
from distflow.errors import InputError, NotFound
from distflow.pools.model import Configuration, Node, Pool, is_program, ssh_node
from distflow.structs import replace

__all__ = ["HOSTFILE_POOL", "Host", "choose_pool", "nodes_of", "parse_hostfile", "with_hosts"]


_KEYS = ("slots", "max_slots", "python")
_MOST_SLOTS = 999_999
_MOST_PROBLEMS = 50
_MOST_IF_NOT_HOSTFILE = 2
"""The maximum number of findings that are shown for a file that does not look like a hostfile."""
_ADDRESS = re.compile(r"(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<count>.*))?")
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of a hostfile."""

    host: str
    """A name, an address, or an alias of the OpenSSH configuration; IPv6 without its brackets."""
    user: str | None = None
    """``None``: the user of the pool or of the OpenSSH configuration."""
    slots: int | None = None
    """The number of GPUs; ``None``: the number in the pool's configuration, or else as many as the machine has."""
    python: str | None = None
    """The Python interpreter on the machine; ``None``: the pool's interpreter."""
    where: Mark = field(default=Mark("hostfile"), compare=False)
    """Its line in the hostfile."""


def parse_hostfile(text: str, file: str) -> tuple[tuple[Host, ...], tuple[Problem, ...]]:
    """Return the valid hosts in order, and the first findings (at most 50) with a summary of the others.

    If the file does not look like a hostfile, the findings are a message that says so, the first two findings and a summary.
    """
    problems: list[Problem] = []
    given: list[Host] = []
    named = 0
    for number, line in enumerate(text.split("\n"), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        named += 1
        host, found = _parse_line(words, Mark(file, number))
        problems += found
        if host is not None:
            given.append(host)
    if not named:
        hint = "write one host on each line, for example `gpu1 slots=8`"
        problems.append(Problem(where=Mark(file), message="the hostfile has no hosts", hint=hint))
    hosts, doubles = _joined(given)
    problems = sorted([*problems, *doubles], key=lambda problem: problem.where)
    return hosts, tuple(_bounded(problems, file, named))


def nodes_of(hosts: Iterable[Host], base: Node, known: Sequence[Node] = ()) -> tuple[Node, ...]:
    """Return the hosts as nodes. A host has the settings of the ``known`` node with its name, or else of ``base``.

    The user, the slots and the Python in the hostfile override these settings.
    """
    named = {node.name: node for node in known}
    found = []
    for host in hosts:
        node = named.get(host.host) or replace(base, name=host.host, host=host.host)
        found.append(
            replace(
                node,
                user=node.user if host.user is None else host.user,
                gpus=node.gpus if host.slots is None else host.slots,
                python=host.python or node.python,
            )
        )
    return tuple(found)


def _parse_line(words: Sequence[str], where: Mark) -> tuple[Host | None, list[Problem]]:
    problems: list[Problem] = []
    given: dict[str, int] = {}
    python, others = _split_python(words[1:])

    def add(message: str, hint: str) -> None:
        problems.append(Problem(where=where, message=message, hint=hint))

    def count(key: str, value: str, written: str) -> None:
        if key in given:
            add(f"`{key}` is given twice in this line", "keep one of them")
        elif not (value.isascii() and value.isdigit()) or len(value) > 18 or int(value) > _MOST_SLOTS:
            add(f"`{written}`: `{key}` must be a whole number from 0 to {_MOST_SLOTS}", f"write the number of GPUs: `{key}=8`")
        else:
            given[key] = int(value)

    address = _ADDRESS.fullmatch(words[0])
    host, hint = _host_name(address.group("host") if address else words[0], words[0])
    if host is None:
        add(f"`{words[0]}` is not a host", hint)
    elif address is not None and address.group("count") is not None:
        count("slots", address.group("count"), words[0])
    if len(python) > 1 or not all(map(is_program, python)):
        add(f"`python={' python='.join(python)}` is not a single path or name", "write `python=/opt/venv/bin/python` once")
    for word in others:
        key, _, value = word.partition("=")
        if "=" in word and _normalized(key) in _KEYS:
            count(_normalized(key), value, word)
        else:
            add(*_word_problem(word))
    if given.get("max_slots", _MOST_SLOTS) < given.get("slots", 0):
        add(f"max_slots={given['max_slots']} is less than slots={given['slots']}", "set `slots` to the number of GPUs")
    if host is None or problems:
        return None, problems
    user = address.group("user") if address else None
    return Host(host=host, user=user, slots=given.get("slots"), python=next(iter(python), None), where=where), problems


def _split_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of ``python=``, and the other words."""
    values = [word.partition("=")[2] for word in words if _normalized(word).startswith("python=")]
    return values, [word for word in words if not _normalized(word).startswith("python=")]


def _normalized(key: str) -> str:
    return key.replace("-", "_").lower()


def _word_problem(word: str) -> tuple[str, str]:
    """Return the message and the hint for an unknown word, or a key without a value."""
    if _normalized(word) in _KEYS:
        return f"`{word}` has no value", f"write `{word}={'PATH' if _normalized(word) == 'python' else 'N'}`"
    key, equals, _ = word.partition("=")
    hint = "write one host on each line, and only `slots=N` and `python=PATH` after it"
    if word.isdigit():
        hint = f"write `slots={word}`"
    elif equals:
        hint = did_you_mean(key, _KEYS, what="words")
    return f"unknown word `{word}`", hint


def _host_name(text: str, word: str) -> tuple[str | None, str]:
    """Return the host, or ``None`` and a hint."""
    if text.startswith("["):
        try:
            return str(ipaddress.IPv6Address(text[1:-1])), ""
        except ValueError:
            return None, "write an IPv6 address in the brackets, such as `[fd00::1]`, and each host on a separate line"
    if word.count(":") > 1:
        return None, "write an IPv6 address in brackets: `[fd00::1] slots=8`"
    if "," in word or "[" in word:
        return None, "write each host on a separate line"
    if not _NAME.fullmatch(text):
        return None, "write a name or an address, then `slots=N`: `user@gpu1 slots=8`"
    return text, ""


def _joined(given: Sequence[Host]) -> tuple[tuple[Host, ...], list[Problem]]:
    """Return each host once, and a finding for each further line of a host, unless its lines are equal and have no slots."""
    seen: dict[str, list[Host]] = {}
    for host in given:
        seen.setdefault(host.host, []).append(host)
    hosts: list[Host] = []
    problems: list[Problem] = []
    for first, *others in seen.values():
        if others and all(host == first for host in others) and first.slots is None:
            hosts.append(replace(first, slots=1 + len(others)))
            continue
        hosts.append(first)
        problems += [
            Problem(
                where=host.where,
                message=f"the host `{first.host}` is already in line {first.where.line}",
                hint="write one line for the host, with all its slots, one user and one Python",
            )
            for host in others
        ]
    return tuple(hosts), problems


def _bounded(problems: Sequence[Problem], file: str, lines: int) -> Sequence[Problem]:
    """Return the first findings and a summary of the others.

    ``lines`` is the number of lines that are not empty or comments. With more findings than that, and more than two, the
    file is probably not a hostfile.
    """
    is_not_hostfile = len(problems) > max(lines, _MOST_IF_NOT_HOSTFILE)
    most = _MOST_IF_NOT_HOSTFILE if is_not_hostfile else _MOST_PROBLEMS
    more = len(problems) - most
    if more <= 0:
        return problems
    hint = "" if is_not_hostfile else "check that this file is a hostfile"
    message = f"{more} more problem{'s' * (more > 1)} from this line on"
    rest = Problem(where=Mark(file, problems[most].where.line), message=message, hint=hint)
    what = "this file does not look like a hostfile, which has one host on each line, such as `gpu1 slots=8`"
    first = [Problem(where=Mark(file), message=what)] if is_not_hostfile else []
    return [*first, *problems[:most], rest]


# -- the pool of a command --------------------------------------------------------------------------------------------

HOSTFILE_POOL = "hostfile"
"""The name of the pool that consists of a hostfile alone."""


def choose_pool(
    configuration: Configuration, *, given: str | None = None, wanted: str | None = None, hosts: Sequence[Host] | None = None
) -> Pool:
    """Return the pool of the flag (``given``), else the pool of the spec (``wanted``), else the default pool.

    ``hosts`` replace its nodes. A pool over SSH keeps its settings. Any other pool is an error if the flag names it, and is
    otherwise replaced by a pool with default settings. Raises ``NotFound`` for an unknown pool, and ``InputError`` for a pool
    that cannot use ``hosts``.
    """
    name = given or wanted or configuration.default_pool
    if hosts is not None and name == HOSTFILE_POOL and name not in configuration.pools:
        return _bare(hosts)
    pool = configuration.pools.get(name)
    if pool is None:
        where = configuration.file or "the built-in configuration"
        alone = f"; `--pool {HOSTFILE_POOL}` uses only the hostfile" if hosts is not None else ""
        near = did_you_mean(name, configuration.pools, what="pools")
        by = "" if given or not wanted else ", but the spec requests it with `pool`"
        raise NotFound(f"there is no pool `{name}` in {where}{by}", hint=f"{near}{alone}")
    if hosts is None:
        return pool
    base = configuration.bases.get(name)
    if base is not None:
        return replace(pool, nodes=nodes_of(hosts, base, pool.nodes))
    if given:
        hint = f"choose a pool that has `backend: ssh`, or `--pool {HOSTFILE_POOL}`, which uses only the hostfile"
        raise InputError(f"the pool `{name}` cannot use a hostfile, because its machines are not reached over SSH", hint=hint)
    return _bare(hosts)


def with_hosts(configuration: Configuration, hosts: Sequence[Host] | None, *, given: str | None = None) -> Configuration:
    """Return the configuration with the hostfile's pool as the default pool; unchanged without a hostfile."""
    if hosts is None:
        return configuration
    chosen = choose_pool(configuration, given=given, hosts=hosts)
    return replace(configuration, pools={**configuration.pools, chosen.name: chosen}, default_pool=chosen.name)


def _bare(hosts: Sequence[Host]) -> Pool:
    return Pool(name=HOSTFILE_POOL, backend="ssh", nodes=nodes_of(hosts, ssh_node()))
