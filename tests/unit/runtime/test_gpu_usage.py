"""Values of GPUs: from a library with the interface of NVML, and from files as the AMD driver writes them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from distflow.runtime.probes.gpu_usage import AmdGpus, NvidiaGpus, open_gpus

NVML = r"""
/* The functions of nvml.h that distflow calls, with the values that two H100 reported. GPU 1 has no ECC counters. */
#include <string.h>
typedef void *device;
static int gpus[2]; static int sent;
int nvmlInit_v2(void) { return FAILS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) { if (i > 1) return 2; *d = &gpus[i]; return 0; }
int nvmlDeviceGetUtilizationRates(device d, unsigned *u) { u[0] = d == &gpus[0] ? 97 : 0; u[1] = 41; return 0; }
int nvmlDeviceGetMemoryInfo(device d, unsigned long long *m) {
    m[0] = 85520809984ull; m[2] = d == &gpus[0] ? 61203283968ull : 601882624ull; m[1] = m[0] - m[2]; return 0; }
int nvmlDeviceGetPowerUsage(device d, unsigned *p) { *p = 689123; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned *p) { *p = 700000; return 0; }
int nvmlDeviceGetTemperature(device d, unsigned sensor, unsigned *t) { if (sensor) return 2; *t = 86; return 0; }
int nvmlDeviceGetClockInfo(device d, unsigned kind, unsigned *c) { if (kind != 1) return 2; *c = 1170; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long *r) { *r = d == &gpus[0] ? 0x48 : 0x4; return 0; }
int nvmlDeviceGetTotalEccErrors(device d, unsigned kind, unsigned counter, unsigned long long *n) {
    if (d != &gpus[0] || kind != 1 || counter != 0) return 3; *n = 2; return 0; }
int nvmlEventSetCreate(void **set) { *set = &sent; return 0; }
int nvmlDeviceRegisterEvents(device d, unsigned long long kinds, void *set) { return kinds == 8 && set == &sent ? 0 : 2; }
struct event { device d; unsigned long long kind, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *e, unsigned timeout) {
    if (set != &sent || timeout || sent++ != 2) return 10;
    memset(e, 0, sizeof *e); e->d = &gpus[1]; e->kind = 8; e->data = 48; return 0; }
"""


def library(folder: Path, *, fails: int = 0, source: str = NVML) -> str:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler (cc) to build a library with the interface of NVML")
    code, path = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    code.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", f"-DFAILS={fails}", "-o", path, code], check=True)
    return str(path)


def test_gpus_of_nvidia_are_read_through_nvml(tmp_path: Path) -> None:
    gpus = NvidiaGpus([0, 1, 5], library(tmp_path))
    first = gpus.read()
    assert first == {
        0: {
            "utilization": 97, "memory_activity": 41, "memory": 61203283968, "memory_limit": 85520809984, "power": 689.123,
            "power_limit": 700, "temperature": 86, "clock": 1170, "throttle_thermal": 1, "throttle_power": 0, "ecc_errors": 2,
            "xid": 0,
        },
        1: {
            "utilization": 0, "memory_activity": 41, "memory": 601882624, "memory_limit": 85520809984, "power": 689.123,
            "power_limit": 700, "temperature": 86, "clock": 1170, "throttle_thermal": 0, "throttle_power": 1, "xid": 0,
        },
    }  # fmt: skip
    gpus.read()
    assert [gpus.read()[gpu]["xid"] for gpu in (0, 1)] == [0, 48]


STATES = r"""
/* Written from the documentation of NVML (nvml.h), not recorded on a machine: GPU 0 has MIG slices, so it has no utilization;
   GPU 1 is virtual and reports neither power nor errors; GPU 2 is hot and slowed down; GPU 3 has fallen off the bus. */
#include <string.h>
typedef void *device;
static int gpus[4]; static int sent;
#define INDEX(d) ((int *) (d) - gpus)
enum { NOT_SUPPORTED = 3, UNKNOWN = 999, LOST = 15 };
static int state(device d) { return INDEX(d) == 3 ? LOST : 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) { *d = &gpus[i]; return 0; }
int nvmlDeviceGetUtilizationRates(device d, unsigned *u) {
    if (INDEX(d) == 0) return NOT_SUPPORTED;
    u[0] = 100; u[1] = 12; return state(d); }
int nvmlDeviceGetMemoryInfo(device d, unsigned long long *m) { m[0] = 1000; m[1] = 600; m[2] = 400; return state(d); }
int nvmlDeviceGetPowerUsage(device d, unsigned *p) { *p = 250000; return INDEX(d) == 1 ? NOT_SUPPORTED : state(d); }
int nvmlDeviceGetTemperature(device d, unsigned sensor, unsigned *t) { *t = INDEX(d) == 2 ? 94 : 60; return state(d); }
int nvmlDeviceGetCurrentClocksEventReasons(device d, unsigned long long *r) {
    if (INDEX(d) == 1) return UNKNOWN;
    *r = INDEX(d) == 2 ? 0x20 | 0x40 | 0x80 : 0x1; return state(d); }
int nvmlEventSetCreate(void **set) { *set = &sent; return 0; }
int nvmlDeviceRegisterEvents(device d, unsigned long long kinds, void *set) { return INDEX(d) == 1 ? NOT_SUPPORTED : 0; }
struct event { device d; unsigned long long kind, data; unsigned gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *e, unsigned timeout) {
    if (sent++) return 10;
    memset(e, 0, sizeof *e); e->d = &gpus[3]; e->kind = 8; e->data = 79; return 0; }
"""


def test_values_that_a_gpu_does_not_report_are_left_out(tmp_path: Path) -> None:
    memory = {"memory": 400, "memory_limit": 1000}
    normal = {"throttle_thermal": 0, "throttle_power": 0, "xid": 0}
    assert NvidiaGpus([0, 1, 2, 3], library(tmp_path, source=STATES)).read() == {
        0: {**memory, **normal, "power": 250, "temperature": 60},
        1: {**memory, "utilization": 100, "memory_activity": 12, "temperature": 60, "xid": 0},
        2: {
            **memory, "utilization": 100, "memory_activity": 12, "power": 250, "temperature": 94, "throttle_thermal": 1,
            "throttle_power": 1, "xid": 0,
        },
        3: {"xid": 79},
    }  # fmt: skip


def test_a_library_that_cannot_be_initialized_or_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be initialized"):
        NvidiaGpus([0], library(tmp_path, fails=9))  # NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(OSError, match="no-such-library"):
        NvidiaGpus([0], "no-such-library.so")


def test_gpus_of_amd_are_read_from_the_files_of_their_driver(tmp_path: Path) -> None:
    bus = {"card1": "0000:c1:00.0", "card2": "0000:05:00.0", "card0": "0000:00:02.0"}
    for card, address in bus.items():
        device = tmp_path / "devices" / address
        (device / "hwmon" / "hwmon4").mkdir(parents=True)
        (tmp_path / "drm" / card).mkdir(parents=True)
        os.symlink(device, tmp_path / "drm" / card / "device")
    (tmp_path / "drm" / "card1-DP-1").mkdir()
    first, second = tmp_path / "devices" / bus["card2"], tmp_path / "devices" / bus["card1"]
    files = {
        "gpu_busy_percent": "99\n", "mem_busy_percent": "12\n", "mem_info_vram_used": "11055104\n",
        "mem_info_vram_total": "206141652992\n", "hwmon/hwmon4/power1_average": "140000000\n",
        "hwmon/hwmon4/power1_cap": "750000000\n", "hwmon/hwmon4/temp1_input": "41000\n",
        "hwmon/hwmon4/freq1_input": "132000000\n", "ras/umc_err_count": "ue: 3\nce: 17\n",
    }  # fmt: skip
    (first / "ras").mkdir()
    for name, text in files.items():
        (first / name).write_text(text)
    (second / "gpu_busy_percent").write_text("7\n")
    (second / "mem_info_vram_used").write_text("not a number\n")
    (second / "hwmon" / "hwmon4" / "power1_input").write_text("55000000\n")
    assert AmdGpus([0, 1, 2], str(tmp_path / "drm")).read() == {
        0: {
            "utilization": 99, "memory_activity": 12, "memory": 11055104, "memory_limit": 206141652992, "power": 140,
            "power_limit": 750, "temperature": 41, "clock": 132, "ecc_errors": 3,
        },
        1: {"utilization": 7, "power": 55},
    }  # fmt: skip


def test_missing_gpus_have_no_values() -> None:
    assert open_gpus([]).read() == {}
    assert open_gpus([999]).read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU of NVIDIA")
def test_a_real_gpu_reports_its_use() -> None:
    values = NvidiaGpus([0]).read()[0]
    assert 0 <= values["utilization"] <= 100
    assert 0 < values["memory"] < values["memory_limit"]
    assert 0 < values["power"] <= 2 * values["power_limit"]
    assert 0 < values["temperature"] < 120
