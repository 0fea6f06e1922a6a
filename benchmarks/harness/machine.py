"""Where a result comes from: the commit, the versions of what ran, and the machine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("perfect-training", "torch", "lightning", "numpy")


def describe_run() -> dict[str, Any]:
    """Commit, versions and machine in one flat dict: every result has it."""
    return {"commit": read_commit(), **list_versions(), **describe_machine()}


def read_commit(checkout: Path = HERE) -> str:
    """The commit of a checkout, with `-dirty` if a Python file differs from it. The environment
    variable COMMIT names it where a copy travels without its history."""
    if given := os.environ.get("COMMIT"):
        return given
    if shutil.which("git") is None or not (commit := _git(checkout, "rev-parse", "HEAD")):
        return "unknown: set COMMIT=..."
    return commit + ("-dirty" if _git(checkout, "status", "--porcelain", "--", ":/*.py") else "")


def list_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def describe_machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "load": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # a copy of the code runs without being installed


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=folder, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_value(file: str, key: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "?")
