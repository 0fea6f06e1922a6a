"""FSDP2 with one rank: a block's weights come before it runs and go after it; AdamW on the host.

Two backends: gradients and clipping of what lies on the host need gloo, the device's nccl.
"""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from benchmarks.gpu.peers.fsdp2_seams import copies_ahead
from benchmarks.gpu.peers.task import Running, Setup, Whole, batch, trained, whole
from benchmarks.gpu.timing import free


def group(setup: Setup) -> None:
    """A world of one process, until that ends: DeepSpeed keeps its first one. No port: its store
    is in memory."""
    if distributed.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    atexit.register(distributed.destroy_process_group)


@contextmanager
def sharded(setup: Setup) -> Iterator[Running]:
    """As torch has it."""
    yield _sharded(setup, 0)


@contextmanager
def patched(setup: Setup) -> Iterator[Running]:
    """Copies on a stream of their own, each begun a block ahead, and as many blocks that stay on
    the device as there is room for."""
    with copies_ahead(setup.device):
        residents = _room(setup)
        running = _sharded(setup, residents, ahead=True)
        yield replace(running, facts={"residents": residents})


def _room(setup: Setup) -> int:
    """Blocks that fit beside what a step takes without any: it is made and run once. One on a CPU,
    where nothing binds."""
    if setup.device != "cuda" or setup.budget is None:
        return 1
    torch.cuda.reset_peak_memory_stats()
    running = _sharded(setup, 0, ahead=True)
    for _ in range(2):  # the optimizer's state comes with the first update
        running.step()
    left = setup.budget - torch.cuda.max_memory_reserved()
    del running
    free(setup.device)
    module = whole(setup, "cpu")
    assert isinstance(module, Whole)
    block = module.inner.blocks[0]
    size = sum(p.nbytes * (4 if p.requires_grad else 1) for p in block.parameters())
    return max(0, left // size)


def _sharded(setup: Setup, residents: int, ahead: bool = False) -> Running:
    on_device = setup.device == "cuda"
    group(setup)
    mesh = init_device_mesh(setup.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=on_device)
    module = whole(setup, "cpu")
    assert isinstance(module, Whole)
    blocks = list(module.inner.blocks)
    staying, going = blocks[:residents], blocks[residents:]
    for block in staying:
        block.to(setup.device)
    for block in going:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    kept = {parameter for block in staying for parameter in block.parameters()}
    fully_shard(module, mesh=mesh, offload_policy=policy, ignored_params=kept)
    if ahead:
        _prefetch(going)
    inputs = batch(setup, setup.device)
    # One update takes sharded parameters (on the host) or whole ones (of residents), not both.
    parts = [[p for p in trained(module) if (p in kept) is resident] for resident in (False, True)]
    optimizers = [torch.optim.AdamW(part, 1e-4, fused=True) for part in parts if part]

    def step() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = module(*inputs)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return Running(step)


def _prefetch(blocks: Sequence[torch.nn.Module]) -> None:
    for first, second in pairwise(blocks):
        assert isinstance(first, FSDPModule)
        assert isinstance(second, FSDPModule)
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
