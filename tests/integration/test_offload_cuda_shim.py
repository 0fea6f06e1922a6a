"""The CUDA allocator compiles against the installed PyTorch and goes in without a driver, or says
what is missing. What it serves is tested on a device (test_offload_device_memory_gpu.py)."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.memory import cuda_shim
from offload.memory.compilation import COMPILERS
from offload.memory.cuda_shim import headers

HEADERS = headers(cuda_shim._header_folders())
COMPILER = next(filter(None, map(shutil.which, COMPILERS)), "")
BUILDS = pytest.mark.skipif(
    isinstance(HEADERS, str) or not COMPILER, reason=f"needs CUDA's headers: {HEADERS}"
)


@BUILDS
@pytest.mark.full
def test_it_compiles_against_this_pytorch_and_goes_in_without_a_driver(tmp_path: Path) -> None:
    script = f"""
import torch
from pathlib import Path
from offload.memory import cuda_shim
from offload.memory.compilation import COMPILERS
found = cuda_shim.build_shim(COMPILERS, Path({str(tmp_path)!r}), Path({str(HEADERS)!r}))
assert not isinstance(found, str), found
assert found.install()
assert torch.cuda.get_allocator_backend() == "native"  # it answers for what it wraps
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.skipif(isinstance(HEADERS, str), reason="needs CUDA's headers")
def test_every_function_of_the_allocator_is_handed_on() -> None:
    home = Path(torch.__file__).parent / "include" / "c10"
    declared = set()
    for header, name in (
        ("cuda/CUDACachingAllocator.h", "class CUDAAllocator"),
        ("core/CachingDeviceAllocator.h", "struct C10_API DeviceAllocator"),
        ("core/Allocator.h", "struct C10_API Allocator"),
    ):
        text = (home / header).read_text()
        body = text[text.index(name) :]
        body = body[: body.index("\n};")]
        declared |= {
            found[1] for found in re.finditer(r"virtual [^;{(]*?[ *&](\w+)\(", body, re.DOTALL)
        }
    assert {"allocate", "raw_alloc", "snapshot", "memcpyAsync", "recordStream"} <= declared
    ours = cuda_shim.SOURCE.read_text()
    missing = {name for name in declared if not re.search(rf"\b{name}\(", ours)}
    assert missing - {"Allocator", "DeviceAllocator", "AllocatorState"} == set()


def test_headers_of_the_cuda_that_pytorch_was_built_with_go_first(tmp_path: Path) -> None:
    places = []
    for name, version in (("old", 12080), ("new", 13000), ("newer", 13020)):
        place = tmp_path / name
        (place / "crt").mkdir(parents=True)
        for needed in cuda_shim.NEEDED:
            (place / needed).write_text(f"#define CUDART_VERSION  {version}\n")
        places.append(place)
    assert headers(places, "13.0") == places[1]
    assert headers(places, "11.8") == places[0]
    (places[1] / "crt" / "host_config.h").unlink()
    assert headers(places, "13.0") == places[2]


def test_missing_headers_are_named_with_the_places_that_were_sought(tmp_path: Path) -> None:
    why = headers([tmp_path / "a", tmp_path / "b"], "13.0")
    assert isinstance(why, str)
    assert "crt/host_config.h" in why
    assert str(tmp_path / "b") in why
    assert "Install the CUDA toolkit 13.0" in why
    assert cuda_shim.build_shim(COMPILERS, tmp_path, why) == why


def test_a_pytorch_without_cuda_has_no_shim_for_it(tmp_path: Path) -> None:
    assert "was built without CUDA" in str(headers([tmp_path], None))
