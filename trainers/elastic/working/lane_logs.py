"""What a module logs in the lanes of a step: held back, added up over all peers, logged once.

lane 0: self.log("acc", 0.5)   lane 1: self.log("acc", 0.7)     of 32 samples each
the step: log("acc", 0.6, batch_size=64) at every peer, with the arguments of the first call
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from trainers.elastic.errors import CannotBeElastic

REFUSED = {
    "sync_dist": "the swarm reduces what is logged by itself: leave sync_dist out",
    "rank_zero_only": "what is logged must be equal at every peer: leave rank_zero_only out",
    "metric_attribute": "a metric object counts the samples of one peer only: log a number",
}


class LogCatcher:
    """Stands in for `self.log` of one module while a lane is computed."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._size = 0
        self._sums: dict[str, float] = {}
        self._arguments: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Forget the sums of the step before. Arguments are kept: a peer may have no lane."""
        self._sums = {}

    @contextmanager
    def catching(self, size: int) -> Iterator[None]:
        """Catch what is logged of a lane with `size` samples."""
        self._size = size
        self._module.__dict__["log"] = self._catch
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def _catch(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if args:
            raise CannotBeElastic(f"self.log({name!r}): give its options by name, not by place")
        for option, why in REFUSED.items():
            if options.get(option):
                raise CannotBeElastic(f"self.log({name!r}, {option}={options[option]!r}): {why}")
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise CannotBeElastic(
                f"self.log({name!r}, reduce_fx={options['reduce_fx']!r}): lanes are reduced by"
                " their mean only"
            )
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            number = float(value.detach())
        elif isinstance(value, int | float):
            number = float(value)
        else:
            raise CannotBeElastic(
                f"self.log({name!r}) of a {type(value).__name__}: a swarm logs numbers only"
            )
        size = options.pop("batch_size", None) or self._size
        if size != self._size:
            raise CannotBeElastic(
                f"self.log({name!r}, batch_size={size}) in a lane of {self._size} samples: a swarm"
                " weights by samples; leave batch_size out"
            )
        self._arguments.setdefault(name, options)
        self._sums[name] = self._sums.get(name, 0.0) + number * size

    def sums(self) -> tuple[tuple[str, float], ...]:
        """Return what was logged, each value times its samples, in the order of names."""
        return tuple(sorted(self._sums.items()))

    def log(self, sums: Mapping[str, float], samples: int) -> None:
        """Log the means of a whole step."""
        for name, total in sums.items():
            options = self._arguments.get(name, {})
            self._module.log(name, total / samples, batch_size=samples, **options)
