"""Runs a step whose last updates wait for the next one's forward pass (lowering/late_updates.py).

    whole --run: first--> pending --run: steady--> pending --flush--> whole

While updates are pending, their parameters and their state are those of the step before: nobody may
look, `flush` comes first. A step that fails before any update of its began leaves them pending;
else it leaves the tensors half way between two steps, as a failed step does.
"""

from collections.abc import Hashable
from typing import Any

import torch

from offload.executor import Runner
from offload.lowering.late_updates import Rotation


class Late:
    """The three graphs of a rotation in a runner, the steady one as `key`."""

    def __init__(self, runner: Runner, rotation: Rotation, key: Hashable) -> None:
        self.pending = False
        """Whether updates of the last step have not run."""
        self._runner = runner
        self._steady = key
        self._first = (key, "first")
        self._flush = (key, "flush")
        runner.add(self._first, rotation.first)
        runner.add(self._flush, rotation.flush)

    def run(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step, its last updates pending."""
        outputs = self._run(self._steady if self.pending else self._first, *batch)
        self.pending = True
        return outputs

    def flush(self) -> None:
        """The step is whole; safe to call again."""
        if self.pending:
            self._run(self._flush)
            self.pending = False

    def forget(self) -> None:
        """The runner needs them no more; nothing is pending."""
        for key in (self._steady, self._first, self._flush):
            self._runner.forget(key)

    def _run(self, key: Hashable, *batch: torch.Tensor) -> tuple[Any, ...]:
        before = self._runner.trace
        try:
            return self._runner.run(key, *batch)
        except BaseException:
            trace = self._runner.trace
            self.pending = self.pending and (trace is before or not trace.began("update"))
            raise
