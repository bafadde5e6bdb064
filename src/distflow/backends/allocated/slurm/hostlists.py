"""Slurm's lists of hosts, such as ``gpu[01-03,07],login``."""

from __future__ import annotations

import itertools
import re

__all__ = ["MAX_HOSTS", "expand_hosts"]

MAX_HOSTS = 65536
"""The maximum number of hosts in a list."""


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in their order.

    >>> expand_hosts("gpu[01-03,07],x1")
    ('gpu01', 'gpu02', 'gpu03', 'gpu07', 'x1')

    An empty text is an empty list. Raises ``ValueError`` if the text is not such a list, or has more than ``MAX_HOSTS`` hosts.
    """
    hosts: list[str] = []
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+(?:,(?:[^\[\],\s]|\[[^\[\]\s]*\])+)*", text or "-"):
        raise ValueError(f"`{text[:80]}` is not a list of hosts such as `gpu[01-03,07]`")
    for item in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(part) if position % 2 else [part] for position, part in enumerate(parts)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(hosts) + count > MAX_HOSTS:
            raise ValueError(f"the list of hosts `{text[:80]}` has more than {MAX_HOSTS} hosts")
        hosts += ["".join(one) for one in itertools.product(*choices)]
    return tuple(hosts)


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"`{item}` in the list of hosts `[{ranges[:80]}]` is not a range such as `01-03`")
        if len(found) + int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"the list of hosts `[{ranges[:80]}]` has more than {MAX_HOSTS} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
