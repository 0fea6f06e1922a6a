"""The compiled part: it sees every operation, keeps the tapes, and makes tensors without bytes.

It is built at first use, as the allocators are (memory/compilation.py). `csrc/live.cpp` begins with
a picture of it.
"""

import functools
import sysconfig
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError
from offload.memory import compilation

HOME = Path(torch.__file__).parent
RECIPE = compilation.BuildRecipe(
    Path(__file__).parent / "csrc" / "live.cpp",
    ("torch_python", "torch_cpu", "torch", "c10"),
    (
        HOME / "include" / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_paths()["include"]),
    ),
    (compilation.CSRC,),
)
_loading = threading.Lock()


def load_core() -> Any:
    """The compiled module, or an error that says why there is none."""
    found = _once()
    if isinstance(found, str):
        raise OffloadError(f"a step's Python cannot run on shadows here: {found}")
    return found


def why_no_core() -> str:
    """Why there is no compiled module; empty if there is one."""
    found = _once()
    return found if isinstance(found, str) else ""


def _once() -> Any:
    with _loading:
        return _built()


@functools.cache
def _built() -> Any:
    return compilation.built(RECIPE, _opened, compilation.COMPILERS, compilation.cache_folder())


def _opened(path: Path) -> Any:
    loader = ExtensionFileLoader("live", str(path))
    spec = spec_from_file_location("live", path, loader=loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise OSError(str(error)) from error
    return module
