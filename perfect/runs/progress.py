"""Shows the progress of a run in one line: step, phase, loss, accuracy, stall, decode rate.

On a terminal it is a bar that stays in place, and in a swarm a table of the members below it; the
test set has a bar of its own. Elsewhere (a log file, CI) one line is printed at each validation.
"""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import lightning as L
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from perfect.callbacks.phase_switch import PhaseSwitch
from perfect.callbacks.train_loaders import decoded_by_all, in_memory
from perfect.report.words import percent
from perfect.runs.record import RunLog
from perfect.runs.swarm_figures import swarm_board, swarm_words

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25


class Bar(Progress):
    """A bar with something below it."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


class RunProgress(L.Callback):
    """Shows the counters of `switch` and of the loader."""

    def __init__(
        self,
        switch: PhaseSwitch,
        run_log: RunLog,
        console: Console | None = None,
        *,
        own_folder: bool = False,
    ) -> None:
        """`own_folder`: every rank has one, and shows its progress. Otherwise rank 0 does."""
        self._own_folder = own_folder
        self._switch = switch
        self._log = run_log
        self._console = console or Console(stderr=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._shown = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start(trainer, "", self._switch.total_steps)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._bar is None or time.monotonic() - self._shown < REFRESH_SECONDS:
            return
        self._shown = time.monotonic()
        self._bar.below = swarm_board(trainer)
        self._bar.update(
            self._task,
            completed=trainer.global_step,
            total=self._switch.total_steps,
            description=self._line(trainer),
        )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is None and self._shows(trainer) and not trainer.sanity_checking:
            self._console.print(self._whole_line(trainer), highlight=False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is None and self._shows(trainer) and not trainer.enable_validation:
            self._console.print(self._whole_line(trainer), highlight=False)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches = sum(trainer.num_test_batches)
        self._start(trainer, "test set", batches if math.isfinite(batches) else None)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _shows(self, trainer: L.Trainer) -> bool:
        """Whoever wants only errors sees no progress (`perfect-train -q`)."""
        return log.isEnabledFor(logging.WARNING) and (self._own_folder or trainer.is_global_zero)

    def _start(self, trainer: L.Trainer, what: str, length: float | None) -> None:
        """Show a bar, if there is a terminal to show it on."""
        if self._shows(trainer) and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=length)
            self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, trainer: L.Trainer) -> str:
        switch, seconds = self._switch, max(self._log.wall_seconds, 1e-9)
        assert switch.loader is not None
        stats, metrics = switch.loader.stats, trainer.callback_metrics
        words = [
            f"step {trainer.global_step}/{switch.total_steps}",
            f"{switch.policy.phase.name} x{switch.policy.phase.reuse}",
        ]
        words += [
            f"{label} {said_as(float(metrics[name]))}"
            for label, name, said_as in (
                ("loss", "train_loss", "{:.3f}".format),
                ("accuracy", switch.monitor, percent),
                ("perplexity", "val_perplexity", "{:.2f}".format),
            )
            if name in metrics
        ]
        if not in_memory(switch.loader):
            words.append(f"{decoded_by_all(trainer, switch.loader) / seconds:.0f} decoded/s")
        words.append(f"stall {percent(stats.stall_seconds / seconds, 0)}")
        return "  ".join(words)

    def _whole_line(self, trainer: L.Trainer) -> str:
        """The line where there is no table below it."""
        return "  ".join([self._line(trainer), *swarm_words(trainer)])
