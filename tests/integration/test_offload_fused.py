"""Compiled regions: the surgery on the graph to the last bit, Inductor's code by tolerance."""

import copy
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.lowering.compiled_regions import Fused, Region
from offload.lowering.fusion import fused
from offload.measuring.profiling import measured
from offload.program.kernels import Value
from offload.tracing.capture import traced_training_step


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("offload_models")


def by_eager(region: Region, device: torch.device) -> Fused:
    """What a compiler would make of it, if it kept every bit: the calls one after the other."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        memory: dict[int, torch.Tensor] = {}
        given = dict(zip(region.inputs, tensors, strict=True))

        def view(value: Value) -> torch.Tensor:
            if value in given:
                return given[value]
            return memory[value.buffer].as_strided(value.size, value.stride, value.offset)

        for call in region.calls:
            args, kwargs = call.arguments(view)
            made = call.op(*args, **kwargs)
            results = made if isinstance(made, tuple | list) else (made,)
            for value, result in zip(call.outputs, results, strict=True):
                if value is not None:
                    memory[value.buffer] = result
        return [view(value) for value in region.outputs]

    return Fused(run, ())


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_regions_of_eagers_own_kernels_leave_eagers_bits(models: Any, name: str) -> None:
    case = models.cases()[name]
    model, optimizer, other, plain = models.twin(case)
    batches = case.batches()
    with case.around():
        traced = traced_training_step(model, case.loss, optimizer, *batches[0])
    lowered = fused(traced, by_eager)
    assert any(isinstance(getattr(t.kernel, "op", None), Fused) for t in lowered.tasks)
    graph = replace(measured(offload.lower(lowered)), program=traced.program)
    plan = offload.plan(graph, int(0.6 * offload.plan(graph).peak_bytes))
    with offload.Runner(plan, order="random", seed=3, poison=True) as runner:
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            loss, *_ = runner(*batch)
            torch.manual_seed(number)
            assert torch.equal(loss, models.eager_step(case, other, plain, batch)), number
    found, wanted = models.state_of(model, optimizer), models.state_of(other, plain)
    assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]


class Block(nn.Module):
    """GPT-2's, its gelu written out as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.down(h)


def compiled_and_not(device: str) -> tuple[list[Any], list[list[float]], list[Any]]:
    """Plans, losses and parameters of three steps: plain, and with compiled regions."""
    plans, losses, parameters = [], [], []
    torch.manual_seed(0)
    first = nn.Sequential(Block(64), Block(64), nn.Linear(64, 8)).to(device)
    x = torch.randn(256, 64, device=device)
    y = torch.randint(8, (256,), device=device)
    for also in ((), ("fused",)):
        module = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        graph = offload.capture_training_step(
            module, functional.cross_entropy, optimizer, x, y, also=also
        )
        plans.append(offload.plan(graph))
        with offload.Runner(plans[-1]) as runner:
            losses.append([runner(x, y)[0].item() for _ in range(3)])
            assert not runner.placed.copied or plans[-1].placement == "copy"
        parameters.append([p.detach().clone() for p in module.parameters()])
    return plans, losses, parameters


def check(plans: list[Any], losses: list[list[float]], parameters: list[Any]) -> None:
    plain, fewer = plans
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for ours, wanted in zip(parameters[1], parameters[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    # Two blocks, of which each has a gelu of 8 kernels and its backward pass of 11.
    assert len(fewer.graph.tasks) <= 0.65 * len(plain.graph.tasks)
    moved = [sum(task.traffic for task in plan.graph.tasks) for plan in plans]
    assert moved[1] < 0.8 * moved[0]
    note = next(note for note in fewer.graph.notes if note.startswith("fused:"))
    assert "compiled regions" in note and "s to compile" in note
    assert "NOT bit-equal to eager: fused" in fewer.explain()
    assert "as eager: no pass that changes bits was asked for" in plain.explain()


@pytest.mark.full
def test_a_step_with_compiled_regions_is_eagers_by_tolerance_in_fewer_tasks_and_bytes() -> None:
    check(*compiled_and_not("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_regions_are_compiled_for_a_gpu_too() -> None:
    check(*compiled_and_not("cuda"))
