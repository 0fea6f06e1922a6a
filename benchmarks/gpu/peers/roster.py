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
    trains: bool = True
    prefills: bool = False
    budgets: bool = True
    """False: it is what the others are compared with, without a budget."""
    exact: bool = True
    """Whether its step is the step that was asked for."""
    asked: float | None = None
    """How many times faster than it ours is to be."""


CEILING = "no offload"
OURS = ("ours, cuda", "ours, cudagraph")
"""The quicker one of them counts as ours."""

PEERS: Mapping[str, Peer] = {
    CEILING: Peer(
        "gpu.peers.everything:on_the_device", "everything on the device, eager", prefills=True,
        budgets=False,
    ),
    "ours, cuda": Peer(
        "gpu.peers.planned:loop", "its Python in every step, plan(budget, optimizer='auto')",
        prefills=True,
    ),
    "ours, cudagraph": Peer(
        "gpu.peers.planned:graph", "the same plan, replayed as one CUDA graph", prefills=True,
    ),
    "FSDP2": Peer(
        "gpu.peers.fsdp2:sharded", "fully_shard a block, CPUOffloadPolicy(pin_memory=True), one"
        " rank; AdamW on the host", asked=2.0,
    ),
    "FSDP2, patched": Peer(
        "gpu.peers.fsdp2:patched", "the same with copies on a stream of their own, begun a block"
        " ahead, and as many blocks resident as fit: torch's own copies wait on the computing"
        " stream with one rank", asked=1.0,
    ),
    "save_on_cpu": Peer(
        "gpu.peers.saved_on_cpu:saved", "inputs of the checkpointed blocks in pinned memory;"
        " weights and optimizer stay on the device",
    ),
    "torchao": Peer(
        "gpu.peers.torchao_optimizer:stepped", "CPUOffloadOptimizer: moments and update on the"
        " host, weights on the device", ("torchao",), on_cpu=False,
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
    **{
        f"RoundPipe, exact, {parts}": Peer(
            f"gpu.peers.roundpiped:in_{parts}", f"the same with micro-batches: {parts}",
            ("roundpipe", "beartype"), on_cpu=False,
        )
        for parts in (1, 4, 8)
    },
    "RoundPipe": Peer(
        "gpu.peers.roundpiped:late", "as it comes: each step uses weights of the one before the"
        " last", ("roundpipe", "beartype"), on_cpu=False, exact=False,
    ),
    "accelerate, dispatched": Peer(
        "gpu.peers.dispatched:by_map", "infer_auto_device_map within the budget less room for"
        " activations", ("accelerate",), on_cpu=False, trains=False, prefills=True,
    ),
    "accelerate, cpu_offload": Peer(
        "gpu.peers.dispatched:all_of_it", "every weight comes when its module runs, and is dropped",
        ("accelerate",), trains=False, prefills=True,
    ),
}  # fmt: skip
