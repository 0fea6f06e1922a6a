"""Builds a C++ file of ours as a library at first use, and caches it for later processes.

    BuildRecipe --built--> ~/.cache/perfect-training/placed-<hash>.so    or a line that says why not

The hash covers the sources, PyTorch's version and the command, so another PyTorch gets another
library. Building needs a C++ compiler and the headers and libraries of PyTorch.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from offload.errors import OffloadError

COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 300
"""Seconds after which a compiler is stopped. It normally takes a few."""
CSRC = Path(__file__).parent / "csrc"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """The sources, libraries and headers that a library is built from."""

    source: Path
    libraries: tuple[str, ...]
    """PyTorch's libraries to link against."""
    includes: tuple[Path, ...] = ()
    """Folders of headers besides PyTorch's and ours."""
    ours: tuple[Path, ...] = ()
    """Further folders of our own headers."""
    home: Path = Path(torch.__file__).parent
    """PyTorch's folder."""

    def command(self, compiler: str) -> tuple[str, ...]:
        return (
            compiler,
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-fvisibility-inlines-hidden",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{self.home / 'include'}",
            *(f"-I{folder}" for folder in (*self.ours, *self.includes)),
            str(self.source),
            f"-L{self.home / 'lib'}",
            *(f"-l{library}" for library in self.libraries),
            # Python's own functions are already in the process.
            *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
        )

    def key(self, compiler: str) -> str:
        headers = (path for root in (self.source.parent, *self.ours) for path in root.glob("*.h"))
        texts = (path.read_text(encoding="utf-8") for path in (self.source, *headers))
        parts = (*texts, torch.__version__, *self.command(compiler))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class LazyLibrary(Generic[T]):
    """A library of ours, which is built and loaded at its first use, once a process."""

    def __init__(self, build: Callable[[], T | str]) -> None:
        """`build` returns the loaded library, or why there is none."""
        self._build = functools.cache(build)
        self._lock = threading.Lock()

    def result(self) -> T | str:
        """The library, or why there is none."""
        with self._lock:
            return self._build()

    def get(self) -> T | None:
        result = self.result()
        return None if isinstance(result, str) else result

    def why_missing(self) -> str:
        """Why there is no library; empty if there is one."""
        result = self.result()
        return result if isinstance(result, str) else ""

    def load(self, problem: str) -> T:
        """The library. Raises an `OffloadError` that begins with `problem` if there is none."""
        result = self.result()
        if isinstance(result, str):
            raise OffloadError(f"{problem}: {result}")
        return result


def build_and_load(
    recipe: BuildRecipe, load: Callable[[Path], T], compilers: Sequence[str], folder: Path | None
) -> T | str:
    """Build a library, or take it from `folder`, and load it with `load`. Returns why, if that
    fails."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return f"no C++ compiler was found ({', '.join(compilers)}); install one"
    if folder is not None:
        return _load_or_build(recipe, load, compiler, folder)
    with tempfile.TemporaryDirectory(prefix="perfect-training-") as instead:
        # The library stays mapped after its file is deleted.
        return _load_or_build(recipe, load, compiler, Path(instead))


def _load_or_build(
    recipe: BuildRecipe, load: Callable[[Path], T], compiler: str, folder: Path
) -> T | str:
    path = folder / f"placed-{recipe.key(compiler)}.so"
    try:
        if not path.exists():
            compile_to(path, recipe.command(compiler))
        return load(path)
    except OSError as error:
        return f"{path} cannot be built or loaded: {error}. Remove it and try again"
    except OffloadError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{compiler} took more than {PATIENCE} seconds"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[0] if lines else "")
        return f"{compiler} failed with exit code {error.returncode}: {wrong}"


def compile_to(path: Path, command: Sequence[str]) -> None:
    """Write to a name of its own first, because several processes may build at once."""
    handle, unfinished = tempfile.mkstemp(".so", path.stem, path.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", unfinished],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """The cache folder; None if it cannot be made or written."""
    try:
        folder = Path.home() / ".cache" / "perfect-training"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None
