"""FSDP2 with one rank: a block's weights come before it runs and go after it; AdamW on the host.

Two backends: gradients and clipping of what lies on the host need gloo, the device's nccl.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from gpu.peers.task import Running, Setup, Whole, batch, trained, whole


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
    on_device = setup.device == "cuda"
    group(setup)
    mesh = init_device_mesh(setup.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=on_device)
    module = whole(setup, "cpu")
    assert isinstance(module, Whole)
    for block in module.inner.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(module, mesh=mesh, offload_policy=policy)
    assert isinstance(module, FSDPModule)
    inputs = batch(setup, setup.device)
    optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield Running(step)
