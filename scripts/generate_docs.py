"""Regenerate the generated parts of docs/ (``make docs``).

A generated part lies between two comments with its name. The sources are the JSON Schemas, the error tree, the tables of
states, the rules of the diagnosis, the golden messages of the rank layout, and the texts in this script. The rest of a page is
written by hand. ``tests/unit/test_generated_docs.py`` fails when a page differs from this script's output.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from distflow import errors
from distflow.diagnosis.ends import END_RULES
from distflow.diagnosis.resources import RESOURCE_RULES
from distflow.diagnosis.rules import EXCEPTION, HANG, Rule
from distflow.diagnosis.rules import RULES as RULES_OF_DIAGNOSIS
from distflow.documents.problems import ProblemsFound
from distflow.documents.schema import load_schema
from distflow.lifecycle import states
from distflow.lifecycle.exits import CODES
from distflow.lifecycle.states import REASON_TEXT, TRANSITIONS, WORKFLOW_TRANSITIONS, Reason, State, WorkflowState

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCES = ROOT / "src" / "distflow"
GOLDENS = ROOT / "tests" / "goldens" / "problems"

MARK = re.compile(r"(<!-- generated: ([a-z-]+) [^\n]*-->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)

Schema = Mapping[str, Any]


# -- schemas into tables ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of the language with its keys."""

    title: str
    schema: Schema


class Reference:
    """A JSON Schema as chapters, one for each kind of mapping, in the order of their first use."""

    def __init__(self, schema: Schema, level: int = 2) -> None:
        """Read ``schema``; headings have ``level`` hashes."""
        self._root = schema
        self._hashes = "#" * level
        self._sections: list[Section] = []
        self._visit(schema)

    def text(self) -> str:
        """Return all chapters."""
        return "\n\n".join(self._chapter(section) for section in self._sections)

    def _visit(self, schema: Schema) -> None:
        if "title" not in schema or any(known.title == schema["title"] for known in self._sections):
            return
        self._sections.append(Section(str(schema["title"]), schema))
        for rule in schema.get("properties", {}).values():
            for inner in self._mappings_in(self._resolved(rule)):
                self._visit(inner)

    def _mappings_in(self, rule: Schema) -> Iterator[Schema]:
        """Yield the rules of mappings within a rule: the rule itself, and those of its items and its values."""
        if "properties" in rule:
            yield rule
        for key in ("items", "additionalProperties"):
            if isinstance(rule.get(key), Mapping):
                yield from self._mappings_in(self._resolved(rule[key]))

    def _resolved(self, rule: Schema) -> dict[str, Any]:
        """Return a rule merged with the rule that it refers to; keys of the rule itself override the others."""
        reference = str(rule.get("$ref", ""))
        if not reference:
            return dict(rule)
        return {**self._resolved(self._root["$defs"][reference.removeprefix("#/$defs/")]), **rule}

    def _chapter(self, section: Section) -> str:
        lines = [f"{self._hashes} {heading(section.title)}", ""]
        if section.schema.get("description"):
            lines += [prose(str(section.schema["description"]).replace("marked x-distflow", "marked ◆")), ""]
        lines += ["| key | type | default | description | example |", "|---|---|---|---|---|"]
        required = section.schema.get("required", ())
        for key, rule in section.schema.get("properties", {}).items():
            lines.append(self._row(key, self._resolved(rule), key in required))
        for example in section.schema.get("examples", ()):
            if section.schema is self._root:
                validated = "" if "workflow" in example else "<!-- configuration -->\n"
                shown = yaml.safe_dump(example, sort_keys=False, width=100).rstrip()
                lines += ["", "The smallest one:", "", f"{validated}```yaml", shown, "```"]
        return "\n".join(lines)

    def _row(self, key: str, rule: Schema, is_required: bool) -> str:
        name = f"`{key}`" + (" ◆" if rule.get("x-distflow") else "")
        default = "*required*" if is_required else code(rule["default"]) if "default" in rule else "–"
        examples = ", ".join(code(example) for example in rule.get("examples", ())[:2])
        cells = (name, prose(self._type(rule)), default, prose(str(rule.get("description", ""))), examples or "–")
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def _type(self, rule: Schema) -> str:
        words = str(rule.get("x-expects", ""))
        if "enum" in rule:
            words = "one of " + ", ".join(code(choice) for choice in rule["enum"])
        limits = {"maxLength": "at most {} characters", "maxProperties": "at most {} entries"}
        words += "".join(f", {text.format(rule[key])}" for key, text in limits.items() if key in rule)
        links = [
            f"[{plain_heading(inner['title'])}](#{slug(heading(inner['title']))})"
            for inner in self._mappings_in(rule)
            if "title" in inner
        ]
        untitled = [inner for inner in self._mappings_in(rule) if "title" not in inner]
        keys = "; ".join(
            f"`{name}`: {self._resolved(value).get('description', '')}"
            for inner in untitled
            for name, value in inner["properties"].items()
        )
        return ". ".join(part for part in (words, *(f"See {link}" for link in links), keys.rstrip(".")) if part)


def heading(title: str) -> str:
    """Return a schema's title as a heading."""
    return title[:1].upper() + title[1:]


def prose(text: str) -> str:
    """Escape ``<name>`` outside of backticks, so that Markdown does not read it as HTML."""
    pieces = text.split("`")
    return "`".join(piece if position % 2 else piece.replace("<", "\\<") for position, piece in enumerate(pieces))


def plain_heading(title: str) -> str:
    """Return a schema's title as the text of a link."""
    return title.replace("`", "")


def slug(text: str) -> str:
    """Return the anchor that GitHub gives to a heading.

    >>> slug("An entry of `workflow.resources`")
    'an-entry-of-workflowresources'
    """
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def code(value: object) -> str:
    """Return a value as YAML on one line, between backticks."""
    if isinstance(value, str):
        # Quote a text that YAML would read as another type.
        return f"`{value}`" if yaml.safe_load(value) == value else f"`{json.dumps(value)}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()
    return f"`{text}`"


def spec_reference() -> str:
    """Return the reference of workflow specs."""
    return Reference(load_schema("distflow.spec", "workflow.schema.json")).text()


def configuration_reference() -> str:
    """Return the reference of the configuration."""
    return Reference(load_schema("distflow.pools", "config.schema.json")).text()


# -- errors and exit codes --------------------------------------------------------------------------------------------

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        0: "the command succeeded; with `--wait`, and for `query --exit-status`, the workflow completed",
        1: "the workflow ended and did not complete",
        2: "the spec, the configuration or the command line is wrong, or the request does not fit the status of a "
        "workflow or task",
        3: "a node, a data store or a target of notifications could not be reached or refused the request; `pool check` found "
        "that a gang cannot run; the supervisor did not start; or `cancel --wait` reached its time limit",
        4: "the workflow has not ended yet: `query --exit-status`, or `submit --wait` after the reader of its output has gone",
        5: "this machine's state directory cannot be used, or the disk with it or with temporary files is full",
        70: "a bug in distflow; the message names the file that holds the traceback",
        130: "interrupted (Ctrl-C)",
    }
)


FAMILY: Sequence[type[errors.DistflowError]] = (
    *(error for name in errors.__all__ if issubclass(error := getattr(errors, name), errors.DistflowError)), ProblemsFound,
)  # fmt: skip
"""Every error that other modules may raise. ``__subclasses__`` would depend on the modules that are already imported."""


def exit_codes() -> str:
    """Return the table of exit codes with their errors."""
    raised: dict[int, list[str]] = {}
    for error in FAMILY:
        raised.setdefault(error.exit_code, []).append(f"`{error.__name__}`")
    unknown = raised.keys() - MEANINGS.keys()
    if unknown:
        raise SystemExit(f"scripts/generate_docs.py: add the exit codes {sorted(unknown)} to MEANINGS")
    # The root has the exit code of a bug, because no module raises the root itself.
    raised[70] = []
    lines = ["| code | meaning | errors |", "|--:|---|---|"]
    return "\n".join(
        [*lines, *(f"| {number} | {text} | {', '.join(raised.get(number, ())) or '–'} |" for number, text in MEANINGS.items())]
    )


def error_tree() -> str:
    """Return the tree from the docstring of ``errors``."""
    lines = inspect.cleandoc(errors.__doc__ or "").splitlines()
    begin = lines.index("::") + 2
    drawn = []
    for line in lines[begin:]:
        if line and not line.startswith(" "):
            break
        drawn.append(line.removeprefix("    "))
    return "```text\n" + "\n".join(drawn).rstrip() + "\n```"


# -- states -----------------------------------------------------------------------------------------------------------

STATE_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "PENDING": "None of its groups has started or ended.",
        "RUNNING": "The command of the task runs; of a group, all tasks have started. Of a workflow, at least one group has "
        "started or ended, and not all have ended.",
        "COMPLETED": "It succeeded: a task with exit code 0 or a code of `exitActions: {COMPLETE: …}`, a group with its lead "
        "or its world, a workflow with all groups.",
        "FAILED": "It did not succeed; its reason shows the cause.",
        "CANCELED": "A person or another program canceled it.",
    }
)
"""Descriptions of the members that have no docstring in ``states``."""


def member_docs(name: str) -> dict[str, str]:
    """Return the docstrings under the members of an enum of ``states``."""
    tree = ast.parse(inspect.getsource(states))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, str] = {}
    for before, after in pairwise(body):
        if isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name) and isinstance(after, ast.Expr):
            found[before.targets[0].id] = str(ast.literal_eval(after.value))
    return found


def state_table() -> str:
    """Return the states of tasks and groups, with the states that may follow."""
    return _moves_table(State, TRANSITIONS, member_docs("State"))


def workflow_state_table() -> str:
    """Return the states of workflows, with the states that may follow."""
    return _moves_table(WorkflowState, WORKFLOW_TRANSITIONS, member_docs("WorkflowState"))


def _moves_table(members: Any, moves: Mapping[Any, Sequence[Any]], docs: Mapping[str, str]) -> str:
    lines = ["| state | meaning | may be followed by |", "|---|---|---|"]
    for state in members:
        text = docs.get(state.name) or STATE_TEXT[state.name]
        lines.append(
            f"| `{state.value}` | {text} | {', '.join(f'`{after.value}`' for after in moves[state]) or 'nothing: final'} |"
        )
    return "\n".join(lines)


def reason_table() -> str:
    """Return every reason with its description, its status, and whether this version uses it."""
    used = _reasons_in_use()
    lines = ["| reason | it ended because … | task and group show | in this version |", "|---|---|---|---|"]
    for reason in Reason:
        state = State.CANCELED if reason is Reason.CANCELED else State.FAILED
        here = "yes" if reason in used else "not set yet"
        lines.append(f"| `{reason.value}` | {REASON_TEXT[reason]} | `{states.status_of(state, reason)}` | {here} |")
    return "\n".join(lines)


def task_exit_codes() -> str:
    """Return the table of exit codes for ends that the command itself did not cause."""
    texts: dict[int, list[str]] = {2010: ["an input could not be fetched"]}
    for reason, number in CODES.items():
        if number is not None:
            texts.setdefault(number, []).append(REASON_TEXT[reason])
    lines = ["| code | the task ended because … |", "|--:|---|"]
    return "\n".join([*lines, *(f"| {number} | {'; or '.join(words)} |" for number, words in sorted(texts.items()))])


def _reasons_in_use() -> set[Reason]:
    files = [path for folder in ("supervisor", "backends") for path in sorted((SOURCES / folder).rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return {reason for reason in Reason if any(re.search(rf"\bReason\.{reason.name}\b", text) for text in texts)}


def status_table() -> str:
    """Return every status in the output of commands, with its states and reasons."""
    tasks = _by_status(State, states.status_of)
    workflows = _by_status(WorkflowState, states.workflow_status_of)
    lines = ["| status | state or reason of a task or group | state or reason of a workflow |", "|---|---|---|"]
    rows = (
        f"| `{status}` | {tasks.get(status, '–')} | {workflows.get(status, '–')} |"
        for status in dict.fromkeys([*tasks, *workflows])
    )
    return "\n".join([*lines, *rows])


def _by_status(members: Any, status_of: Callable[[Any, Reason | None], str]) -> dict[str, str]:
    """Return the states and reasons of each status.

    The state and the reason CANCELED have one status and one name, so the reason is left out. FAILED also has this reason if a
    task was canceled outside of distflow.
    """
    found: dict[str, list[str]] = {}
    for state in members:
        if state.name != "FAILED":
            found.setdefault(status_of(state, None), []).append(f"`{state.value}`")
            continue
        for reason in Reason:
            if reason is not Reason.CANCELED:
                found.setdefault(status_of(state, reason), []).append(f"`{reason.value}`")
        if members is WorkflowState:
            found[status_of(state, None)].append("or several reasons in several groups")
    return {status: ", ".join(words) for status, words in found.items()}


# -- the rules of the rank layout -------------------------------------------------------------------------------------

RULES: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        "Every rank belongs to exactly one task",
        (
            ("gap", "No rank may be left out."),
            ("overlap", "Two tasks may not claim the same rank."),
            ("claimed_twice", "Two tasks may not have the same offset."),
            ("beyond_world_size", "No task may have a rank beyond the world size."),
            ("size_too_small", "The sizes must fill the world."),
            ("size_too_large", "The sizes must not exceed the world."),
            ("task_absent", "A task may not be missing at the end of the world."),
            ("task_absent_in_the_middle", "A task may not be missing in the middle."),
            ("sum_is_not_world_size", "The sizes must add up to the world size."),
            ("several_mistakes", "If several values are wrong, distflow proposes a whole layout."),
            ("alone", "Tasks of one world must be in one group."),
            ("ranks_overlap", "The same rules apply to the `ranks` field."),
        ),
    ),
    (
        "All tasks agree on the world size",
        (
            ("world_size_differs", "If one task has another world size, distflow names that task."),
            ("world_size_not_raised", "A new worker raises the world size in every task."),
            ("world_size_too_small_everywhere", "The world size must be right even if all tasks agree on it."),
            ("tutorial_in_small", "The world size is also checked if each task holds one rank."),
            ("world_size_left_out_everywhere", "A task with `--offset` and `--size` also needs `--world_size`."),
        ),
    ),
    (
        "Offset, size and world size are numbers, and none is missing",
        (
            ("flags_left_out", "Every task of the world needs its flags."),
            ("flag_left_out", "A task needs all three flags."),
            ("size_unknown", "After a task of unknown size, the offset is unknown."),
            ("not_a_number", "The values are whole numbers."),
            ("offset_negative", "An offset is 0 or more."),
            ("size_zero", "A size is 1 or more."),
            ("unknown_variable", "distflow cannot check a variable that only the shell knows (a warning)."),
            ("two_commands", "A task may not start two commands with different ranks."),
        ),
    ),
    (
        "Every rank has a GPU",
        (
            ("size_more_than_gpus", "A task that asks for GPUs may not have more ranks than GPUs."),
            ("torchrun_nproc_more_than_gpus", "The same applies to torchrun's `--nproc_per_node`."),
        ),
    ),
    (
        "The lead holds rank 0",
        (
            ("lead_is_not_rank_0", "The task with rank 0 must be the lead."),
            ("lead_holds_no_ranks", "A task without ranks cannot lead a world."),
        ),
    ),
    (
        "All tasks use the master's address",
        (
            ("master_addr_localhost", "`localhost` is a different node for each task."),
            ("master_addr_names_another_task", "`{{host:…}}` must name the master."),
            ("master_addr_task_name", "The name of a task is not an address."),
            ("master_addr_fixed", "A fixed address is wrong if distflow places the master on another node (a warning)."),
            ("torchrun_master_addr", "The same applies to torchrun's `--master_addr`."),
            ("torchrun_rdzv_endpoint", "The same applies to torchrun's `--rdzv-endpoint`."),
        ),
    ),
    (
        "All tasks use one port",
        (
            ("port_differs", "The port must be the same in every task."),
            ("port_out_of_range", "The port must be a valid port number."),
            ("port_set_twice", "A task may not set two ports."),
            ("torchrun_master_port", "torchrun's `--master_port` must also be the same in every task."),
        ),
    ),
    (
        "torchrun: each node rank from 0 to nnodes − 1 occurs once",
        (
            ("torchrun_nnodes_not_raised", "`--nnodes` is the number of tasks."),
            ("torchrun_task_absent", "Every node rank needs a task."),
            ("torchrun_node_rank_twice", "Two tasks may not have the same node rank."),
            ("torchrun_node_rank_too_high", "Node ranks may not have gaps."),
            ("torchrun_alone", "Tasks of one world must be in one group."),
            (
                "torchrun_nproc_unknown",
                "`--nproc_per_node auto` is the `gpu` of the task's resource. Without `gpu`, it cannot be checked (a warning).",
            ),
            ("torchrun_c10d", "torchrun's c10d rendezvous numbers the nodes itself (a warning)."),
            ("torchrun_worlds_of_their_own", "Without `ranks`, each plain `torchrun` is a separate world (a warning)."),
        ),
    ),
    (
        "Programs that get their rank and the world size: each rank from 0 to world size − 1 occurs once",
        (
            ("rank_variables_twice", "Two tasks may not set the same `RANK`."),
            ("rank_flags_of_a_program", "A `--rank` may not be too high."),
            ("rank_flags_world_size", "`--world-size` is the number of tasks, and `--dist-url` must name the master."),
        ),
    ),
    (
        "The `ranks` field, flags and launcher agree",
        (
            ("ranks_against_flags", "Flags must agree with the `ranks` field."),
            ("ranks_against_torchrun", "torchrun's flags must agree with it too."),
            ("ranks_against_variables", "`RANK` and `WORLD_SIZE` must agree with it too."),
            ("mixed_styles", "All tasks of a group must start their ranks in the same way."),
        ),
    ),
    (
        "Rank tokens have a value",
        (
            ("token_without_ranks", "A rank token needs a group with ranks."),
            ("token_of_a_helper", "`{{rank_offset}}`, `{{rank_size}}` and `{{node_rank}}` need a task with ranks."),
            ("token_without_size", "A rank token needs a size that the spec states."),
        ),
    ),
    (
        "Replicas have different ranks",
        (
            ("replicas_with_one_offset", "A fixed offset would be the same in all replicas."),
            ("replicas_with_one_node_rank", "A fixed node rank would be the same in all replicas."),
        ),
    ),
    (
        "A launcher or a framework starts a Python script, and starts it once",
        (
            ("launcher_of_a_torchrun", "With a `launcher`, the command may not start the ranks itself."),
            ("launcher_twice", "The same applies with a `framework`."),
            ("launcher_beside_a_framework", "`torchrun` and `spawn` can only be combined with `framework: pytorch`."),
            ("launcher_of_a_shell", "The command must be a Python script or a module."),
            ("launcher_of_a_text", "The script must be a file."),
            ("launcher_of_an_option", "Options of the interpreter are not passed to the ranks."),
            ("launcher_restarts_of_spawn", "`spawn` cannot restart the ranks of several tasks."),
            (
                "launcher_restarts_of_torchrun",
                "torchrun does not keep the order of the ranks when it restarts them (a warning).",
            ),
            ("launcher_uneven", "Accelerate needs the same number of ranks in every task."),
            ("jax_launch", "JAX does not have a launcher."),
        ),
    ),
    (
        "A strategy fits the ranks",
        (
            ("strategy_mesh_too_big", "A mesh must have as many places as the group has ranks."),
            ("strategy_across_nodes", "Ranks that share a tensor must be on one node."),
            ("strategy_unknown_kind", "The `kind` of a strategy must be one that distflow knows."),
            ("strategy_without_ranks", "A strategy needs ranks."),
            ("strategy_of_ray", "A block that asks for Ray needs `framework: ray`."),
            ("strategy_of_a_guide", "distflow converts a strategy in a form of NeMo RL or tunix, with a warning."),
            ("strategy_beside_a_framework", "Some frameworks do not read `strategy` (a warning)."),
        ),
    ),
    (
        "An elastic group is valid in each of its sizes",
        (
            ("elastic_min", "`min` must be less than the number of tasks."),
            ("elastic_without_ranks", "An elastic group needs ranks."),
            ("elastic_literal_world_size", "Values that depend on the number of tasks must not be fixed."),
            ("elastic_mesh", "The strategy must fit every size."),
            ("elastic_names_a_worker", "No task may need the address of a task that may be left out."),
            ("elastic_output", "No task may need the output of a task that may be left out."),
        ),
    ),
    (
        "After a restart, all tasks of a world find the same files",
        (
            ("checkpoint_of_one_task", "A checkpoint of one task restores files for that task only (a warning)."),
            ("shared_without_restart", "`shared` needs a group that may be retried (a warning)."),
        ),
    ),
)


def layout_rules() -> str:
    """Return every rule of the rank layout, with the message for a spec that breaks it."""
    named = [name for _, cases in RULES for name, _ in cases]
    existing = {path.stem.removeprefix("layout_") for path in GOLDENS.glob("layout_*.yaml")}
    if set(named) != existing or len(named) != len(set(named)):
        different = sorted(set(named) ^ existing)
        raise SystemExit(f"scripts/generate_docs.py: only in RULES, only in tests/goldens/problems, or twice: {different}")
    parts = []
    for title, cases in RULES:
        parts.append(f"### {title}")
        for name, sentence in cases:
            path = f"../tests/goldens/problems/layout_{name}.yaml"
            parts.append(f"{sentence} ([spec]({path}))\n\n```text\n{_message(name)}\n```")
    return "\n\n".join(parts)


def _message(name: str) -> str:
    """Return the messages of a golden file, without the drawing of the world that follows warnings."""
    text = (GOLDENS / f"layout_{name}.txt").read_text(encoding="utf-8")
    return re.split(r"^\S+: world of ", text, maxsplit=1, flags=re.MULTILINE)[0].rstrip()


# -- diagnoses --------------------------------------------------------------------------------------------------------


def diagnosis_table() -> str:
    """Return every rule of ``distflow workflow diagnose`` for failures: symptom, cause and remedy."""
    return _rule_table((*RULES_OF_DIAGNOSIS, EXCEPTION, HANG, *END_RULES))


def finding_table() -> str:
    """Return every rule of ``distflow workflow diagnose`` for the use of resources."""
    return _rule_table(RESOURCE_RULES)


def _rule_table(rules: Sequence[Rule]) -> str:
    lines = ["| `key` | symptom | cause | remedy |", "|---|---|---|---|"]
    for rule in rules:
        cells = (f"`{rule.key}`", rule.shows, rule.cause, rule.remedy)
        lines.append("| " + " | ".join(prose(cell) for cell in cells) + " |")
    return "\n".join(lines)


# -- pages ------------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "spec": spec_reference,
        "configuration": configuration_reference,
        "exit-codes": exit_codes,
        "error-tree": error_tree,
        "states": state_table,
        "workflow-states": workflow_state_table,
        "reasons": reason_table,
        "statuses": status_table,
        "task-exit-codes": task_exit_codes,
        "layout-rules": layout_rules,
        "diagnoses": diagnosis_table,
        "findings": finding_table,
    }
)


def renewed(page: str) -> str:
    """Return a page with its generated parts regenerated."""
    return MARK.sub(lambda match: f"{match.group(1)}\n{PARTS[match.group(2)]()}\n\n{match.group(4)}", page)


def parts_of(page: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [match.group(2) for match in MARK.finditer(page)]


def main() -> int:
    """Write every page whose generated parts have changed."""
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
