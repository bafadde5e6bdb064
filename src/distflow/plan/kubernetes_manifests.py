"""Write a plan as manifests of Kubernetes that run without distflow.

Each group becomes a ConfigMap, and a JobSet or an Indexed Job with a Service. A workflow of one group that runs torchrun may
become a TrainJob of Kubeflow Trainer.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml
from msgspec import Struct

from distflow.documents.problems import Mark, Problem, ProblemsFound
from distflow.errors import InputError
from distflow.plan.model import GroupPlan, Launch, Plan, runs_torchrun
from distflow.plan.slurm_tasks import (
    address_variable,
    as_exported,
    ends_with_lead,
    kinds_of,
    ordered,
    shared_files,
    task_script,
)
from distflow.pools.model import KubernetesPlatform, KubernetesSettings, Pool
from distflow.pools.pod_templates import template_image, with_template
from distflow.spec.model import GroupSpec, TaskSpec, WorkflowSpec

__all__ = ["Kind", "kubernetes_manifests", "manifest_objects"]

Kind = Literal["jobset", "job", "trainjob"]
_RUNTIME = "torch-distributed"
"""Kubeflow Trainer's runtime for PyTorch. In it, the job and the container of a TrainJob's nodes have the name `node`."""
_NODE = "node"
_LARGEST = 900_000
"""The maximum size of a group's script and files in bytes. Kubernetes limits a ConfigMap to 1 MiB."""
_RUN = "/distflow/run"
_PORT = 29500
_POSITION = "JOB_COMPLETION_INDEX"
_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_LONGEST_NAME = 40


def kubernetes_manifests(
    plan: Plan, spec: WorkflowSpec, pool: Pool, contents: Mapping[str, bytes], *, kind: Kind, priority: str = "NORMAL"
) -> str:
    """Return the manifests of a plan as YAML.

    Args:
        plan: The plan.
        spec: The spec of the plan, for the positions in errors.
        pool: The settings of pods (``kubernetes``) and of nodes (``template``).
        contents: The content of each blob of the plan, by its digest.
        kind: A JobSet, whose controller must be installed, an Indexed Job (Kubernetes 1.24 or newer), or a TrainJob of Kubeflow
            Trainer 2.2 or newer.
        priority: The priority of the workflow (``HIGH``, ``NORMAL`` or ``LOW``), for the pool's priority classes.

    Raises:
        InputError: if a setting of the pool is missing or cannot be expressed, if the files are too large, or if a variable of
            the spec has the name of a variable of the script.
        ProblemsFound: if manifests cannot express the spec.

    """
    objects = manifest_objects(plan, spec, pool, contents, kind=kind, priority=priority)
    head = f"# {plan.name}: run with `kubectl create --filename FILE`. distflow is not needed in the cluster.\n"
    return head + yaml.dump_all(objects, sort_keys=False, Dumper=_Dumper, explicit_start=True, width=128)


def manifest_objects(
    plan: Plan, spec: WorkflowSpec, pool: Pool, contents: Mapping[str, bytes], *, kind: Kind, priority: str = "NORMAL"
) -> list[dict[str, Any]]:
    """Return the manifests as objects, with the arguments and errors of ``kubernetes_manifests``."""
    if kind == "trainjob" and len(plan.groups) > 1:
        message = f"a TrainJob has one group of tasks, but this workflow has {len(plan.groups)}"
        raise _refusal(spec.groups[1].mark, message, "export it with --to kubernetes, which writes one JobSet for each group")
    _require_expressible_workflow(spec)
    settings, specs = pool.kubernetes or KubernetesSettings(), {group.name: group for group in spec.groups}
    template = json.loads(settings.pod_template)
    found: list[dict[str, Any]] = []
    for group in plan.groups:
        name = _name(plan.name if len(plan.groups) == 1 else f"{plan.name}-{group.name}")
        one = _Group(plan, as_exported(group), specs[group.name], spec.labels, pool, settings, template, name, kind, priority)
        found += one.objects(contents)
    return found


def _require_expressible_workflow(spec: WorkflowSpec) -> None:
    """Raise ``ProblemsFound`` if manifests cannot express a part of the workflow outside of its groups."""
    message, hint = f"a manifest cannot express this part of workflow {spec.name}", "run it with distflow"
    if spec.notify:
        raise _refusal(spec.notify[0].where, f"{message}: `notify`", hint)
    if spec.max_log is not None:
        raise _refusal(spec.mark, f"{message}: `max_log`", hint)
    for key in spec.labels:
        if re.search(r"[.-]\.|\.-", key.rpartition("/")[0]):
            reason = "each part of its prefix between dots must begin and end with a letter or a digit"
            message = f"Kubernetes does not allow the label key `{key}`: {reason}"
            raise _refusal(spec.mark, message, "rename the label, or run the workflow with distflow")


def _refusal(where: Mark, message: str, hint: str) -> ProblemsFound:
    return ProblemsFound([Problem(where=where, message=message, hint=hint)])


class _Group(Struct, frozen=True):
    plan: Plan
    group: GroupPlan
    spec: GroupSpec
    labels: Mapping[str, str]
    pool: Pool
    settings: KubernetesSettings
    template: Mapping[str, Any]
    name: str
    kind: Kind
    priority: str

    def objects(self, contents: Mapping[str, bytes]) -> list[dict[str, Any]]:
        launches = ordered(self.group)
        self._require_expressible(launches)
        files = shared_files(self.plan)
        script = self._script(files)
        used = {file.blob for launch in launches for file in launch.files if file.blob is not None}
        size = len(script) + sum(len(contents[digest]) for digest in used)
        if size > _LARGEST:
            limit = f"but distflow puts at most {_LARGEST:,} into a ConfigMap"
            message = f"the script and files of group `{self.group.name}` have {size:,} bytes, {limit}"
            raise InputError(message, hint="put files into the container image of the tasks")
        binary = {files[digest]: base64.b64encode(contents[digest]).decode() for digest in sorted(used)}
        settings: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(),
            "data": {"task.sh": script},
            **({"binaryData": binary} if binary else {}),
        }
        pod = self._pod(launches)
        job = self._job(pod, len(launches))
        if self.kind == "job":
            return [settings, self._service(), self._object("batch/v1", "Job", job)]
        if self.kind == "trainjob":
            return [settings, self._train_job(pod["spec"], launches)]
        return [settings, self._job_set(job)]

    def _script(self, files: Mapping[str, str]) -> str:
        return task_script(self.group, self.pool, files, position=_POSITION, restarts="restart_attempt", node_name="node_name")

    def _require_expressible(self, launches: Sequence[Launch]) -> None:
        """Raise ``ProblemsFound`` if manifests cannot express a part of the group."""
        tasks = {task.name: task for task in self.spec.tasks}
        for launch in launches:
            if what := self._task_not_expressible(launch):
                message = f"a manifest cannot express this part of task {launch.task}: {what}"
                raise _refusal(tasks[launch.task].mark, message, "run it with distflow")
        if what := self._group_not_expressible():
            message = f"a manifest cannot express this part of group {self.group.name}: {what}"
            raise _refusal(self.spec.mark, message, "run it with distflow")
        first = launches[0]
        for launch in launches[1:]:
            if (launch.resource, self._image(launch), launch.mounts) != (first.resource, self._image(first), first.mounts):
                message = f"task {launch.task} has other resources, another image or other mounts than task {first.task}"
                hint = "give all tasks of the group the same ones: all pods of a group are equal"
                raise _refusal(tasks[launch.task].mark, message, hint)
        if self.kind == "trainjob":
            self._require_train_job(launches, tasks)

    def _group_not_expressible(self) -> str:
        """Return a part of the group that manifests cannot express; empty if there is none."""
        if ends_with_lead(self.group):
            return "tasks that are stopped when the lead has completed"
        if self.group.venv is not None:
            return "a `venv`; install the packages in the image"
        if self.group.timeouts.queue_s is not None:
            return "`queue_timeout`"
        if self.group.timeouts.hang_s is not None:
            return "`hang_timeout`"
        if self.group.stop_on_missing_ranks:
            return "`stop_on_missing_ranks`"
        return "`elastic`" if self.spec.elastic is not None else ""

    def _task_not_expressible(self, launch: Launch) -> str:
        """Return a part of a task that manifests cannot express; empty if there is none."""
        if launch.inputs:
            return "inputs from other groups"
        if launch.earlier_inputs:
            return "inputs from earlier workflows"
        if launch.url_inputs or launch.url_outputs:
            return "inputs or outputs at URLs"
        if launch.checkpoints:
            return "`checkpoint` or `shared`"
        if launch.privileged:
            return "`privileged`"
        if launch.resource.storage:
            return "`storage`"
        if launch.resource.topology:
            return "`topology`"
        if launch.exit_actions.reschedule and self.kind == "job":
            return "RESCHEDULE of `exitActions`, which a JobSet supports, but an Indexed Job does not"
        if launch.secret_names:
            return "the secrets of --set-env"
        return "credentials" if launch.credentials else ""

    def _require_train_job(self, launches: Sequence[Launch], tasks: Mapping[str, TaskSpec]) -> None:
        """Raise ``ProblemsFound`` or, for a setting of the pool, ``InputError`` if only a JobSet can express the group."""
        first, or_else = launches[0], "export the workflow with --to kubernetes, which writes a JobSet"
        for launch in launches:
            task = tasks[launch.task]
            if not (runs_torchrun(launch.argv) or PurePosixPath(launch.argv[0]).name == "torchrun"):
                hint = f"set `launcher: torchrun` in the group, or {or_else}"
                raise _refusal(task.mark, f"a TrainJob runs torchrun on each node, but task {task.name} does not", hint)
            if task.launcher.max_restarts:
                raise _refusal(task.launcher.mark, "a TrainJob cannot restart ranks (`max_restarts`)", or_else)
            if launch.exit_actions.reschedule:
                message = f"a TrainJob does not support RESCHEDULE of `exitActions`, which task {task.name} uses"
                raise _refusal(task.mark, message, f"remove RESCHEDULE, or {or_else}")
            if (launch.ranks and launch.ranks.size) != (first.ranks and first.ranks.size):
                message = f"all nodes of a TrainJob have the same number of ranks, but task {task.name} has another number"
                raise _refusal(task.mark, f"{message} than task {first.task}", or_else)
        if len(kinds := kinds_of(launches)) > 1:
            other = tasks[kinds[1][0].task]
            message = f"task {other.name} differs from task {first.task} in its command, environment, files or `exitActions`"
            raise _refusal(other.mark, message, f"make the tasks of the group equal, except for their names, or {or_else}")
        given = {
            "scheduler": self.settings.scheduler,
            "host_network": self.settings.host_network,
            "priority_classes": self.settings.priority_classes.get(self.priority),
            "pod_template": self.template,
        }
        if key := next((key for key, value in given.items() if value), None):
            message = f"a TrainJob takes `{key}` from its runtime, but the pool `{self.pool.name}` sets it"
            raise InputError(message, hint=or_else)

    def _image(self, launch: Launch) -> str:
        if not (image := launch.image or self.settings.image or template_image(self.template)):
            raise InputError(
                f"task {launch.task} has no container image",
                hint="set `image` of the task, or `kubernetes.image` of the pool; --pool selects another pool",
            )
        return image

    def _metadata(self, **more_labels: str) -> dict[str, Any]:
        given = {"namespace": self.settings.namespace, "labels": {**self.labels, **more_labels}}
        return {"name": self.name, **{key: value for key, value in given.items() if value}}

    def _queue(self) -> dict[str, str]:
        return {"kueue.x-k8s.io/queue-name": self.settings.queue} if self.settings.queue else {}

    def _host(self, position: int) -> str:
        """Return the DNS name of the pod with this position."""
        job = {"job": self.name, "jobset": f"{self.name}-task-0", "trainjob": f"{self.name}-{_NODE}-0"}[self.kind]
        return f"{job}-{position}.{self.name}"

    def _service(self) -> dict[str, Any]:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": self.name}}
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._metadata(), "spec": spec}

    def _job(self, pod: dict[str, Any], count: int) -> dict[str, Any]:
        limit_s = self.group.timeouts.exec_s
        return {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            **({"activeDeadlineSeconds": math.ceil(limit_s)} if limit_s else {}),
            "template": pod,
        }

    def _job_set(self, job: dict[str, Any]) -> dict[str, Any]:
        spec = {
            "failurePolicy": {"maxRestarts": self.group.retry.limit if self._is_rescheduled else 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": self.name},
            "replicatedJobs": [{"name": "task", "replicas": 1, "template": {"spec": job}}],
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec)

    def _train_job(self, pod: dict[str, Any], launches: Sequence[Launch]) -> dict[str, Any]:
        """Return a TrainJob. Settings for which it has no field become a patch of its runtime's pods."""
        (task,) = pod["containers"]
        ranks, limit_s = launches[0].ranks, self.group.timeouts.exec_s
        patched: dict[str, Any] = {key: pod[key] for key in ("serviceAccountName", "nodeSelector", "tolerations") if key in pod}
        patched |= {"containers": [{"name": _NODE, "volumeMounts": task["volumeMounts"]}], "volumes": pod["volumes"]}
        job = {"name": _NODE, "template": {"spec": {"template": {"spec": patched}}}}
        patch = {"template": {"spec": {"replicatedJobs": [job]}}}
        spec = {
            "runtimeRef": {"name": _RUNTIME},
            **({"activeDeadlineSeconds": math.ceil(limit_s)} if limit_s else {}),
            "trainer": {
                "numNodes": len(launches),
                "numProcPerNode": ranks.size if ranks is not None else 1,
                **{key: task[key] for key in ("image", "command", "env")},
                **({"resourcesPerNode": task["resources"]} if "resources" in task else {}),
            },
            "runtimePatches": [{"manager": "distflow.dev/export", "trainingRuntimeSpec": patch}],
        }
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", spec)

    def _object(self, api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": api_version, "kind": kind, "metadata": self._metadata(**self._queue()), "spec": spec}

    @property
    def _is_rescheduled(self) -> bool:
        """Whether the spec requests another attempt after some exit codes."""
        return any(launch.exit_actions.reschedule for launch in self.group.launches)

    def _pod(self, launches: Sequence[Launch]) -> dict[str, Any]:
        """Return the pod of each task, merged with the pool's template."""
        settings, resource = self.settings, launches[0].resource
        platform = settings.platforms.get(resource.platform or "", KubernetesPlatform())
        requests = {
            **({"cpu": str(resource.cpu)} if resource.cpu else {}),
            **({"memory": str(resource.memory)} if resource.memory else {}),
            **({platform.gpu_resource or settings.gpu_resource: str(resource.gpu)} if resource.gpu else {}),
        }
        limits = {name: amount for name, amount in requests.items() if name != "cpu"}
        mounts = [mount.partition(":") for mount in launches[0].mounts]
        container: dict[str, Any] = {
            "name": "task",
            "image": self._image(launches[0]),
            "command": ["bash", f"{_RUN}/files/task.sh"],
            "env": [
                *({"name": name, "value": value} for name, value in self._environment(launches).items()),
                _field("node_name", "spec.nodeName"),
                *([_field("restart_attempt", _ATTEMPT)] if self.kind != "job" else []),
            ],
            **({"resources": {"requests": requests, **({"limits": limits} if limits else {})}} if requests else {}),
            "volumeMounts": [
                {"name": "distflow-run", "mountPath": _RUN},
                {"name": "distflow-files", "mountPath": f"{_RUN}/files"},
                {"name": "distflow-shm", "mountPath": "/dev/shm"},  # noqa: S108  workers of data loaders need more than 64 MiB
                *({"name": f"distflow-mount-{at}", "mountPath": to or source} for at, (source, _, to) in enumerate(mounts)),
            ],
        }
        given: dict[str, Any] = {
            "subdomain": self.name if self.kind == "job" else None,
            "serviceAccountName": settings.service_account,
            "schedulerName": settings.scheduler,
            "priorityClassName": settings.priority_classes.get(self.priority),
            "hostNetwork": settings.host_network or None,
            "dnsPolicy": "ClusterFirstWithHostNet" if settings.host_network else None,
            "nodeSelector": dict(platform.node_selector),
            "tolerations": [dict(one) for one in platform.tolerations],
        }
        spec = {
            "restartPolicy": "Never",
            **{key: value for key, value in given.items() if value},
            "containers": [container],
            "volumes": [
                {"name": "distflow-run", "emptyDir": {}},
                {"name": "distflow-files", "configMap": {"name": self.name}},
                {"name": "distflow-shm", "emptyDir": {"medium": "Memory"}},
                *({"name": f"distflow-mount-{at}", "hostPath": {"path": source}} for at, (source, _, _) in enumerate(mounts)),
            ],
        }
        return with_template(self.template, {"spec": spec})

    def _environment(self, launches: Sequence[Launch]) -> dict[str, str]:
        """Return the variables of the script that are known before the pods exist."""
        world, tasks = self.group.world, [launch.task for launch in launches]
        found = {
            "run_dir": _RUN,
            "workflow_id": self.plan.name,
            "master_addr": self._host(tasks.index(self.group.master)),
            "master_port": str((world.port if world is not None and isinstance(world.port, int) else None) or _PORT),
        }
        script = self._script({})
        for position, task in enumerate(tasks):
            variable = address_variable(task)
            if variable in script:
                found[variable] = self._host(position)
        return found


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _name(text: str) -> str:
    """Return a name for objects: a DNS label, short enough to append the positions of pods."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-") or "workflow"
    return words if words[0].isalpha() else f"w-{words}"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
