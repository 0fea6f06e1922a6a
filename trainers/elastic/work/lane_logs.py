"""What a module logs in the lanes of a step: held back, added up over all peers, logged once.

lane 0: self.log("acc", 0.5)   lane 1: self.log("acc", 0.7)     of 32 samples each
the step: log("acc", 0.6, batch_size=64) at every peer, with the options of the calls
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import lightning as L
import torch

from trainers.elastic.deciding.header import LaneLogs, in_units, sum_of_units
from trainers.elastic.errors import CannotBeElastic

REFUSED = MappingProxyType(
    {
        "sync_dist": "the swarm reduces what is logged by itself: leave sync_dist out",
        "rank_zero_only": "what is logged must be equal at every peer: leave rank_zero_only out",
        "metric_attribute": "a metric object counts the samples of one peer only: log a number",
    }
)


class LogCatcher:
    """Stands in for `self.log` of one module while a lane is computed."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._size = 0
        self._caught: list[tuple[tuple[str, str], Any, int]] = []
        """By name and options: a number, or a tensor that may wait for the lane's kernels, and the
        samples of its lane."""

    def begin(self) -> None:
        """Forget the step before."""
        self._caught = []

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
        self._check(name, args, options)
        if not isinstance(value, int | float | torch.Tensor) or torch.as_tensor(value).numel() != 1:
            raise CannotBeElastic(
                f"self.log({name!r}) of a {type(value).__name__}: a swarm logs single numbers"
            )
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        given = {key: option for key, option in options.items() if option is not None}
        key = name, json.dumps(given, sort_keys=True)
        self._caught.append((key, value, self._size))

    def _check(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Refuse what cannot be reduced over lanes, and take out what says nothing new."""
        if args:
            raise CannotBeElastic(f"self.log({name!r}): give its options by name, not by place")
        for option, why in REFUSED.items():
            if options.pop(option, None):
                raise CannotBeElastic(f"self.log({name!r}, {option}=...): {why}")
        if (how := options.pop("reduce_fx", "mean")) not in ("mean", torch.mean):
            raise CannotBeElastic(
                f"self.log({name!r}, reduce_fx={how!r}): lanes are reduced by their mean only"
            )
        size = options.pop("batch_size", None) or self._size
        if size != self._size:
            raise CannotBeElastic(
                f"self.log({name!r}, batch_size={size}) in a lane of size {self._size}: a swarm"
                " weights by samples; leave batch_size out"
            )

    @property
    def values(self) -> tuple[tuple[str, str, int | None], ...]:
        """What was logged, as `LaneLogs` has it."""
        sums: dict[tuple[str, str], int | None] = {}
        for key, value, size in self._caught:
            sums[key] = sum_of_units(sums.get(key, 0), in_units(float(value) * size))
        return tuple((*key, sums[key]) for key in sorted(sums))

    def log(self, logs: LaneLogs) -> None:
        """Log the means of a whole step."""
        for name, options, units in logs.values:
            known = json.loads(options)
            self._module.log(name, logs.mean(units), batch_size=logs.samples, **known)
