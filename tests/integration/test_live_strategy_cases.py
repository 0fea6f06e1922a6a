"""Modules, callbacks and loaders of others: a live strategy's run has plain Lightning's bits."""

from pathlib import Path
from typing import Any

import pytest
from support import live_features, live_holders, live_hooks, live_modules, live_ops, live_runs
from support import offload_lightning as ol
from support.live_modules import Case

from offload import BudgetTooSmall, OffloadError
from trainers.offloading.strategy import OffloadStrategy

OTHERS = (
    "ignore:`training_step` returned `None`",
    "ignore:None of the inputs have requires_grad=True",
    "ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Detected call of `lr_scheduler.step",
    "ignore:Using backward.. with create_graph=True",
)
"""Warnings that the cases have with plain Lightning, too."""
pytestmark = [
    pytest.mark.usefixtures("core"),
    *(pytest.mark.filterwarnings(line) for line in (*ol.QUIET, *OTHERS)),
]
MODULES = (live_modules, live_holders, live_hooks, live_features, live_runs)
CASES = [
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, type)
    and issubclass(each, Case)
    and each.__module__ == module.__name__
    and each not in (Case, live_modules.Manual, live_features.WithNorm, live_runs.OfOptimizer)
]
CASES += [*live_ops.OF_CALLS, *live_runs.OF_OPTIMIZERS]
ROWS = [
    pytest.param(each, budget, id=f"{each.__name__}-{budget or 'free'}")
    for n, each in enumerate(CASES)
    for budget in each.only or [(None, "70%")[n % 2]]
]


def trained(case: type[Case], strategy: Any, folder: Path) -> ol.Result:
    given = {"loader": case.loader(), "callbacks": case.callbacks(), "default_root_dir": folder}
    return ol.train(strategy, case, **given, **case.options)


@pytest.mark.parametrize(("case", "budget"), ROWS)
def test_a_case_has_the_bits_of_plain_lightning(
    case: type[Case], budget: Any, tmp_path: Path
) -> None:
    plain = trained(case, "auto", tmp_path / "plain")
    live = trained(case, OffloadStrategy(budget=budget), tmp_path / "live")
    assert ol.differences(plain, live) == []
    assert repr(plain.module.seen) == repr(live.module.seen)


@pytest.mark.parametrize(
    ("case", "budget", "devices"),
    [
        pytest.param(
            *row.values,
            2 + n % 3,
            id=f"{row.id}-{2 + n % 3}",
            marks=pytest.mark.full if n % 4 else (),
        )
        for n, row in enumerate(ROWS)
    ],
)
def test_a_case_on_several_devices_has_the_bits_of_plain_lightning(
    case: type[Case], budget: Any, devices: int, tmp_path: Path
) -> None:
    plain = trained(case, "auto", tmp_path / "plain")
    live = None
    while live is None:  # a device's share is smaller, and the largest task of a step is not
        strategy = OffloadStrategy(budget=budget, devices=devices)
        try:
            live = trained(case, strategy, tmp_path / str(budget))
        except BudgetTooSmall as refused:
            budget = refused.needed
    assert ol.differences(plain, live) == []


def test_compiled_kernels_that_keep_no_budget_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"torch\.compile made a part of this step.*budget=None"):
        trained(live_features.CompiledKernels, OffloadStrategy(budget="70%"), tmp_path)
