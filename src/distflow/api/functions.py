"""Run Python functions on every rank of a gang, and return the values of all ranks.

distflow pickles the function and its arguments with cloudpickle, and sends the pickle, the package cloudpickle and the files of
a project (see ``Launcher.project``). The pickle contains functions of a notebook or a script by value, and functions of a
module by name. The nodes need the same minor version of Python and the packages that the pickle refers to. distflow checks both
before it stores anything, except on nodes that do not answer and on nodes that Slurm, Kubernetes or Ray allocates later. If the
job sets ``PYTHONPATH``, packages are not checked, because they may be in the project. If it uses ``venv``, packages are not
checked on nodes that have not built the environment yet. The results are pickles, too. Loading a pickle runs code, so run
functions only on nodes that you trust.
"""

from __future__ import annotations

import dis
import inspect
import json
import logging
import os
import pickle
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import IO, Any, Generic, Literal, ParamSpec, TypeVar, overload

import cloudpickle

from distflow.api import function_rank
from distflow.api.spec import File, Group, Ranks, Resources, Spec, Task, Timeouts
from distflow.api.workflow import TaskInfo, Workflow, submit_checked
from distflow.client.logs import LogLine
from distflow.client.spec_drafts.drafts import excluded_files, name_of, project_directory
from distflow.client.submission import PlannedWorkflow, check_python, pool_key
from distflow.client.workflows import pause
from distflow.errors import DistflowError, InputError, NotFound, WorkflowEnded

__all__ = ["FunctionJob", "Launcher", "RemoteTraceback", "Results", "print_line", "run"]

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("distflow")
_POLL_S = 0.2
"""Seconds between two checks whether jobs have ended."""
_DIRECTORY = "distflow_function"
"""The directory for the function's files in a task's working directory."""
_SENT_PACKAGES = {"cloudpickle", "distflow"}
"""Packages that distflow itself sends to the nodes. Of ``distflow``, it sends only the modules for tasks."""
_IMPORT_INSTRUCTIONS = (
    "COPY_FREE_VARS", "EXTENDED_ARG", "GEN_START", "IMPORT_", "LOAD_CONST", "LOAD_SMALL_INT", "MAKE_CELL", "POP_TOP", "RESUME",
    "ROT_TWO", "STORE_DEREF", "STORE_FAST", "STORE_GLOBAL", "SWAP",
)  # fmt: skip
"""Prefixes of the byte code instructions of import statements. Other instructions may install a module or handle an error."""
_CHECKED = set[Hashable]()
"""The requirements that this process has already checked on nodes. Each rank checks its Python version again."""


class RemoteTraceback(Exception):
    """The traceback of an exception on a node, as the ``__cause__`` of that exception."""


class Results(Sequence[T]):
    """The return values of all ranks: ``results[3]`` is the value of rank 3."""

    def __init__(self, values: Sequence[T], workflow: Workflow) -> None:
        """Store the values in the order of the ranks, and the workflow that returned them."""
        self._values = tuple(values)
        self.workflow = workflow

    @overload
    def __getitem__(self, rank: int) -> T: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[T]: ...
    def __getitem__(self, rank: int | slice) -> T | Sequence[T]:
        """Return the value of a rank, or the values of a slice of the ranks."""
        return self._values[rank]

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._values)

    def __repr__(self) -> str:
        """Return the values and the id of the workflow."""
        return f"<Results of {self.workflow.id}: {list(self._values)!r}>"


class FunctionJob(Generic[T]):
    """A function that runs on nodes."""

    def __init__(self, workflow: Workflow) -> None:
        """Use a workflow that ``Launcher.submit`` started."""
        self.workflow = workflow

    def __repr__(self) -> str:
        """Return the id and the current status."""
        return repr(self.workflow).replace("Workflow", "FunctionJob", 1)

    def result(self, timeout: float | None = None) -> Results[T]:
        """Wait for the end of the job, and return the values of all ranks.

        Args:
            timeout: The maximum time to wait, in seconds. Default: no limit.

        Raises:
            Exception: the exception of the rank that failed first. Its ``__cause__`` is the traceback on the node.
            WaitTimeout: if the job has not ended after ``timeout``. It continues to run.
            WorkflowEnded: if the job failed and there is no exception of the function that can be loaded here. For example, the
                job was canceled, a rank was killed, or the function could not be loaded on a node. Also if the return value of
                a rank is missing or cannot be loaded here.
            NodeError: if the results cannot be copied from a node.
            StorageError: if this machine has no space for the results.

        """
        self.workflow.wait(timeout)
        try:
            self.workflow.raise_for_status()
        except WorkflowEnded as ended:
            failure = self._failure(ended)
            raise failure from failure.__cause__
        tasks = self.workflow.tasks
        stored = self._fetch(tasks)
        size = sum(len(task.ranks) for task in tasks)
        missing = [rank for rank in range(size) if "value" not in stored.get(rank, {})]
        if missing:
            raise WorkflowEnded(
                f"{self.workflow.id}: rank {missing[0]} ended without a return value",
                hint=f"its output: distflow workflow logs {self.workflow.id}",
            )
        return Results([self._value(rank, stored[rank]["value"]) for rank in range(size)], self.workflow)

    def _value(self, rank: int, data: bytes) -> T:
        try:
            value: T = pickle.loads(data)
        except Exception as error:
            message = f"the return value of rank {rank} of {self.workflow.id} cannot be loaded: {type(error).__name__}: {error}"
            raise WorkflowEnded(
                message, hint="let the function return only objects whose classes this program can import"
            ) from error
        return value

    def _fetch(self, tasks: Sequence[TaskInfo]) -> dict[int, dict[str, Any]]:
        """Return the stored results of these tasks by rank. ``function_rank`` describes their format."""
        stored = {}
        with tempfile.TemporaryDirectory(prefix="distflow-results-") as folder:
            try:
                fetched = self.workflow.fetch(function_rank.RESULTS, to=folder, task=[task.name for task in tasks])
            except (InputError, NotFound):  # no task has run, or no rank has stored a result
                return {}
            for task in tasks:
                for rank in task.ranks:
                    task_folder = fetched.folders.get(task.name, Path(folder))
                    path = task_folder / function_rank.RESULTS / function_rank.result_name(rank)
                    if path.is_file():
                        stored[rank] = pickle.loads(path.read_bytes())
        return stored

    def _failure(self, ended: WorkflowEnded) -> BaseException:
        """Return the exception of the rank that failed first.

        Return a ``WorkflowEnded`` with the text of the error if the rank stored only that text: the exception could not be
        pickled, or the error occurred outside of the function.

        Return ``ended`` if no single rank is known to have failed first, or if its exception is not stored or cannot be loaded.
        """
        cause = next((failure.cause for failure in self.workflow.why() if failure.cause), None)
        if cause is None or not cause.ranks.isdigit():
            return ended
        rank = int(cause.ranks)
        try:
            error = self._fetch([task for task in self.workflow.tasks if task.name == cause.task]).get(rank, {})
            if "error" not in error:
                return ended
            where = f"rank {rank} of {self.workflow.id} ({cause.task} on {cause.node})"
            raised: BaseException = WorkflowEnded(f"{where}: {error['name']}")
            if error["error"]:
                raised = pickle.loads(error["error"])
            if error["traceback"]:
                raised.__cause__ = RemoteTraceback(f"\n\n{where}:\n{error['traceback']}")
        except Exception as other:
            _log.warning("the exception of rank %d of %s cannot be loaded: %s", rank, self.workflow.id, other)
            return ended
        return raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Settings for running functions. ``submit`` returns as soon as the job is stored; ``distflow.run`` waits for its result.

    ::

        lab = Launcher(nodes=2, gpus=8, pool="lab")
        job = lab.submit(train, 0.2, epochs=3)
        print(job.result()[0])
    """

    nodes: int = 1
    gpus: int | None = None
    """The number of GPUs to reserve on each node; 0 hides all GPUs. Default: no reservation. Over SSH and on this machine, the
    job then sees all GPUs."""
    ranks: int | None = None
    """Processes on each node. Default: one for each reserved GPU, or one without ``gpus``."""
    pool: str | None = None
    hosts: str | os.PathLike[str] | Sequence[str] | None = None
    """A hostfile, or its lines, instead of the nodes of the pool."""
    python: str | None = None
    """The Python interpreter on the nodes. Default: the pool's."""
    venv: str | None = None
    """A requirements file, from which each node builds an environment once."""
    name: str | None = None
    """The name of the workflows. Default: the name of the function."""
    project: str | None = "auto"
    """The directory to send, or ``None`` to send no files. ``auto`` sends the working directory. If the function's module is
    elsewhere and not an installed package, ``auto`` sends the module's git repository or directory instead. It never sends a
    home directory. Files that ``.gitignore`` lists are not sent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Secret environment variables, which are stored only until the workflow has ended."""
    memory: str | None = None
    """Memory to reserve on each node, such as ``64Gi``."""
    timeout: str | float | None = None
    """The maximum time from start to end, such as ``2h``, or in seconds."""
    queue_timeout: str | float | None = None
    """The maximum time to wait for nodes, in the same format."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> FunctionJob[T]:
        """Submit a job that runs a function on all ranks, without waiting for its end.

        Args:
            function: The function. Each rank calls it with the arguments. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
                ``MASTER_ADDR`` and ``MASTER_PORT`` are set in the environment.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            InputError: if a setting is not valid, or if the function does not take the arguments.
            InputError: if the function or an argument cannot be pickled, or if the project is not a directory.
            InputError: if a checked node has another minor version of Python, or lacks a package that the function uses.
            NotFound: if the pool does not exist.
            ProblemsFound: if the pool cannot hold the job.
            SupervisorError: if the supervisor does not start.

        """
        self._check(function, args, kwargs)
        root = self._project(function)
        with tempfile.TemporaryDirectory(prefix="distflow-function-") as folder:
            modules = _pickle_to(Path(folder, "function.pkl"), function, args, kwargs)
            spec = self._spec(function, root, Path(folder))
            modules |= _first_imports(function)
            needed = tuple(name for name in sorted(modules - _SENT_PACKAGES) if not _is_in_project(name, root))
            workflow = submit_checked(
                spec, lambda planned: self._check_nodes(planned, needed), pool=self.pool, hosts=self.hosts, python=self.python,
                secrets=self.secrets,
            )  # fmt: skip
        return FunctionJob(workflow)

    def _check_nodes(self, planned: PlannedWorkflow, modules: tuple[str, ...]) -> None:
        """Check Python and the modules on the nodes, unless this process has already checked the same requirements."""
        modules = () if "PYTHONPATH" in self.environment else modules  # they may be in the project, which is not sent yet
        requirements = (pool_key(planned.pool), planned.plan.groups[0].venv, modules, frozenset(self.environment.items()))
        if requirements not in _CHECKED:
            check_python(planned, modules, self.environment)
            _CHECKED.add(requirements)

    @overload
    def map_array(
        self,
        function: Callable[..., T],
        *iterables: Iterable[Any],
        limit: int = 16,
        return_exceptions: Literal[False] = False,
    ) -> Iterator[Results[T]]: ...
    @overload
    def map_array(
        self, function: Callable[..., T], *iterables: Iterable[Any], limit: int = 16, return_exceptions: Literal[True]
    ) -> Iterator[Results[T] | Exception]: ...
    def map_array(
        self, function: Callable[..., T], *iterables: Iterable[Any], limit: int = 16, return_exceptions: bool = False
    ) -> Iterator[Results[T] | Exception]:
        """Run a function once for each item, as independent jobs, and yield the results in the order of the items.

        Args:
            function: The function, called as ``map`` calls it: with one item of each iterable.
            iterables: The items.
            limit: The maximum number of jobs that are submitted and have not ended.
            return_exceptions: Whether to yield the exceptions of jobs instead of raising the first one. Errors of ``submit``
                are raised in any case.

        Raises:
            Exception: the exception of a job. Submitted jobs continue to run, and no more jobs are submitted.
            InputError: if ``limit`` is less than 1. Nothing is checked or submitted before the first result is requested.

        """
        if limit < 1:
            raise InputError(f"`limit` must be at least 1, not {limit}")
        items = iter(zip(*iterables, strict=False))
        jobs, running = deque[FunctionJob[T]](), list[FunctionJob[T]]()
        while True:
            running = [job for job in running if not job.workflow.is_finished]
            started = [self.submit(function, *item) for item in islice(items, limit - len(running))]
            jobs += started
            running += started
            if not jobs:
                return
            if jobs[0] in running:
                pause(_POLL_S)
                continue
            try:
                result: Results[T] | Exception = jobs.popleft().result()
            except Exception as error:
                if not return_exceptions:
                    raise
                result = error
            yield result

    def _check(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise ``InputError`` if a setting is invalid, or if the function cannot be called with these arguments."""
        for name, number in (("nodes", self.nodes), ("ranks", self.ranks)):
            if number is not None and not (str(number).isdigit() and int(number) > 0):
                raise InputError(f"`{name}` must be a whole number, 1 or more, not {number!r}")
        if self.name is not None and self.name != name_of(self.name):
            raise InputError(f"`{self.name}` is not a valid name of a workflow", hint=f"for example `{name_of(self.name)}`")
        if not callable(function):
            raise InputError(f"{function!r} is not a function")
        shown = str(getattr(function, "__name__", function))
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise InputError(
                f"`{shown}` returns a coroutine or a generator, which nodes cannot send back",
                hint="call `asyncio.run(...)` in a plain function, or return a list instead of using `yield`",
            )
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"`{shown}` cannot be called with these arguments: {error}") from None
        except ValueError:  # functions that are written in C may have no signature
            return

    def _spec(self, function: Callable[..., object], root: Path | None, folder: Path) -> Spec:
        """Return the spec of a job whose pickle is in ``folder``."""
        metadata = {
            "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
            "executable": sys.executable,
            "paths": [] if root is None else _paths_in(root),
        }
        (folder / "function.json").write_text(json.dumps(metadata), encoding="utf-8")
        sent = {
            "main.py": Path(function_rank.__file__),
            "function.pkl": folder / "function.pkl",
            "function.json": folder / "function.json",
            "cloudpickle": Path(cloudpickle.__file__).parent,
        }
        files = [File(path=f"{_DIRECTORY}/{path}", localpath=str(local)) for path, local in sent.items()]
        if root is not None:
            files.insert(0, File(path=".", localpath=str(root), exclude=[*excluded_files(root, None)]))
        task = Task(
            name="node",
            command=["python3", f"{_DIRECTORY}/main.py"],
            replicas=self.nodes,
            ranks=Ranks(size=self.ranks or self.gpus or 1),
            environment=dict(self.environment),
            files=files,
        )
        return Spec(
            name=self.name or name_of(getattr(function, "__name__", "function").strip("<>_") or "function"),
            groups=[Group(name="function", launcher="spawn", tasks=[task])],
            venv=self.venv,
            resources={"default": Resources(gpu=self.gpus, memory=self.memory)},
            timeout=Timeouts(exec_timeout=self.timeout, queue_timeout=self.queue_timeout),
        )

    def _project(self, function: Callable[..., object]) -> Path | None:
        if self.project is None:
            return None
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        is_installed = file is not None and any(
            Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")
        )
        script = None if file is None or is_installed else Path(file).resolve()
        if self.project != "auto":
            return project_directory(Path.cwd(), script, Path(self.project))
        try:
            return project_directory(Path.cwd(), script, None)
        except InputError:
            why = "because they would include your home directory"
            _log.warning("no files are sent with the function, %s: set `project` to the directory to send", why)
            return None


def print_line(line: LogLine) -> None:
    """Print a line of output with the rank or the task that printed it."""
    print(f"[{line.task if line.rank is None else f'rank {line.rank}'}] {line.text}")  # noqa: T201  its purpose is to print


def run(
    function: Callable[..., T],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on_line: Callable[[LogLine], object] | None = print_line,
    on_interrupt: Literal["cancel", "detach"] = "cancel",
    nodes: int = 1,
    gpus: int | None = None,
    ranks: int | None = None,
    pool: str | None = None,
    hosts: str | os.PathLike[str] | Sequence[str] | None = None,
    python: str | None = None,
    venv: str | None = None,
    name: str | None = None,
    project: str | None = "auto",
    environment: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    memory: str | None = None,
    timeout: str | float | None = None,
    queue_timeout: str | float | None = None,
) -> Results[T]:
    """Run a function on all ranks of a gang, and return the values of all ranks.

    ::

        def train(lr):
            torch.distributed.init_process_group()
            ...
            return loss

        results = distflow.run(train, args=(0.1,), nodes=2, gpus=8, pool="lab")
        print(results[0])

    Args:
        function: The function. Each rank calls it with the arguments. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
            and ``MASTER_PORT`` are set in the environment.
        args: Its arguments.
        kwargs: Its keyword arguments.
        on_line: Called with each line of the output. Default: print it with its rank. ``None``: the output is ignored.
        on_interrupt: The action if Ctrl-C or an error, such as one in ``on_line``, ends this call before the job ends:
            ``cancel`` the job, or ``detach`` and let it run.
        nodes: The number of nodes. This and the following arguments are the fields of ``Launcher``.
        gpus: The number of GPUs to reserve on each node.
        ranks: Processes on each node. Default: one for each reserved GPU, or one without ``gpus``.
        pool: The name of the pool.
        hosts: A hostfile, or its lines, instead of the nodes of the pool.
        python: The Python interpreter on the nodes.
        venv: A requirements file, from which each node builds an environment once.
        name: The name of the workflow. Default: the name of the function.
        project: The directory to send, or ``None`` to send no files. Default: see ``Launcher.project``.
        environment: Environment variables.
        secrets: Secret environment variables.
        memory: Memory to reserve on each node.
        timeout: The maximum time from start to end.
        queue_timeout: The maximum time to wait for nodes.

    Raises:
        Exception: the exception of the rank that failed first. Its ``__cause__`` is the traceback on the node.
        InputError: if ``on_interrupt`` is not valid, or if the job cannot be submitted (see ``Launcher.submit``).
        NodeError: if the results cannot be copied from a node.
        ProblemsFound: if the pool cannot hold the job.
        StorageError: if this machine has no space for the results.
        SupervisorError: if the supervisor does not start.
        WorkflowEnded: if the job failed without an exception from the function (see ``FunctionJob.result``).

    """
    launcher = Launcher(
        nodes=nodes, gpus=gpus, ranks=ranks, pool=pool, hosts=hosts, python=python, venv=venv, name=name, project=project,
        environment=environment or {}, secrets=secrets or {}, memory=memory, timeout=timeout,
        queue_timeout=queue_timeout,
    )  # fmt: skip
    if on_interrupt not in ("cancel", "detach"):
        raise InputError(f"`on_interrupt` must be `cancel` or `detach`, not `{on_interrupt}`")
    job = launcher.submit(function, *args, **(kwargs or {}))
    try:
        for line in job.workflow.logs(follow=True):
            if on_line is not None:
                on_line(line)
        return job.result()
    except BaseException as error:
        with suppress(DistflowError):
            if not job.workflow.is_finished and on_interrupt == "cancel":
                job.workflow.cancel(f"{type(error).__name__} in distflow.run")
            elif not job.workflow.is_finished:
                _log.warning(
                    "%s continues. Get its result: distflow.FunctionJob(distflow.get(%r)).result()",
                    job.workflow.id,
                    job.workflow.id,
                )
        raise


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that records the installed packages that loading the pickle will import."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.packages: set[str] = set()

    def reducer_override(self, obj: object) -> object:
        """Pickle an object like cloudpickle, but keep the file names of code. Record packages of objects pickled by name."""
        if isinstance(obj, CodeType):
            # From version 3.1.3, cloudpickle replaces the file name. Tracebacks on nodes need the original one.
            make, fields = self.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if isinstance(one, str) and one == "<dynamic-code>" else one for one in fields)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and isinstance(obj, type | FunctionType | BuiltinFunctionType | ModuleType):
            name = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
            file = getattr(sys.modules.get(name or ""), "__file__", None)
            if file and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
                self.packages.add(name.partition(".")[0])
        return reduced


def _pickle_to(path: Path, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> set[str]:
    """Write the pickle of a call to a file, and return the packages that the nodes need to load it."""
    with path.open("wb") as file:
        pickler = _Pickler(file)
        try:
            pickler.dump((function, tuple(args), dict(kwargs)))
        except Exception as error:
            hint = "create files, locks, connections and models inside of the function instead of passing them to it"
            raise InputError(f"the function or an argument cannot be pickled: {error}", hint=hint) from error
    return pickler.packages


def _first_imports(function: Callable[..., object]) -> set[str]:
    """Return the top-level modules that a function's leading statements import, without those of the standard library.

    Later statements are not read, because they may install modules or handle errors.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    found, seen = set(), list[object]()
    handled_from = min((one.start for one in getattr(dis.Bytecode(code), "exception_entries", ())), default=len(code.co_code))
    for one in dis.get_instructions(code):
        if one.offset >= handled_from or not one.opname.startswith(_IMPORT_INSTRUCTIONS):
            break
        if one.opname == "IMPORT_NAME" and seen[-2] == 0:  # the level: 0 is an absolute import
            found.add(str(one.argval).partition(".")[0])
        seen.append(one.argval)
    return found - sys.stdlib_module_names


def _is_in_project(module: str, root: Path | None) -> bool:
    """Return whether a top-level module is also sent as a part of the project."""
    folders = [] if root is None else [root, *(root / path for path in _paths_in(root))]
    return any((folder / module).is_dir() or (folder / f"{module}.py").is_file() for folder in folders)


def _paths_in(root: Path) -> list[str]:
    """Return the directories of ``sys.path`` that are below the project, relative to it."""
    paths = [Path(path or ".").resolve() for path in sys.path]
    return [path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root) and path != root and path.is_dir()]
