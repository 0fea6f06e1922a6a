"""Which machine measured: processor, memory, torch, and what nvidia-smi says of the GPU.

The parent asks; it never makes a context of its own on the GPU, whose memory is measured.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from code_version import commit

ASKED = (
    "name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "power.draw", "power.limit", "temperature.gpu", "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
WANTED = ("torchvision", "lightning", "numpy", "matplotlib", "pynvml")
"""Modules that a part may do without, or not: those that are missing are named at the start."""


def device_name(device: str) -> str:
    """What rows are known by."""
    if device == "cpu":
        return "cpu"
    return _smi().get("name", "") or torch.cuda.get_device_name()


def record(device: str) -> dict[str, Any]:
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "device": device_name(device),
        **{f"gpu {key}": value for key, value in (_smi() if device != "cpu" else {}).items()},
        "load": round(os.getloadavg()[0], 2),
    }


def absent() -> list[str]:
    return [name for name in WANTED if importlib.util.find_spec(name) is None]


def _smi() -> dict[str, str]:
    """Of the first GPU; empty where the tool is not there or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return {}
    values = [value.strip() for value in done.stdout.split(",")]
    if done.returncode or len(values) != len(ASKED):
        return {}
    return dict(zip(ASKED, values, strict=True))


def _first(file: str, key: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "?")
