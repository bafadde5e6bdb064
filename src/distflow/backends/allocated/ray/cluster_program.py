"""The program that uses Ray for distflow, on a node of the Ray cluster, and the actors that run the resident programs.

The cluster's own Python runs it, so the submitter needs no Ray. It first writes one line of JSON: ``{"answer": …}`` with the
versions of Ray and Python. If it cannot use Ray, it writes ``{"kind": …, "error": …}`` instead, and ends. It reads
requests as lines ``{"do": method, "with": arguments}``, and answers each with one line of either form. The placement groups and
actors that it creates are detached, so the program may end at any time, and another instance continues. It ends when its
standard input ends.

An allocation is a placement group whose name is distflow's marker, with one actor for each task. An actor is the parent of the
resident program (``runtime/services/resident.py``) of its task, and listens on a TCP port for connections from this cluster's
nodes. A client proves with an HMAC that it knows the actor's token. Its connection becomes the standard input and output of a
command that the resident program starts.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import importlib
import inspect
import json
import os
import queue
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Cluster", "NodeActor", "NotPossible", "main"]

NAMESPACE = "distflow"
MARK = "distflow:"
ID_LENGTH = 12
_ACTOR_NAME = r"distflow:.*/([0-9]+)@([0-9a-f]{12})"
_OF_RAY = ("RAY_", "SPT_")
_SET_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
"""Variables that Ray sets for its workers if they are not set already. Other programs must not inherit them from Ray."""
_INTERNAL = ("node:", "object_store_memory")
"""Prefixes of the names of Ray's own resources. Tasks do not request these resources."""
_LONGEST_LINE = 1 << 20
_LONGEST_ERROR = 2000
"""Characters of an error message of Ray that are reported."""
_AUTHENTICATION_S = 10.0
_MOST_UNAUTHENTICATED = 32
"""Limit of connections that have not been authenticated yet."""
_CONNECT_S = 10.0
_ANSWER_S = 2.0
"""Seconds to wait for the answers of new actors. Later requests collect late answers."""
_PEER_S = 30.0
_PROBE_S = 60.0


class NotPossible(Exception):
    """Ray will never grant a request."""


class NodeActor:
    """The actor of one task. It starts the resident program, and accepts connections for it."""

    def __init__(self, resident: str, allocation: str, index: int, peers: list[str], idle_release_s: float) -> None:
        """Start the resident program.

        ``resident``: the source text of ``resident.py``. ``peers``: the names of all actors of the allocation.
        """
        ray = importlib.import_module("ray")
        self._address = str(ray.util.get_node_ip_address())
        self._token = secrets.token_bytes(32)
        self._socket_name = f"distflow-{os.getuid()}-{allocation}-{index}-{secrets.token_hex(8)}"
        self._others = [name for position, name in enumerate(peers) if position != index]
        self._idle_release_s = idle_release_s
        self._idle_since: float | None = time.monotonic()
        self._timer = threading.Event()
        self._unauthenticated = threading.BoundedSemaphore(_MOST_UNAUTHENTICATED)
        has_gpus = bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
        command = [sys.executable, "-I", "-S", "-c", resident, "tied", self._socket_name]
        # The program ends when its standard input ends, and so also if this process is killed.
        self._resident = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True,
            env=_environment(self._address, has_gpus),
        )  # fmt: skip
        if not self._resident.stdout or not self._resident.stdout.readline():  # its first line reports that it accepts requests
            raise RuntimeError("distflow's program on the node ended before it was ready; see the logs of Ray's worker")
        self._server = socket.create_server(
            (self._address, 0), family=socket.AF_INET6 if ":" in self._address else socket.AF_INET, backlog=128
        )
        for target in (self._read_reports, self._accept, self._release_when_idle):
            threading.Thread(target=target, daemon=True).start()

    def endpoint(self) -> dict[str, Any]:
        """Return the address and port at which the actor accepts connections, and the token."""
        port = self._server.getsockname()[1]
        return {"address": self._address, "port": port, "token": self._token.hex()}

    def idle_s(self) -> float:
        """Return the seconds since the resident program last had a process or a connection."""
        since = self._idle_since
        return 0.0 if since is None else time.monotonic() - since

    def _read_reports(self) -> None:
        for line in self._resident.stdout or ():
            self._idle_since = time.monotonic() if line.split()[-1:] == [b"idle"] else None
        self._resident.wait()
        os.write(2, b"distflow's resident program has ended\n")
        os._exit(1)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            if self._unauthenticated.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_AUTHENTICATION_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                nonce = secrets.token_hex(16).encode()
                connection.sendall(nonce + b"\n")
                mac, _, request = _line(connection).partition(b" ")
                expected = hmac.new(self._token, nonce + request, hashlib.sha256).hexdigest().encode()
                if hmac.compare_digest(mac, expected):
                    connection.settimeout(None)
                    self._start([sys.executable, *json.loads(request.decode("utf-8"))["argv"]], connection)
        except (OSError, ValueError, KeyError, TypeError):
            return  # the end of the connection informs the client
        finally:
            self._unauthenticated.release()

    def _start(self, argv: list[str], connection: socket.socket) -> None:
        """Let the resident program start a command whose standard input and output are the connection."""
        words = [os.fsencode(word).decode("latin-1") for word in argv]
        request = json.dumps({"argv": words, "limit_s": None}).encode("ascii")
        with socket.socket(socket.AF_UNIX) as resident:
            resident.connect("\0" + self._socket_name)
            fds = array.array("i", [connection.fileno(), connection.fileno(), 2])
            resident.sendmsg([struct.pack(">I", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            resident.sendall(request)

    def _release_when_idle(self) -> None:
        """Remove the placement group once all of its actors have been idle for ``idle_release_s``."""
        while True:
            self._timer.wait(max(0.5, self._idle_release_s - self.idle_s()))
            if self.idle_s() >= self._idle_release_s and all(self._is_idle(name) for name in self._others):
                ray = importlib.import_module("ray")
                ray.util.remove_placement_group(ray.util.get_current_placement_group())

    def _is_idle(self, name: str) -> bool:
        ray = importlib.import_module("ray")
        try:
            idle_s = ray.get(ray.get_actor(name, namespace=NAMESPACE).idle_s.remote(), timeout=_PEER_S)
        except (ValueError, ray.exceptions.ActorDiedError):
            return True  # the actor has ended
        except ray.exceptions.RayError:
            return False  # no answer
        return bool(idle_s >= self._idle_release_s)


def _environment(address: str, has_gpus: bool) -> dict[str, str]:
    """Return the environment of the resident program: that of Ray's worker without the variables that Ray adds."""
    inherited = b""
    try:
        with open("/proc/{}/environ".format(int(os.environ.get("RAY_RAYLET_PID", ""))), "rb") as file:
            inherited = b"\0" + file.read()
    except (OSError, ValueError):
        pass
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_RAY) and (name not in _SET_BY_RAY or b"\0" + name.encode() + b"=" in inherited)
    }
    env["DISTFLOW_NODE_ADDRESS"] = address
    if not has_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""  # Ray does not hide GPUs from actors that requested none
    return env


def _line(connection: socket.socket) -> bytes:
    """Read a line and nothing after it, because the rest belongs to the command."""
    data = b""
    while len(data) < _LONGEST_LINE:
        peeked = connection.recv(65536, socket.MSG_PEEK)
        if not peeked:
            raise ValueError("the connection ended before a newline")
        end = peeked.find(b"\n")
        data += connection.recv(len(peeked) if end < 0 else end + 1)
        if end >= 0:
            return data[:-1]
    raise ValueError(f"the request line has more than {_LONGEST_LINE} bytes")


class Cluster:
    """Answers requests. Each public method is one request, and returns a JSON value."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster."""
        self._ray: Any = importlib.import_module("ray")
        host, _, port = address.rpartition(":")
        if host:  # fail early, because Ray itself would try for a minute
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        # Stop Ray's thread for error messages: while the head is unreachable, it polls without a pause and keeps a core busy.
        worker = importlib.import_module("ray._private.worker").global_worker
        if hasattr(worker, "threads_stopped"):  # other versions of Ray may lack this internal attribute
            worker.threads_stopped.set()
        self._state: Any = importlib.import_module("ray._private.state")
        self._endpoints: dict[str, Any] = {}
        """Name of an actor → its endpoint, or the reference of an answer that has not arrived yet."""

    def about(self) -> dict[str, Any]:
        """Return the versions of Ray and Python."""
        return {"ray": self._ray.__version__, "python": ".".join(str(part) for part in sys.version_info[:3])}

    def request(
        self, marker: str, bundles: list[dict[str, float]], strategy: str, excluded: list[list[str]], resident: str,
        idle_release_s: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Create a placement group with its actors, unless they exist.

        Returns its ``id``, and a warning (``notice``), which may be empty. ``excluded``: node names, by bundle.
        ``resident``: the source text of ``resident.py``.
        """
        group = self._existing(marker)
        notice = ""
        if group is None:
            options: dict[str, Any] = {}
            if any(excluded):
                options, notice = self._without(excluded)
            try:
                group = self._ray.util.placement_group(
                    bundles, strategy=strategy, name=marker, lifetime="detached", **options
                )  # fmt: skip
            except ValueError as error:
                raise NotPossible(str(error)) from error
        name = group.id.hex()[:ID_LENGTH]
        names = [f"{marker}/{index}@{name}" for index in range(len(bundles))]
        known = {actor["Name"] for actor in self._state.actors().values()}
        for index, bundle in enumerate(bundles):
            if names[index] not in known:
                self._create(group, names, index, bundle, resident, idle_release_s)
        return {"id": name, "notice": notice}

    def _existing(self, marker: str) -> Any:
        for one in self._groups().values():
            if one["name"] == marker:
                return self._ray.util.get_placement_group(marker)
        return None

    def _without(self, excluded: list[list[str]]) -> Any:
        """Return the options that keep bundles away from excluded nodes, and a warning."""
        function = self._ray.util.placement_group
        if "bundle_label_selector" not in inspect.signature(function).parameters:
            return {}, "nodes to avoid are ignored: avoiding them needs Ray 2.49 or newer"
        ids: dict[str, list[str]] = {}
        for node in self._ray.nodes():
            ids.setdefault(_node_name(node), []).append(node["NodeID"])
        chosen = [sorted(one for name in names for one in ids.get(name, [])) for names in excluded]
        selectors = [{"ray.io/node-id": "!in({})".format(",".join(one))} if one else {} for one in chosen]
        return {"bundle_label_selector": selectors}, ""

    def _create(
        self, group: Any, names: list[str], index: int, bundle: dict[str, float], resident: str, idle_release_s: float
    ) -> None:
        placed = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
        resources = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        actor = self._ray.remote(NodeActor).options(
            name=names[index], lifetime="detached", namespace=NAMESPACE, max_restarts=0, max_concurrency=8,
            scheduling_strategy=placed, num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory") or None, resources=resources,
        )  # fmt: skip
        actor.remote(resident, names[index].rpartition("@")[2], index, names, idle_release_s)

    def states(self, ids: list[str]) -> dict[str, Any]:
        """Return the states of allocations and their actors, and the nodes of the cluster."""
        groups = {name[:ID_LENGTH]: one for name, one in self._groups(also_removed=True).items()}
        actors = self._actors(ids)
        self._query_endpoints([actor["name"] for found in actors.values() for actor in found if actor["state"] == "ALIVE"])
        answer: dict[str, Any] = {}
        for one in ids:
            group = groups.get(one)
            if group is None:
                answer[one] = None
                continue
            for actor in actors[one]:
                endpoint = self._endpoints.get(actor["name"])
                actor["endpoint"] = endpoint if isinstance(endpoint, dict) else None
            answer[one] = {
                "state": group["state"], "scheduling": (group.get("stats") or {}).get("scheduling_state", ""),
                "strategy": group["strategy"], "bundles": [group["bundles"][index] for index in sorted(group["bundles"])],
                "actors": actors[one],
            }  # fmt: skip
        return {"states": answer, "nodes": self.nodes()}

    def _actors(self, ids: list[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the actors of allocations."""
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in ids}
        for actor in self._state.actors().values():
            match = re.match(_ACTOR_NAME + "$", actor["Name"] or "")
            if match is not None and match.group(2) in found:
                found[match.group(2)].append(
                    {
                        "name": actor["Name"], "index": int(match.group(1)), "state": actor["State"],
                        "node": actor["Address"]["NodeID"], "ended": actor["EndTime"], "cause": _cause(actor["DeathCause"]),
                    }
                )  # fmt: skip
        return found

    def _query_endpoints(self, names: list[str]) -> None:
        """Query new actors for their endpoints."""
        pending = {}
        for name in names:
            known = self._endpoints.get(name)
            if known is None:
                try:
                    known = self._endpoints[name] = self._ray.get_actor(name, namespace=NAMESPACE).endpoint.remote()
                except ValueError:
                    continue  # it has just ended
            if not isinstance(known, dict):
                pending[known] = name
        if not pending:
            return
        ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=_ANSWER_S)
        for one in ready:
            try:
                self._endpoints[pending[one]] = self._ray.get(one)
            except self._ray.exceptions.RayError:
                self._endpoints.pop(pending[one], None)

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the cluster with their resources."""
        free = self._state.available_resources_per_node()
        kinds = ("CPU", "GPU", "memory")
        return [
            {
                "id": node["NodeID"], "name": _node_name(node), "is_alive": bool(node["Alive"]),
                "death": str(node.get("DeathReasonMessage") or ""),
                "total": {name: node["Resources"].get(name, 0.0) for name in kinds},
                "free": {name: free.get(node["NodeID"], {}).get(name, 0.0) for name in kinds},
                "others": sorted(one for one in node["Resources"] if one not in kinds and not one.startswith(_INTERNAL)),
            }
            for node in sorted(self._ray.nodes(), key=_node_name)
        ]  # fmt: skip

    def allocations(self) -> dict[str, Any]:
        """Return id → name, for all placement groups of distflow."""
        return {name[:ID_LENGTH]: one["name"] for name, one in self._groups().items()}

    def release(self, ids: list[str]) -> dict[str, Any]:
        """Remove placement groups and actors. Placement groups of other programs are ignored."""
        groups = {name[:ID_LENGTH]: one["name"] for name, one in self._groups().items()}
        for found in self._actors(ids).values():
            for actor in found:
                self._endpoints.pop(actor["name"], None)
                if actor["state"] != "DEAD":
                    try:
                        self._ray.kill(self._ray.get_actor(actor["name"], namespace=NAMESPACE), no_restart=True)
                    except ValueError:
                        pass  # it has just ended
        for one in ids:
            if one in groups:
                try:
                    self._ray.util.remove_placement_group(self._ray.util.get_placement_group(groups[one]))
                except ValueError:
                    pass  # it has just been removed
        return {}

    def probe(self, python: str, root: str) -> list[dict[str, Any]]:
        """Run ``python`` on each node. Return, for each node, the result of ``_probe``, or an ``error``."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        nodes = sorted((node for node in self._ray.nodes() if node["Alive"]), key=_node_name)
        task = self._ray.remote(_probe)
        nodes_by_task = {
            task.options(
                num_cpus=0, max_retries=0,
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(python, root): _node_name(node)
            for node in nodes
        }  # fmt: skip
        ready, late = self._ray.wait(list(nodes_by_task), num_returns=len(nodes_by_task), timeout=_PROBE_S)
        found = []
        for one in ready:
            try:
                found.append(dict(self._ray.get(one), node=nodes_by_task[one]))
            except self._ray.exceptions.RayError as error:
                found.append({"node": nodes_by_task[one], "error": str(error).strip().split("\n")[-1]})
        for one in late:
            self._ray.cancel(one, force=True)
            found.append({"node": nodes_by_task[one], "error": f"no answer within {_PROBE_S:g} s"})
        return sorted(found, key=lambda one: str(one["node"]))

    def _groups(self, also_removed: bool = False) -> dict[str, Any]:
        return {
            name: one
            for name, one in self._ray.util.placement_group_table().items()
            if str(one["name"]).startswith(MARK) and (also_removed or one["state"] != "REMOVED")
        }


def _probe(python: str, root: str) -> dict[str, Any]:
    """Run the pool's Python on this node.

    Returns its exit code (``code``), its version or an error (``output``), and whether ``root`` is writable (``is_writable``).
    If ``root`` does not exist, its nearest existing parent is checked. If Python does not start or takes longer than 30 s,
    ``code`` is 127, and ``is_writable`` is True without a check.
    """
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run(
            [os.path.expanduser(python), "-I", "-S", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=30,
            check=False, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"code": 127, "output": str(error)[:300], "is_writable": True}
    folder = os.path.expanduser(root)
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    output = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-300:]
    return {"code": done.returncode, "output": output, "is_writable": os.access(folder, os.W_OK)}


def _node_name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


def _cause(cause: Any) -> dict[str, str] | None:
    """Return the cause of an actor's death, from Ray's ``ActorDeathCause``."""
    kind = cause.WhichOneof("context") if cause is not None else None
    if kind is None:
        return None
    context = getattr(cause, kind)
    reason = node = ""
    if kind == "actor_died_error_context":
        try:
            reason = context.Reason.Name(context.reason)
            node = context.node_death_info.Reason.Name(context.node_death_info.reason)
        except (AttributeError, ValueError):  # another version of Ray
            pass
    text = getattr(context, "error_message", "") or getattr(context, "formatted_exception_string", "")
    return {"kind": kind, "reason": reason, "node": node, "message": str(text)[-_LONGEST_ERROR:]}


def main(address: str) -> None:
    """Connect, and answer requests until standard input ends. Returns early if Ray is missing or does not connect."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of Ray must not mix with answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # at once, because the main thread may be waiting for Ray

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    threading.Thread(target=read, daemon=True).start()
    try:
        cluster = Cluster(address)
    except ImportError as error:
        send({"kind": "no ray", "error": f"{sys.executable}: {error}"})
        return
    except Exception as error:  # noqa: BLE001  Ray's own errors have no common class here
        send({"kind": "not connected", "error": _short(error)})
        return
    send({"answer": cluster.about()})
    while True:
        request = json.loads(lines.get())
        function: Callable[..., Any] = getattr(cluster, request["do"])
        try:
            send({"answer": function(**request["with"])})
        except NotPossible as error:
            send({"kind": "refused", "error": str(error).strip()[:_LONGEST_ERROR]})
        except Exception as error:  # noqa: BLE001  the next request may succeed
            send({"kind": "failed", "error": _short(error)})


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:_LONGEST_ERROR]


if __name__ == "__main__":
    main(sys.argv[1])
