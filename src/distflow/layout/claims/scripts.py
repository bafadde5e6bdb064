"""Find a task's commands: in its argv, in scripts after ``sh -c``, and in the injected shell scripts that these mention.

Also find the known values of the variables in them. Nothing is run, and only inline ``contents`` are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from msgspec import Struct

from distflow.documents.problems import Mark
from distflow.layout.claims.shell_commands import SHELLS, ShellCommand, Word, read_commands, takes_argument
from distflow.spec.model import TaskSpec, Text

__all__ = ["WORLD_VARIABLES", "TaskCommand", "base_name", "commands_of", "nested", "variables_of"]

WORLD_VARIABLES = MappingProxyType(
    {
        "MASTER_ADDR": "{{master_addr}}",
        "MASTER_PORT": "{{master_port}}",
        "NODE_RANK": "{{node_rank}}",
        "NNODES": "{{num_nodes}}",
        "DISTFLOW_RANK_OFFSET": "{{rank_offset}}",
        "DISTFLOW_RANK_SIZE": "{{rank_size}}",
        "DISTFLOW_WORLD_SIZE": "{{world_size}}",
    }
)
"""Variables that distflow sets for the tasks of a world, each with the token of the same value."""


class TaskCommand(Struct, frozen=True):
    """A command of a task, the text of the spec that contains it, and whether a shell reads it."""

    parsed: ShellCommand
    text: Text
    """The text that contains the command."""
    base: int
    """The offset in ``text`` of the script that contains the command."""
    expands: bool
    """Whether a shell reads it and replaces variables; a task's argv is passed on unchanged."""

    def place(self, word: Word) -> Mark:
        """Return the line of the spec that contains the word."""
        return self.text.mark_at(min(self.base + word.offset, len(self.text.value)))


def commands_of(task: TaskSpec) -> Iterator[TaskCommand]:
    """Yield the commands of a task: those of its argv, then those of the shell scripts that it mentions."""
    argv = (*task.command, *task.args)
    words = tuple(
        Word(raw=item.value, offset=offset, parts=(item.value,)) for item, offset in zip(argv, _offsets(argv), strict=True)
    )
    shell_at = next((index for index, item in enumerate(argv) if base_name(item.value) in SHELLS), len(argv))
    started = {base_name(item.value) for item in argv[shell_at + 1 :]}
    mentions = "\n".join(item.value for item in argv)
    if words:
        # Each word of argv may have its own line in the spec.
        command = TaskCommand(ShellCommand(words=words), Text(mentions, argv[0].mark, tuple(_marks(argv))), 0, expands=False)
        yield command
        yield from nested(command)
    waiting = [file for file in task.files if _is_shell(file.path.value, file.contents, started)]
    reached = True
    while reached:
        reached = False
        for file in list(waiting):
            contents = file.contents
            if contents is not None and base_name(file.path.value) in mentions:
                waiting.remove(file)
                reached = True
                mentions += "\n" + contents.value
                for parsed in read_commands(contents.value):
                    command = TaskCommand(parsed, contents, 0, expands=True)
                    yield command
                    yield from nested(command)


def nested(command: TaskCommand) -> Iterator[TaskCommand]:
    """Yield the commands of the script in ``sh -c SCRIPT``."""
    word = _script_in(command.parsed.words)
    if word is None:
        return
    text = "".join(part for part in word.parts if isinstance(part, str)) if word.has_variables else word.literal
    source = word.raw[1:-1] if command.expands and word.has_variables and word.raw[:1] == '"' else text
    base = command.base + word.offset + (1 if command.expands and word.raw[:1] in "\"'" else 0)
    for parsed in read_commands(source):
        inner = TaskCommand(parsed, command.text, base, expands=True)
        yield inner
        yield from nested(inner)


def _script_in(words: Sequence[Word]) -> Word | None:
    """Return the SCRIPT of the first ``sh -c SCRIPT``. A ``-c`` after the name of a script file does not count."""
    for index, shell in enumerate(words):
        if base_name(shell.literal) not in SHELLS:
            continue
        has_c_option, rest = False, iter(words[index + 1 :])
        for word in rest:
            if not word.beginning.startswith(("-", "+")):
                if has_c_option:
                    return word
                if word.beginning:
                    break
            has_c_option = has_c_option or re.fullmatch("-[A-Za-z]*c[A-Za-z]*", word.literal) is not None
            if takes_argument(word.literal):
                next(rest, None)
    return None


def _marks(items: Iterable[Text]) -> Iterator[Mark]:
    for item in items:
        for offset in [0, *(match.end() for match in re.finditer("\n", item.value))]:
            yield item.mark_at(offset)


def _offsets(items: Iterable[Text]) -> list[int]:
    offsets, at = [], 0
    for item in items:
        offsets.append(at)
        at += len(item.value) + 1
    return offsets


def base_name(path: str) -> str:
    """Return the last component of a path."""
    return path.rpartition("/")[2]


def _is_shell(path: str, contents: Text | None, started: set[str]) -> bool:
    if contents is None:
        return False
    name = base_name(path)
    first = contents.value.partition("\n")[0]
    if first.startswith("#!"):
        return bool(SHELLS & set(re.split(r"[\s/]+", first[2:])))
    return name in started or name.rpartition(".")[2] in SHELLS


def variables_of(task: TaskSpec, commands: Iterable[TaskCommand]) -> dict[str, str | None]:
    """Return the values of variables that distflow, the environment or scripts set; ``None`` if unknown or ambiguous."""
    known: dict[str, str | None] = dict(WORLD_VARIABLES)
    known.update({name: text.value for name, text in task.environment.items()})
    # The first assignment in a script replaces the value that distflow sets. Another, different one makes it ambiguous.
    still_default = {name for name in WORLD_VARIABLES if name not in task.environment}
    for command in commands:
        for name, word in command.parsed.assignments if command.expands else ():
            variable, value = word.value_of(name, known)
            if value is None and variable == "MASTER_ADDR":
                value = word.raw  # $(getent hosts {{host:master}}) still names a task
            before = known.get(variable)
            is_append = variable.endswith("[@]") and value is not None and before is not None and value.startswith(before)
            if is_append or variable in still_default or variable not in known or known[variable] == value:
                known[variable] = value
                still_default.discard(variable)
            else:
                known[variable] = None
    return known
