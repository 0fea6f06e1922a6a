"""What a key must say of this machine and of our own version, beside the graph and the budget.

Another PyTorch has other kernels; another processor, another number of threads or another setting
of the libraries other seconds and other workspaces; another version of this package other plans.
"""

import functools
import hashlib
import platform
from pathlib import Path

import torch

from offload.torch_seams import float32_precisions

PACKAGE = Path(__file__).parents[1]


def machine_of(device: torch.device) -> tuple[object, ...]:
    """What kernels depend on beside their arguments."""
    settings = (
        torch.are_deterministic_algorithms_enabled(),
        float32_precisions(),
        torch.backends.mkldnn.enabled,
    )
    there = (torch.__version__, _processor(), torch.get_num_threads(), settings)
    if device.type != "cuda":
        return there
    cudnn = torch.backends.cudnn
    chosen = cudnn.version(), cudnn.enabled, cudnn.deterministic
    return (*there, torch.version.cuda, torch.cuda.get_device_name(device), chosen)


@functools.cache
def our_version() -> str:
    """A digest of the source text of this package: each version of it plans for itself."""
    text = hashlib.blake2b(digest_size=16)
    for path in sorted(PACKAGE.rglob("*.py")):
        text.update(path.relative_to(PACKAGE).as_posix().encode())
        text.update(path.read_bytes())
    return text.hexdigest()


@functools.cache
def _processor() -> tuple[str, str]:
    name = platform.processor()
    with_names = Path("/proc/cpuinfo")
    if with_names.is_file():
        lines = with_names.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line for line in lines if line.startswith("model name")), name)
    return name, torch.backends.cpu.get_cpu_capability()
