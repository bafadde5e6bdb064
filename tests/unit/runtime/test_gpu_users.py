"""The GPU to which an error of the driver belongs, and the processes that use a GPU. Formats are those of NVIDIA's tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.runtime.leases.gpu_users import address_of, addresses_of_others, is_xid_of_another, list_gpu_users

ADDRESSES = {"0": "0000:17:00", "1": "0000:3b:00", "2": "0001:3b:00"}
OTHERS = addresses_of_others(ADDRESSES, [1])


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
def test_addresses_of_the_driver_and_of_nvidia_smi_are_normalized(text: str, address: str | None) -> None:
    assert address_of(text) == address


def test_all_gpus_except_the_leased_ones_are_others() -> None:
    assert addresses_of_others(ADDRESSES, [1]) == {"0000:17:00", "0001:3b:00"}
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
def test_an_error_is_of_another_gpu_only_if_that_gpu_is_known(line: str, is_other: bool) -> None:
    assert is_xid_of_another(line, OTHERS, {1}) is is_other


@pytest.mark.parametrize("pid", ["2345", "'2345'"])
def test_an_error_that_names_a_process_of_the_task_belongs_to_the_task(pid: str) -> None:
    line = f"NVRM: Xid (PCI:0000:17:00): 31, pid={pid}, name=python3, Ch 00000008"
    assert not is_xid_of_another(line, OTHERS, {2345})
    assert is_xid_of_another(line, OTHERS, {234, 5})


# Written in the formats of `nvidia-smi --help-query-gpu` and `--help-query-compute-apps`, not recorded on a machine.
# The process ids are above the kernel's limit.
SMI = {
    "two H100": (
        "0, GPU-11111111, 00000000:17:00.0\n1, GPU-22222222, 00000000:3B:00.0\n",
        "GPU-22222222, 4194400, /opt/conda/bin/python3, 61203\nGPU-22222222, 4194401, [Not Found], 512\n",
        ["GPU 1: pid 4194400 (python3, 61203 MiB)", "GPU 1: pid 4194401 ([Not Found], 512 MiB)"],
    ),
    "MIG slices": (
        "0, GPU-11111111, 00000000:17:00.0\n",
        "GPU-11111111, 4194400, python3, [N/A]\nMIG-33333333, 4194401, python3, 9000\n",
        ["GPU 0: pid 4194400 (python3)"],
    ),
    "fields that the driver does not report": (
        "0, GPU-11111111, [N/A]\n1, [GPU is lost], [GPU is lost]\n",
        "GPU-11111111, [N/A], [N/A], [N/A]\nGPU-11111111, 4194400, [Insufficient Permissions], [N/A]\n",
        ["GPU 0: pid 4194400 ([Insufficient Permissions])"],
    ),
    "no GPU": ("No devices were found\n", "No devices were found\n", []),
    "a driver that reports an error": ("Unable to determine the device handle for GPU 0000:17:00.0: Unknown Error\n", "", []),
}


@pytest.mark.parametrize(("gpus", "processes", "users"), SMI.values(), ids=SMI.keys())
def test_processes_are_read_from_all_formats_of_the_output(
    gpus: str, processes: str, users: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus").write_text(gpus)
    (tmp_path / "processes").write_text(processes)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in *apps*) cat {tmp_path}/processes;; *) cat {tmp_path}/gpus;; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = [f"GPU {one['gpu']}: {one['words']}" for one in list_gpu_users()]
    assert found == [f"{user}, which is not known to be a task of distflow" for user in users]
