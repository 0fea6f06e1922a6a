"""Who is measured, what each needs, and what a reader must know of it.

Nothing is imported here: a peer that is missing is a line of the table, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    run: str
    """module:function(Setup), a context manager that gives the step."""
    note: str
    needs: tuple[str, ...] = ()
    """Modules to be found; the first one's version is told."""
    on_cpu: bool = True
    budgets: bool = True
    """False: it is what the others are compared with, without a budget."""
    asked: float = 1.0
    """How many times faster than it ours is to be, of 7B LoRA."""


CEILING = "no offload"
OURS = ("ours, cuda", "ours, cudagraph")
"""The quicker one of them counts as ours."""

PEERS: Mapping[str, Peer] = {
    CEILING: Peer(
        "gpu.peers.planned:on_the_device", "everything on the device, eager", budgets=False
    ),
    "ours, cuda": Peer(
        "gpu.peers.planned:loop", "its Python in every step, plan(budget, optimizer='auto')"
    ),
    "ours, cudagraph": Peer(
        "gpu.peers.planned:graph", "the same plan, replayed as one CUDA graph"
    ),
    "FSDP2": Peer(
        "gpu.peers.fsdp2:sharded", "fully_shard a block, CPUOffloadPolicy(pin_memory=True), one"
        " rank, with which torch's copies wait on the computing stream (pytorch issue 178861);"
        " AdamW on the host", asked=2.0,
    ),
    "ZeRO-Offload": Peer(
        "gpu.peers.zero:offload", "DeepSpeed stage 2, optimizer on the host (its CPU Adam), all"
        " states bfloat16", ("deepspeed",),
    ),
    "ZeRO-3 offload": Peer(
        "gpu.peers.zero:infinity", "DeepSpeed stage 3, parameters and optimizer on the host, all"
        " states bfloat16", ("deepspeed",), asked=2.0,
    ),
    "RoundPipe, exact": Peer(
        "gpu.peers.roundpiped:waiting", "step(is_async=False), recomputes by stage, 2"
        " micro-batches (its default)", ("roundpipe", "beartype"), on_cpu=False, asked=1.3,
    ),
}  # fmt: skip
