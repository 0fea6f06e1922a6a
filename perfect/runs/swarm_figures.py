"""Shows the swarm of a peer while it trains: a table, a line of progress, and logged figures.

Loggers get elastic/peers (members of the generation), elastic/generation (its number) and
elastic/gap_seconds (the seconds waited in unplanned gaps between generations so far), and of each
member:

elastic/NAME/lanes               of the latest step
elastic/NAME/samples_per_second  while it computed them
elastic/NAME/sent_bytes          bytes of sums that it had sent to other members since it joined,
                                 before the reduce of the latest step
"""

import faulthandler
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

import lightning as L
from rich import box
from rich.table import Table
from rich.text import Text

from perfect.report.words import size
from perfect.runs.record import RunLog
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
        f"{header.name} {len(header.done)} lanes {header.samples_per_second:.0f} samples/s"
        f" {size(header.pace.sent)} sent"
        for header in _members(view, headers)
    )
    return f"generation {view.generation}: {members}"


def board_of(view: View, headers: Sequence[Header], own_rank: int) -> Table:
    """Say it in a row for each member."""
    table = Table(f"generation {view.generation}", box=box.SIMPLE, pad_edge=False)
    for head in ("lanes", "samples/s", "sent"):
        table.add_column(head, justify="right")
    table.add_column("state")
    for rank, header in enumerate(_members(view, headers)):
        remarks = {
            "writes": rank == 0,
            "this peer": rank == own_rank,
            "computes nothing": not header.done,
            "a change is announced": header.announced,
        }
        table.add_row(
            Text(header.name),
            str(len(header.done)),
            f"{header.samples_per_second:.0f}",
            size(header.pace.sent),
            ", ".join(words for words, is_so in remarks.items() if is_so),
        )
    return table


def _members(view: View, headers: Sequence[Header]) -> list[Header]:
    """The members of the generation, also those that have sent no header yet."""
    known = {header.name: header for header in headers}
    return [known.get(name, Header(name, 0)) for name in view.names]


class SwarmFigures(L.Callback):
    """Logs the swarm's figures, and lets the run's log begin where this peer came in."""

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
    figures: dict[str, float] = {}
    for header in headers:
        figures[f"elastic/{header.name}/lanes"] = float(len(header.done))
        figures[f"elastic/{header.name}/samples_per_second"] = header.samples_per_second
        figures[f"elastic/{header.name}/sent_bytes"] = float(header.pace.sent)
    return figures


def swarm_table(trainer: L.Trainer) -> dict[str, Any]:
    """Return the section `elastic` of run.json; nothing if the run is no swarm's."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, SwarmFigures):
            return {"elastic": callback.section(trainer)}
    return {}


Line = Mapping[str, Any]
PLANNED = "somebody came"
"""Why a generation ends without a gap."""


@dataclass(slots=True)
class _PeerSums:
    """What is counted of one peer."""

    name: str
    lanes: int = 0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    present: float = 0.0
    bytes_sent: int = 0
    reported: int | None = None
    """The bytes sent, by its latest report."""

    def add(self, samples: int, seconds: float, sent: int, present: float) -> None:
        """Count its report of a step. `present`: the seconds since the step before."""
        self.samples += samples
        self.seconds += seconds
        self.present += present
        if self.reported is not None:  # a peer that joins again under its name begins at 0
            self.bytes_sent += sent - self.reported if sent >= self.reported else sent
        self.reported = sent

    def plain(self) -> dict[str, Any]:
        values = asdict(self) | {
            key: round(getattr(self, key), 3) for key in ("seconds", "present")
        }
        del values["reported"]
        return values


def swarm_record(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the section `elastic` of run.json."""
    first = next((line["time"] for line in lines), 0.0)
    generations: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    peers: dict[str, _PeerSums] = {}
    began: dict[str, Any] = {}
    lanes = 0
    latest: float | None = None
    for line in lines:
        if "run" in line:
            lanes = line["run"]["lanes"]
        elif "begins" in line:
            began = {"step": line["begins"], "with": line["with"]}
            latest = None
            for peer in peers.values():
                peer.reported = None  # what it has sent while this peer was away is not counted
        elif "generation" in line:
            latest = line["time"] if latest is None else latest
            if generations:
                generations[-1]["ended"] = PLANNED
            generations.append(
                {
                    "generation": line["generation"],
                    "step": line["step"],
                    "seconds": round(line["time"] - first, 3),
                    "members": line["members"],
                    "steps": 0,
                    "ended": None,
                }
            )
        elif "gap" in line:
            gaps.append({"step": line["step"], "seconds": line["gap"], "why": line["why"]})
            if len(generations) > 1:  # the line comes when the next generation has begun
                generations[-2]["ended"] = line["why"]
        elif "commit" in line:
            if generations:
                generations[-1]["steps"] += 1
            for name, added in line["added"]:
                peer = peers.setdefault(name, _PeerSums(name))
                peer.lanes += len(added)
                peer.steps += 1
            for name, samples, seconds, sent in line.get("peers", ()):
                present = line["time"] - latest if latest is not None else 0.0
                peers.setdefault(name, _PeerSums(name)).add(samples, seconds, sent, present)
            latest = line["time"]
    return {
        "lanes": lanes,
        "began": began,
        "generations": generations,
        "gaps": gaps,
        "peers": [peer.plain() for peer in peers.values()],
    }


STDERR = 2
OF_GLOO = re.compile(rb"/gloo/|ProcessGroupGloo\.cpp")


@contextmanager
def gloo_apart(log: Path) -> Iterator[None]:
    """Send the output of C++ libraries to `log` in this block, and show at its end what is not of
    gloo. If the process dies in the block, the terminal has Python's traceback, `log` the rest."""
    before = sys.stderr
    terminal = os.fdopen(os.dup(STDERR), "w", buffering=1)
    reports = faulthandler.is_enabled()
    with terminal, log.open("ab+") as file:
        begin = file.tell()
        if _descriptor(before) == STDERR:
            sys.stderr = terminal
        if not reports:
            faulthandler.enable(terminal)
        os.dup2(file.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(terminal.fileno(), STDERR)
            sys.stderr = before
            if not reports:
                faulthandler.disable()
            file.seek(begin)
            for line in file:
                if not OF_GLOO.search(line):
                    os.write(STDERR, line)
            if not file.tell():
                log.unlink()


def _descriptor(stream: object) -> int | None:
    """Return the descriptor that a stream writes to; None if it writes to none."""
    try:
        return stream.fileno()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, UnsupportedOperation, ValueError):
        return None
