"""Any optimizer whose step is traced: planned, in pieces, on the host, and with eager's bits.

The oracle is the optimizer itself, called as everybody calls it.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import own_optimizers as own
from support.optimizer_twins import Twins, batch, loss_of, made_by, net
from torch import nn, optim

import offload
from offload import BudgetTooSmall, Plan
from offload.lowering import update_splits

STEPS = 4
FOREACH: tuple[dict[str, Any], ...] = ({"foreach": True}, {"foreach": False})
FUSED = {"fused": True}


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each optimizer, with the options that change what its step does."""
    both = {"weight_decay": 0.1, "maximize": True}
    yield optim.Adam, {"amsgrad": True, **both}
    yield optim.AdamW, {"lr": torch.tensor(0.01)}
    yield optim.AdamW, {"amsgrad": True, **FUSED}
    yield optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    yield optim.Adadelta, both
    yield optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5, **both}
    yield optim.Adagrad, {"fused": True}
    yield optim.Adamax, both
    yield optim.NAdam, {"decoupled_weight_decay": True, **both}
    yield optim.RAdam, {"decoupled_weight_decay": True, **both}
    yield optim.RAdam, {"lr": torch.tensor(0.01), "foreach": False}
    yield optim.ASGD, {"t0": 3, "lambd": 0.1}
    yield optim.RMSprop, {"centered": True, "momentum": 0.9, **both}
    yield optim.Rprop, {"maximize": True, "etas": (0.4, 1.1)}
    yield optim.Adafactor, both
    yield optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    yield optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}
    for kind in (own.Lion, own.Slow, own.Beginning, own.Trusting, own.Warm):
        yield kind, {}
    yield own.Named, {"amsgrad": True, "weight_decay": 0.1}


def others() -> Iterator[tuple[Any, dict[str, Any]]]:
    """All the other options."""
    for how in ({}, *FOREACH, FUSED):
        for more in ({}, {"weight_decay": 0.1, "maximize": True}, {"amsgrad": True}):
            yield from ((kind, {**how, **more}) for kind in (optim.Adam, optim.AdamW))
        for more in ({}, {"momentum": 0.9, "maximize": True}, {"momentum": 0.9, "nesterov": True}):
            yield optim.SGD, {"lr": 0.0123, **how, **more}
    kinds = (optim.Adadelta, optim.Adagrad, optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD)
    for kind in (*kinds, optim.RMSprop, optim.Rprop, optim.Adafactor):
        yield from ((kind, more) for more in ({}, *FOREACH))
    yield optim.RMSprop, {"momentum": 0.9, "foreach": True}
    yield optim.ASGD, {"t0": 3, "foreach": True}
    yield optim.ASGD, {"weight_decay": 0.1, "maximize": True}
    yield optim.Muon, {}
    for more in ({"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}, {"fused": True}):
        yield optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, **more}
    for kind in (optim.RMSprop, optim.Adamax, optim.Adadelta):
        yield kind, {"lr": torch.tensor(0.01)}


def said(case: Any) -> str:
    kind, more = case
    return "-".join([kind.__name__, *(f"{k}={v}" for k, v in more.items())])


def smallest(graph: offload.TaskGraph, **how: Any) -> Plan:
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, budget=1, **how)
    # the numbers vary from the second step on, which groups the calls otherwise
    made = offload.plan(graph, budget=max(refused.value.needed + 512, 68 << 10), **how)
    made.verify()
    return made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_splits, "ON_HOST", 40 << 10)


WHOLE = (optim.Adafactor, optim.Muon, own.Trusting)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "case",
    [*cases(), *[pytest.param(case, marks=pytest.mark.full) for case in others()]],
    ids=said,
)
def test_every_optimizer_has_eagers_bits_in_the_smallest_budget_and_on_the_host(case: Any) -> None:
    kind, more = case
    twins = Twins.of(made_by(kind, more))
    graph = twins.graph()
    twins.run(smallest(graph))
    on_host = offload.plan(graph, optimizer="host")
    twins.run(on_host, engine="serial")
    twins.run(offload.plan(graph), steps=1)


SHORT = (optim.ASGD, optim.Rprop, optim.SGD, optim.Adafactor, own.Lion)
COUNTED = [
    (optim.RAdam, {"betas": (0.9, 0.999)}),  # rectified from step 6 on
    (optim.RAdam, {"betas": (0.5, 0.7), "foreach": True}),  # never
    (optim.ASGD, {"t0": 5}),
    (optim.ASGD, {"t0": 0, "foreach": True}),
    (optim.NAdam, {"momentum_decay": 0.1}),
    (optim.Adafactor, {"beta2_decay": -0.5}),
    (own.Lion, {}),
]


@pytest.mark.parametrize("case", COUNTED, ids=said)
@pytest.mark.parametrize("before", [0, pytest.param(3, marks=pytest.mark.full), 7])
def test_counters_cross_their_thresholds_as_in_eager_wherever_the_capture_was(
    case: Any, before: int
) -> None:
    twins = Twins.of(made_by(*case))
    for optimizer, module in (
        (twins.eager_optimizer, twins.eager),
        (twins.our_optimizer, twins.ours),
    ):
        for number in range(before):
            optimizer.zero_grad()
            x, y = batch(100 + number)
            loss_of(module(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
    twins.run(offload.plan(twins.graph()), steps=12)


@pytest.mark.parametrize(
    "case",
    [
        case if case[0] in SHORT else pytest.param(case, marks=pytest.mark.full)
        for case in cases()
    ],
    ids=said,
)  # fmt: skip
def test_checkpoints_go_on_in_both_directions(case: Any) -> None:
    make = made_by(*case)
    twins = Twins.of(make)
    twins.run(offload.plan(twins.graph()), steps=3)
    # Ours goes on eagerly.
    eager = net()
    eager.load_state_dict(twins.ours.state_dict())
    optimizer = make(eager)
    optimizer.load_state_dict(copy.deepcopy(twins.our_optimizer.state_dict()))
    # Eager's goes on planned.
    ours = net()
    ours.load_state_dict(twins.eager.state_dict())
    planned = make(ours)
    planned.load_state_dict(copy.deepcopy(twins.eager_optimizer.state_dict()))
    crossed = Twins(eager, ours, optimizer, planned, twins.step)
    crossed.run(offload.plan(crossed.graph()), steps=3)


def test_a_state_that_is_loaded_between_two_steps_is_used() -> None:
    for kind, more in ((optim.Rprop, {}), (optim.NAdam, {}), (own.Slow, {})):
        make = made_by(kind, more)
        twins, other = Twins.of(make), Twins.of(make)
        for _ in range(3):
            other.eagerly()
        with twins.stepping() as step:
            # Before the first step, and again later.
            for _ in range(2):
                for module, optimizer in (
                    (twins.ours, twins.our_optimizer),
                    (twins.eager, twins.eager_optimizer),
                ):
                    module.load_state_dict(other.eager.state_dict())
                    optimizer.load_state_dict(copy.deepcopy(other.eager_optimizer.state_dict()))
                twins.both(step)
                twins.both(step)


@pytest.mark.usefixtures("small_pieces")
def test_groups_have_their_own_settings() -> None:
    def make(module: Any) -> Any:
        first, last = module[0], module[2]
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        return optim.RMSprop(
            [
                {"params": [first.weight], "lr": 0.1, "momentum": 0.9, "centered": True},
                {"params": [first.bias, frozen], "alpha": 0.5, "foreach": True},
                {"params": [last.weight], "weight_decay": 0.1, "maximize": True},
            ]
        )

    twins = Twins.of(make)
    twins.run(smallest(twins.graph()))


@pytest.mark.parametrize(
    "case",
    [
        (optim.RAdam, {}),
        (optim.Rprop, {}),
        (optim.Adagrad, {}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (own.Slow, {}),
    ],
    ids=said,
)
def test_batches_of_several_shapes_share_one_state(case: Any) -> None:
    twins = Twins.of(made_by(*case))
    with twins.stepping() as step:
        for size in (8, 8, 3, 3, 8, 3, 5):
            twins.both(step, size)


class Sum(nn.Module):
    """Autograd gives both parameters one tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(70))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (self.one + self.other)).sum(1, keepdim=True)


def test_a_step_that_changes_gradients_changes_those_of_no_other_parameter() -> None:
    eager, ours = Sum(), Sum()
    twins = Twins(eager, ours, own.Slow(eager.parameters()), own.Slow(ours.parameters()))
    twins.run(offload.plan(twins.graph()))


def test_schedules_are_followed() -> None:
    twins = Twins.of(made_by(optim.RAdam, {}))
    schedules = [
        optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        for optimizer in (twins.eager_optimizer, twins.our_optimizer)
    ]
    with twins.stepping() as step:
        for _ in range(9):
            twins.eagerly()
            step(*batch(twins.step))
            twins.step += 1
            for schedule in schedules:
                schedule.step()
            twins.compare()


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    def make(module: nn.Module) -> Any:
        return optim.NAdam([*module.parameters(), nn.Parameter(torch.ones(5))])

    twins = Twins.of(make)
    twins.run(offload.plan(twins.graph()))
