"""Cards and links by their published rates.

A card's products run at its published dense rate with sums in float32, which is what PyTorch uses.
Real kernels reach 80 to 95 % of that. Slower kernels hide more copies, so the published rate is the
hardest case for swapping, and utilisation here is not flattered.

A link is taken at 80 % of what its lanes carry, as copies from pinned memory reach. While both
directions copy, each keeps the share that was measured on an H200's link.
"""

from dataclasses import dataclass

from offload import Costs

GIB = 2**30
FOR_CUDA = GIB
"""Bytes of a card for the context, libraries and what the allocator rounds up."""
HOST = 384 * 10**9
"""Bytes of the host, as in ATOM's largest one."""
SHARED = 0.91
"""benchmarks/results/2026-11-22_gpu_ceilings.md"""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, and the numbers it computes with."""

    name: str
    gib: int
    flops: float
    """Published, dense, with sums in float32."""
    memory: float
    """Bytes a second."""
    element: int
    """Bytes of a weight, an activation and a gradient: 2 with tensor cores, 4 without."""
    links: tuple[str, ...]
    """What it may be plugged into."""

    @property
    def budget(self) -> int:
        return self.gib * GIB - FOR_CUDA

    def costs(self, link: float) -> Costs:
        """`link`: bytes a second each way."""
        return Costs(
            flops=self.flops, memory=self.memory, launch=5e-6, h2d=link, d2h=link, shared=SHARED,
            copy=1e-5,
        )  # fmt: skip


CARDS = (
    Card("RTX 4090", 24, 165.2e12, 1008e9, 2, ("PCIe 4", "PCIe 3")),
    Card("RTX 3090", 24, 71e12, 936e9, 2, ("PCIe 4", "PCIe 3")),
    Card("V100", 32, 125e12, 900e9, 2, ("PCIe 3",)),
    Card("V100 float32", 32, 15.7e12, 900e9, 4, ("PCIe 3",)),
    Card("GTX 1080", 8, 8.9e12, 320e9, 4, ("PCIe 3",)),
)
LINKS = {"PCIe 4": 25.2e9, "PCIe 3": 12.6e9}
"""Bytes a second each way: 80 % of 16 lanes."""
