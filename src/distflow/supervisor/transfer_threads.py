"""Execute the commands of ``transfers``, which copy data between URLs, the blob store and nodes, in one thread each.

Progress and outcomes are reported as observations. A transfer may be repeated at any time, by this supervisor or the next one:
it then skips data that is already transferred, where possible.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distflow.backends.base import AttemptKey, Backend
from distflow.backends.machines.connection.transfers import TransferRate
from distflow.documents.text import report_bug
from distflow.errors import DistflowError
from distflow.state.record import TransferRecord
from distflow.storage.credentials import CredentialsFor, ambient_credentials
from distflow.supervisor.commands import CommandId, TransferData, TransferEnded, TransferMoved
from distflow.supervisor.transfers import Transfer

if TYPE_CHECKING:
    from distflow.storage.base import DataStore
    from distflow.storage.credentials import Identity
    from distflow.storage.failures import Retries
    from distflow.storage.task_data import Delivery

__all__ = ["ThreadedTransfers", "TransferRunner"]


_MOST_TRANSFERS = 4
"""The maximum number of transfers through this machine at a time. Nodes that write outputs themselves do not count."""
_PAUSES_S = (1.0, 5.0, 20.0, 60.0)
"""Seconds between retries. They are long, because results of days of computing must survive a network failure of a minute."""

_LOCAL_CREDENTIALS = (
    "this machine has no credentials that distflow may send to nodes for this URL: distflow never sends credential files, AWS "
    "profiles, roles or SAS tokens (to let nodes transfer the data: distflow credential set NAME --type DATA)"
)


class TransferRunner(Protocol):
    """Moves data between URLs, nodes and the blob store.

    No method waits for a transfer or a network. The supervisor's sink gets progress and outcomes.
    """

    def begin(self, command: TransferData, transfer: Transfer, backend: Backend | None = None) -> None:
        """Begin one transfer and report its progress and outcome. ``backend`` is that of the node that holds the data."""
        ...

    def cancel(self, command: TransferData) -> None:
        """Abandon one transfer. Progress may still be reported, but its outcome is not."""
        ...

    def identity(self, url: str) -> Identity | None:
        """Return the credentials of this machine for a URL's store, or ``None`` when a node could not use them."""
        ...

    def forget(self, workflow: str) -> None:
        """Remove the temporary files of a workflow (uuid) that has ended."""
        ...

    def close(self) -> None:
        """Abandon everything without waiting."""
        ...


class ThreadedTransfers:
    """The ``TransferRunner`` of a supervisor process: one thread for each transfer."""

    def __init__(
        self,
        blobs: Path,
        scratch: Path,
        now: Callable[[], float],
        sink: Callable[[TransferMoved | TransferEnded], None],
        credentials_for: CredentialsFor = ambient_credentials,
    ) -> None:
        """Start no transfer yet. ``scratch`` must be on the file system of ``blobs``, and is created when it is needed."""
        self._blobs = blobs
        self._scratch = scratch
        self._now = now
        self._sink = sink
        self._credentials_for = credentials_for
        self._halts: dict[CommandId, threading.Event] = {}
        self._slots = threading.BoundedSemaphore(_MOST_TRANSFERS)

    def begin(self, command: TransferData, transfer: Transfer, backend: Backend | None = None) -> None:
        """Begin one transfer in a thread, which reports to the sink until it ends. ``backend`` is that of the source's node."""
        halt = self._halts[command.id] = threading.Event()
        arguments = (command, transfer, backend, halt)
        threading.Thread(target=self._run, args=arguments, name=f"data {transfer.data}", daemon=True).start()

    def cancel(self, command: TransferData) -> None:
        """Abandon one transfer that is not needed now. Progress may still be reported, but its outcome is not."""
        halt = self._halts.pop(command.id, None)
        if halt is not None:
            halt.set()

    def forget(self, workflow: str) -> None:
        """Remove the temporary files of a workflow (uuid) that has ended."""
        shutil.rmtree(self._scratch / workflow, ignore_errors=True)

    def close(self) -> None:
        """Abandon everything without waiting."""
        for halt in list(self._halts.values()):  # a copy: transfers that end meanwhile remove their entry
            halt.set()

    def _run(self, command: TransferData, transfer: Transfer, backend: Backend | None, halt: threading.Event) -> None:
        from distflow.storage.failures import TransferCanceled  # noqa: PLC0415  most workflows have no data at URLs

        reporter = _TransferReporter(command, transfer, self._now, self._sink)
        try:
            if transfer.source is not None:
                outcome = self._deliver(command, transfer, transfer.source, backend, halt, reporter)
            else:
                with self._slots:
                    outcome = self._copy(command, transfer, halt, reporter)
        except TransferCanceled:
            outcome = reporter.outcome(error="the transfer was canceled")  # if by the supervisor, it is not reported: see below
        except DistflowError as error:
            outcome = reporter.outcome(error=": ".join(str(error).split("\n")))
        except OSError as error:
            outcome = reporter.outcome(error=f"{error.filename or self._blobs}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001  a bug in a transfer must not leave its gang waiting forever
            outcome = reporter.outcome(error=report_bug(error))
        # A failed file sets `halt`, too, so only a missing entry shows that the supervisor canceled the transfer.
        if self._halts.pop(command.id, None) is halt:
            self._sink(reporter.ended(outcome))

    def _copy(
        self, command: TransferData, transfer: Transfer, halt: threading.Event, reporter: _TransferReporter
    ) -> TransferRecord:
        from distflow.documents.urls import parse_url  # noqa: PLC0415
        from distflow.storage.failures import Retries  # noqa: PLC0415
        from distflow.storage.stores import open_store  # noqa: PLC0415
        from distflow.storage.task_data import deliver, unpacked  # noqa: PLC0415

        retries = Retries(halt, _PAUSES_S)
        retries.check()
        url = parse_url(transfer.url, writes=bool(transfer.digest))
        store = open_store(url, self._credentials_for)
        try:
            if not transfer.digest:
                return self._fetch(command, transfer, store, retries, reporter)
            with unpacked(self._blobs / transfer.digest, self._scratch_of(command)) as top:
                done = deliver(store, self._delivery(command, transfer), top, retries=retries, on_progress=reporter)
            return reporter.outcome(files=done.files, content_bytes=done.size, url=done.label)
        finally:
            store.close()

    def _fetch(
        self, command: TransferData, transfer: Transfer, store: DataStore, retries: Retries, reporter: _TransferReporter
    ) -> TransferRecord:
        from distflow.storage import task_data  # noqa: PLC0415

        request = task_data.pin_version(
            store, task_data.InputRequest(url=transfer.url, regex=transfer.regex, dataset=transfer.dataset), retries
        )
        if transfer.nodes_can_fetch:
            if self.identity(transfer.url) is None:
                return reporter.outcome(relay_reason=_LOCAL_CREDENTIALS)
            content = task_data.inspect_input(store, request, retries)
            return reporter.outcome(
                url=request.label, files=content.files, content_bytes=content.size, is_direct=True, dataset=request.dataset
            )  # fmt: skip
        found = task_data.make_archive(
            lambda files: task_data.fetch_input(store, request, files, retries=retries, on_progress=reporter),
            self._blobs, self._scratch_of(command), retries,
        )  # fmt: skip
        return reporter.outcome(
            digest=found.digest, size=found.size, files=found.content.files, content_bytes=found.content.size, url=request.label
        )

    def identity(self, url: str) -> Identity | None:
        """Return this machine's credentials for a URL's store, or ``None`` if a node could not use them."""
        from distflow.documents.urls import parse_url  # noqa: PLC0415
        from distflow.storage.credentials import identity_of  # noqa: PLC0415

        parsed = parse_url(url)
        return identity_of(parsed, self._credentials_for(parsed.profile), os.environ)

    def _deliver(
        self,
        command: TransferData,
        transfer: Transfer,
        source: AttemptKey,
        backend: Backend | None,
        halt: threading.Event,
        reporter: _TransferReporter,
    ) -> TransferRecord:
        """Make a node write its output. If it cannot, the outcome contains the reason."""
        if backend is None:
            raise AssertionError("the backend of the node that writes the output is missing")
        from distflow.storage.task_data import RelayRequired  # noqa: PLC0415

        identity = self.identity(transfer.url)
        if identity is None:
            return reporter.outcome(relay_reason=_LOCAL_CREDENTIALS)
        try:
            done = backend.deliver(source, self._delivery(command, transfer), identity, halt, reporter)
        except RelayRequired as why:
            return reporter.outcome(relay_reason=str(why))
        return reporter.outcome(files=done.files, content_bytes=done.size, url=done.label)

    def _delivery(self, command: TransferData, transfer: Transfer) -> Delivery:
        from distflow.storage.task_data import Delivery  # noqa: PLC0415

        # Every retry of this delivery has the same id.
        key = command.key
        name = f"{command.data}/{key.workflow}/{key.group}/{key.task}/{key.attempt}"
        upload_id = hashlib.sha256(name.encode()).hexdigest()[:16]
        return Delivery(
            url=transfer.url,
            regex=transfer.regex,
            dataset=transfer.dataset,
            paths=transfer.paths,
            is_update=transfer.is_update,
            upload_id=upload_id,
            at=self._now(),
        )

    def _scratch_of(self, command: TransferData) -> Path:
        key = command.key
        return self._scratch / key.workflow / key.group / key.task / str(command.data).replace("/", "-")


class _TransferReporter:
    """Reports the progress of one transfer, at most once a second."""

    def __init__(
        self,
        command: TransferData,
        transfer: Transfer,
        now: Callable[[], float],
        sink: Callable[[TransferMoved | TransferEnded], None],
    ) -> None:
        self._command = command
        self._transfer = transfer
        self._now = now
        self._sink = sink
        self._pace = TransferRate()
        self._since = now()

    def __call__(self, done: int, total: int) -> None:
        rate = self._pace.due(done)
        if rate is not None:
            self._sink(
                TransferMoved(
                    at=self._now(), key=self._command.key, data=self._command.data, url=self._transfer.label, done=done,
                    total=total, bytes_per_s=max(0.0, rate),
                )
            )  # fmt: skip

    def ended(self, outcome: TransferRecord) -> TransferEnded:
        return TransferEnded(
            at=self._now(), key=self._command.key, data=self._command.data, url=self._transfer.label, outcome=outcome
        )

    def outcome(
        self, *, digest: str = "", size: int = 0, files: int = 0, content_bytes: int = 0, error: str = "", url: str = "",
        relay_reason: str = "", is_direct: bool = False, dataset: str = "",
    ) -> TransferRecord:  # fmt: skip
        return TransferRecord(
            data=self._command.data, is_relayed=bool(relay_reason), task=self._command.key.task, at=self._now(),
            since=self._since, url=url or self._transfer.label, regex=self._transfer.regex, digest=digest, size=size,
            files=files, content=content_bytes, error=relay_reason or error, is_direct=is_direct, dataset=dataset,
        )  # fmt: skip
