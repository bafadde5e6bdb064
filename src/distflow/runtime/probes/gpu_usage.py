"""Use of GPUs, from NVIDIA's library NVML or from the files of the AMD driver. No program is started.

NVML (``libnvidia-ml.so.1``) is the library of ``nvidia-smi``. Its functions return a number: 0 for success. A value that a GPU
does not report is left out. Source: https://docs.nvidia.com/deploy/nvml-api/ and the files of ``amdgpu`` in
https://docs.kernel.org/gpu/amdgpu/thermal.html.
"""

from __future__ import annotations

import ctypes
import os
import re

from distflow.protocol.light_typing import Dict, List, Optional, Sequence, Tuple

__all__ = ["LIMITS", "AmdGpus", "GpuReader", "NvidiaGpus", "open_gpus"]

Values = Dict[str, float]
"""Values of one GPU by name: ``utilization`` and ``memory_activity`` (percent of the time), ``memory`` (bytes in use),
``memory_limit`` (bytes), ``power`` and ``power_limit`` (watts), ``temperature`` (degrees Celsius), ``clock`` (MHz),
``throttle_thermal`` and ``throttle_power`` (1 while the GPU is slowed down for that reason, else 0), ``ecc_errors``
(uncorrected, since the driver was loaded), ``xid`` (the driver's last error code during this attempt; 0 before any)."""

LIMITS = ("memory_limit", "power_limit")
"""Values that rarely change."""

_XID_EVENT = 8
_THERMAL = 0x20 | 0x40
"""nvmlClocksEventReasonSwThermalSlowdown and nvmlClocksEventReasonHwThermalSlowdown."""
_POWER = 0x04 | 0x80
"""nvmlClocksEventReasonSwPowerCap and nvmlClocksEventReasonHwPowerBrakeSlowdown."""
_MOST_EVENTS = 32
_DRM = "/sys/class/drm"


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class GpuReader:
    """The base class of readers of GPU values. It is itself the reader for a machine without GPUs."""

    def read(self) -> Dict[int, Values]:
        """Return the values of each GPU by its index."""
        return {}


def open_gpus(ids: Sequence[int]) -> GpuReader:
    """Return a reader of the GPUs with these indexes. Without a driver, the reader returns no values."""
    if ids:
        for kind in (NvidiaGpus, AmdGpus):
            try:
                return kind(ids)
            except OSError:
                continue
    return GpuReader()


class NvidiaGpus(GpuReader):
    """GPUs of NVIDIA. Their indexes are those of ``nvidia-smi``."""

    def __init__(self, ids: Sequence[int], library: str = "libnvidia-ml.so.1") -> None:
        """Load the library. Raises ``OSError`` if the library is missing or finds no driver."""
        self._nvml = ctypes.CDLL(library)
        if self._call("nvmlInit_v2") is None:
            raise OSError("NVML cannot be initialized")
        self._devices: Dict[int, ctypes.c_void_p] = {}
        self._xids: Dict[int, int] = {}
        for gpu in ids:
            device = ctypes.c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu), ctypes.byref(device)) is not None:
                self._devices[gpu] = device
        self._events = self._listen()

    def read(self) -> Dict[int, Values]:
        """Return the values of each GPU."""
        self._read_events()
        return {gpu: self._read_device(gpu, device) for gpu, device in self._devices.items()}

    def _call(self, name: str, *arguments: object) -> Optional[bool]:
        """Call a function. Returns None if it fails or if this version of the library does not have it."""
        try:
            return True if getattr(self._nvml, name)(*arguments) == 0 else None
        except AttributeError:
            return None

    def _number(self, device: ctypes.c_void_p, name: str, *arguments: object, wide: bool = False) -> Optional[int]:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        return value.value if self._call(name, device, *arguments, ctypes.byref(value)) else None

    def _read_device(self, gpu: int, device: ctypes.c_void_p) -> Values:
        found: Dict[str, Optional[float]] = {}
        used = _Utilization()
        if self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(used)):
            found.update(utilization=used.gpu, memory_activity=used.memory)
        memory = _Memory()
        if self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
            found.update(memory=memory.used, memory_limit=memory.total)
        power = self._number(device, "nvmlDeviceGetPowerUsage")
        limit = self._number(device, "nvmlDeviceGetEnforcedPowerLimit")
        found["power"] = None if power is None else power / 1000
        found["power_limit"] = None if limit is None else limit / 1000
        found["temperature"] = self._number(device, "nvmlDeviceGetTemperature", ctypes.c_uint(0))
        found["clock"] = self._number(device, "nvmlDeviceGetClockInfo", ctypes.c_uint(1))
        reasons = self._number(device, "nvmlDeviceGetCurrentClocksEventReasons", wide=True)
        if reasons is None:  # drivers before 535
            reasons = self._number(device, "nvmlDeviceGetCurrentClocksThrottleReasons", wide=True)
        if reasons is not None:
            found.update(throttle_thermal=int(bool(reasons & _THERMAL)), throttle_power=int(bool(reasons & _POWER)))
        found["ecc_errors"] = self._number(device, "nvmlDeviceGetTotalEccErrors", ctypes.c_uint(1), ctypes.c_uint(0), wide=True)
        if self._events is not None:
            found["xid"] = self._xids.get(gpu, 0)
        return {name: value for name, value in found.items() if value is not None}

    def _listen(self) -> Optional[ctypes.c_void_p]:
        """Let the driver report Xid errors from now on. Returns None where it cannot, as in some virtual machines."""
        events = ctypes.c_void_p()
        if not self._call("nvmlEventSetCreate", ctypes.byref(events)):
            return None
        kind = ctypes.c_ulonglong(_XID_EVENT)
        accepted = [self._call("nvmlDeviceRegisterEvents", device, kind, events) for device in self._devices.values()]
        return events if any(accepted) else None

    def _read_events(self) -> None:
        event = _Event()
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            if not self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), ctypes.c_uint(0)):
                break
            for gpu, device in self._devices.items():
                if device.value == event.device and event.type == _XID_EVENT:
                    self._xids[gpu] = event.data


class AmdGpus(GpuReader):
    """GPUs of AMD, in the order of their PCI addresses."""

    def __init__(self, ids: Sequence[int], drm: str = _DRM) -> None:
        """Find the devices. Raises ``OSError`` if none of them exists."""
        cards = [os.path.join(drm, name, "device") for name in os.listdir(drm) if re.fullmatch(r"card\d+", name)]
        found = sorted((one for one in cards if os.path.exists(os.path.join(one, "gpu_busy_percent"))), key=os.path.realpath)
        self._devices = [(gpu, found[gpu], _sensors(found[gpu])) for gpu in ids if gpu < len(found)]
        if not self._devices:
            raise OSError("there are no AMD GPUs")

    def read(self) -> Dict[int, Values]:
        """Return the values of each GPU."""
        return {gpu: _read_amd(device, sensors) for gpu, device, sensors in self._devices}


def _sensors(device: str) -> str:
    """Return the directory of a device's sensors. Without sensors, the directory is empty or does not exist."""
    folder = os.path.join(device, "hwmon")
    try:
        return os.path.join(folder, sorted(os.listdir(folder))[0])
    except (OSError, IndexError):
        return folder


def _read_amd(device: str, sensors: str) -> Values:
    files: List[Tuple[str, str, str, float]] = [
        ("utilization", device, "gpu_busy_percent", 1),
        ("memory_activity", device, "mem_busy_percent", 1),
        ("memory", device, "mem_info_vram_used", 1),
        ("memory_limit", device, "mem_info_vram_total", 1),
        ("power", sensors, "power1_average", 1e6),
        ("power", sensors, "power1_input", 1e6),
        ("power_limit", sensors, "power1_cap", 1e6),
        ("temperature", sensors, "temp1_input", 1e3),
        ("clock", sensors, "freq1_input", 1e6),
        ("ecc_errors", device, "ras/umc_err_count", 1),
    ]
    found: Values = {}
    for name, folder, file, unit in files:
        value = None if name in found else _read_number(os.path.join(folder, file))
        if value is not None:
            found[name] = value / unit if unit > 1 else value
    return found


def _read_number(path: str) -> Optional[int]:
    """Return the number in a file; in a file of error counts, the number of uncorrected errors."""
    try:
        with open(path, "rb", buffering=0) as file:
            # `u[e]` matches the key of uncorrected errors. The brackets hide it from codespell.
            match = re.match(rb"(?:u[e]:\s*)?([0-9]{1,18})\b", file.read(256))
    except OSError:
        return None
    return int(match.group(1)) if match is not None else None
