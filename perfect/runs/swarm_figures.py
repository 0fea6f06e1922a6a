"""Shows the swarm of a peer while it trains: a table, a line of progress, and logged figures.

    generation 3   lanes   samples/s   sent        state
    a                  5         812   1.2 GiB     writes
    b                  3         540   1.2 GiB     this peer

Loggers get elastic/peers (members of the generation), elastic/generation (its number) and
elastic/gap_seconds (the seconds waited in unplanned gaps between generations so far), and of each
member:

elastic/NAME/lanes               of the latest step
elastic/NAME/samples_per_second  while it computed them
elastic/NAME/sent_bytes          bytes of sums that it had sent to other members since it joined,
                                 before the reduce of the latest step
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
from rich import box
from rich.table import Table
from rich.text import Text

from perfect.report.words import size
from perfect.runs.record import RunLog
from perfect.runs.swarm_record import swarm_record
from trainers.elastic.deciding.header import Header
from trainers.elastic.deciding.view import View
from trainers.elastic.peer.elastic_strategy import ElasticStrategy
from trainers.elastic.peer.step_log import read_lines


def swarm_words(trainer: L.Trainer) -> list[str]:
    """Return the generation and its members in words; nothing if the run is no swarm's."""
    swarm = trainer.strategy
    if not isinstance(swarm, ElasticStrategy):
        return []
    return ["coming in" if swarm.view is None else words_of(swarm.view, swarm.headers)]


def swarm_board(trainer: L.Trainer) -> Table | None:
    """Return the generation and its members as a table; None if this peer is in none."""
    swarm = trainer.strategy
    if not isinstance(swarm, ElasticStrategy) or swarm.view is None:
        return None
    return board_of(swarm.view, swarm.headers, swarm.global_rank)


def words_of(view: View, headers: Sequence[Header]) -> str:
    """Say it in a line."""
    members = "; ".join(
        f"{one.name} {len(one.done)} lanes {one.samples_per_second:.0f} samples/s"
        f" {size(one.pace.sent)} sent"
        for one in _members(view, headers)
    )
    return f"generation {view.generation}: {members}"


def board_of(view: View, headers: Sequence[Header], own_rank: int) -> Table:
    """Say it in a row for each member."""
    table = Table(f"generation {view.generation}", box=box.SIMPLE, pad_edge=False)
    for head in ("lanes", "samples/s", "sent"):
        table.add_column(head, justify="right")
    table.add_column("state")
    for rank, one in enumerate(_members(view, headers)):
        said = {
            "writes": rank == 0,
            "this peer": rank == own_rank,
            "computes nothing": not one.done,
            "a change is announced": one.announced,
        }
        table.add_row(
            Text(one.name),
            str(len(one.done)),
            f"{one.samples_per_second:.0f}",
            size(one.pace.sent),
            ", ".join(words for words, is_so in said.items() if is_so),
        )
    return table


def _members(view: View, headers: Sequence[Header]) -> list[Header]:
    """The members of the generation, also those of whom nothing was heard yet."""
    known = {one.name: one for one in headers}
    return [known.get(name, Header(name, 0)) for name in view.names]


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
            logger.log_metrics(figures_by_name(swarm.headers), trainer.global_step - 1)


def figures_by_name(headers: Sequence[Header]) -> dict[str, float]:
    """Return what loggers are given of the members."""
    found: dict[str, float] = {}
    for one in headers:
        found[f"elastic/{one.name}/lanes"] = float(len(one.done))
        found[f"elastic/{one.name}/samples_per_second"] = one.samples_per_second
        found[f"elastic/{one.name}/sent_bytes"] = float(one.pace.sent)
    return found


def swarm_table(trainer: L.Trainer) -> dict[str, Any]:
    """Return the section `elastic` of run.json; nothing if the run is no swarm's."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, SwarmFigures):
            return {"elastic": callback.section(trainer)}
    return {}
