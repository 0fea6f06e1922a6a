"""Ours, by hand: captured on the device, planned within the budget with this machine's rates, run.

The plan's budget is the peer's; a context and loaded kernels come out of the ballast's spare, as
everybody's do. Updates run where they are faster.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import offload
from gpu.ours import run_by
from gpu.peers.task import MIB, Running, Setup, Whole, batch, trained, whole
from gpu.timing import free
from offload.measuring.calibration import calibrate


@contextmanager
def loop(setup: Setup) -> Iterator[Running]:
    with _planned(setup, "cuda") as running:
        yield running


@contextmanager
def graph(setup: Setup) -> Iterator[Running]:
    with _planned(setup, "cudagraph") as running:
        yield running


@contextmanager
def _planned(setup: Setup, engine: str) -> Iterator[Running]:
    module = whole(setup, "cpu")
    inputs = batch(setup, "cpu")
    there: dict[str, Any] = {"device": torch.device(setup.device)} if setup.device == "cuda" else {}
    if isinstance(module, Whole):
        optimizer = torch.optim.AdamW(trained(module), 1e-4, fused=True)
        captured = offload.capture_training_step(
            module.inner, module.loss, optimizer, *inputs, **there
        )
    else:
        captured = offload.capture(_without_gradients(module), *inputs, **there)
    costs = calibrate(setup.device, "bfloat16") if setup.device == "cuda" else None
    free(setup.device)
    made = offload.plan(captured, setup.budget, costs, optimizer="auto")
    facts = {
        "bound_s": made.bound.seconds, "binds": made.bound.lane,
        "predicted_s": made.predicted_seconds, "planned_mib": made.device_bytes / MIB,
        "pinned_mib": made.host_bytes / MIB,
    }  # fmt: skip
    with run_by(engine, made) as runner:
        yield Running(lambda: runner(*inputs)[0], facts)


def _without_gradients(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(ids)

    return call
