"""The allocator of csrc/placed_cuda_allocator.cpp, and which shim belongs to a device.

    cpu    cpu_shim.py     wraps the allocator of the CPU
    cuda   this module     wraps PyTorch's caching allocator; loads without a driver

It needs a C++ compiler and the headers of the CUDA runtime: from a toolkit, from pip's packages, or
from Triton. Without them there is no shim: `why_not_on(device)` says what is missing, and
placement.py copies outputs instead.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from offload.memory import compilation, cpu_shim
from offload.memory.compilation import COMPILERS, CSRC, BuildRecipe, LazyLibrary
from offload.memory.cpu_shim import Shim, open_shim

SOURCE = CSRC / "placed_cuda_allocator.cpp"
LIBRARIES = ("c10", "c10_cuda")
NEEDED = ("cuda_runtime.h", "cuda_runtime_api.h", "crt/host_config.h")
"""Headers that c10's headers include. pip's runtime package alone lacks the last one."""
VERSION = re.compile(r"#define\s+CUDART_VERSION\s+(\d+)")
TOOLKITS = Path("/usr/local")


def available_on(device: torch.device) -> Shim | None:
    """The device's shim; None if it cannot be built, and `why_not_on` says why."""
    return _library(device).get()


def load_on(device: torch.device) -> Shim:
    """The device's shim, or an error that says why there is none."""
    if device.type != "cuda":
        return cpu_shim.load()
    shim = LIBRARY.load(f"the allocator cannot place outputs on {device}")
    shim.install()  # another allocator may have been installed over it since
    return shim


def why_not_on(device: torch.device) -> str:
    """Why there is no shim; empty if there is one."""
    return _library(device).why_missing()


def _library(device: torch.device) -> LazyLibrary[Shim]:
    return LIBRARY if device.type == "cuda" else cpu_shim.LIBRARY


def build_shim(compilers: Sequence[str], folder: Path | None, includes: Path | str) -> Shim | str:
    """The shim, from `folder` if the same source was built before; or why there is none.

    `includes`: the folder of CUDA's headers, or why there is none."""
    if isinstance(includes, str):
        return includes
    return compilation.build_and_load(recipe(includes), open_shim, compilers, folder)


def recipe(includes: Path) -> BuildRecipe:
    return BuildRecipe(SOURCE, LIBRARIES, (includes,))


def headers(places: Iterable[Path], cuda: str | None = torch.version.cuda) -> Path | str:
    """The first folder with all headers, or what is missing.

    Headers of the CUDA version that PyTorch was built with come first. Others work as well: the
    parts in use have not changed in years."""
    if cuda is None:
        return "this PyTorch was built without CUDA; install one that was built with it"
    sought = tuple(places)
    complete = [place for place in sought if all((place / name).is_file() for name in NEEDED)]
    major = int(cuda.split(".")[0])
    same = [place for place in complete if _major(place) == major]
    if not complete:
        return (
            f"the headers of the CUDA runtime ({', '.join(NEEDED)}) are in none of"
            f" {', '.join(map(str, sought))}. Install the CUDA toolkit {cuda}"
        )
    return (same or complete)[0]


def _major(place: Path) -> int:
    text = (place / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    match = VERSION.search(text)
    return int(match[1]) // 1000 if match else 0


def _header_folders() -> list[Path]:
    """Folders that may hold headers: toolkits, newest first, then pip's packages beside PyTorch."""
    beside = Path(torch.__file__).parent.parent
    toolkits = [TOOLKITS / "cuda", *sorted(TOOLKITS.glob("cuda-*"), reverse=True)]
    return [
        *(toolkit / "include" for toolkit in toolkits),
        *sorted((beside / "nvidia").glob("cu*/include"), reverse=True),
        beside / "nvidia" / "cuda_runtime" / "include",
        beside / "triton" / "backends" / "nvidia" / "include",
    ]


LIBRARY = LazyLibrary(
    lambda: build_shim(COMPILERS, compilation.cache_folder(), headers(_header_folders()))
)
