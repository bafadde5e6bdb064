"""The common part of gangs under random faults, on SSH hosts and on cluster engines."""

from __future__ import annotations

from collections.abc import Callable

from distflow.state.record import WorkflowRecord
from distflow.state.store import Store
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

__all__ = ["ChaosGang"]

_SPEC = """
workflow:
  name: chaos
  groups:
  - name: g
    tasks:
"""
_TASK = """    - name: tNUMBER
      lead: LEAD
      ranks: {size: 1}
      exitActions: {ACTIONS}
      command:
      - sh
      - -c
      - |
        exec 9> "FOLDER/tNUMBER.lock"
        flock -n 9 || echo tNUMBER >> "FOLDER/twice"
        FIRST
        echo $$ > "FOLDER/tNUMBER.pid"
        i=0
        while [ ! -e "FOLDER/go" ]; do
          echo line $i
          i=$((i+1))
          if [ -e "FOLDER/tNUMBER.code" ]; then
            code=$(cat "FOLDER/tNUMBER.code")
            rm "FOLDER/tNUMBER.code"
            echo late
            exit $code
          fi
          { sleep 0.1; } 2>/dev/null  # if Slurm ends `sleep` first, the shell prints "Terminated"
        done
        echo late
"""


class ChaosGang:
    """One gang with its own folder. Its tasks print numbered lines until the file ``go`` exists."""

    end_s = 60.0
    """How long the gang may take to reach a state."""

    def __init__(self, cli: Cli, seed: int, schedule: object) -> None:
        """Submit nothing yet. ``schedule`` is shown if the gang does not reach a state."""
        self.cli = cli
        self.folder = cli.folder / f"chaos-{seed}"
        self.folder.mkdir()
        self._schedule = schedule
        self._name = ""

    @property
    def record(self) -> WorkflowRecord:
        """The workflow's record in the store."""
        with Store(self.cli.state / "distflow.sqlite3") as store:
            return store.find(self._name)

    def spec(self, tasks: int, *, is_retried: bool, first: str = ":") -> str:
        """Return a spec. Each task begins with the shell command ``first``. With ``is_retried``, it has a second attempt."""
        text = _SPEC + "".join(
            _TASK.replace("FIRST", first.strip())
            .replace("NUMBER", str(number))
            .replace("LEAD", str(number == 0).lower())
            .replace("FOLDER", str(self.folder))
            for number in range(tasks)
        )
        retry = "    retry: {limit: 1, backoff: 0}\n" if is_retried else ""
        return text.replace("ACTIONS", "RESCHEDULE: 1-255" if is_retried else "") + retry

    def exit(self, victim: int, code: int) -> None:
        """Let a task exit with a code."""
        (self.folder / "code").write_text(str(code))
        (self.folder / "code").rename(self.folder / f"t{victim}.code")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. If there is no supervisor, run a command that starts one, as a user would."""

        def check() -> bool:
            if condition():
                return True
            if self.cli.supervisor() is None:
                self.cli.run("workflow", "query", self._name)
            return False

        try:
            wait_until(check, self.end_s, what)
        except TimeoutError as error:
            events = self.cli.run("workflow", "events", self._name).out
            raise AssertionError(f"{self._schedule}: {error}\n{events}\n{self.record}") from None
