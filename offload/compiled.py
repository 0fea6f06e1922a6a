"""A C++ file of ours as a library: built at first use, kept in a cache for the next process.

    Recipe --built--> ~/.cache/perfect-training/placed-<hash>.so     or a line that says why not

The hash is of the sources, of PyTorch's version and of the command: another PyTorch, another
library. Needs a C++ compiler, and what PyTorch brings.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from offload.errors import OffloadError

COMPILERS = ("c++", "g++", "clang++")
PATIENCE = 300
"""Seconds that a compiler may take; it takes a few."""
CSRC = Path(__file__).parent / "csrc"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a library is made of."""

    source: Path
    libraries: tuple[str, ...]
    """Of PyTorch's."""
    includes: tuple[Path, ...] = ()
    """Besides PyTorch's."""
    home: Path = Path(torch.__file__).parent
    """PyTorch's."""

    def command(self, compiler: str) -> tuple[str, ...]:
        return (
            compiler,
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{self.home / 'include'}",
            *(f"-I{folder}" for folder in self.includes),
            str(self.source),
            f"-L{self.home / 'lib'}",
            *(f"-l{library}" for library in self.libraries),
            # Python's own functions are in the process already.
            *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
        )

    def key(self, compiler: str) -> str:
        texts = (path.read_text(encoding="utf-8") for path in (self.source, *CSRC.glob("*.h")))
        parts = (*texts, torch.__version__, *self.command(compiler))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def built(
    recipe: Recipe, load: Callable[[Path], T], compilers: Sequence[str], folder: Path | None
) -> T | str:
    """What `load` makes of the library, from `folder` if the same one lies there; or why there is
    none."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        return f"no C++ compiler was found ({', '.join(compilers)}); install one"
    if folder is not None:
        return _loaded(recipe, load, compiler, folder)
    with tempfile.TemporaryDirectory(prefix="perfect-training-") as instead:
        # It stays mapped when its file is gone.
        return _loaded(recipe, load, compiler, Path(instead))


def _loaded(recipe: Recipe, load: Callable[[Path], T], compiler: str, folder: Path) -> T | str:
    path = folder / f"placed-{recipe.key(compiler)}.so"
    try:
        if not path.exists():
            compile_to(path, recipe.command(compiler))
        return load(path)
    except OSError as error:
        return f"{path} cannot be built or loaded: {error}; remove it and try again"
    except OffloadError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{compiler} took more than {PATIENCE} seconds"
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        wrong = next((line for line in lines if "error" in line), lines[0] if lines else "")
        return f"{compiler} failed with exit code {error.returncode}: {wrong}"


def compile_to(path: Path, command: Sequence[str]) -> None:
    """Under a name of its own first: several processes may build at once."""
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
    """None where the home folder does not exist or cannot be written."""
    try:
        folder = Path.home() / ".cache" / "perfect-training"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None
