"""What a result comes from: the commit, the versions of what ran, and the machine."""

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


def provenance() -> dict[str, Any]:
    """All of it, flat: every result has it."""
    return {"commit": commit(), **versions(), **machine()}


def commit() -> str:
    """Of the code that runs; `COMMIT` says it where a copy travels without its history. `-dirty`: a
    Python file differs from it."""
    if given := os.environ.get("COMMIT"):
        return given
    if shutil.which("git") is None or not (found := _git("rev-parse", "HEAD")):
        return "unknown: COMMIT=... says it"
    return found + ("-dirty" if _git("status", "--porcelain", "--", ":/*.py") else "")


def commit_of(checkout: Path) -> str:
    """Of other code, which is compared with the code that runs."""
    return _git("rev-parse", "HEAD", folder=checkout) or "unknown"


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "load": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # a copy of the code runs without being installed


def _git(*words: str, folder: Path = HERE) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=folder, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _first(file: str, key: str) -> str:
    path = Path(file)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "?")
