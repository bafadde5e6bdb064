"""``from distflow import distributed``: the API of ``valohai.distributed``, such as ``distributed.me()``.

It reads ``distributed.json``, which distflow writes for the tasks of a gang in Valohai's format. A *member* is a task on its
node, not a process. Names, meanings and the order of ranks are the same as in https://github.com/valohai/valohai-utils, which
reads the same file. This module is for nodes without that package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Config", "Distributed", "Member"]

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A task of the gang."""

    member_id: str
    rank: int
    """The position of the member's id in the order of all ids. The member with rank 0 is the master."""
    identity: str
    """Name of the node."""
    job_id: str
    announce_time: str
    """When the attempt leased its nodes, as ISO 8601 (UTC). It is the same for all members."""
    local_ips: tuple[str, ...] = ()
    """The address on the training network. distflow writes only one."""
    public_ips: tuple[str, ...] = ()
    """The same as ``local_ips``: distflow does not know public addresses."""
    exposed_ports: Mapping[str, str] = field(default_factory=dict)
    """Port of the node → port of the container; empty in files that distflow writes."""

    @property
    def is_master(self) -> bool:
        """Whether this is the member with rank 0."""
        return self.rank == 0

    @property
    def primary_local_ip(self) -> str:
        """The first local address. Raises ``RuntimeError`` if the member has none."""
        return _first(self.local_ips, f"member {self.member_id} has no local address")

    @property
    def primary_public_ip(self) -> str:
        """The first public address. Raises ``RuntimeError`` if the member has none."""
        return _first(self.public_ips, f"member {self.member_id} has no public address")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The content of ``distributed.json``."""

    group_name: str
    member_id: str
    """The id of this task."""
    required_count: int
    """Number of members."""
    members: tuple[Member, ...]


class Distributed:
    """The gang of this task. The file is read at the first call, and again after ``flush_state``."""

    def __init__(self) -> None:
        self._config: Config | None = None

    @property
    def config(self) -> Config:
        """The content of the file. Raises ``OSError`` if the file cannot be read, and ``ValueError`` if its format is wrong."""
        if self._config is None:
            default = "/valohai/config" if os.environ.get("VH_JOB_ID") else ".valohai/config"
            self._config = _read(Path(os.environ.get("VH_CONFIG_DIR") or default) / "distributed.json")
        return self._config

    group_name = property(lambda self: self.config.group_name, doc="Name of the gang.")
    member_id = property(lambda self: self.config.member_id, doc="The id of this task.")
    required_count = property(lambda self: self.config.required_count, doc="Number of members.")
    rank = property(lambda self: self.me().rank, doc="Number of this task among the members.")

    def is_distributed_task(self) -> bool:
        """Return whether ``distributed.json`` exists, is valid and names a gang."""
        try:
            return bool(self.config.group_name)
        except (OSError, ValueError):
            return False

    def members(self) -> tuple[Member, ...]:
        """Return all members, in the order of the file."""
        return self.config.members

    def member(self, member_id: str) -> Member:
        """Return the member with this id. Raises ``RuntimeError`` if it does not exist."""
        for member in self.members():
            if member.member_id == member_id:
                return member
        known = ", ".join(member.member_id for member in self.members())
        raise RuntimeError(f"no member has the id {member_id!r}; existing members: {known or 'none'}")

    def me(self) -> Member:
        """Return the member of this task. Raises ``RuntimeError`` if the file does not contain it."""
        return self.member(self.config.member_id)

    def master(self) -> Member:
        """Return the member with rank 0. Raises ``RuntimeError`` if the gang has no members."""
        return _first([member for member in self.members() if member.is_master], "the gang has no members and so no master")

    def flush_state(self) -> None:
        """Read the file again at the next call."""
        self._config = None


_gang = Distributed()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_gang, name)


def _read(path: Path) -> Config:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        own, entries = found["config"], found["members"]
        ids = [str(entry["member_id"]) for entry in entries]
        order = _in_order(ids)
        members = tuple(
            Member(
                member_id=member_id,
                rank=order.index(member_id),
                **{name: entry[name] for name in ("identity", "job_id", "announce_time")},
                local_ips=tuple(entry["network"]["local_ips"]),
                public_ips=tuple(entry["network"]["public_ips"]),
                exposed_ports=dict(entry["network"]["exposed_ports"]),
            )
            for member_id, entry in zip(ids, entries, strict=True)
        )
        return Config(
            group_name=own["group_name"],
            member_id=str(own["member_id"]),
            required_count=int(own["required_count"]),
            members=members,
        )
    except KeyError as error:
        raise ValueError(f"{path} is not a valid distributed.json: the key {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a valid distributed.json: {error}") from error


def _in_order(ids: Sequence[str]) -> list[str]:
    """Return the ids sorted by number, or by text if one of them is not a number."""
    try:
        return sorted(ids, key=int)
    except ValueError:
        return sorted(ids)


def _first(values: Sequence[_Value], message: str) -> _Value:
    if not values:
        raise RuntimeError(message)
    return values[0]
