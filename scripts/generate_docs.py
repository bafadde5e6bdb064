"""Write the generated parts of docs/ anew (``make docs``).

A page holds prose that people write, and between two comments that name a part what is made here from the code: from the JSON
Schemas, the error tree, the tables of states, and the golden messages of the rank layout. ``tests/unit/test_generated_docs.py``
fails when a page differs from what this would write.
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
from distflow.diagnosis.rules import EXCEPTION
from distflow.diagnosis.rules import RULES as RULES_OF_DIAGNOSIS
from distflow.documents.problems import ProblemsFound
from distflow.lifecycle import states
from distflow.lifecycle.exits import CODES
from distflow.lifecycle.states import MOVES, REASON_TEXT, WORKFLOW_MOVES, Reason, State, WorkflowState

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
    """A JSON Schema as chapters, one for each kind of mapping, in the order in which they are met."""

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
        """Yield the mappings that a value holds: itself, its items, its values."""
        if "properties" in rule:
            yield rule
        for key in ("items", "additionalProperties"):
            if isinstance(rule.get(key), Mapping):
                yield from self._mappings_in(self._resolved(rule[key]))

    def _resolved(self, rule: Schema) -> dict[str, Any]:
        """Return a rule with what it refers to below what it says itself."""
        reference = str(rule.get("$ref", ""))
        if not reference:
            return dict(rule)
        return {**self._resolved(self._root["$defs"][reference.removeprefix("#/$defs/")]), **rule}

    def _chapter(self, section: Section) -> str:
        lines = [f"{self._hashes} {heading(section.title)}", ""]
        if section.schema.get("description"):
            lines += [prose(str(section.schema["description"])), ""]
        lines += ["| key | type | default | what it says | example |", "|---|---|---|---|---|"]
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
    """Return text in which ``<name>`` is no HTML; what stands in code marks is left alone."""
    pieces = text.split("`")
    return "`".join(piece if position % 2 else piece.replace("<", "\\<") for position, piece in enumerate(pieces))


def plain_heading(title: str) -> str:
    """Return a schema's title as the words of a link."""
    return title.replace("`", "")


def slug(text: str) -> str:
    """Return the anchor that GitHub gives to a heading.

    >>> slug("An entry of `workflow.resources`")
    'an-entry-of-workflowresources'
    """
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def code(value: object) -> str:
    """Return a value as YAML on one line, in code marks."""
    if isinstance(value, str):
        # Quoted where YAML would read it as something else than this text.
        return f"`{value}`" if yaml.safe_load(value) == value else f"`{json.dumps(value)}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()
    return f"`{text}`"


def spec_reference() -> str:
    """Return the reference of workflow specs."""
    return Reference(json.loads((SOURCES / "spec" / "workflow.schema.json").read_text(encoding="utf-8"))).text()


def configuration_reference() -> str:
    """Return the reference of the configuration."""
    return Reference(json.loads((SOURCES / "pools" / "config.schema.json").read_text(encoding="utf-8"))).text()


# -- errors and exit codes --------------------------------------------------------------------------------------------

MEANINGS: Mapping[int, str] = MappingProxyType(
    {
        0: "what was asked was done; with `--wait`, and for `query --exit-status`, the workflow completed",
        1: "the workflow ended and did not complete",
        2: "the spec, the configuration or the command line is wrong; nothing was started",
        3: "a node or a store of data could not be reached or refused, or `pool check` found that no gang can run; or the "
        "supervisor did not start; or `cancel --wait` ran out of time",
        4: "the workflow has not ended yet: `query --exit-status`, or `submit --wait` when nobody reads its output any more",
        5: "this machine's state directory cannot be used, or a disk is full",
        70: "a bug in distflow; the message names the file that holds the traceback",
        130: "interrupted (Ctrl-C)",
    }
)


FAMILY: Sequence[type[errors.DistflowError]] = (*(getattr(errors, name) for name in errors.__all__), ProblemsFound)
"""Every error that other modules may raise. Not ``__subclasses__``: what that holds depends on what was imported before."""


def exit_codes() -> str:
    """Return the table of exit codes and who raises them."""
    raised: dict[int, list[str]] = {}
    for error in FAMILY:
        raised.setdefault(error.exit_code, []).append(f"`{error.__name__}`")
    unknown = raised.keys() - MEANINGS.keys()
    if unknown:
        raise SystemExit(f"scripts/generate_docs.py: no meaning for the exit codes {sorted(unknown)}")
    # The root's own code is that of a bug: nothing raises the root itself.
    raised[70] = []
    lines = ["| code | meaning | errors |", "|--:|---|---|"]
    return "\n".join(
        [*lines, *(f"| {number} | {text} | {', '.join(raised.get(number, ())) or '–'} |" for number, text in MEANINGS.items())]
    )


def error_tree() -> str:
    """Return the tree as ``errors`` draws it."""
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
        "PENDING": "No task of it has started.",
        "RUNNING": "Its command runs; for a workflow: at least one group has started, and not all have ended.",
        "COMPLETED": "It ended well: a task with exit code 0, a group as its lead or its world, a workflow with every group.",
        "FAILED": "It ended otherwise; the reason says why.",
        "CANCELED": "A person asked for its end.",
    }
)
"""For the members that ``states`` leaves without words, because their names say it."""


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
    """Return where a task or a group can be, and what may follow."""
    return _moves_table(State, MOVES, member_docs("State"))


def workflow_state_table() -> str:
    """Return where a workflow can be, and what may follow."""
    return _moves_table(WorkflowState, WORKFLOW_MOVES, member_docs("WorkflowState"))


def _moves_table(members: Any, moves: Mapping[Any, Sequence[Any]], docs: Mapping[str, str]) -> str:
    lines = ["| state | meaning | may be followed by |", "|---|---|---|"]
    for state in members:
        text = docs.get(state.name) or STATE_TEXT[state.name]
        lines.append(
            f"| `{state.value}` | {text} | {', '.join(f'`{after.value}`' for after in moves[state]) or 'nothing: final'} |"
        )
    return "\n".join(lines)


def reason_table() -> str:
    """Return every reason with its words, the status that shows it, and whether this version can set it."""
    used = _reasons_in_use()
    lines = ["| reason | it ended because … | task and group show | in this version |", "|---|---|---|---|"]
    for reason in Reason:
        state = State.CANCELED if reason is Reason.CANCELED else State.FAILED
        here = "yes" if reason in used else "not set yet"
        lines.append(f"| `{reason.value}` | {REASON_TEXT[reason]} | `{states.status_of(state, reason)}` | {here} |")
    return "\n".join(lines)


def task_exit_codes() -> str:
    """Return the exit codes of ends that the command did not choose."""
    texts: dict[int, list[str]] = {2010: ["its data could not be brought to it"]}
    for reason, number in CODES.items():
        if number is not None:
            texts.setdefault(number, []).append(REASON_TEXT[reason])
    lines = ["| code | the task ended because … |", "|--:|---|"]
    return "\n".join([*lines, *(f"| {number} | {'; or '.join(words)} |" for number, words in sorted(texts.items()))])


def _reasons_in_use() -> set[Reason]:
    texts = [path.read_text(encoding="utf-8") for path in sorted((SOURCES / "supervisor").glob("*.py"))]
    return {reason for reason in Reason if any(re.search(rf"\bReason\.{reason.name}\b", text) for text in texts)}


def status_table() -> str:
    """Return every status that people see, with what it is made of."""
    tasks = _by_status(State, states.status_of)
    workflows = _by_status(WorkflowState, states.workflow_status_of)
    lines = ["| status | state or reason of a task or group | state or reason of a workflow |", "|---|---|---|"]
    rows = (
        f"| `{status}` | {tasks.get(status, '–')} | {workflows.get(status, '–')} |"
        for status in dict.fromkeys([*tasks, *workflows])
    )
    return "\n".join([*lines, *rows])


def _by_status(members: Any, status_of: Callable[[Any, Reason | None], str]) -> dict[str, str]:
    """Return what each status is made of. CANCELED as the reason of FAILED never occurs: that is the state CANCELED."""
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
        "Every rank is claimed exactly once",
        (
            ("gap", "No rank is left out."),
            ("overlap", "No rank is claimed twice."),
            ("claimed_twice", "No two tasks have the same offset."),
            ("beyond_world_size", "No rank lies beyond the world size."),
            ("size_too_small", "The sizes fill the world."),
            ("size_too_large", "The sizes do not exceed the world."),
            ("task_absent", "Every part of the world has its task."),
            ("task_absent_in_the_middle", "Also in the middle."),
            ("sum_is_not_world_size", "The sizes add up to the world size."),
            ("several_mistakes", "When several things are wrong, a whole layout is proposed."),
            ("alone", "Tasks that share a world stand in one group."),
            ("ranks_overlap", "The `ranks` field is held to the same rules."),
        ),
    ),
    (
        "One world size, the same everywhere",
        (
            ("world_size_differs", "A single other number is the one to change."),
            ("world_size_not_raised", "After a worker was added, all tasks name the new size."),
            ("world_size_too_small_everywhere", "Also when all agree on the old one."),
            ("tutorial_in_small", "The same with one process a task."),
            ("world_size_left_out_everywhere", "It is written out, as offset and size are."),
        ),
    ),
    (
        "Offset, size and world size are numbers, and all three are there",
        (
            ("flags_left_out", "No task of the world is without its flags."),
            ("flag_left_out", "None has only some of them."),
            ("not_a_number", "They are whole numbers."),
            ("offset_negative", "An offset is 0 or more."),
            ("size_zero", "A size is 1 or more."),
            ("unknown_variable", "A variable that only the shell knows cannot be checked."),
            ("two_commands", "A task says one thing."),
        ),
    ),
    (
        "A GPU for every rank",
        (
            ("size_more_than_gpus", "A task that asks for GPUs has at most as many ranks."),
            ("torchrun_nproc_more_than_gpus", "The same for torchrun."),
        ),
    ),
    (
        "The lead holds rank 0",
        (
            ("lead_is_not_rank_0", "Master and lead are one task."),
            ("lead_holds_no_ranks", "A helper cannot lead a world."),
        ),
    ),
    (
        "All tasks name the master's address",
        (
            ("master_addr_localhost", "`localhost` is another node for each task."),
            ("master_addr_names_another_task", "`{{host:…}}` names the master."),
            ("master_addr_task_name", "The name of a task is no address."),
            ("master_addr_fixed", "A fixed address holds only as long as the placement does."),
            ("torchrun_master_addr", "The same for torchrun's `--master_addr`."),
            ("torchrun_rdzv_endpoint", "And for its `--rdzv-endpoint`."),
        ),
    ),
    (
        "All tasks use one port",
        (
            ("port_differs", "The same in every task."),
            ("port_out_of_range", "It is a port."),
            ("port_set_twice", "A task names one."),
            ("torchrun_master_port", "The same for torchrun's `--master_port`."),
        ),
    ),
    (
        "torchrun: node ranks are 0 … nnodes − 1, each once",
        (
            ("torchrun_nnodes_not_raised", "`--nnodes` is the number of tasks."),
            ("torchrun_task_absent", "Every node rank has its task."),
            ("torchrun_node_rank_twice", "No node rank is given twice."),
            ("torchrun_node_rank_too_high", "They are dense."),
            ("torchrun_alone", "The tasks of one world stand in one group."),
            ("torchrun_nproc_unknown", "`--nproc_per_node auto` cannot be checked."),
            ("torchrun_c10d", "The c10d rendezvous numbers the nodes itself."),
            ("torchrun_worlds_of_their_own", "Several bare torchruns are several worlds."),
        ),
    ),
    (
        "Programs that are told their rank and the world size: ranks are 0 … world size − 1, each once",
        (
            ("rank_variables_twice", "No two tasks set the same `RANK`."),
            ("rank_flags_of_a_program", "No `--rank` is too high."),
            ("rank_flags_world_size", "`--world-size` is the number of tasks; `--dist-url` names the master."),
        ),
    ),
    (
        "Field, flags and launcher agree",
        (
            ("ranks_against_flags", "Flags beside a `ranks` field say the same."),
            ("ranks_against_torchrun", "So do torchrun's."),
            ("ranks_against_variables", "So do `RANK` and `WORLD_SIZE`."),
            ("mixed_styles", "One group starts its ranks in one way."),
        ),
    ),
    (
        "Rank tokens have something to stand for",
        (
            ("token_without_ranks", "The group shares a world."),
            ("token_of_a_helper", "The task holds ranks."),
            ("token_without_size", "Something says how many."),
        ),
    ),
    (
        "Replicas differ in their ranks",
        (
            ("replicas_with_one_offset", "A literal offset would be the same in all of them."),
            ("replicas_with_one_node_rank", "So would a literal node rank."),
        ),
    ),
    (
        "A launcher or a framework starts Python, and starts it once",
        (
            ("launcher_of_a_torchrun", "The command does not start the ranks, too."),
            ("launcher_twice", "Nor does it with a framework."),
            ("launcher_beside_a_framework", "A framework has a launcher of its own."),
            ("launcher_of_a_shell", "The command is a script or a module."),
            ("launcher_of_a_text", "It stands in a file."),
            ("launcher_of_an_option", "Options of the interpreter do not reach the ranks."),
            ("launcher_restarts_of_spawn", "One task's launcher cannot restart the ranks of another."),
            ("launcher_restarts_of_torchrun", "torchrun's restarts cost the order of the ranks (a warning)."),
            ("launcher_uneven", "Accelerate gives every task equally many ranks."),
            ("jax_launch", "JAX has no launcher."),
        ),
    ),
    (
        "A strategy fits the ranks",
        (
            ("strategy_mesh_too_big", "A mesh has as many places as the group has ranks."),
            ("strategy_across_nodes", "Ranks that share a tensor are on one node."),
            ("strategy_unknown_kind", "Its words are known."),
            ("strategy_without_ranks", "There are ranks."),
            ("strategy_of_ray", "What it asks for is done, or refused."),
            ("strategy_of_a_guide", "A block from another guide is converted (a warning)."),
            ("strategy_beside_a_framework", "Somebody reads it (a warning)."),
        ),
    ),
    (
        "An elastic group is right in each of its sizes",
        (
            ("elastic_min", "There is a smaller one."),
            ("elastic_without_ranks", "It shares a world."),
            ("elastic_literal_world_size", "Numbers that follow from the size are not written out."),
            ("elastic_mesh", "The strategy fits each of them."),
            ("elastic_names_a_worker", "Nobody needs the address of a task that may be left out."),
            ("elastic_output", "Nor its output."),
        ),
    ),
    (
        "After a restart all tasks of a world find the same files",
        (
            ("checkpoint_of_one_task", "A checkpoint of one task reaches only that task (a warning)."),
            ("shared_without_restart", "A shared directory is for groups that are tried again (a warning)."),
        ),
    ),
)


def layout_rules() -> str:
    """Return every rule of the rank layout with the message about a spec that breaks it."""
    named = [name for _, cases in RULES for name, _ in cases]
    there = {path.stem.removeprefix("layout_") for path in GOLDENS.glob("layout_*.yaml")}
    if set(named) != there or len(named) != len(set(named)):
        different = sorted(set(named) ^ there)
        raise SystemExit(f"scripts/generate_docs.py: RULES and tests/goldens/problems/layout_* differ: {different}")
    parts = []
    for title, cases in RULES:
        parts.append(f"### {title}")
        for name, sentence in cases:
            path = f"../tests/goldens/problems/layout_{name}.yaml"
            parts.append(f"{sentence} ([spec]({path}))\n\n```text\n{_message(name)}\n```")
    return "\n\n".join(parts)


def _message(name: str) -> str:
    """Return a golden's messages, without the world that a spec with mere warnings still has."""
    text = (GOLDENS / f"layout_{name}.txt").read_text(encoding="utf-8")
    return re.split(r"^\S+: world of ", text, maxsplit=1, flags=re.MULTILINE)[0].rstrip()


# -- diagnoses --------------------------------------------------------------------------------------------------------


def diagnosis_table() -> str:
    """Return every rule of ``distflow workflow diagnose``: how a cause shows, what it is, what to do."""
    lines = ["| `key` | how it shows | cause | remedy |", "|---|---|---|---|"]
    for rule in (*RULES_OF_DIAGNOSIS, EXCEPTION, *END_RULES):
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
    }
)


def renewed(page: str) -> str:
    """Return a page with its generated parts as they should be now."""
    return MARK.sub(lambda match: f"{match.group(1)}\n{PARTS[match.group(2)]()}\n\n{match.group(4)}", page)


def parts_of(page: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [match.group(2) for match in MARK.finditer(page)]


def main() -> int:
    """Write every page that is not as it should be."""
    for path in sorted(DOCS.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = renewed(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
