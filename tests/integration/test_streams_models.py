"""Models over the CPU's twin of a device: eager PyTorch's bits, whichever stream is late.

Five steps each, compared as test_offload_models.py does, dead memory being NaN. What runs on a GPU
is compared with eager there by benchmarks/gpu.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from products import every_value, only_first
from support.offload_training import trained_once
from torch import nn

import offload
from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from offload.lowering.passes import host_updates
from offload.lowering.rotation import rotated, updates_of
from offload.running.rotated_step import RotatedStep
from offload.running.runner import Runner

HELD = ("compute", "h2d", "d2h")


@pytest.mark.parametrize("name", only_first("gpt", "resnet18", "llama"))
def test_a_model_at_the_smallest_budget_has_eagers_bits_whatever_is_late(name: str) -> None:
    case = trained_once(name)
    smallest = case.planned(0.0, "auto")
    for number, held in enumerate(HELD):
        case.run(smallest, "cuda", number, "priority", Twin((held,)))
    case.run(case.planned(0.6, "copy"), "cuda", 7, "random", Twin())
    case.run(case.planned(1.0, "auto"), "cuda", 8, "random", Twin(("compute",)))


@pytest.mark.parametrize("name", only_first("llama", "resnet18", "gpt"))
def test_a_captured_model_has_eagers_bits_in_any_order_that_its_edges_allow(name: str) -> None:
    case = trained_once(name)
    for share, placement in ((0.0, "auto"), (1.0, "copy")):
        driver = GraphTwin(order="random", seed=11)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one would say that it was not captured
            case.run(case.planned(share, placement), "cudagraph", 0, "priority", driver)


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


def fresh(dropout: float = 0.0) -> tuple[nn.Module, nn.Module, Any, Any, list[Any]]:
    ours = Wide()
    if dropout:
        ours.layers.insert(2, nn.Dropout(dropout))
    theirs = copy.deepcopy(ours)
    mine = torch.optim.AdamW(ours.parameters(), 1e-3, fused=True)
    other = torch.optim.AdamW(theirs.parameters(), 1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 32, generator=generator), torch.randn(8, 64, generator=generator))
        for _ in range(4)
    ]
    return ours, theirs, mine, other, batches


def alike(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("held, optimizer", every_value(HELD, ["device", "host"]))
def test_huge_copies_beside_tiny_kernels_have_eagers_bits(held: str, optimizer: str) -> None:
    ours, theirs, mine, other, batches = fresh(dropout=0.3)
    graph = offload.capture_training_step(ours, loss_of, mine, *batches[0])
    peak = offload.plan(graph).peak_bytes
    made = offload.plan(graph, int(peak * 0.7), optimizer=optimizer)
    lanes = {node.lane for node in made.memgraph.nodes}
    assert {"compute", "h2d", "d2h"} <= lanes and ("host" in lanes) == (optimizer == "host")
    with Runner(made, "cuda", "random", 1, poison=True, driver=Twin((held,))) as runner:
        for step, batch in enumerate(batches):
            torch.manual_seed(step)
            (loss,) = runner(*batch)
            torch.manual_seed(step)
            assert torch.equal(loss, eagerly(theirs, other, batch)), step
            assert alike(ours, theirs), step


class Tails:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.begun = self.over = 0

    def on_tail(self) -> None:
        self.begun += 1

    def tail_over(self) -> None:
        self.over += 1


@pytest.mark.parametrize("held", HELD)
def test_updates_that_wait_for_the_next_forward_pass_run_on_streams_too(held: str) -> None:
    ours, theirs, mine, other, batches = fresh()
    graph = offload.capture_training_step(ours, loss_of, mine, *batches[0])
    # All updates that can wait do: which of them `late=True` takes, the clock decides.
    on_host = host_updates(graph, offload.Costs(), "host")
    rotation = rotated(on_host, updates_of(on_host))
    assert rotation is not None
    peak = offload.plan(rotation.steady).peak_bytes
    made = offload.plan(rotation.steady, int(peak * 0.7), recompute=False)
    with Runner(made, "cuda", driver=Twin((held,)), key="steady") as runner:
        runner.tails = tails = Tails()
        late = RotatedStep(runner, rotation, "steady")
        for batch in batches:
            loss, *_ = late.run(*batch)
            assert torch.equal(loss, eagerly(theirs, other, batch))
        late.flush()
        assert alike(ours, theirs)
    # All updates of a step in between wait for the next one; those of the flush are a tail.
    assert tails.begun == tails.over > 0
