"""DeepSpeed: ZeRO-Offload (stage 2, the optimizer on the host) and ZeRO-3 with parameters, too.

Its CPU Adam is compiled at its first use. Weights, gradients and moments are bfloat16, as
everybody's: its default would keep 16 bytes a parameter.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gpu.peers.fsdp2 import group
from gpu.peers.task import Running, Setup, batch, trained, whole


def offload(setup: Setup) -> AbstractContextManager[Running]:
    return _engine(setup, {"stage": 2})


def infinity(setup: Setup) -> AbstractContextManager[Running]:
    return _engine(
        setup,
        {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            # Two blocks of 7B and one ahead: by default a billion parameters may be there at once.
            "stage3_max_live_parameters": 500_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 250_000_000,
        },
    )


@contextmanager
def _engine(setup: Setup, stage: Mapping[str, Any]) -> Iterator[Running]:
    import deepspeed  # pyright: ignore[reportMissingImports]

    with group(setup):
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
            "reduce_bucket_size": 50_000_000,  # the default takes gigabytes of the budget
            **stage,
        },
        "wall_clock_breakdown": False,
    }
