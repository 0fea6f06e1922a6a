"""DeepSpeed: ZeRO-Offload (stage 2, the optimizer on the host) and ZeRO-3 with parameters, too.

Its CPU Adam is compiled at its first use. Weights, gradients and moments are bfloat16, as
everybody's: its default would keep 16 bytes a parameter.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from benchmarks.gpu.peers.fsdp2 import begin_group
from benchmarks.gpu.peers.task import Running, Setup, batch, trained, whole


def offload(setup: Setup) -> AbstractContextManager[Running]:
    return _engine(setup, {"stage": 2})


def infinity(setup: Setup) -> AbstractContextManager[Running]:
    return _engine(setup, streamed(setup))


def streamed(setup: Setup) -> Mapping[str, Any]:
    """Stage 3. What it may hold beside a step's own memory are shares of the budget: by default a
    billion parameters may be there at once."""
    return {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_max_live_parameters": share(setup, 8),
        "stage3_prefetch_bucket_size": share(setup, 16),  # of those that may live
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_model_persistence_threshold": share(setup, 64),
    }


def share(setup: Setup, of: int) -> int:
    """So many parameters that they take one part of `of` parts of the budget."""
    assert setup.budget is not None, "a peer's buckets are shares of its budget"
    return setup.budget // of // setup.kind.dtype.itemsize


@contextmanager
def _engine(setup: Setup, stage: Mapping[str, Any]) -> Iterator[Running]:
    import deepspeed  # pyright: ignore[reportMissingImports]

    begin_group(setup)
    module = whole(setup, "cpu")
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=trained(module), config=config(setup, stage)
    )
    inputs = batch(setup, setup.device)

    def step() -> torch.Tensor:
        loss = engine(*inputs)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    yield Running(step)
    engine.destroy()


def config(setup: Setup, stage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setup.kind.size.batch,
        "gradient_accumulation_steps": 1,
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            # The defaults take gigabytes of the budget; there are two of the first.
            "reduce_bucket_size": share(setup, 64),
            "allgather_bucket_size": share(setup, 64),
            **stage,
        },
        "wall_clock_breakdown": False,
    }
