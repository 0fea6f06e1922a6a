"""Ops that are given a `torch.Generator` draw what they do in eager PyTorch, and leave it there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from products import every_pair
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import offload
from offload import CaptureError, Runner
from offload.tracing.capture import capture as capture_by_fakes
from offload.tracing.capture import traced

Op = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
OPS: dict[str, Op] = {
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g),
    "rand like": lambda x, g: x + torch.rand_like(x, generator=g),
    "randint": lambda x, g: x + torch.randint(0, 9, (8,), generator=g),
    "randperm": lambda x, g: x[:, torch.randperm(8, generator=g)],
    "normal": lambda x, g: torch.normal(x, x.abs(), generator=g),
    "normal_": lambda x, g: x + torch.empty(8).normal_(generator=g),
    "uniform_": lambda x, g: x + nn.init.uniform_(torch.empty(8), generator=g),
    "exponential_": lambda x, g: x + torch.empty(8).exponential_(generator=g),
    "bernoulli": lambda x, g: x * torch.bernoulli(x.sigmoid(), generator=g),
    "bernoulli_": lambda x, g: x * torch.empty(8).bernoulli_(0.3, generator=g),
    "multinomial": lambda x, g: x + torch.multinomial(x.abs() + 0.1, 8, generator=g),
    "poisson": lambda x, g: x + torch.poisson(x.abs(), generator=g),
}
DEFAULT = torch.default_generator


class Noisy(nn.Module):
    """Two layers; the op draws before each of them, from one generator and from another."""

    def __init__(self, op: Op, generators: list[torch.Generator]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.op, self.generators = op, generators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, generator in zip(self.layers, self.generators, strict=True):
            x = functional.dropout(layer(self.op(x, generator)).tanh(), 0.2)
            x = x + torch.rand(8, generator=self.generators[0])
        return x


def states(*generators: torch.Generator) -> list[torch.Tensor]:
    return [one.get_state() for one in (DEFAULT, *generators)]


def trained(op: Op, budget: float | None, order: str, whose: str) -> Any:
    """The losses and the generators' states, of eager or of a runner."""
    torch.manual_seed(0)
    one, other = (torch.Generator().manual_seed(n) for n in range(2))
    pair = {"one": [one, one], "two": [one, other], "default": [one, DEFAULT]}[whose]
    model = Noisy(op, pair)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(3)]
    if order == "eager":
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, states(one, other)
    before = states(one, other)
    graph = offload.capture_training_step(model, functional.mse_loss, optimizer, *batches[0])
    assert all(map(torch.equal, before, states(one, other)))  # capturing moves none of them
    plan = offload.plan(graph)
    if budget is not None:
        with pytest.raises(offload.BudgetTooSmall) as refused:
            offload.plan(graph, budget=64)
        least = refused.value.needed
        plan = offload.plan(graph, budget=least + int(budget * (plan.peak_bytes - least)))
    with Runner(plan, order=order) as runner:
        return [runner(*b)[0] for b in batches], states(one, other)


@pytest.mark.parametrize(
    ("op", "budget", "order", "whose"),
    every_pair([*OPS], (None, 0.0, 0.5), ("priority", "random"), ("one", "two", "default")),
)
def test_draws_from_own_generators_are_eagers_and_so_are_their_states(
    op: str, budget: float | None, order: str, whose: str
) -> None:
    losses, ends = trained(OPS[op], budget, "eager", whose)
    found, left = trained(OPS[op], budget, order, whose)
    assert all(map(torch.equal, losses, found))
    assert all(map(torch.equal, ends, left))


OWN, SEEDED = (torch.Generator().manual_seed(n) for n in (5, 6))


def kept(run: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that runs something besides its result."""
    return lambda x: (x + 1, run(x))[0]


SETS = "the step sets the state of the random numbers"
MAKES = "draws from a torch.Generator that it makes itself"
READS = "a tensor that no op of torch makes"
TWICE = "two calls of the step do different things"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "made": (lambda x: x + torch.randn(3, generator=torch.Generator()), MAKES),
    "made and seeded": (
        lambda x: x + torch.randn(3, generator=torch.Generator().manual_seed(3)),
        MAKES,
    ),
    "a copy": (lambda x: x + torch.randn(3, generator=OWN.clone_state()), MAKES),
    "seeded to draw": (lambda x: x + torch.randn(3, generator=OWN.manual_seed(7)), SETS),
    "seeded as it is": (kept(lambda x: SEEDED.manual_seed(6)), SETS),
    "seeded after a draw": (
        kept(lambda x: (torch.randn(3, generator=OWN), OWN.manual_seed(7))),
        SETS,
    ),
    "seeded by chance": (kept(lambda x: OWN.seed()), SETS),
    "put back": (
        kept(lambda x: (s := OWN.get_state(), torch.randn(3, generator=OWN), OWN.set_state(s))),
        SETS,
    ),
    "the default seeded as it is": (kept(lambda x: DEFAULT.manual_seed(11)), SETS),
    "a state as a number": (lambda x: x + OWN.get_state().float().mean(), READS),
    "the default's state": (lambda x: x + torch.get_rng_state().float().mean(), READS),
    "a seed as a number": (lambda x: x + float(OWN.initial_seed()), TWICE),
    "the default's seed": (lambda x: x + float(torch.initial_seed()), TWICE),
}


@pytest.mark.parametrize("how", [*REFUSED])
def test_what_else_a_step_does_with_a_generator_is_refused_and_undone(how: str) -> None:
    step, message = REFUSED[how]
    torch.manual_seed(11)
    before = states(OWN, SEEDED)
    with pytest.raises(CaptureError, match=message):
        traced(step, torch.ones(3), reaches={"step": step, "own": [OWN, SEEDED]})
    assert all(map(torch.equal, before, states(OWN, SEEDED)))


def test_a_state_that_is_read_and_set_without_a_draw_between_changes_nothing() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, x, use_reentrant=False) + torch.rand(3, generator=OWN)

    before = OWN.get_state()
    with Runner(offload.plan(capture_by_fakes(step, torch.ones(3)))) as runner:
        found = runner(torch.ones(3))[0]
    OWN.set_state(before)
    assert torch.equal(found, step(torch.ones(3)))


def test_a_literal_that_is_not_a_number_is_the_same_in_two_traces() -> None:
    nan = torch.tensor([float("nan")])
    graph = traced(lambda x: x + torch.tensor([float("nan")]) + nan, torch.ones(1))
    assert len(graph.tasks) == 2


@pytest.mark.gpu
def test_a_step_with_a_generator_of_its_own_is_not_captured_into_a_graph_of_the_device() -> None:
    own = torch.Generator("cuda").manual_seed(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3, generator=own, device="cuda")

    expected = [
        torch.ones(3, device="cuda") + torch.randn(3, generator=own, device="cuda")
        for _ in range(4)
    ]
    own.manual_seed(1)
    plan = offload.plan(capture_by_fakes(step, torch.ones(3, device="cuda")))
    with (
        pytest.warns(RuntimeWarning, match=r"draws from a torch.Generator of its own"),
        Runner(plan, "cudagraph") as runner,
    ):
        found = [runner(torch.ones(3, device="cuda"))[0] for _ in range(4)]
    assert all(map(torch.equal, expected, found))
