"""What `self.log(on_epoch=True)` has collected in a pass, for a pass that is resumed in its middle.

    before   b0 b1 b2: value 3.1 of 3 | checkpoint
    resumed                             b3: value 1.0 of 1, and the earlier 3.1 of 3 | b4 ...

A checkpoint of Lightning's does not have it, so the mean of a resumed pass would be one over its
rest. Metrics of torchmetrics that a module logs are not kept: they are states of the module.
"""

from typing import Any

import lightning as L
import torch

from trainers.lightning_seams import results

NAMES = ("value", "cumulated_batch_size")


class PassLogs:
    """One job's."""

    def __init__(self) -> None:
        self._earlier: dict[str, dict[str, torch.Tensor]] = {}
        """By the name of the log call: what the part of the pass before the checkpoint gave."""

    def collected(self, trainer: L.Trainer) -> dict[str, dict[str, torch.Tensor]]:
        """Return what the pass has collected so far."""
        return {
            key: {name: getattr(one, name).clone() for name in NAMES if hasattr(one, name)}
            for key, one in _numbers(trainer).items()
        }

    def resume(self, earlier: dict[str, dict[str, torch.Tensor]]) -> None:
        """Note what the first part of the pass has collected."""
        self._earlier = dict(earlier)

    def add_earlier(self, trainer: L.Trainer) -> None:
        """Add the first part to every log call that has been made since."""
        if not self._earlier:
            return
        for key, one in _numbers(trainer).items():
            earlier = self._earlier.pop(key, None)
            if earlier is None:
                continue
            if one.meta.is_max_reduction or one.meta.is_min_reduction:
                one.value = one.meta.reduce_fx(earlier["value"], one.value)
                continue
            for name, value in earlier.items():
                setattr(one, name, value + getattr(one, name))

    def forget(self) -> None:
        """Forget the first part, because its pass is over."""
        self._earlier = {}


def _numbers(trainer: L.Trainer) -> dict[str, Any]:
    """Return the log calls that collect plain numbers over a pass."""
    kept = results(trainer.fit_loop.epoch_loop).items()
    return {key: one for key, one in kept if one.is_tensor and one.meta.on_epoch}
