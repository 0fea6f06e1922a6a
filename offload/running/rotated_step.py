"""Runs a step whose last updates wait for the next one's forward pass (lowering/rotation.py).

    whole --run: first--> pending --run: steady--> pending --flush--> whole

While updates are pending, their parameters and states are those of the step before. Nobody may look
at them before `flush`. A step that fails before any of its updates began leaves the pending ones
pending. A step that fails later leaves the tensors half way between two steps, as any failed step
does.
"""

from collections.abc import Hashable
from typing import Any

import torch

from offload.lowering.rotation import Rotation
from offload.running.runner import Runner


class RotatedStep:
    """The three graphs of a rotation in a runner; the steady one is bound as `key`."""

    def __init__(self, runner: Runner, rotation: Rotation, key: Hashable) -> None:
        self.pending = False
        """Whether updates of the last step have not run yet."""
        self._runner = runner
        self._steady = key
        self._first = (key, "first")
        self._flush = (key, "flush")
        runner.add(self._first, rotation.first)
        runner.add(self._flush, rotation.flush)

    def run(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        """Run one step, and leave its last updates pending."""
        outputs = self._run(self._steady if self.pending else self._first, *batch)
        self.pending = True
        return outputs

    def flush(self) -> None:
        """Run the pending updates. Does nothing if there are none."""
        if self.pending:
            self._run(self._flush)
            self.pending = False

    def forget(self) -> None:
        """Remove the graphs from the runner. No updates may be pending."""
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
