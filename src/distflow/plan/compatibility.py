"""Files, variables and programs for tasks that were written for Valohai or OSMO.

Valohai: programs that were written for its distributed tasks run unchanged. They find the other tasks with the package
``valohai-utils``, which reads ``distributed.json`` or ``distributed.yaml`` in the directory ``VH_CONFIG_DIR``. A *member* is a
task, not a rank: eight GPUs of a node are one member. Members are numbered in the order of ranks, and tasks without ranks come
last. By Valohai's rule the lowest ``member_id`` is the master, so the master is the task with rank 0, or the lead if no task
has ranks. distflow knows one address of a member, so its public and its local address are equal. Format: the samples and the
parser of https://github.com/valohai/valohai-utils (``valohai/internals/distributed_config``).

OSMO: ``{{host:<task>}}`` is a DNS name in OSMO, and an address in distflow. Some specs pass it to ``nslookup``,
``getent hosts``, ``dig`` or ``host``, which may fail for an address. If the command, environment or files of a task contain
such an address and mention one of these programs, distflow puts a script of that name into a directory at the beginning of the
task's PATH. The script answers for these addresses in the format of the real program, and passes all other calls to the real
program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from distflow.layout.ranks import WorldLayout
from distflow.plan.model import ATTEMPT_DIR, PLACEHOLDER, GroupPlan, PlannedFile, TaskBinding, address_of
from distflow.spec.model import TaskSpec

__all__ = ["LOOKUP_SCRIPTS_DIR", "distributed_environment", "distributed_files", "lookup_scripts", "member_ids"]


_FOLDER = "config"
"""The directory of Valohai's files, relative to the attempt's directory."""
_RESERVED = "VH_"
_NO_VALUES: Final[Mapping[str, str]] = MappingProxyType({})
_NO_PLACES: Final[Mapping[str, TaskBinding]] = MappingProxyType({})


def member_ids(tasks: Sequence[TaskSpec], world: WorldLayout | None) -> dict[str, int]:
    """Return the member number of each task of a gang, by name; empty for a group of one task without ranks."""
    if len(tasks) < 2 and world is None:
        return {}
    ranked = {item.task: item.node_rank for item in world.tasks} if world is not None else {}
    order = sorted(tasks, key=lambda task: (ranked.get(task.name, len(ranked)), not task.lead))
    return {task.name: number for number, task in enumerate(order)}


def distributed_environment(task: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a member; empty if its ``environment`` has variables that begin with ``VH_``."""
    if any(name.startswith(_RESERVED) for name in environment):
        return {}
    return {
        "VH_JOB_ID": _job_id(task),
        "VH_CONFIG_DIR": f"{ATTEMPT_DIR}/{_FOLDER}",
        "VH_INPUTS_DIR": f"{ATTEMPT_DIR}/input",
        "VH_OUTPUTS_DIR": f"{ATTEMPT_DIR}/output",
        "VH_REPOSITORY_DIR": f"{ATTEMPT_DIR}/work",
    }


def distributed_files(
    group: GroupPlan, task: str, values: Mapping[str, str] = _NO_VALUES, places: Mapping[str, TaskBinding] = _NO_PLACES
) -> tuple[PlannedFile, ...]:
    """Return ``distributed.json`` and ``.yaml`` of a task; empty for a task that is not a member.

    Both contain the same JSON text, which is also YAML (https://yaml.org/spec/1.2.2, section 1.2). ``values`` are the values of
    placeholders by name, and ``places`` has the nodes and addresses of the members. Other values stay placeholders. The files
    are created when a task is bound, and not stored, because their total size grows with the square of the gang's size.
    """
    own = group.launch(task).member
    if own is None:
        return ()
    workflow, attempt, leased = (values.get(name, f"@@{name}@@") for name in ("WORKFLOW_ID", "RETRY_ID", "LEASED_AT"))
    members = {}
    for number, name in sorted((one.member, one.task) for one in group.launches if one.member is not None):
        node, address = f"@@NODE:{name}@@", address_of(name)
        if place := places.get(name):
            node, address = place.node, place.address
        members[number] = {
            "announce_time": leased,
            "identity": node,
            "job_id": _job_id(name, workflow, attempt),
            "member_id": str(number),
            "network": {"exposed_ports": {}, "local_ips": [address], "public_ips": [address]},
        }
    found = {
        "config": {"group_name": f"task-{workflow}-{group.name}", "member_id": str(own), "required_count": len(members)},
        "members": list(members.values()),
        "self": members[own],
    }
    text = json.dumps(found) + "\n"  # in one line: an indentation takes ten times as long, for each of N tasks with N members
    return tuple(
        PlannedFile(path=f"{_FOLDER}/{name}", shown=name, text=text, size=len(text.encode()), mode=0o600)
        for name in ("distributed.json", "distributed.yaml")
    )


def _job_id(task: str, workflow: str = "@@WORKFLOW_ID@@", attempt: str = "@@RETRY_ID@@") -> str:
    return f"exec-{workflow}-{task}-{attempt}"


# -- OSMO -------------------------------------------------------------------------------------------------------------

LOOKUP_SCRIPTS_DIR = f"{ATTEMPT_DIR}/bin"
"""The directory of the scripts."""

_MENTION = re.compile(r"(?<![\w./{-])(nslookup|getent|dig|host)(?![\w./:=-])")

# Formats: bind9-dnsutils 9.18 (nslookup, dig, host) and glibc 2.36 (getent).
_SCRIPT = r"""#!/bin/sh
# From distflow: in this workflow, tasks of the group have these addresses and no names.
addresses='ADDRESSES'
tool=${0##*/}
name='' is_short='' is_passed_on=''
[ "$tool" = getent ] && [ "${1-}" != hosts ] && is_passed_on=1
for word in "$@"; do
    case $word in
    +short) is_short=1 ;;
    -x | PTR | ptr | -type=[Pp][Tt][Rr] | -query=[Pp][Tt][Rr]) is_passed_on=1 ;;
    -* | +* | @* | A | AAAA | a | aaaa | hosts) ;;
    *) [ -n "$name" ] || name=$word ;;
    esac
done
if [ -n "$name" ] && [ -z "$is_passed_on" ]; then
    for address in $addresses; do
        [ "$name" = "$address" ] || continue
        kind=A words='has address'
        case $address in *:*) kind=AAAA words='has IPv6 address' ;; esac
        case $tool in
        nslookup) printf 'Server:\t\tdistflow\nAddress:\t127.0.0.1#53\n\nName:\t%s\nAddress: %s\n\n' "$name" "$address" ;;
        getent) printf '%-15s %s\n' "$address" "$name" ;;
        host) printf '%s %s %s\n' "$name" "$words" "$address" ;;
        dig)
            [ -n "$is_short" ] || printf ';; ANSWER SECTION:\n%s.\t\t0\tIN\t%s\t' "$name" "$kind"
            printf '%s\n' "$address"
            ;;
        esac
        exit 0
    done
fi
own=${0%/*}
set -f
IFS=:
for directory in $PATH; do
    if [ "$directory" != "$own" ] && [ -f "$directory/$tool" ] && [ -x "$directory/$tool" ]; then
        exec "$directory/$tool" "$@"
    fi
done
echo "$tool: not found on this node. distflow's replacement answers only for: $addresses" >&2
exit 127
"""


def lookup_scripts(texts: Iterable[str]) -> tuple[PlannedFile, ...]:
    """Return a script for each of ``nslookup``, ``getent``, ``dig`` and ``host`` that the texts of a task mention.

    The result is empty if the texts do not contain a placeholder for an address.
    """
    known = list(texts)
    found = (one for text in known for one in PLACEHOLDER.finditer(text) if one.group(1) in ("ADDRESS", "MASTER_ADDR"))
    addresses = sorted({one.group(0) for one in found})
    if not addresses:
        return ()
    script = _SCRIPT.replace("ADDRESSES", " ".join(addresses), 1)
    names = sorted({one.group(1) for text in known for one in _MENTION.finditer(text)})
    return tuple(
        PlannedFile(path=f"bin/{name}", shown=f"distflow's {name}", text=script, size=len(script.encode()), mode=0o700)
        for name in names
    )
