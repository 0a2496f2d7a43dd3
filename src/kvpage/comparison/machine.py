"""What the machine is."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvpage.comparison.records import Machine

_PACKAGES = ("kvpage", "torch", "transformers", "triton", "numba")


def this_machine(device: str) -> Machine:
    """The machine of this process; `device` is where the model computes, as torch names it."""
    import psutil

    return Machine(
        processor=_processor(),
        cores=_cores(),
        memory_bytes=psutil.virtual_memory().total,
        device=_device(device),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=(("Python", platform.python_version()), *_versions()),
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """Linux has the name in a file only."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _device(device: str) -> str:
    """A GPU's own name; torch is loaded if there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return device
    return str(torch.cuda.get_device_name(device))


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found
