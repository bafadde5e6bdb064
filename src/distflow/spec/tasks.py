"""Parse the entries of ``tasks``: commands, resources, ranks, launchers and exit actions. Replicas become separate tasks."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from posixpath import normpath
from types import MappingProxyType

from distflow.documents.document import Text, View
from distflow.documents.problems import Problem, Severity
from distflow.documents.quantities import parse_duration
from distflow.documents.text import did_you_mean, splitting_problem
from distflow.errors import InvalidValue
from distflow.lifecycle.exits import Action, Codes, ExitActions, overlap, parse_codes
from distflow.spec.credentials import parse_credentials
from distflow.spec.data import checkpoints, earlier_inputs, url_inputs, url_outputs
from distflow.spec.files import parse_files
from distflow.spec.model import Elastic, InputSpec, LauncherOptions, Ranks, Retry, StrategyBlock, TaskSpec, WorkflowSpec
from distflow.spec.tokens import TOKEN_NAMES, find_tokens
from distflow.structs import replace

__all__ = [
    "check_tokens",
    "parse_elastic",
    "parse_framework",
    "parse_retry",
    "parse_strategy_block",
    "parse_task",
    "replica_names",
    "unused_reschedules",
    "with_launchers",
]


_DEFAULT = "default"


def replica_names(task: View) -> tuple[str, ...]:
    """Return the names of the tasks of an entry: one for each replica or, without ``replicas``, only its own name."""
    name, count = task.string("name") or "", _replicas(task)
    return (name,) if count is None else tuple(f"{name}-{number}" for number in range(count))


def parse_task(
    task: View, *, leads: bool, resources: Container[str], inputs: tuple[InputSpec, ...], base_dir: Path
) -> tuple[TaskSpec, ...]:
    """Return the tasks of an entry, and add findings. With ``leads``, the first task is the lead."""
    _warn_of_ignored_keys(task)
    _warn_of_unread_variables(task)
    names = replica_names(task)
    first = TaskSpec(
        name=names[0],
        written_name=task.string("name") or "",
        lead=leads,
        command=_command(task),
        args=task.texts("args"),
        image=task.text("image"),
        mounts=_mounts(task),
        privileged=task.flag("privileged") is True,
        environment=_environment(task),
        files=parse_files(task, base_dir),
        inputs=inputs,
        url_inputs=url_inputs(task),
        earlier_inputs=earlier_inputs(task),
        checkpoints=checkpoints(task),
        credentials=parse_credentials(task),
        resource=_resource(task, resources),
        exit_actions=_parse_exit_actions(task),
        ranks=_ranks(task),
        replica=None if _replicas(task) is None else 0,
        outputs=_output_descriptions(task),
        url_outputs=url_outputs(task),
        output_dir=_output_dir(task),
        mark=task.key_mark("name"),
    )
    for text in (*first.command, *first.args, *first.environment.values()):
        if "\0" in text.value:
            hint = "remove it, or write the text to a file with `files`"
            task.add("commands and variables cannot contain a NUL byte", hint, where=text.mark)
    return (first, *(replace(first, name=name, lead=False, replica=number) for number, name in enumerate(names) if number))


_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_OPERATOR = re.compile(r"&&|\|\||<<|>>|[;|&<>\n]")


def _command(task: View) -> tuple[Text, ...]:
    """Return the words of ``command``, which is a list, or one string that is split as a shell would split it."""
    text = task.text("command")
    if text is None:
        return task.texts("command")
    joined = text.value.replace("\\\n", "").strip()
    try:
        words = shlex.split(joined)
    except ValueError as error:
        hint = "use quotes as in a shell, or write the command as a list of words"
        task.add(f"`command` has {splitting_problem(error)}", hint, key="command")
        return ()
    operator = _OPERATOR.search(_QUOTED.sub("_", joined))
    if operator is not None:
        shown = "a second line" if operator[0] == "\n" else f"`{operator[0]}`"
        hint = "write `command: [bash, -c, …]` with the text as the last item, or quote characters that the program needs"
        task.add(f"`command` has {shown}, but no shell runs it", hint, key="command")
    if not words:
        task.add("`command` is empty", "write a program and its arguments", key="command")
    return tuple(Text(word, text.mark) for word in words)


def _replicas(task: View) -> int | None:
    count = task.whole("replicas")
    return count if count is not None and 1 <= count <= 4096 else None


def _mounts(task: View) -> tuple[Text, ...]:
    found = task.texts("volumeMounts")
    for text in found:
        parts = text.value.split(":")
        if len(parts) > 2 or not all(part.startswith("/") for part in parts):
            hint = "write a directory of the node, or a pair with a directory of the container: `/data` or `/data:/mnt/data`"
            task.add(f"`{text.value}` is not a valid entry of `volumeMounts`", hint, where=text.mark_at(0))
    return found


def _output_dir(task: View) -> str | None:
    path = task.string("output_dir")
    if path is not None and (path.startswith("/") or ".." in path.split("/") or normpath(path) == "."):
        hint = "write a directory below the task's working directory, such as `outputs`"
        task.add(f"`{path}` is not a valid `output_dir`", hint, key="output_dir")
    return path and normpath(path)


def _environment(task: View) -> Mapping[str, Text]:
    names = task.view("environment").keys
    found = {name: task.document.text_at((*task.path, "environment", name)) for name in names}
    return MappingProxyType({name: text for name, text in found.items() if text is not None})


def _resource(task: View, resources: Container[str]) -> str:
    name = task.string("resource")
    if name is not None and name not in resources:
        known = resources if isinstance(resources, Mapping) else ()
        task.add(
            f"there is no resource `{name}`",
            did_you_mean(name, known, what="resources") if known else "define it in `workflow.resources`",
            key="resource",
        )
    if name is None and _DEFAULT not in resources:
        known = resources if isinstance(resources, Mapping) else ()
        hint = "define a resource named `default`"
        if known:
            hint = f"add `resource:` with one of {', '.join(f'`{entry}`' for entry in known)}, or {hint}"
        task.add(
            f"the task `{task.string('name')}` has no `resource`, and `workflow.resources` has no `default`", hint, key="name"
        )
    return name or _DEFAULT


def _ranks(task: View) -> Ranks | None:
    if "ranks" not in task.keys:
        return None
    ranks = task.view("ranks")
    if ranks.has("offset") and len(replica_names(task)) > 1:
        ranks.add(
            "`offset` cannot be combined with `replicas`",
            "remove `offset`: distflow computes the offsets of replicas",
            key="offset",
        )
    return Ranks(
        offset=ranks.whole("offset"),
        size=ranks.whole("size"),
        world_size=ranks.whole("world_size"),
        mark=task.key_mark("ranks"),
        marks=MappingProxyType({key: ranks.key_mark(key) for key in ranks.keys}),
    )


def check_tokens(task: View, spec: TaskSpec, group: Sequence[View], all_names: Container[str]) -> None:
    """Report tokens that cannot be replaced: unknown tokens, hosts outside of the task's group, and inputs that the task lacks.

    ``all_names`` has the names of the tasks of all groups.
    """
    hosts = {name: member.string("name") or "" for member in group for name in replica_names(member)}
    for text in _texts(spec):
        for token in find_tokens(text.value):
            message, hint = "", ""
            if token.name == "host":
                message, hint = _host_finding(token.argument, hosts, all_names)
            elif token.name == "input":
                message, hint = _input_finding(token.argument, spec)
            elif token.name not in TOKEN_NAMES or token.argument is not None:
                shown = token.name if token.argument is None else f"{token.name}:{token.argument}"
                message = f"`{{{{{shown}}}}}` is not a token of distflow, so it would not be replaced"
                near = did_you_mean(token.name, TOKEN_NAMES, what="tokens")
                hint = f"{near}; to send text with such braces, put it into a file, and send the file with `localpath`"
            if message:
                severity = Severity.WARNING if _is_in_comment(text.value, token.position) else Severity.ERROR
                task.add(message, hint, where=text.mark_at(token.position), severity=severity)


def _is_in_comment(text: str, offset: int) -> bool:
    """Return whether the offset is in a comment of a shell or of Python: after a `#` that begins a word."""
    return re.search(r"(?:^|\s)#", text[text.rfind("\n", 0, offset) + 1 : offset]) is not None


def _host_finding(name: str | None, hosts: Mapping[str, str], all_names: Container[str]) -> tuple[str, str]:
    if name is None:
        return "`{{host}}` has no task", "write `{{host:<task>}}` with a task of the same group"
    if name in hosts:
        return "", ""
    message = f"`{{{{host:{name}}}}}` does not name a task of this group"
    if name in hosts.values():
        return f"{message}: `{name}` has replicas", f"name a replica, such as `{{{{host:{name}-0}}}}`"
    if name in all_names:
        return (
            f"{message}: `{name}` is in another group",
            "put both tasks into one group, because distflow does not always run groups at the same time",
        )
    return message, did_you_mean(name, hosts, what="tasks")


def _input_finding(argument: str | None, spec: TaskSpec) -> tuple[str, str]:
    known = [name for one in spec.inputs for name in (str(one.position), one.task)]
    known += [str(one.position) for one in spec.url_inputs]
    known += [name for one in spec.earlier_inputs for name in (str(one.position), one.task)]
    if argument in known:
        return "", ""
    token = "`{{input}}`" if argument is None else f"`{{{{input:{argument}}}}}`"
    if not known:
        return f"{token} cannot be replaced: the task has no `inputs`", "add `inputs: [{task: …}]` or `inputs: [{url: …}]`"
    return f"{token} does not name an input of this task", did_you_mean(argument or "", known, what="inputs")


def _texts(spec: TaskSpec) -> Iterator[Text]:
    yield from (*spec.command, *spec.args, *spec.environment.values())
    for file in spec.files:
        yield file.path
        if file.contents is not None:
            yield file.contents


# -- warnings about ignored keys and misspelled variables -------------------------------------------------------------

_TASK_WARNINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "hostNetwork": (
            "`hostNetwork` is ignored: outside of Kubernetes, tasks always use the node's network",
            "remove it; for Kubernetes, set `kubernetes.host_network` of the pool",
        ),
        "downloadType": ("`downloadType` is ignored: distflow always downloads inputs", "remove it"),
        "cacheSize": ("`cacheSize` is ignored: nodes have no cache of inputs", "remove it"),
        "kpis": ("`kpis` is ignored: its files are not uploaded", "upload them to a URL with `outputs`"),
    }
)


def _warn_of_ignored_keys(task: View) -> None:
    """Warn about keys of a task that distflow ignores."""
    for key, (message, hint) in _TASK_WARNINGS.items():
        if task.has(key):
            task.warn(message, hint, key=key)


def _output_descriptions(task: View) -> tuple[str, ...]:
    """Describe the destinations of the task's output."""
    words = []
    for entry in task.views("outputs"):
        for key, verb in (("url", "upload to"), ("dataset", "store as dataset"), ("update_dataset", "add to dataset")):
            what = entry.string(key) or entry.view(key).string("name")
            if what:
                words.append(f"{verb} {what}")
    return tuple(words)


_NCCL = (
    "ALGO", "ALLOC_P2P_NET_LL_BUFFERS", "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "BUFFSIZE", "CGA_CLUSTER_SIZE",
    "CHECKS_DISABLE", "CHECK_POINTERS", "COLLNET_ENABLE", "COLLNET_NODE_THRESHOLD", "COMM_BLOCKING", "COMM_ID", "CONF_FILE",
    "CROSS_NIC", "CTA_POLICY", "CUMEM_ENABLE", "CUMEM_HOST_ENABLE", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS",
    "DEBUG_TIMESTAMP_FORMAT", "DEBUG_TIMESTAMP_LEVELS", "DESYNC_DEBUG", "DMABUF_ENABLE", "ENABLE_TIMING", "GRAPH_DUMP_FILE",
    "GRAPH_FILE", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER", "GRAPH_STREAM_ORDERING", "HOSTID", "IB_ADAPTIVE_ROUTING",
    "IB_ADDR_FAMILY", "IB_ADDR_RANGE", "IB_AR_THRESHOLD", "IB_CUDA_SUPPORT", "IB_DISABLE", "IB_ECE_ENABLE", "IB_FIFO_TC",
    "IB_GID_INDEX", "IB_HCA", "IB_MERGE_NICS", "IB_PCI_RELAXED_ORDERING", "IB_QPS_PER_CONNECTION", "IB_RETRY_CNT",
    "IB_RETURN_ASYNC_EVENTS", "IB_ROCE_VERSION_NUM", "IB_SL", "IB_SPLIT_DATA_ON_QPS", "IB_TC", "IB_TIMEOUT",
    "IGNORE_CPU_AFFINITY", "IPC_USE_ABSTRACT_SOCKET", "LAUNCH_MODE", "LAUNCH_ORDER_IMPLICIT", "LAUNCH_RACE_FATAL",
    "LEGACY_CUDA_REGISTER", "LL_THRESHOLD", "LOCAL_REGISTER", "MAX_CTAS", "MAX_NCHANNELS", "MAX_NRINGS", "MAX_P2P_NCHANNELS",
    "MEM_SYNC_DOMAIN", "MIN_CTAS", "MIN_NCHANNELS", "MIN_NRINGS", "MIN_P2P_NCHANNELS", "MNNVL_CLIQUE_ID", "MNNVL_ENABLE",
    "MNNVL_UUID", "NCHANNELS_PER_NET_PEER", "NCHANNELS_PER_PEER", "NET", "NETDEVS_POLICY", "NET_GDR_C2C", "NET_GDR_LEVEL",
    "NET_GDR_READ", "NET_MERGE_LEVEL", "NET_MERGE_POLICY", "NET_PLUGIN", "NET_SHARED_BUFFERS", "NET_SHARED_COMMS",
    "NSOCKS_PERTHREAD", "NTHREADS", "NVB_DISABLE", "NVLS_ENABLE", "OOB_NET_ENABLE", "OOB_NET_IFNAME", "P2P_DIRECT_DISABLE",
    "P2P_DISABLE", "P2P_LEVEL", "P2P_LL_THRESHOLD", "P2P_NET_CHUNKSIZE", "P2P_PXN_LEVEL", "PROFILER_PLUGIN", "PROTO",
    "PXN_C2C", "PXN_DISABLE", "RAS_ADDR", "RAS_ENABLE", "RAS_TIMEOUT_FACTOR", "RMA_EAGER_INIT", "RUNTIME_CONNECT",
    "SET_THREAD_NAME", "SHM_DISABLE", "SINGLE_RING_THRESHOLD", "SOCKET_FAMILY", "SOCKET_IFNAME", "SOCKET_NTHREADS",
    "SOCKET_RETRY_CNT", "SOCKET_RETRY_SLEEP_MSEC", "SYM_GIN_KERNELS_ENABLE", "TOPO_DUMP_FILE", "TOPO_DUMP_FILE_RANK",
    "TOPO_FILE", "TREE_THRESHOLD", "TUNER_PLUGIN", "UID_STAGGER_RATE", "UID_STAGGER_THRESHOLD", "WIN_ENABLE",
)  # fmt: skip
"""Names of variables without the prefix ``NCCL_``: those in NCCL's manual, and former names of torch's own, which it reads."""
_TORCH_NCCL = (
    "ASYNC_ERROR_HANDLING", "AVOID_RECORD_STREAMS", "BLOCKING_WAIT", "DEBUG_INFO_TEMP_FILE", "DESYNC_DEBUG",
    "DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "ENABLE_TIMING", "HEARTBEAT_TIMEOUT_SEC", "TRACE_BUFFER_SIZE", "TRACE_CPP_STACK",
    "USE_COMM_NONBLOCKING", "WAIT_TIMEOUT_DUMP_MILSEC",
)  # fmt: skip
_KNOWN = frozenset({*(f"NCCL_{name}" for name in _NCCL), *(f"TORCH_NCCL_{name}" for name in _TORCH_NCCL)})
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {"NCCL_P2P_CONNECT_TIMEOUT": "remove it, and write `init_process_group(timeout=…)` in the script"}
)
_NEAR = 0.88
"""Minimum similarity, between 0 and 1, at which an unknown name counts as a misspelling of a known one."""


def _warn_of_unread_variables(task: View) -> None:
    """Warn about variables in the task's environment that look like misspelled variables of NCCL, or have no effect."""
    environment = task.view("environment")
    for name in environment.keys:
        if name in _KNOWN or not name.startswith(("NCCL_", "TORCH_NCCL_")):
            continue
        near = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=_NEAR)
        if name in _WITHOUT_EFFECT:
            environment.warn(f"neither NCCL nor torch reads `{name}`", _WITHOUT_EFFECT[name], key=name)
        elif near:
            environment.warn(f"`{name}` is not a documented variable of NCCL or torch", f"did you mean {near[0]}?", key=name)


# -- launcher, framework, strategy, elastic ---------------------------------------------------------------------------

_WITHOUT_RANKS = ("custom",)
"""Frameworks that do not define the number of processes of a task."""


def parse_framework(group: View) -> Text | None:
    """Return the group's framework."""
    return group.text("framework")


def parse_strategy_block(group: View) -> StrategyBlock | None:
    """Return the group's strategy as written, with the position of each of its keys."""
    path, document = (*group.path, "strategy"), group.document
    value = document.value_at(path)
    if not isinstance(value, dict):
        return None
    below = (place for place in document.places if place[: len(path)] == path)
    marks = MappingProxyType({place: document.key_mark_at(place) for place in below})
    return StrategyBlock(value=MappingProxyType(value), path=path, marks=marks)


def parse_elastic(group: View) -> Elastic | None:
    """Return the minimum number of tasks, and how long the group waits for all of them; ``None`` if it needs all of them."""
    elastic = group.view("elastic")
    least = elastic.whole("min")
    if least is None:
        return None
    wait_s = elastic.parsed("wait", parse_duration)
    mark = elastic.key_mark("min")
    return Elastic(least=least, mark=mark) if wait_s is None else Elastic(least=least, wait_s=wait_s, mark=mark)


def _parse_launcher(owner: View) -> LauncherOptions | None:
    """Return the launcher of a group or a task; ``None`` if it has none."""
    if not owner.has("launcher"):
        return None
    mark = owner.key_mark("launcher")
    name = owner.string("launcher")
    if name is not None:
        return LauncherOptions(kind=name, mark=mark)
    launcher = owner.view("launcher")
    kind, restarts = launcher.string("kind"), launcher.whole("max_restarts") or 0
    if restarts and kind == "command":
        message = "`max_restarts` has no effect: `launcher: command` does not start ranks"
        launcher.add(
            message, "use `torchrun` or `spawn`; to restart the whole gang, use `exitActions` and `retry`", key="max_restarts"
        )
    numa = launcher.flag("numa") or False
    if numa and kind in ("torchrun", "command"):
        hint = "use `kind: spawn`"
        if kind == "torchrun":
            hint += ", or run torchrun in the command, with its option `--numa-binding=node`"
        launcher.add(f"`numa` has no effect with `{kind}`: only `spawn` supports it", hint, key="numa")
    return LauncherOptions(kind=kind or "command", max_restarts=restarts, numa=numa, mark=mark)


def with_launchers(group: View | None, tasks: Sequence[View], specs: Sequence[TaskSpec]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a group with their launchers, and add ranks to tasks whose launcher or framework needs them.

    ``tasks`` are the entries of the group, ``specs`` their tasks (one for each replica). Added ranks have no ``size`` yet:
    the layout gives such a task one rank for each requested GPU, or one rank if it requests no GPU.
    """
    framework = parse_framework(group) if group is not None else None
    general = _parse_launcher(group) if group is not None else None
    own = {task.string("name") or "": _parse_launcher(task) for task in tasks}
    if general is None and framework is not None and framework.value == "pytorch":
        general = LauncherOptions(kind="torchrun", mark=framework.mark)
    return tuple(_with_launcher(spec, own.get(spec.written_name) or general or LauncherOptions(), framework) for spec in specs)


def _with_launcher(spec: TaskSpec, launcher: LauncherOptions, framework: Text | None) -> TaskSpec:
    framework_needs_ranks = framework is not None and framework.value not in (*_WITHOUT_RANKS, "pytorch")
    if spec.ranks is not None or not (launcher.starts_ranks or framework_needs_ranks):
        return replace(spec, launcher=launcher)
    where = launcher.mark if launcher.starts_ranks or framework is None else framework.mark
    return replace(spec, launcher=launcher, ranks=Ranks(mark=where))


# -- exit actions and retries -----------------------------------------------------------------------------------------


def _parse_exit_actions(task: View) -> ExitActions:
    """Return a task's exit actions. If two actions name the same code, OSMO uses the first one, and distflow adds a finding."""
    entries = task.view("exitActions")
    found: dict[Action, tuple[str, Codes]] = {}
    for key in entries.keys:
        action = Action.__members__.get(key.upper())
        text = entries.string(key)
        if action is None or text is None:
            continue  # reported by the check against the schema
        if action in found:
            entries.add(f"`{found[action][0]}` and `{key}` are the same action", "write all codes into one of them", key=key)
            continue
        try:
            codes = parse_codes(text)
        except InvalidValue as error:
            entries.add(f"`{key}`: {error.message}", error.hint, key=key)
            continue
        found[action] = (key, codes)
    for (first, first_codes), (second, second_codes) in combinations(found.values(), 2):
        code = overlap(first_codes, second_codes)
        if code is not None:
            entries.add(f"exit code {code} is in `{first}` and in `{second}`", "remove it from one of them", key=second)
    codes_of = {action: codes for action, (_, codes) in found.items()}
    return ExitActions(
        complete=codes_of.get(Action.COMPLETE, ()),
        fail=codes_of.get(Action.FAIL, ()),
        reschedule=codes_of.get(Action.RESCHEDULE, ()),
    )


def parse_retry(owner: View, above: Retry) -> Retry:
    """Return the retry settings of a group or workflow, whose keys override the settings ``above`` it."""
    retry = owner.view("retry")
    limit, avoid_after = retry.whole("limit"), retry.whole("avoid_after")
    given_s, longest_s = retry.parsed("backoff", parse_duration), retry.parsed("max_backoff", parse_duration)
    backoff_s = above.backoff_s if given_s is None else given_s
    if longest_s is not None and longest_s < backoff_s:
        retry.add(
            f"`max_backoff` ({longest_s:g} s) is shorter than `backoff` ({backoff_s:g} s)",
            "write at least the value of `backoff`: the wait begins with `backoff`, and doubles up to `max_backoff`",
            key="max_backoff",
        )
    return Retry(
        limit=above.limit if limit is None else limit,
        backoff_s=backoff_s,
        max_backoff_s=max(above.max_backoff_s, backoff_s) if longest_s is None else longest_s,
        avoid_after=above.avoid_after if avoid_after is None else avoid_after,
    )


def unused_reschedules(spec: WorkflowSpec, worlds: Container[str]) -> tuple[Problem, ...]:
    """Return a warning for each RESCHEDULE that never has an effect, or has none after its task has started.

    ``worlds`` has the names of the groups with a world.
    """
    found = []
    for group in spec.groups:
        ignores = group.ignore_nonlead_status if group.ignore_nonlead_status is not None else group.name not in worlds
        for task in group.tasks:
            if not task.exit_actions.reschedule or (task.replica or 0) > 0:
                continue
            message = hint = ""
            if group.retry.limit == 0:
                message = "no effect: `retry` has the limit 0"
                hint = "set the limit to 1 or more, or remove it: the default is 10"
            elif ignores and not task.lead:
                why = f"the group continues without `{task.written_name}`, because only the lead decides the group's end"
                message = f"no effect after the task has started: {why}"
                hint = "set `ignoreNonleadStatus: false` to retry the whole group"
            if message:
                message = f"RESCHEDULE of `{task.written_name}` has {message}"
                found.append(Problem(where=task.mark, severity=Severity.WARNING, message=message, hint=hint))
    return tuple(found)
