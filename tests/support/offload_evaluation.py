"""Evaluating with and without OffloadStrategy, and how often steps were captured for it."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.accelerators import here

from trainers import OffloadStrategy
from trainers.offloading.steps.evaluation import Evaluation

METHODS = ("validate", "test", "predict")
HOST = "on the host, without offloading"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of steps that were captured, in order."""
    kinds: list[str] = []
    real = Evaluation._trace

    def traced(self: Evaluation, given: Any) -> Any:
        kinds.append(given.kind)
        return real(self, given)

    monkeypatch.setattr(Evaluation, "_trace", traced)
    yield kinds


def run(
    method: str,
    strategy: Any = "auto",
    make: Callable[[], L.LightningModule] = ol.Module,
    *,
    loaders: Any = None,
    weights: Any = None,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """What `trainer.validate` and the like return, and the trainer."""
    torch.manual_seed(3)
    module = make()
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **here(),
    }
    trainer = L.Trainer(strategy=strategy, **{**defaults, **options})
    torch.manual_seed(4)
    more: Any = {} if method == "predict" else {"verbose": False}
    result = getattr(trainer, method)(module, loaders or ol.data(20), **more)
    return result, trainer


def both(method: str, make: Any = ol.Module, budget: Any = "60%", **options: Any) -> Any:
    """Planned, and told apart from plain Lightning by nothing."""
    strategy = OffloadStrategy(budget=budget)
    ours, trainer = run(method, strategy, make, **options)
    theirs, plain = run(method, "auto", make, **options)
    assert ol._unequal("", ours, theirs) == []
    assert ol._unequal("", trainer.callback_metrics, plain.callback_metrics) == []
    state = trainer.lightning_module.state_dict(), plain.lightning_module.state_dict()
    assert ol._unequal("state", *state) == []
    assert strategy.plan.device_bytes
    return ours
