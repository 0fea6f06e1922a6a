"""The compiled part: it sees every operation, keeps the tapes, and makes tensors without bytes.

It is built at first use, as the allocators are (memory/compilation.py). `csrc/live.cpp` begins with
a picture of it.
"""

import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from offload.memory import compilation
from offload.memory.compilation import LazyLibrary

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


def load_core() -> Any:
    """The compiled module, or an error that says why there is none."""
    return LIBRARY.load("a step's Python cannot run on shadows here")


def why_no_core() -> str:
    """Why there is no compiled module; empty if there is one."""
    return LIBRARY.why_missing()


def _open_module(path: Path) -> Any:
    loader = ExtensionFileLoader("live", str(path))
    spec = spec_from_file_location("live", path, loader=loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise OSError(str(error)) from error
    return module


LIBRARY: LazyLibrary[Any] = LazyLibrary(
    lambda: compilation.build_and_load(
        RECIPE, _open_module, compilation.COMPILERS, compilation.cache_folder()
    )
)
