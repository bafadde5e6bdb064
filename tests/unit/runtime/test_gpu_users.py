"""Whose GPU an error of the driver's is of. Lines and addresses are as driver and nvidia-smi write them."""

from __future__ import annotations

import pytest

from distflow.runtime.leases.gpu_users import address_of, addresses_of_others, is_xid_of_another

SAID = {"0": "0000:17:00", "1": "0000:3b:00", "2": "0001:3b:00"}
OTHERS = addresses_of_others(SAID, [1])


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("0000:3b:00", "0000:3b:00"),
        ("00010000:C1:1F.0", "10000:c1:1f"),
        ("[N/A]", None),
        ("[GPU is lost]", None),
        ("", None),
    ],
)
def test_both_ways_to_write_an_address_mean_the_same(text: str, address: str | None) -> None:
    assert address_of(text) == address


def test_all_but_the_leased_gpus_are_others() -> None:
    assert addresses_of_others(SAID, [1]) == {"0000:17:00", "0001:3b:00"}
    assert addresses_of_others({}, [1]) == frozenset()


@pytest.mark.parametrize(
    ("line", "is_other"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", False),
        ("NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", True),
        ("NVRM: Xid (PCI:0001:3b:00): 13, pid=4711, name=python3, Graphics Exception", True),
        ("NVRM: Xid (PCI:0000:17:00 GPU-I:05): 94, pid=4711, name=python3, Ch 00000010", True),
        ("NVRM: Xid (0000:17:00): 31, Ch 00000010, engmask 00000101", True),
        ("NVRM: Xid (PCI:0000:ca:00): 79, GPU has fallen off the bus.", False),
        ("NVRM: Xid (0003:00): 13, 0001 00000000 000050c0", False),
        ("NVRM: Xid", False),
    ],
    ids=["own", "other", "other domain", "other MIG slice", "old driver", "not listed", "no domain", "no address"],
)
def test_only_what_is_known_to_be_anothers_is(line: str, is_other: bool) -> None:
    assert is_xid_of_another(line, OTHERS, {1}) is is_other


@pytest.mark.parametrize("pid", ["2345", "'2345'"])
def test_an_error_that_names_a_process_of_the_task_is_its_own_wherever_it_was(pid: str) -> None:
    line = f"NVRM: Xid (PCI:0000:17:00): 31, pid={pid}, name=python3, Ch 00000008"
    assert not is_xid_of_another(line, OTHERS, {2345})
    assert is_xid_of_another(line, OTHERS, {234, 5})
