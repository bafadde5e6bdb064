"""Parsing the output of nvidia-smi."""

from __future__ import annotations

from distflow.backends.machines.checks.measured import Gpu, GpuApp, parse_apps, parse_gpus

# nvidia-smi --query-gpu=index,uuid,name,driver_version,memory.total,memory.used,
#   ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits
EIGHT_GPUS = "".join(f"{i}, GPU-5c1d2e3f-000{i}, NVIDIA H100 80GB HBM3, 550.54.15, 81559, {4 + i}, 0\n" for i in range(8))


def test_each_line_is_parsed_as_a_gpu() -> None:
    gpus = parse_gpus(EIGHT_GPUS)
    assert len(gpus) == 8
    assert gpus[7] == Gpu(
        index=7,
        uuid="GPU-5c1d2e3f-0007",
        name="NVIDIA H100 80GB HBM3",
        driver="550.54.15",
        memory_mib=81559,
        used_mib=11,
        ecc_errors=0,
    )


def test_values_that_a_gpu_does_not_report_are_none() -> None:
    (gpu,) = parse_gpus("0, GPU-1, NVIDIA GB10, 580.82, [N/A], [Not Supported], [N/A]\n")
    assert (gpu.name, gpu.driver, gpu.memory_mib, gpu.used_mib) == ("NVIDIA GB10", "580.82", None, None)


def test_lines_without_a_gpu_are_ignored() -> None:
    text = (
        "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"
        + EIGHT_GPUS
        + "No devices were found\n\n8, [Unknown Error], a, b, 1, 2, 3\n"
    )
    assert len(parse_gpus(text)) == 8
    assert parse_gpus("") == ()


def test_process_names_may_contain_commas() -> None:
    assert parse_apps("GPU-1, 4711, /opt/venv/bin/python, 20480\nGPU-2, 12, a, b, [N/A]\n[Not Found], 1, x, 2\n") == (
        GpuApp(gpu_uuid="GPU-1", pid=4711, name="/opt/venv/bin/python", used_mib=20480),
        GpuApp(gpu_uuid="GPU-2", pid=12, name="a, b", used_mib=None),
    )
    assert parse_apps("No running processes found\n") == ()
