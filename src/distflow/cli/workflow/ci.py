"""Reports of ``submit`` and ``validate``: GitHub annotations and summaries, JUnit files, and self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli.options import CheckFormat
from distflow.errors import DistflowError, InputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from distflow.client.client import Client
    from distflow.client.specs import CheckedSpec
    from distflow.documents.problems import Problem
    from distflow.state.record import WorkflowRecord

__all__ = ["CiReport"]


class CiReport:
    """The reports of one command. Without ``--format-type github``, ``--junit`` and ``--report``, its methods do nothing."""

    def __init__(
        self, format_type: CheckFormat, junit: Path | None = None, page: Path | None = None, *, is_waiting: bool = False
    ) -> None:
        """Check the options before anything starts.

        Raises:
            InputError: if ``junit`` or ``page`` is given without ``--wait``, or cannot be written.

        """
        self._is_github = format_type is CheckFormat.GITHUB
        self._junit, self._page, self._has_page = junit, page, False
        for option, path in (("--junit", junit), ("--report", page)):
            if path is not None:
                from distflow.cli.render.junit import check_path

                if not is_waiting:
                    raise InputError(f"{option} needs --wait, because the report is written when the workflow has ended")
                check_path(option, path)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Annotate the errors of a block. If an error occurs before the workflow's page is written, write a page about it."""
        try:
            with self._annotating_errors():
                yield
        except DistflowError as error:
            if self._page is not None and not self._has_page:
                from distflow.cli.ui.report import write_error_page

                write_error_page(error, self._page)
            raise

    def _annotating_errors(self) -> AbstractContextManager[None]:
        if not self._is_github:
            return nullcontext()
        from distflow.cli.render.github import reporting_errors

        return reporting_errors()

    def warn(self, warnings: Sequence[Problem]) -> None:
        """Annotate warnings about a spec."""
        if self._is_github:
            from distflow.cli.render.github import problem_lines

            for line in problem_lines(warnings):
                print(line, flush=True)

    @contextmanager
    def following(self, client: Client, checked: CheckedSpec) -> Iterator[Callable[[WorkflowRecord], None]]:
        """Yield a function to call with the ended workflow. If the block calls it, write the reports at the end of the block.

        In the block, GitHub does not run lines of task output that look like its own workflow commands (``::error::``).
        """
        ended: list[WorkflowRecord] = []
        try:
            with self._without_workflow_commands():
                yield ended.append
        finally:
            for record in ended:
                self._report(client, record, checked)

    def _without_workflow_commands(self) -> AbstractContextManager[None]:
        if not self._is_github:
            return nullcontext()
        from distflow.cli.render.github import without_workflow_commands

        return without_workflow_commands()

    def _report(self, client: Client, record: WorkflowRecord, checked: CheckedSpec) -> None:
        if self._is_github:
            from distflow.cli.render.failures import remedies_of
            from distflow.cli.render.github import append_summary, workflow_lines, workflow_summary
            from distflow.client.failures import diagnose_groups

            remedies = remedies_of(record, diagnose_groups(client, record))
            for line in workflow_lines(record, checked, remedies):
                print(line)
            append_summary(workflow_summary(record, remedies))
        if self._junit is not None:
            from distflow.cli.render.junit import write_junit

            write_junit(record, self._junit)
        if self._page is not None:
            from distflow.cli.ui.report import write_report

            self._has_page = True
            write_report(client, record, self._page)
