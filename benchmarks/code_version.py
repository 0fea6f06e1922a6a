"""Which code measured: a result names its commit."""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def commit() -> str:
    """Of the code that runs; `COMMIT` says it where a copy travels without its history. `-dirty`: a
    Python file differs from it."""
    if given := os.environ.get("COMMIT"):
        return given
    if shutil.which("git") is None or not (found := _git("rev-parse", "HEAD")):
        return "unknown: COMMIT=... says it"
    return found + ("-dirty" if _git("status", "--porcelain", "--", ":/*.py") else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=HERE, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
