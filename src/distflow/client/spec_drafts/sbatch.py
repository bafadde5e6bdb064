"""Translate a script for Slurm's ``sbatch`` to the draft of a spec."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct, field

from distflow.client.spec_drafts.drafts import Draft, draft_command, draft_torchrun
from distflow.documents.text import splitting_problem
from distflow.errors import InputError
from distflow.layout.claims.shell_commands import SHELLS, ShellCommand, Word, read_commands, takes_argument
from distflow.structs import replace

__all__ = ["draft_sbatch"]

_SHORT = MappingProxyType(
    {
        "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "J": "job-name", "p": "partition",
        "o": "output", "e": "error", "a": "array", "A": "account", "q": "qos", "w": "nodelist", "x": "exclude",
        "C": "constraint", "d": "dependency", "D": "chdir", "i": "input", "L": "licenses", "b": "begin",
    }
)  # fmt: skip
_SWITCHES = frozenset(
    {
        "exclusive", "requeue", "no-requeue", "overcommit", "oversubscribe", "label", "unbuffered", "kill-on-bad-exit", "pty",
        "overlap", "verbose", "quiet", "no-kill", "l", "u", "K", "v", "Q", "s", "O", "k", "H", "hold", "parsable",
        "wait-all-nodes",
    }
)  # fmt: skip
"""Options of sbatch and srun without a value."""
_TRANSLATED = frozenset(
    {
        "nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task", "cpus-per-gpu",
        "mem", "mem-per-cpu", "mem-per-gpu", "time", "job-name",
    }
)  # fmt: skip
_OF_POOL = "set it in a pool with `backend: slurm`; other pools have no such option"
_ADVICE = MappingProxyType(
    {
        **dict.fromkeys(("account", "qos", "constraint", "reservation"), _OF_POOL),
        **dict.fromkeys(("mail-type", "mail-user"), "write `notify` into the spec"),
        "partition": "choose a pool instead, with `--pool`",
        "output": "`distflow workflow logs` shows the output",
        "error": "`distflow workflow logs` shows the output",
        "array": "submit the spec once for each value, with `--set`",
        "nodelist": "name the machines in a hostfile or a pool",
        "exclude": "write `nodesExcluded: […]` into the resource",
        "dependency": "write the jobs as groups of one workflow, connected by `inputs`",
        "requeue": "write `exitActions` and `retry`",
        "chdir": "the command runs in a copy of the project",
        "exclusive": "a task gets the GPUs that it requests, and no other task gets them",
        "container-image": "write `image:` into the task",
        "export": "write variables into `environment`",
    }
)
_HETJOB = "hetjob"
_COUNTS = frozenset({"nodes", "ntasks", "ntasks-per-node", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-task"})
"""Options whose values are combined if a heterogeneous job has several components."""
_EXPORTED = "written by `distflow workflow export`"
"""The mark of a script that distflow wrote. The commands of such a script need no notes."""
_SET_BY_DISTFLOW = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "NNODES", "CUDA_VISIBLE_DEVICES"}
)
"""Variables that distflow sets itself."""
_SETUP = frozenset({"module", "ml", "source", ".", "conda", "mamba", "micromamba", "ulimit", "spack", "eval"})
"""Commands that prepare a node."""
_SILENT = frozenset(
    {
        "set",
        "echo",
        "printf",
        "hostname",
        "date",
        "nvidia-smi",
        "pwd",
        "scontrol",
        "tee",
        "wait",
        "env",
        "sleep",
        "head",
        "grep",
    }
)
"""Commands that are left out without a note."""
_WRAPPERS = frozenset({"env", "exec", "nohup", "command", "time"})
"""Programs that start the command after them. They are left out if they have no options of their own."""
_KEYWORDS = frozenset({"done", "fi", "esac", "}", "[", "[[", "test", "true", ":"})
_FRAMEWORKS = MappingProxyType(
    {"accelerate": "accelerate", "deepspeed": "deepspeed", "horovodrun": "horovod", "mpirun": "mpi", "mpiexec": "mpi"}
)
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
_LAUNCHERS = re.compile(r"srun|torchrun|accelerate|deepspeed|mpirun|mpiexec|horovodrun|python[0-9.]*|.*\.(py|sh)")


class _Script(Struct):
    """The parts of a script that have been read so far."""

    text: str
    options: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    launch: list[str] | None = None
    is_under_srun: bool = False
    is_exported: bool = False
    """Whether distflow wrote it."""
    shell_line: str = ""
    """The line of a ``bash -c``, or of a call to a script from a here-document, while its commands are read: ``line 7``.

    Otherwise empty.
    """
    notes: list[str] = field(default_factory=list)


def draft_sbatch(text: str, *, folder: Path, must_exist: bool = False) -> Draft:
    """Return the draft of the job that a script for ``sbatch`` starts.

    Args:
        text: The script.
        folder: The working directory, to which paths of the script are relative.
        must_exist: Whether a Python script that does not exist is an error. Otherwise it becomes a note.

    Raises:
        InputError: if the script contains no training command, if an ``#SBATCH`` line cannot be read, if the project would
            contain the home directory, or if ``must_exist`` is set and the Python script does not exist.

    """
    script = _Script(text, is_exported=_EXPORTED in text)
    script.options = _read_options(script)
    _read_body(script)
    if script.launch is None:
        hint = (
            "distflow looks for a command that begins with srun, torchrun, accelerate, deepspeed, mpirun, mpiexec, horovodrun, "
            "python or the path of a `.py` or `.sh` file, or for `bash FILE`; use `distflow init --command` instead"
        )
        raise InputError("no training command was found in the script", hint=hint)
    draft = draft_command(script.launch, folder=folder, must_exist=must_exist)
    unknown = sorted({name for word in draft.command for name in re.findall(r"\$\{?([A-Za-z_]\w*)", word)})
    if unknown:
        script.notes.append(f"variables in the command are not replaced, because no shell runs it: {', '.join(unknown)}")
    framework = _FRAMEWORKS.get(script.launch[0].rpartition("/")[2])
    if framework is not None:
        remedy = f"write `framework: {framework}` into the group, and only the script with its arguments into `command`"
        script.notes.append(f"{remedy}: distflow then starts it with the right ranks")
    return _with_options(replace(draft, setup="; ".join(script.setup)), script)


def _read_options(script: _Script) -> dict[str, str]:
    """Return the options of the job. A heterogeneous job becomes one with equal nodes of the largest requested size."""
    components: list[dict[str, str]] = [{}]
    for number, name, value in _directives(script):
        if name == _HETJOB:
            note = "the job's nodes differ, but this spec requests the largest size for all: write a task for each kind of node"
            script.notes += [f"line {number}: `#SBATCH hetjob`: {note}"] if len(components) == 1 else []
            components.append({})
            continue
        components[-1][name] = value
        script.notes += [f"line {number}: {note}" for note in _notes_of(name, value)]
    if len(components) == 1:
        return components[0]
    sizes = [(_nodes(one), _ranks_per_node(one, _nodes(one)), _gpus(one, _nodes(one)) or 0) for one in components]
    merged = {name: value for one in reversed(components) for name, value in one.items() if name not in _COUNTS}
    merged |= {"nodes": str(sum(nodes for nodes, _, _ in sizes)), "ntasks-per-node": str(max(ranks for _, ranks, _ in sizes))}
    gpus = max(gpus for _, _, gpus in sizes)
    cpus = max(_cpus(one, ranks, gpus) for one, (_, ranks, gpus) in zip(components, sizes, strict=True))
    ranks = int(merged["ntasks-per-node"])
    return merged | {"cpus-per-task": str(-(-cpus // ranks))} | ({"gpus-per-node": str(gpus)} if gpus else {})


def _notes_of(name: str, value: str) -> Iterator[str]:
    """Yield a note for each part of an option that is not translated."""
    shown = _shown("#SBATCH", name, value)
    if name not in _TRANSLATED:
        yield f"{shown}: {_advice(name)}"
    elif name == "nodes" and "-" in value:
        yield f"{shown}: the spec uses the minimum; for a range, raise `replicas` and add `elastic: {{min: …}}` to the group"
    elif name == "gres":
        others = [entry for entry in value.split(",") if entry.split(":")[0] not in ("gpu", "none")]
        if others:
            yield f"{shown}: `{','.join(others)}` is not requested"
    kinds = [entry.split(":")[-2] for entry in value.split(",") if name.startswith("gpus") and ":" in entry]
    kinds += [entry.split(":")[1] for entry in value.split(",") if name == "gres" and entry.count(":") == 2]
    if kinds:
        remedy = "write `platform` into the resource, or choose a pool of such GPUs"
        yield f"{shown}: the type `{kinds[0]}` is not requested: {remedy}"


def _shown(command: str, name: str, value: str) -> str:
    return f"`{command} --{name}={value}`" if value else f"`{command} --{name}`"


def _advice(name: str) -> str:
    return _ADVICE.get(name, "distflow has no such option")


def _with_options(draft: Draft, script: _Script) -> Draft:
    """Return the draft with everything that the options set: name, nodes, ranks, resources, time limit and notes."""
    options, notes = script.options, [*draft.notes, *script.notes]
    nodes = _nodes(options, draft.nodes or 1)
    per_node = _ranks_per_node(options, nodes)
    gpus = _gpus(options, nodes)
    ranks = draft.ranks
    starts_ranks = draft_torchrun(script.launch or ()) is not None
    if draft.launcher == "torchrun" and script.is_under_srun and not starts_ranks:
        ranks = per_node
        notes.append("a script that reads SLURM_PROCID or SLURM_LOCALID must read RANK and LOCAL_RANK instead")
    elif script.is_under_srun and draft.launcher == "command" and per_node > 1:
        notes.append(f"srun started {per_node} processes on each node; here the command runs once on each node")
    if draft.launcher == "command" and any(_TORCHRUN.search(word) for word in draft.command):
        notes.append("the options of torchrun in the command are not translated: check `replicas` and `ranks`")
    resources = _resources(options, per_node, gpus)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", options.get("job-name", "")).strip("-_")
    return replace(
        draft, name=name if name[:1].isalpha() else draft.name, nodes=nodes, gpus=gpus,
        ranks=ranks or (None if gpus or draft.ranks_written else per_node),
        environment=script.environment, exec_timeout=_duration(options.get("time", ""), notes), resources=resources,
        notes=tuple(notes),
    )  # fmt: skip


def _resources(options: Mapping[str, str], per_node: int, gpus: int | None) -> dict[str, str]:
    """Return the CPUs and the memory of each node."""
    found = {}
    if cpus := _cpus(options, per_node, gpus or 0):
        found["cpu"] = str(cpus)
    for name, times in (("mem", 1), ("mem-per-cpu", cpus or per_node), ("mem-per-gpu", gpus or 0)):
        memory = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)B?", options.get(name, ""), re.IGNORECASE)
        if memory and times:
            found["memory"] = f"{int(memory[1]) * times}{memory[2].upper() or 'M'}"
    return found


def _cpus(options: Mapping[str, str], per_node: int, gpus: int) -> int:
    for_ranks = (_number(options.get("cpus-per-task", "")) or 0) * per_node
    return for_ranks or (_number(options.get("cpus-per-gpu", "")) or 0) * gpus


def _nodes(options: Mapping[str, str], default: int = 1) -> int:
    return _number(options.get("nodes", "").partition("-")[0]) or default


def _gpus(options: Mapping[str, str], nodes: int) -> int | None:
    """Return the number of GPUs of each node, or ``None`` if no option requests GPUs."""
    for entry in options.get("gres", "").split(","):
        if entry.split(":")[0] == "gpu":
            return 1 if (count := _number(entry.rpartition(":")[2])) is None else count
    counts = {name: _number(options.get(name, "").rpartition(":")[2]) for name in ("gpus-per-node", "gpus-per-task", "gpus")}
    if counts["gpus-per-task"] is not None:
        return counts["gpus-per-task"] * _ranks_per_node(options, nodes)
    if counts["gpus"] is not None:
        return -(-counts["gpus"] // nodes)
    return counts["gpus-per-node"]


def _ranks_per_node(options: Mapping[str, str], nodes: int) -> int:
    given = _number(options.get("ntasks-per-node", ""))
    return given or -(-(_number(options.get("ntasks", "")) or nodes) // nodes)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _duration(text: str, notes: list[str]) -> str:
    """Return a time limit of Slurm (``1-12:00:00``, ``90``) as a duration of a spec; empty if there is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        if text:
            notes.append(f"the time limit `{text}` is not understood: write `timeout: {{exec_timeout: 2h}}`")
        return ""
    days, *rest = found.groups()
    first, second, third = (int(part) if part else 0 for part in rest)
    if days is not None or rest[2] is not None:
        seconds = int(days or 0) * 86400 + first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second  # minutes, or minutes and seconds
    unit, size = ("h", 3600) if seconds % 3600 == 0 else ("m", 60) if seconds % 60 == 0 else ("s", 1)
    return f"{seconds // size}{unit}" if seconds else ""


def _directives(script: _Script) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the value of each option, and ``_HETJOB`` between the components of a job.

    Slurm ignores options after the first command, so they become notes.
    """
    has_begun = False
    for number, line in enumerate(script.text.splitlines(), 1):
        if not line.startswith("#SBATCH"):
            has_begun |= bool(line.strip()) and not line.lstrip().startswith("#")
            continue
        try:
            words = shlex.split(line[len("#SBATCH") :], comments=True)
        except ValueError as error:
            raise InputError(f"line {number} has {splitting_problem(error)}: {line}") from None
        if has_begun:
            script.notes.append(f"line {number}: `{line.strip()}` is after the first command, where Slurm ignores it")
        elif words[:1] in ([_HETJOB], ["packjob"]):
            yield number, _HETJOB, ""
        else:
            yield from ((number, name, value) for name, value in _split_options(words)[0])


def _split_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options at the beginning of ``words``, and the words after them."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = _SHORT.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
            equals = value
        if not equals and name not in _SWITCHES and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found.append((name, value))
    return found, rest[1:] if rest[:1] == ["--"] else rest


# -- the commands of the script ---------------------------------------------------------------------------------------


def _read_body(script: _Script) -> None:
    _read_commands(script, read_commands(script.text), _slurm_variables(script.options))


def _read_commands(script: _Script, commands: Sequence[ShellCommand], variables: dict[str, str | None]) -> None:
    exported = {name for line in re.findall(r"\bexport\s+(.*)", script.text) for name in re.findall(r"([A-Za-z_]\w*)=", line)}
    fallback = None if any(map(_is_launch, commands)) else next(filter(_runs_script, commands), None)
    for command in commands:
        for written, word in command.assignments:
            name, value = word.value_of(written, variables)
            variables[name] = value
            if (name in exported or command.words) and name not in _SET_BY_DISTFLOW and not _is_from_export(script, name):
                _export(script, name, value, word)
        if command.words:
            _read_command(script, command, variables, is_launch=command is fallback or _is_launch(command))


def _export(script: _Script, name: str, value: str | None, word: Word) -> None:
    if value is not None:
        script.environment[name] = value
    else:
        script.notes.append(f"{_line_of(script, word)}: `{name}={word.raw}`: only a shell can compute this value")


def _is_from_export(script: _Script, name: str) -> bool:
    own = ("DISTFLOW_", "PET_", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "LOCAL_WORLD_SIZE")
    return script.is_exported and (name.startswith(own) or name.islower())


def _line_of(script: _Script, word: Word) -> str:
    return script.shell_line or f"line {script.text.count(chr(10), 0, word.offset) + 1}"


def _slurm_variables(options: Mapping[str, str]) -> dict[str, str | None]:
    nodes = options.get("nodes", "1").partition("-")[0]
    per_node, gpus = _ranks_per_node(options, _number(nodes) or 1), _gpus(options, _number(nodes) or 1)
    return {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_GPUS_ON_NODE": str(gpus) if gpus else None, "SLURM_GPUS_PER_NODE": str(gpus) if gpus else None,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"), "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_JOB_ID": "{{workflow_id}}", "SLURM_JOBID": "{{workflow_id}}", "SLURM_NODEID": "{{node_rank}}",
        "SLURM_SUBMIT_DIR": ".",
    }  # fmt: skip


def _read_command(script: _Script, command: ShellCommand, variables: dict[str, str | None], *, is_launch: bool) -> None:
    program, raw = command.program, " ".join(word.raw for word in command.words)
    if program in _SETUP:
        script.setup.append(raw)
    elif is_launch and script.launch is None:
        _read_launch(script, _expanded(command, variables), _line_of(script, command.words[0]), variables)
    elif program == "cd" and raw.strip("\"'").endswith("SLURM_SUBMIT_DIR"):
        pass
    elif program not in _SILENT | _KEYWORDS and not script.is_exported:
        script.notes.append(f"{_line_of(script, command.words[0])}: `{raw[:100]}`: only one command is translated")


def _is_launch(command: ShellCommand) -> bool:
    """Return whether a command starts the training, probably.

    An interpreter that reads its program from standard input (``python - <<END``) does not.
    """
    reads_program = len(command.words) > 1 and command.words[1].raw == "-"
    return _LAUNCHERS.fullmatch(command.program) is not None and not reads_program


def _runs_script(command: ShellCommand) -> bool:
    """Return whether a shell runs a script file: ``bash FILE``. It starts the training if no other command does."""
    words = iter(command.words[1:] if command.program in SHELLS else ())
    for word in words:
        if not word.raw.startswith(("-", "+")):
            return True
        if re.fullmatch(r"-[a-z]*[cs]|-", word.raw):
            return False
        if takes_argument(word.raw):
            next(words, None)
    return False


def _expanded(command: ShellCommand, variables: Mapping[str, str | None]) -> list[str]:
    words = [one for word in command.words for one in word.divided(variables)]
    values = [(one.expanded(variables), one.raw) for one in words]
    return [raw.strip('"') if value is None else value for value, raw in values]


def _read_launch(script: _Script, words: list[str], line: str, variables: dict[str, str | None]) -> None:
    if words[0].rpartition("/")[2] == "srun":
        script.is_under_srun = True
        options, words = _split_options(words[1:])
        for name, value in options:
            if name in _TRANSLATED:
                script.options[name] = value
            elif name not in _SWITCHES and not script.is_exported:
                script.notes.append(f"{line}: {_shown('srun', name, value)}: {_advice(name)}")
    if len(words) > 1 and words[0] in _WRAPPERS and not words[1].startswith("-"):
        words = words[1:]
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        if "$" in value:
            script.notes.append(f"{line}: `{name}={value}`: only a shell can compute this value")
        elif name not in _SET_BY_DISTFLOW:
            script.environment[name] = value
    is_shell = bool(words) and words[0].rpartition("/")[2] in SHELLS
    at = next((number for number, word in enumerate(words[1:-1], 1) if re.fullmatch(r"-[a-z]*c", word)), 0) if is_shell else 0
    written = _here_document(script.text, words[1]) if is_shell and not at and len(words) > 1 else ""
    commands = read_commands(words[at + 1]) if at else read_commands(written)
    if any(_LAUNCHERS.fullmatch(command.program) for command in commands):
        before, script.shell_line = script.shell_line, line
        _read_commands(script, commands, dict(variables))
        script.shell_line = before
    else:
        script.launch = words or None


def _here_document(text: str, file: str) -> str:
    """Return the text that a script writes to a file with ``cat > FILE <<END``; empty if there is none."""
    pattern = r"cat\s*>\s*[\"']?" + re.escape(file) + r"[\"']?\s*<<-?\s*(['\"]?)(\w+)\1\n(.*?)\n\2$"
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    return found[3] if found else ""
