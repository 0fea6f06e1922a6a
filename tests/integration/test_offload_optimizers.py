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


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("case", [*cases()], ids=said)
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
