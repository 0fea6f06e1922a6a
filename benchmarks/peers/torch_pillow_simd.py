"""torch's DataLoader over Pillow-SIMD, a fork of Pillow that is imported by the same name. It is
another package's files, so it wants a virtual environment of its own."""

from dataclasses import dataclass
from importlib import metadata

from peers.torch_pillow import TorchPillow

try:
    metadata.version("pillow-simd")
except metadata.PackageNotFoundError:  # Pillow itself is no Pillow-SIMD
    raise ModuleNotFoundError("No package 'pillow-simd'", name="pillow-simd") from None


@dataclass(frozen=True, slots=True)
class TorchPillowSimd(TorchPillow):
    """As `TorchPillow`."""
