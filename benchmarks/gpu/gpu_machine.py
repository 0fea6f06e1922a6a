"""Which machine measured: what every result says, and what nvidia-smi says of the GPU.

The parent asks; it never makes a context of its own on the GPU, whose memory is measured.
"""

import importlib.util
import shutil
import subprocess
from typing import Any

import torch

from benchmarks.harness.machine import describe_run

ASKED = (
    "name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "power.draw", "power.limit", "temperature.gpu", "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
WANTED = ("torchvision", "lightning", "numpy", "pynvml")
"""Modules that a part may do without, or not: those that are missing are named at the start."""


def device_name(device: str) -> str:
    """What rows are known by."""
    if device == "cpu":
        return "cpu"
    return _smi().get("name", "") or torch.cuda.get_device_name()


def record(device: str) -> dict[str, Any]:
    return {
        **describe_run(),
        "cuda": torch.version.cuda,
        "device": device_name(device),
        **{f"gpu {key}": value for key, value in (_smi() if device != "cpu" else {}).items()},
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
