"""The end of a Slurm job: its cause, and the last messages of its script."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from msgspec import Struct

from distflow.backends.allocated.engine import AllocationState, Over, Queued
from distflow.backends.allocated.slurm.hostlists import expand_hosts
from distflow.backends.allocated.slurm.job_request import log_path
from distflow.backends.allocated.slurm.job_states import ENDS, Component, JobPhase, parse_limit, phase_of, state_text
from distflow.documents.quantities import seconds_text
from distflow.documents.text import plain
from distflow.lifecycle.states import Reason

__all__ = ["JobEnd", "job_end_command"]

_LONGEST_LOG = 2000
"""Bytes of a job's messages."""
_EXCESS = "exceeded .*memory limit|out of memory|oom.?kill"
"""A pattern for Python and for ``grep -E`` that matches Slurm's messages about too much memory, if case is ignored."""
_SCRIPT = r"""
seconds=3
for job in "$@"; do
  shown=$(scontrol show job -d -o "$job" 2>&1)
  printf '%s\n' "$shown" '{separator}'
  account=$(timeout 10 sacct --noheader --allocations --parsable2 --jobs="$job" --format=State,ExitCode,NodeList 2>/dev/null)
  printf '%s\n' "$account" '{separator}'
  uid=$(printf '%s\n' "$account" | sed -n 's/.*CANCEL[A-Z]* by \([0-9][0-9]*\).*/\1/p' | head -n 1)
  [ -z "$uid" ] || id -nu "$uid" 2>/dev/null || echo "user $uid"
  echo '{separator}'
  case $shown in *JobState=OUT_OF_MEMORY*)
    # The message with the node may arrive after the state.
    while [ $seconds -gt 0 ] && ! grep -Eiq '{excess}' {log} 2>/dev/null; do
      sleep 1
      seconds=$((seconds - 1))
    done
  esac
  tail -c {longest} {log} 2>/dev/null
  rm -f {log}
  echo '{separator}'
done
timeout 20 sinfo --noheader --Node --format='%N %T' 2>/dev/null
exit 0
"""

_BY_SEVERITY = (
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "PREEMPTED",
    "LAUNCH_FAILED",
    "FAILED",
    "CANCELLED",  # codespell:ignore
)
"""States of components. The first one that occurs explains the end of a heterogeneous job."""
_OUT_OF_MEMORY = re.compile(rf"(?:slurmstepd-(\S+): error: .*|srun: error: (\S+): .*)?(?i:{_EXCESS})")
"""Matches a message that a step used too much memory, and the node if it is named. Such a job may end as ``FAILED``."""

_NO_GPUS = re.compile(r" JOB_GRES=\S*:0\s")
"""Matches the output of ``scontrol`` for a job that Slurm started without the GPUs that it requested.

Slurm 22.05 does that if it starts the job after a restart of ``slurmctld`` but before the nodes have registered again. Such a
job cannot create steps.
"""


def job_end_command(separator: str, root: str, jobs: Sequence[str]) -> tuple[str, ...]:
    """Return a command that prints the four fields of ``JobEnd`` for each job, and then the states of all nodes.

    It also removes the files with the messages of the jobs' scripts. If a job used too much memory, the command waits up to 3 s
    for the message that names the node.
    """
    script = _SCRIPT.format(separator=separator, longest=_LONGEST_LOG, excess=_EXCESS, log=log_path(root, "$job"))
    return ("sh", "-c", script, "sh", *jobs)


class JobEnd(Struct, frozen=True):
    """The output of Slurm's commands for one job that has ended."""

    scontrol: str
    """Output of ``scontrol``, which forgets a job after some minutes."""
    accounting: str
    """Output of ``sacct``; empty on clusters without accounting."""
    canceled_by: str
    """Name or ``user <uid>`` of the user that canceled it; empty if that is unknown."""
    log: str
    """The last messages of its script; empty if the script succeeded or the login node cannot read the file with them."""

    def state_of(self, job: str, components: Sequence[Component], down: Collection[str]) -> AllocationState | None:
        """Return the state of a job that ``squeue`` did not list as active; ``None`` if Slurm did not answer.

        Args:
            job: The id of the job.
            components: Its components in ``squeue``; empty if ``squeue`` did not list it.
            down: The nodes that are down now.

        """
        states = [one.state for one in components] or re.findall(r" JobState=(\S+) Reason=", self.scontrol)
        if not states:
            states = [line.split("|")[0].split(" ")[0] for line in self.accounting.splitlines() if line]
            if not states and "invalid job id" not in self.scontrol.lower():
                return None
        if not states:
            return Over(reason=None, message=f"Slurm no longer knows job {job}")
        active = [state for state in states if phase_of(state) is not JobPhase.OVER]
        if active:
            return Queued(why=state_text(active[0]))  # it was submitted after the query with squeue
        state = next((one for one in _BY_SEVERITY if one in states), states[0])
        excess = [match for line in self.log.splitlines() if (match := _OUT_OF_MEMORY.search(line))]
        if state == "FAILED" and excess:
            state = "OUT_OF_MEMORY"
        reason, text = ENDS[state]
        hosts: tuple[str, ...] = ()
        if reason is Reason.OOM_KILLED:
            hosts = tuple(dict.fromkeys(host for match in excess for host in match.groups() if host))
            text += f" on {', '.join(hosts)}" if hosts else ""
        if reason is Reason.NODE_LOST:
            hosts = self._lost(components, down)
            text += f" ({', '.join(hosts)})" if hosts else ""
        if reason is Reason.CANCELED:
            by = plain(self.canceled_by)[:60]
            text += f" by {by} with `scancel`" if by else " in Slurm, for example with `scancel`"
        if state == "TIMEOUT" and (limit := self._time_limit()) is not None:
            text += f" of {seconds_text(limit)}"
        if state == "FAILED":
            text += self._exit()
        # If Slurm ended the job while its script started, or granted no GPUs, the script failed because of that.
        is_failure = state == "FAILED" and "already completing" not in self.log and _NO_GPUS.search(self.scontrol) is None
        return Over(reason=reason, message=f"Slurm job {job} {text}", hosts=hosts, is_failure=is_failure)

    def _lost(self, components: Sequence[Component], down: Collection[str]) -> tuple[str, ...]:
        """Return the nodes that the job lost."""
        named = re.findall(r" FailedNode=(\S+)", self.scontrol)
        lists = [one.hosts for one in components] or re.findall(r" NodeList=(\S*)", self.scontrol)
        try:
            failed = [host for text in named for host in expand_hosts(text)]
            hosts = [host for text in lists for host in expand_hosts("" if text == "(null)" else text)]
        except ValueError:
            return ()
        return tuple(failed) or tuple(host for host in hosts if host in down)

    def _time_limit(self) -> float | None:
        match = re.search(r" TimeLimit=(\S+) ", self.scontrol)
        return parse_limit(match[1]) if match is not None else None

    def _exit(self) -> str:
        match = re.search(r" ExitCode=([0-9]+):([0-9]+) ", self.scontrol)
        match = match or re.search(r"\|([0-9]+):([0-9]+)\|", self.accounting)
        text = ""
        if match is not None:
            text = f" with signal {match[2]}" if match[2] != "0" else f" with exit code {match[1]}"
        why = re.search(r" Reason=(\S+)", self.scontrol)
        if why is not None and why[1] not in ("None", "NonZeroExitCode"):
            text += f" ({plain(why[1])[:100]})"
        log = "; ".join(plain(line).strip() for line in self.log.splitlines()[-5:] if line.strip())
        return f"{text}: {log}" if log else text
