"""A task's claims about its ranks: from its ``ranks`` field, command, environment and injected shell scripts.

``scripts`` finds the commands: the words of ``command`` and ``args``, a script after ``sh -c``, and inline shell scripts that
one of these mentions. Other files are data: an ``add_argument("--offset")`` in Python claims nothing.

These commands claim ranks:

* ``torchrun``, ``python -m torch.distributed.run`` or ``.launch`` with a training script. Only the options before that script
  are torchrun's; the script's own options are not checked.
* any other command with ``--world_size`` and at least one of ``--offset`` and ``--size``. Programs that only process text
  (``echo``, ``grep``, …) never count. A command with fewer of the three flags counts if another task of the group runs the same
  program with more, or if several tasks run it with ``--offset`` and ``--size`` (``layout.checks`` decides that). A single
  ``crop.py --offset 3 --size 128`` claims no ranks.
* a command with ``--rank`` and ``--world-size``, as in torch's ImageNet example, or a task that sets ``RANK`` and
  ``WORLD_SIZE``. These count only if several tasks of the group have them, or if the task also has a ``ranks`` field of size 1.
  With this field, the values are the offset and the world size; without it, torchrun's node rank and number of nodes.

distflow computes the value of a token (``{{rank_offset}}``) and of its own variables (``$NODE_RANK``). A variable with one
literal value in the environment and the scripts has that value. A variable without a value has its default (``${N:-8}``). Any
other variable is known only when the task runs.

Flags: https://docs.pytorch.org/docs/stable/elastic/run.html and OSMO's ``pytorch_dist_training`` sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from types import MappingProxyType

import msgspec
from msgspec import Struct

from distflow.documents.problems import Mark
from distflow.layout.claims.scripts import WORLD_VARIABLES, TaskCommand, base_name, commands_of, nested, variables_of
from distflow.layout.claims.shell_commands import TOKEN, ShellCommand, Word
from distflow.spec.model import ResourceSpec, TaskSpec
from distflow.spec.tokens import RANK_TOKENS, find_tokens
from distflow.structs import replace

__all__ = ["RANK_KEYS", "Claim", "Invocation", "Known", "TaskClaims", "read_claims"]

RANK_KEYS = ("offset", "size", "world_size")
_TORCHRUN_KEYS = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint")
_SCRIPT_KEYS = (*RANK_KEYS, "master_addr", "master_port")
_ONE_RANK_PER_GPU = "--multiprocessing-distributed"
"""The option of torch's ImageNet example that starts a process for each GPU; ``--rank`` is then the rank of the node."""
_TORCHRUN_SWITCHES = frozenset({"-m", "module", "no_python", "run_path", "virtual_local_rank", "use_env"})
_TORCHRUN_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
_TEXT_PROGRAMS = frozenset(
    {
        *("echo", "printf", ":", "cat", "tee", "grep", "egrep", "sed", "awk", "test", "[", "[[", "logger", "which", "type"),
        *("truncate", "fallocate", "losetup", "dd", "tail", "head", "split", "find", "man", "pip", "apt", "apt-get"),
    }
)
"""Programs whose arguments are text, sizes of files or names, never ranks."""


class Known(str, Enum):
    """Whether a claimed value is known before anything runs, and how."""

    LITERAL = "literal"
    """A number or a text in the spec."""
    COMPUTED = "computed"
    """distflow computes it: the value is a token or one of distflow's variables."""
    RUNTIME = "runtime"
    """It is known only when the task runs."""


class Claim(Struct, frozen=True, kw_only=True):
    """One value that a task claims, and its written form."""

    key: str
    """One of ``RANK_KEYS`` or ``_TORCHRUN_KEYS``."""
    value: str
    """The value after a shell has expanded it; for ``RUNTIME`` the value as written."""
    where: Mark
    """The line to change."""
    form: str
    """The written form, with ``{}`` for the value: ``--offset {}``, ``--size={}``, ``offset: {}``."""
    known: Known = Known.LITERAL

    @property
    def number(self) -> int | None:
        """The value as an integer; ``None`` if it is not a number or not known."""
        is_integer = self.known is Known.LITERAL and re.fullmatch(r"[+-]?\d{1,18}", self.value)
        return int(self.value) if is_integer else None

    @property
    def text(self) -> str:
        """The claim as written, with known values in place of variables."""
        return self.form.format(self.value)

    def written(self, value: object) -> str:
        """Return the claim as it would be written with another value."""
        return self.form.format(value)


class Invocation(Struct, frozen=True, kw_only=True):
    """A command that starts, or may start, processes of a world; or a task's variables ``RANK`` and ``WORLD_SIZE``."""

    launcher: str
    """``flags`` (``--offset --size --world_size``), ``torchrun``, or ``rank`` (a program with its rank and the world size)."""
    program: str
    """The name of its script, module or program, without the directory; for variables, the name of the task."""
    where: Mark
    claims: Mapping[str, Claim]
    """Claims by key; the last one wins, as in ``argparse``."""
    standalone: bool = False
    """Whether it is ``torchrun --standalone``, which starts a separate world."""

    @property
    def rank_flags(self) -> int:
        """The number of its flags among offset, size and world_size."""
        return sum(key in self.claims for key in RANK_KEYS)


class TaskClaims(Struct, frozen=True, kw_only=True):
    """All claims of one task about its ranks."""

    task: TaskSpec
    gpus: int | None
    """GPUs that its resource requests; ``None`` if it does not state them."""
    field: Mapping[str, Claim] | None
    """Claims of the ``ranks`` field; ``None`` without one."""
    invocations: tuple[Invocation, ...] = ()
    """Commands that claim ranks, independent of other tasks."""
    others: tuple[Invocation, ...] = ()
    """Commands with too few rank flags. ``layout.checks`` decides whether they count."""
    stated_rank: Invocation | None = None
    """The task's rank and the world size, from flags or variables. ``layout.checks`` decides whether they count."""
    modules: Mapping[str, Mark] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """Modules that it runs by ``python -m``, each with the place of its first use."""
    settings: tuple[Claim, ...] = ()
    """The task's settings of MASTER_ADDR and MASTER_PORT: those in scripts, else those in its environment."""
    tokens: Mapping[str, Mark] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """Tokens of the layout that it uses, each with the place of its first use."""

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name


def read_claims(task: TaskSpec, resource: ResourceSpec | None = None) -> TaskClaims:
    """Return the claims of ``task``; ``resource`` is the resource that it requests."""
    commands = tuple(commands_of(task))
    variables = variables_of(task, commands)
    found = [item for command in commands for item in _invocations(command, variables)]
    counted = [item for item in found if _counts(item)]
    gpus = resource.gpu if resource else None
    return TaskClaims(
        task=task,
        gpus=gpus,
        field=_field(task),
        invocations=tuple(counted),
        others=tuple(item for item in found if item not in counted and item.launcher == "flags"),
        settings=tuple(_settings(task, commands, variables)),
        stated_rank=None if counted else _stated_rank(task, commands, variables, gpus),
        modules=MappingProxyType(dict(reversed(list(_modules(commands))))),
        tokens=MappingProxyType(_tokens(task)),
    )


def _counts(item: Invocation) -> bool:
    return item.launcher == "torchrun" or ("world_size" in item.claims and item.rank_flags > 1)


def _field(task: TaskSpec) -> Mapping[str, Claim] | None:
    if task.ranks is None:
        return None
    ranks = task.ranks
    return {
        key: Claim(key=key, value=str(value), where=ranks.marks.get(key, ranks.mark), form=f"{key}: {{}}")
        for key in RANK_KEYS
        if (value := getattr(ranks, key)) is not None
    }


# -- claims of one command --------------------------------------------------------------------------------------------


def _invocations(command: TaskCommand, variables: Mapping[str, str | None]) -> Iterator[Invocation]:
    words = command.parsed.words
    if command.expands:
        words = tuple(one for word in words for one in word.divided(variables))
    if not words or command.parsed.program in _TEXT_PROGRAMS:
        return
    start = _torchrun_at(words)
    if start is None:
        if _nested_script(command):
            return
        claims = dict(_flags(command, words, variables, _SCRIPT_KEYS))
        yield Invocation(launcher="flags", program=_script(words), where=command.place(words[0]), claims=claims)
        return
    end = _torchrun_end(words, start)
    if end < len(words):
        claims = dict(_flags(command, words[start:end], variables, _TORCHRUN_KEYS))
        standalone = any(_key(word.literal) == "standalone" for word in words[start:end])
        where = command.place(words[max(0, start - 1)])
        program = base_name(words[end].literal)
        yield Invocation(launcher="torchrun", program=program, where=where, claims=claims, standalone=standalone)


def _nested_script(command: TaskCommand) -> bool:
    return next(nested(command), None) is not None


def _torchrun_at(words: tuple[Word, ...]) -> int | None:
    """Return the index after ``torchrun`` (or ``-m torch.distributed.run``); ``None`` if there is none."""
    for index, word in enumerate(words):
        if base_name(word.literal) == "torchrun":
            return index + 1
        if word.literal in _TORCHRUN_MODULES and index and words[index - 1].literal == "-m":
            return index + 1
    return None


def _torchrun_end(words: tuple[Word, ...], start: int) -> int:
    """Return the index of the training script: the first word that is neither an option of torchrun nor its value."""
    index = start
    while index < len(words):
        # An option with a variable as its value (`--nnodes=$N`) is an option, too.
        text = words[index].beginning
        if not text.startswith("-"):
            return index
        takes_none = "=" in text or text in _TORCHRUN_SWITCHES or _key(text) in {*_TORCHRUN_SWITCHES, "standalone"}
        index += 1 if takes_none else 2
    return index


def _key(option: str) -> str:
    return option[2:].partition("=")[0].replace("-", "_") if option.startswith("--") else ""


def _script(words: tuple[Word, ...]) -> str:
    """Return the name of the Python script or module that a command runs, else of its program."""
    for before, word in pairwise(words):
        if word.literal.endswith(".py") or before.literal == "-m":
            return base_name(word.literal)
    return base_name(words[0].literal)


def _flags(
    command: TaskCommand, words: tuple[Word, ...], variables: Mapping[str, str | None], keys: tuple[str, ...]
) -> Iterator[tuple[str, Claim]]:
    for index, word in enumerate(words):
        option, equals, _ = word.beginning.partition("=")
        key = _key(option)
        key = {"nproc": "nproc_per_node"}.get(key, key)
        if key not in keys:
            continue
        if equals:
            yield key, _claim(command, word.without(len(option) + 1), key, option + "={}", variables)
        elif index + 1 < len(words):
            value = words[index + 1]
            yield key, _claim(command, value, key, option + " {}", variables)


def _claim(command: TaskCommand, word: Word, key: str, form: str, variables: Mapping[str, str | None]) -> Claim:
    where = command.place(word)
    value = word.expanded(variables) if command.expands else "".join(str(part) for part in word.parts)
    if value is None:
        return Claim(key=key, value=word.raw, where=where, form=form, known=Known.RUNTIME)
    token = TOKEN.search(value)
    computed = token is not None and token.group(1) in RANK_TOKENS
    return Claim(key=key, value=value, where=where, form=form, known=Known.COMPUTED if computed else Known.LITERAL)


# -- a rank and the world size --------------------------------------------------------------------------------------------


def _stated_rank(
    task: TaskSpec, commands: Iterable[TaskCommand], variables: Mapping[str, str | None], gpus: int | None
) -> Invocation | None:
    """Return the rank and the world size that a task states by flags or variables; ``None`` unless it states both.

    A task without a ``ranks`` field that states a world size of 1 shares no world, so the result is ``None``, too.
    """
    found = _find_stated_rank(task, commands, variables, gpus)
    is_alone = found is not None and "nnodes" in found.claims and found.claims["nnodes"].number == 1
    return None if is_alone else found


def _find_stated_rank(
    task: TaskSpec, commands: Iterable[TaskCommand], variables: Mapping[str, str | None], gpus: int | None
) -> Invocation | None:
    if task.launcher.starts_ranks or (task.ranks is not None and (task.ranks.size or gpus or 1) != 1):
        return None  # the launcher, or the program, sets them for its processes
    # With a `ranks` field they repeat its numbers; without one they are the node rank and the number of nodes.
    rank, world_size = ("offset", "world_size") if task.ranks is not None else ("node_rank", "nnodes")
    for command in commands:
        words = command.parsed.words
        if not words or command.parsed.program in _TEXT_PROGRAMS or _nested_script(command):
            continue
        claimed = dict(_flags(command, words, variables, ("rank", "world_size", "dist_url")))
        url = claimed.pop("dist_url", None)
        claims = {{"rank": rank, "world_size": world_size}[key]: claim for key, claim in claimed.items()}
        if len(claims) > 1 and not any((claim.number or 0) < 0 for claim in claims.values()):
            if url is not None and url.value.startswith("tcp://"):
                form = url.form.replace("{}", "tcp://{}")
                value = url.value.removeprefix("tcp://")
                claims["rdzv_endpoint"] = replace(url, key="rdzv_endpoint", value=value, form=form)
            if gpus and any(word.literal == _ONE_RANK_PER_GPU for word in words):
                where = command.place(words[0])
                claims["nproc_per_node"] = Claim(key="nproc_per_node", value="gpu", where=where, form=_ONE_RANK_PER_GPU)
            return _rank_invocation(_script(words), claims)
    names = {"RANK": rank, "WORLD_SIZE": world_size}
    set_to = {claim.key: claim for claim in _settings(task, commands, variables, names)}
    return _rank_invocation(task.name, set_to) if len(set_to) == len(names) else None


def _rank_invocation(program: str, claims: Mapping[str, Claim]) -> Invocation:
    own = {key: replace(claim, key=key) for key, claim in claims.items()}
    return Invocation(launcher="rank", program=program, where=min(claim.where for claim in own.values()), claims=own)


def _modules(commands: Iterable[TaskCommand]) -> Iterator[tuple[str, Mark]]:
    for command in commands:
        for before, word in pairwise(command.parsed.words):
            if before.literal == "-m" and word.literal:
                yield word.literal, command.place(word)


# -- settings and tokens --------------------------------------------------------------------------------------------------

_MASTER = MappingProxyType({"MASTER_ADDR": "master_addr", "MASTER_PORT": "master_port"})


def _settings(
    task: TaskSpec, commands: Iterable[TaskCommand], variables: Mapping[str, str | None], names: Mapping[str, str] = _MASTER
) -> Iterator[Claim]:
    """Yield the settings of the variables in ``names``. Settings in scripts replace those in the environment."""
    found: set[str] = set()
    for command in commands:
        for name, word in command.parsed.assignments:
            if name in names and command.expands:
                found.add(name)
                # In `MASTER_ADDR=$MASTER_ADDR`, the right side is the earlier value, which the spec or distflow sets.
                own = task.environment[name].value if name in task.environment else WORLD_VARIABLES.get(name)
                yield _claim(command, word, names[name], name + "={}", {**variables, name: own})
    for name, key in names.items():
        if name in task.environment and name not in found:
            text = task.environment[name]
            word = Word(raw=text.value, offset=0, parts=(text.value,))
            command = TaskCommand(ShellCommand(words=(word,)), text, 0, expands=False)
            yield _claim(command, word, key, name + ": {}", variables)


def _tokens(task: TaskSpec) -> dict[str, Mark]:
    texts = [*task.command, *task.args, *task.environment.values()]
    texts += [file.contents for file in task.files if file.contents is not None]
    found: dict[str, Mark] = {}
    for text in texts:
        for token in find_tokens(text.value):
            if token.name in RANK_TOKENS:
                found.setdefault(token.name, text.mark_at(token.position))
    return found
