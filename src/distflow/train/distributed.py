"""Who else is in the gang: the calls of ``valohai.distributed``, answered from ``distributed.json``.

distflow writes that file for every task of a gang, in Valohai's format. A *member* is a task on its node, not a process: with
eight processes a node, two nodes have two members. For the rank of a process ask ``torch.distributed``.

Names, meaning and the order of the ranks are those of https://github.com/valohai/valohai-utils.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Config", "Distributed", "Member", "distributed"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A task of the gang."""

    member_id: str
    rank: int
    """Its number among the members; the one with 0 is the master."""
    identity: str
    """Name of its node."""
    job_id: str
    announce_time: str
    """When it joined, ISO 8601."""
    local_ips: tuple[str, ...] = ()
    """Addresses on the training network, the usual one first."""
    public_ips: tuple[str, ...] = ()
    exposed_ports: Mapping[str, str] = field(default_factory=dict)
    """Port of the node → port of the container."""

    @property
    def is_master(self) -> bool:
        """Whether all others meet at it."""
        return self.rank == 0

    @property
    def primary_local_ip(self) -> str:
        """The address to reach it at. Raises ``RuntimeError`` when it has none."""
        return _first(self.local_ips, f"member {self.member_id} has no local address")

    @property
    def primary_public_ip(self) -> str:
        """Its public address; distflow gives the local one. Raises ``RuntimeError`` when it has none."""
        return _first(self.public_ips, f"member {self.member_id} has no public address")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What ``distributed.json`` says."""

    group_name: str
    member_id: str
    """This task's own."""
    required_count: int
    """How many members there are."""
    members: tuple[Member, ...]


class Distributed:
    """The gang of this task; the file is read once, when something is asked for the first time."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._config: Config | None = None

    def is_distributed_task(self) -> bool:
        """Whether this task has fellows: a file that can be read, and that names a group."""
        try:
            return bool(self.config.group_name)
        except (OSError, ValueError):
            return False

    @property
    def config(self) -> Config:
        """The content of the file. Raises ``OSError`` if it does not exist, and ``ValueError`` if it has another format."""
        if self._config is None:
            self._config = _read(Path(_folder()) / "distributed.json")
        return self._config

    @property
    def group_name(self) -> str:
        """Name of the gang."""
        return self.config.group_name

    @property
    def member_id(self) -> str:
        """This task's own."""
        return self.config.member_id

    @property
    def rank(self) -> int:
        """This task's number among the members."""
        return self.me().rank

    @property
    def required_count(self) -> int:
        """How many members there are."""
        return self.config.required_count

    def members(self) -> tuple[Member, ...]:
        """Return all members, in the order of the file."""
        return self.config.members

    def member(self, member_id: str) -> Member:
        """Return the member with that id. Raises ``RuntimeError`` when there is none."""
        for member in self.members():
            if member.member_id == member_id:
                return member
        known = ", ".join(member.member_id for member in self.members())
        raise RuntimeError(f"no member has the id {member_id!r}; there are {known or 'none'}")

    def me(self) -> Member:
        """Return this task."""
        return self.member(self.member_id)

    def master(self) -> Member:
        """Return the member with rank 0. Raises ``RuntimeError`` when there are no members."""
        for member in self.members():
            if member.is_master:
                return member
        raise RuntimeError("the gang has no members, so that none is the master")

    def flush_state(self) -> None:
        """Forget what was read; the next question reads the file again."""
        self._config = None


distributed = Distributed()
"""The gang of this process's task."""


def _folder() -> str:
    """Return the directory of the file: the one that is named, else the two that Valohai knows."""
    usual = "/valohai/config" if os.environ.get("VH_JOB_ID") else ".valohai/config"
    return os.environ.get("VH_CONFIG_DIR") or usual


def _read(path: Path) -> Config:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = found["config"]
        ranks = _ranks([str(entry["member_id"]) for entry in found["members"]])
        return Config(
            group_name=config["group_name"],
            member_id=str(config["member_id"]),
            required_count=int(config["required_count"]),
            members=tuple(_member(entry, ranks) for entry in found["members"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a valid distributed.json: {type(error).__name__}: {error}") from error


def _member(entry: Mapping[str, Any], ranks: Mapping[str, int]) -> Member:
    network = entry["network"]
    return Member(
        member_id=str(entry["member_id"]),
        rank=ranks[str(entry["member_id"])],
        identity=entry["identity"],
        job_id=entry["job_id"],
        announce_time=entry["announce_time"],
        local_ips=tuple(network["local_ips"]),
        public_ips=tuple(network["public_ips"]),
        exposed_ports=dict(network["exposed_ports"]),
    )


def _ranks(ids: Sequence[str]) -> dict[str, int]:
    """Return the rank of each member: in the order of the ids as numbers, or as texts if one of them is not a number."""
    try:
        order = sorted(ids, key=int)
    except ValueError:
        order = sorted(ids)
    return {name: rank for rank, name in enumerate(order)}


def _first(addresses: Sequence[str], otherwise: str) -> str:
    if not addresses:
        raise RuntimeError(otherwise)
    return addresses[0]
