"""What a peer tells of its swarm while it trains: to the loggers, and in its line of progress.

elastic/peers         the members of the present generation
elastic/generation    its number
elastic/gap_seconds   the seconds that this peer has waited in gaps so far: from the end of a
                      generation, which nobody had planned, to the beginning of the next one

and of each member:

elastic/NAME/lanes               of the latest step
elastic/NAME/samples_per_second  while it computed at them
elastic/NAME/sent_bytes          bytes of sums that it had sent to other members since it joined,
                                 before the reduce of the latest step
"""

from collections.abc import Sequence
from typing import Any

import lightning as L

from perfect.runs.record import RunLog
from perfect.runs.swarm_record import swarm_record
from trainers.elastic.deciding.peer_figures import PeerFigures
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.replaying.step_log import read_lines


class SwarmFigures(L.Callback):
    """Logs the figures as often as PhaseSwitch logs its own, and lets the run's log begin at the
    step at which this peer came in."""

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._seconds: float | None = None

    def section(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the section `elastic` of run.json."""
        path = getattr(trainer.strategy, "log_path", None)
        if path is None or not path.exists():
            return {}
        return {**swarm_record(read_lines(path)), "seconds_per_sample": self._seconds}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step:
            self._log.resume(trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any
    ) -> None:
        swarm = trainer.strategy
        every = max(1, getattr(trainer, "log_every_n_steps", 50))
        if not isinstance(swarm, ElasticStrategy):
            return
        self._seconds = swarm.seconds_per_sample or self._seconds
        if trainer.global_step % every:
            return
        view = swarm.view
        figures = {
            "elastic/peers": float(len(view.members)) if view else 0.0,
            "elastic/generation": float(view.generation) if view else 0.0,
            "elastic/gap_seconds": sum(seconds for _, seconds in swarm.gaps),
        }
        pl_module.log_dict(figures, on_step=True, on_epoch=False)
        # Lightning would repeat what was logged of a member after its death, until the pass ends.
        for logger in trainer.loggers:
            logger.log_metrics(figures_by_name(swarm.figures), trainer.global_step - 1)


def figures_by_name(figures: Sequence[PeerFigures]) -> dict[str, float]:
    """Return what loggers are given of the members."""
    found: dict[str, float] = {}
    for one in figures:
        found[f"elastic/{one.name}/lanes"] = float(one.lanes)
        found[f"elastic/{one.name}/samples_per_second"] = one.samples_per_second
        found[f"elastic/{one.name}/sent_bytes"] = float(one.sent)
    return found


def swarm_table(trainer: L.Trainer) -> dict[str, Any]:
    """Return the section `elastic` of run.json; nothing if the run is no swarm's."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, SwarmFigures):
            return {"elastic": callback.section(trainer)}
    return {}
