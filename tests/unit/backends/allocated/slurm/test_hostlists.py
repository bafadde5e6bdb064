"""Slurm's lists of hosts."""

from __future__ import annotations

import pytest

from distflow.backends.allocated.slurm.hostlists import expand_hosts

CORPUS = {
    "": (),
    "n1": ("n1",),
    "gpu[01-03,07],x1": ("gpu01", "gpu02", "gpu03", "gpu07", "x1"),
    "n[9-11]": ("n9", "n10", "n11"),
    "n[098-101]": ("n098", "n099", "n100", "n101"),
    "r[1-2]n[1-2]-ib": ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"),
    "a.example.org,b-[3].example.org": ("a.example.org", "b-3.example.org"),
    "n[1,1]": ("n1", "n1"),
}


@pytest.mark.parametrize(("text", "hosts"), CORPUS.items(), ids=list(CORPUS))
def test_a_list_is_expanded_in_order(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "n[1-",
        "n]",
        "n[[1]]",
        "n[a-b]",
        "n[3-1]",
        "n[]",
        "a,,b",
        ",a",
        "a,",
        "a b",
        "n[1-99999999]",
        "[1-999][1-999]",
        "a[1-2\n]",
    ],
)
def test_invalid_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of hosts"):
        expand_hosts(text)
