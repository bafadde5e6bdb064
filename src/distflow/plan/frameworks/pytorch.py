"""PyTorch: ``torchrun``, or distflow's own launcher (``spawn``). Each becomes the parent of the task's ranks.

torchrun's static rendezvous keeps the ranks as the spec has them, so it is the one that is taken. It cannot restart ranks: its
store keeps what the last attempt left there, and the ranks hang or fail again (pytorch/pytorch#135712). With
``max_restarts`` the dynamic rendezvous takes its place, with a store of its own for each attempt; it numbers the nodes itself.

Options: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from distflow.plan.frameworks.model import ADDRESS, PORT, Place, Started

__all__ = ["as_command", "spawn", "torchrun"]


def as_command(place: Place) -> Started:
    """Return the command as it is: it starts its ranks itself."""
    return Started(argv=place.argv)


def torchrun(place: Place) -> Started:
    """Return the command below torchrun."""
    python, restarts = place.python, place.launcher.max_restarts
    words = [python.interpreter, "-m", "torch.distributed.run", "--nnodes", place.nodes, "--node-rank", place.node_rank]
    words += ["--nproc-per-node", str(place.ranks.size)]
    environment = {}
    if restarts:
        # Its workers meet at the address that the first node gives: by itself that would be its host name.
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS}:{PORT}", "--local-addr", place.address]
        words += ["--rdzv-id", f"@@WORKFLOW_ID@@-{place.group}-@@RETRY_ID@@", "--rdzv-conf", f"is_host={int(place.is_master)}"]
        words += ["--max-restarts", str(restarts)]
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        words += ["--master-addr", ADDRESS, "--master-port", PORT]
    return Started(argv=(*words, *_target(place)), environment=environment)


def spawn(place: Place) -> Started:
    """Return the command below distflow's own launcher, ``distflow.train.launch``."""
    words = [place.python.interpreter, "-m", "distflow.train.launch", "--offset", str(place.ranks.offset)]
    words += ["--size", str(place.ranks.size), "--world_size", str(place.world.world_size)]
    if place.launcher.max_restarts:
        words += ["--max-restarts", str(place.launcher.max_restarts)]
    words += ["--numa"] if place.launcher.numa else []
    return Started(argv=(*words, *_target(place)))


def _target(place: Place) -> tuple[str, ...]:
    python = place.python
    return (*(("-m",) if python.is_module else ()), python.target, *python.arguments)
