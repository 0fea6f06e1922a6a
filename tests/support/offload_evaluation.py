"""Evaluating with and without OffloadStrategy."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from support import offload_lightning as ol
from support.accelerators import here

from trainers import OffloadStrategy

METHODS = ("validate", "test", "predict")


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


def both(method: str, make: Any = ol.Module, budget: Any = "60%", **options: Any) -> None:
    """With the strategy and without, told apart by nothing."""
    strategy = OffloadStrategy(budget=budget)
    ours, trainer = run(method, strategy, make, **options)
    theirs, plain = run(method, "auto", make, **options)
    assert ol._unequal("", ours, theirs) == []
    assert ol._unequal("", trainer.callback_metrics, plain.callback_metrics) == []
    state = trainer.lightning_module.state_dict(), plain.lightning_module.state_dict()
    assert ol._unequal("state", *state) == []
    if budget is not None:
        assert strategy.plan.device_bytes
