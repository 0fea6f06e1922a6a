"""Models on streams: eager PyTorch's bits, whichever stream is late.

Five steps each, compared as test_offload_models.py does, dead memory being NaN. On a GPU they are
compared with eager by benchmarks/gpu: there kernels add in any order.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from support.fake_gpu import only_on_a_fake_gpu
from support.live_training import LiveTraining, training_graph
from support.offload_training import trained_once
from support.products import every_value, only_first
from support.stream_runs import CUDA, HELD, driver
from torch import nn

import offload

pytestmark = [pytest.mark.gpu, only_on_a_fake_gpu("kernels of a GPU add in any order")]


@pytest.mark.parametrize("name", only_first("gpt", "resnet18", "llama"))
def test_a_model_at_the_smallest_budget_has_eagers_bits_whatever_is_late(name: str) -> None:
    case = trained_once(name, "cuda")
    smallest = case.planned(0.0, "auto")
    for number, held in enumerate(HELD):
        case.run(smallest, "cuda", number, "priority", driver(held))
    case.run(case.planned(0.6, "copy"), "cuda", 7, "random", driver())
    case.run(case.planned(1.0, "auto"), "cuda", 8, "random", driver("compute"))


@pytest.mark.parametrize("name", only_first("llama", "resnet18", "gpt"))
def test_a_captured_model_has_eagers_bits_in_any_order_that_its_edges_allow(name: str) -> None:
    case = trained_once(name, "cuda")
    for share, placement in ((0.0, "auto"), (1.0, "copy")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one would say that it was not captured
            case.run(case.planned(share, placement), "cudagraph", 0, "priority")


def test_a_device_and_the_host_draw_each_its_own_numbers_at_the_same_time() -> None:
    x, first = torch.ones(64, 64, device=CUDA), torch.Generator().manual_seed(7)
    right_here = torch.rand(1, generator=first)

    def draw_there() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [nn.functional.dropout(x, 0.5) for _ in range(200)]

    right_there = draw_there()
    torch.cuda.synchronize()
    for _ in range(10):
        made = draw_there()
        for _ in range(2000):
            torch.default_generator.manual_seed(7)
            assert torch.equal(torch.rand(1), right_here)
        assert all(map(torch.equal, made, right_there))


class Wide(nn.Module):
    """Huge weights, little to compute: copies are all that a step does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 16384), nn.ReLU(), nn.Linear(16384, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(y, target)


def eagerly(module: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(module(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def fresh() -> tuple[nn.Module, nn.Module, Any, Any, list[Any]]:
    ours = Wide().to(CUDA)
    ours.layers.insert(2, nn.Dropout(0.3))
    theirs = copy.deepcopy(ours)
    mine = torch.optim.AdamW(ours.parameters(), 1e-3, fused=True)
    other = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randn(8, n, generator=generator).to(CUDA) for n in (32, 64)) for _ in range(4)
    ]
    return ours, theirs, mine, other, batches


def alike(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("held, optimizer", every_value(HELD, ["device", "host"]))
def test_huge_copies_beside_tiny_kernels_have_eagers_bits(held: str, optimizer: str) -> None:
    ours, theirs, mine, other, batches = fresh()
    graph = training_graph(ours, loss_of, mine, *batches[0])
    whole = offload.plan(graph)
    made = offload.plan(graph, int(whole.peak_bytes * 0.7) + whole.reserve, optimizer=optimizer)
    lanes = {node.lane for node in made.memgraph.nodes}
    assert {"compute", "h2d", "d2h"} <= lanes and ("host" in lanes) == (optimizer == "host")
    how: Any = {"engine": "cuda", "order": "random", "seed": 1, "driver": driver(held)}
    with LiveTraining(ours, loss_of, mine, made, poison=True, **how) as step_of:
        for step, batch in enumerate(batches):
            torch.manual_seed(step)
            (loss,) = step_of(*batch)
            torch.manual_seed(step)
            assert torch.equal(loss, eagerly(theirs, other, batch)), step
            assert alike(ours, theirs), step
