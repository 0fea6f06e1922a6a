"""Measures the accuracy of a finished run, with its final weights (the averages, if it keeps them).

It is measured on the test set if there is one, and on the hold-out otherwise. A module logs
`test_accuracy` in test_step; without a test_step, its validation_step and the monitored metric are
used. Language models log `test_perplexity` (`val_perplexity`) instead.
"""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from perfect.assembly import Data
from perfect.callbacks.phase_switch import PhaseSwitch


def judge(
    trainer: L.Trainer, module: L.LightningModule, data: Data, switch: PhaseSwitch
) -> dict[str, Any]:
    """Return `accuracy`, `perplexity`, and the set each was measured on; None if not logged."""
    own = data.datamodule
    tests, validates = (is_overridden(f"{s}_step", module) for s in ("test", "validation"))
    if tests and data.test is not None:
        return _figures(trainer.test(module, data.test, verbose=False), "test_accuracy", "test")
    if tests and own is not None and is_overridden("test_dataloader", own):
        results = trainer.test(module, datamodule=own, verbose=False)
        return _figures(results, "test_accuracy", "test")
    if validates and data.test is not None:
        return _figures(trainer.validate(module, data.test, verbose=False), switch.monitor, "test")
    if validates and own is not None and is_overridden("val_dataloader", own):
        results = trainer.validate(module, datamodule=own, verbose=False)
        return _figures(results, switch.monitor, "holdout")
    return _figures([], "", "")


def _figures(results: Any, name: str, where: str) -> dict[str, Any]:
    seen = results[0] if results else {}
    accuracy = seen.get(name)
    perplexity = seen.get("test_perplexity", seen.get("val_perplexity"))
    return {
        "accuracy": accuracy,
        "accuracy_on": where if accuracy is not None else None,
        "perplexity": perplexity,
        "perplexity_on": where if perplexity is not None else None,
    }
