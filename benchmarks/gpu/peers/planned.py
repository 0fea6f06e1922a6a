"""Ours: steps whose Python runs, by plans within the budget with this machine's rates.

The plan's budget is the peer's; a context and loaded kernels come out of the ballast's spare, as
everybody's do. Updates run where they are faster.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

import offload
from benchmarks.gpu.peers.task import MIB, Running, Setup, batch, eager_step, trained, whole
from benchmarks.gpu.timing import free
from benchmarks.offloading.live_steps import LiveSteps, training_step
from offload.measuring.calibration import calibrate


@contextmanager
def on_the_device(setup: Setup) -> Iterator[Running]:
    """The ceiling: all of it on the device, eager."""
    yield Running(eager_step(whole(setup, setup.device), batch(setup, setup.device)))


def loop(setup: Setup) -> AbstractContextManager[Running]:
    return _planned(setup, "cuda")


def graph(setup: Setup) -> AbstractContextManager[Running]:
    return _planned(setup, "cudagraph")


@contextmanager
def _planned(setup: Setup, engine: str) -> Iterator[Running]:
    module = whole(setup, "cpu")
    inputs = batch(setup, setup.device)
    costs = calibrate(setup.device, "bfloat16") if setup.device == "cuda" else None
    free(setup.device)
    made = partial(offload.plan, budget=setup.budget, costs=costs, optimizer="auto")
    how: dict[str, Any] = {"device": setup.device, "run_by": partial(offload.Runner, engine=engine)}
    optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)
    step = training_step(module.inner, module.loss, optimizer)
    steps = LiveSteps(step, made, module, optimizer, **how)
    facts: dict[str, Any] = {}

    def run() -> torch.Tensor:
        result = steps(*inputs)
        facts.update(_facts(steps.plans))
        return result

    with steps:
        yield Running(run, facts)


def _facts(parts: Sequence[offload.Plan]) -> dict[str, Any]:
    return {
        "bound_s": sum(part.bound.seconds for part in parts), "binds": parts[-1].bound.lane,
        "predicted_s": sum(part.predicted_seconds for part in parts), "parts": len(parts),
        "planned_mib": max(part.device_bytes for part in parts) / MIB,
        "pinned_mib": max(part.host_bytes for part in parts) / MIB,
    }  # fmt: skip
