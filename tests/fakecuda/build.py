"""Builds the fake GPU for the installed torch, and prints the folder that it is in.

    python tests/fakecuda/build.py

    libcudart.so.N   runtime/: what is played, and a stub for each other function of the real one
    libcuda.so.1     runtime/driver.cpp, and a stub for each other function that torch asks for
    libfakeops.so    ops/: the CPU's kernels for CUDA's ops

The folder is `.fakecuda/KEY` in the root of the checkout. The key is torch's version and a hash of
the sources, so that a second call finds it made. When a folder is made, others that no command took
for a day are removed. Needed: a CUDA build of torch, g++, nm and CUDA's headers, of the pip wheels
that torch brings or of a system's CUDA.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parents[1] / ".fakecuda"
SOURCES = ("build.py", "runtime/*", "ops/*")
DRIVER = "runtime/driver.cpp"
OPS = "ops/install.cpp"
ASKS_DRIVER = "lib/libcaffe2_nvrtc.so"
"""Torch's library that calls the driver."""
WHEELS = ("nvidia/cu[0-9]*", "nvidia/cuda_runtime")
"""Where a wheel of the CUDA runtime keeps include/ and lib/, beside torch."""
TRITONS = "triton/backends/nvidia/include"
"""It has the headers of `crt/`, which the runtime's wheel lacks."""
RUNTIME = "lib*/libcudart.so.[0-9][0-9]"
SYSTEM = ("/usr/local/cuda", "/opt/cuda")
HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")
FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-Wno-attributes")
UNUSED = 24 * 3600.0
"""Seconds without a command that took it, after which a folder is removed."""
NOT_SUPPORTED = 801
"""cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED: what a stub returns."""


class BuildError(Exception):
    """The fake GPU cannot be built here. The message says what is missing."""


def build() -> Path:
    """The folder of the fake GPU, which is made if it is not there."""
    torch = _torch()
    folder = BUILDS / f"torch-{importlib.metadata.version('torch')}-{_hash()}"
    if folder.is_dir():
        os.utime(folder)
        return folder
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise BuildError(f"the fake GPU is compiled, and there is no {tool} here: install it")
    includes, runtime = headers(torch.parent), _runtime(torch.parent)
    BUILDS.mkdir(exist_ok=True)
    sweep()
    made = Path(tempfile.mkdtemp(dir=BUILDS))
    try:
        _build_runtime(made, runtime, includes)
        _build_driver(made, torch)
        _build_ops(made, torch, made / runtime.name, includes)
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else somebody else was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def sweep() -> None:
    """Remove what nobody uses any more: of older sources, and of builds that were cut short."""
    for folder in BUILDS.iterdir():
        if time.time() - folder.stat().st_mtime > UNUSED:
            shutil.rmtree(folder)


def _torch() -> Path:
    """The folder of torch, which is not imported for it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed in this Python")
    folder = Path(spec.origin).parent
    if not (folder / "lib/libtorch_cuda.so").is_file():
        raise BuildError(f"the fake GPU plays for CUDA builds of torch, and {folder} is another")
    return folder


def _hash() -> str:
    found = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(HERE.glob(pattern)):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _systems() -> list[Path]:
    return [Path(root) for root in (os.environ.get("CUDA_HOME"), *SYSTEM) if root]


def _wheels(packages: Path) -> list[Path]:
    return [path for pattern in WHEELS for path in sorted(packages.glob(pattern))]


def headers(packages: Path) -> list[Path]:
    """Folders that have all of CUDA's headers together."""
    wheels = [*(wheel / "include" for wheel in _wheels(packages)), packages / TRITONS]
    for folders in (wheels, *([system / "include"] for system in _systems())):
        if all(any((folder / name).is_file() for folder in folders) for name in HEADERS):
            return folders
    raise BuildError(
        f"CUDA's headers ({', '.join(HEADERS)}) are neither in the wheels beside torch, "
        f"{packages}/nvidia and {TRITONS}, nor in {', '.join(map(str, _systems()))}: install torch "
        "with its CUDA wheels, or set CUDA_HOME"
    )


def _runtime(packages: Path) -> Path:
    """The real runtime, whose functions are listed."""
    folders = [*_wheels(packages), *_systems()]
    for path in (found for folder in folders for found in sorted(folder.glob(RUNTIME))):
        return path
    raise BuildError(
        f"the real runtime, {RUNTIME}, is in none of {', '.join(map(str, folders))}: install torch "
        "with its CUDA wheels, or set CUDA_HOME"
    )


def _build_runtime(made: Path, real: Path, includes: Sequence[Path]) -> None:
    objects = []
    for source in sorted(HERE.glob("runtime/*.cpp")):
        if source.name != Path(DRIVER).name:
            objects.append(made / f"{source.stem}.o")
            # Structures of the runtime are named by their versions without this.
            _compile(source, objects[-1], "-c", "-DCUDART_VERSION_INTERNAL", *_including(includes))
    stubs = _stubs(made, "runtime", _functions(real) - _functions(*objects, dynamic=False))
    version = made / "version.txt"
    version.write_text(
        f"{real.name} {{ global: cuda*; __cuda*; fakecuda_*; local: *; }};\n", encoding="utf-8"
    )
    _link(made / real.name, *objects, stubs, f"-Wl,--version-script={version}", "-lpthread")


def _build_driver(made: Path, torch: Path) -> None:
    driver = made / "driver.o"
    _compile(HERE / DRIVER, driver, "-c")
    wanted = {name for name in _functions(torch / ASKS_DRIVER, defined=False) if name[:2] == "cu"}
    stubs = _stubs(made, "driver_stubs", wanted - _functions(driver, dynamic=False))
    _link(made / "libcuda.so.1", driver, stubs)


def _build_ops(made: Path, torch: Path, runtime: Path, includes: Sequence[Path]) -> None:
    of_torch = (torch / "include", torch / "include/torch/csrc/api/include")
    libraries = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch")
    _compile(
        HERE / OPS, made / "libfakeops.so", "-shared", "-w", *_including([*of_torch, *includes]),
        f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries), str(runtime),
    )  # fmt: skip


def _functions(*files: Path, defined: bool = True, dynamic: bool = True) -> set[str]:
    """Names of what these files define, or, else, of what they need."""
    told = subprocess.run(
        ["nm", *(["-D"] if dynamic else []), *map(str, files)],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    kinds = ("T", "W") if defined else ("U",)
    lines = [line.split()[-2:] for line in told.splitlines()]
    return {line[1].split("@")[0] for line in lines if len(line) == 2 and line[0] in kinds}


def _stubs(made: Path, name: str, functions: set[str]) -> Path:
    """Functions that say that they are not played. They have no arguments: C lets them be called
    with any."""
    source, target = made / f"{name}.c", made / f"{name}.o"
    lines = [
        f'int {function}() {{ fputs("[fakecuda] {function} is not played\\n", stderr); '
        f"return {NOT_SUPPORTED}; }}"
        for function in sorted(functions)
    ]
    source.write_text("\n".join(["#include <stdio.h>", *lines, ""]), encoding="utf-8")
    _run("g++", "-x", "c", "-fPIC", "-w", "-c", str(source), "-o", str(target))
    return target


def _including(folders: Sequence[Path]) -> list[str]:
    return [f"-I{folder}" for folder in folders]


def _compile(source: Path, target: Path, *arguments: str) -> None:
    _run("g++", *FLAGS, str(source), "-o", str(target), *arguments)


def _link(target: Path, *arguments: str | Path) -> None:
    _run("g++", "-shared", *map(str, arguments), "-o", str(target), f"-Wl,-soname,{target.name}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"the fake GPU was not built: {' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
