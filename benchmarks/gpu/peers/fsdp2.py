"""FSDP2 with one rank: a block's weights come before it runs and go after it; AdamW on the host.

Two backends: gradients and clipping of what lies on the host need gloo, the device's nccl.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.gpu.peers.task import Running, Setup, batch, eager_step, whole


def begin_group(setup: Setup) -> None:
    """A world of one process, until that ends. No port: its store is in memory."""
    if distributed.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    atexit.register(distributed.destroy_process_group)


@contextmanager
def sharded(setup: Setup) -> Iterator[Running]:
    begin_group(setup)
    policy = CPUOffloadPolicy(pin_memory=setup.device == "cuda")
    module = whole(setup, "cpu")
    mesh = init_device_mesh(setup.device, (1,))
    for block in module.inner.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(module, mesh=mesh, offload_policy=policy)
    yield Running(eager_step(module, batch(setup, setup.device)))
