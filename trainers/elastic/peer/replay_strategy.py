"""Trains a swarm's run again in one process, from its logs, and compares every step's digest."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from trainers.elastic.commits.commit import Commits
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_fit import ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.replaying.logged_commits import LoggedCommits
from trainers.elastic.replaying.step_log import read_history


class ReplayStrategy(ElasticFit):
    """`L.Trainer(strategy=ReplayStrategy(logs), max_steps=steps)`."""

    strategy_name = "replay"

    def __init__(
        self,
        logs: Sequence[Path],
        global_batch: int | None = None,
        budget: str | int | None = None,
        **more: Any,
    ) -> None:
        """`logs`: of one peer that was there from the first step, or of several that together
        were. `global_batch`: as the swarm had it; the loader's batch size if not given. `budget`:
        of bytes of the device, as of `ElasticStrategy`; the swarm may have had another."""
        self.history = read_history(logs)
        run = self.history.run
        super().__init__(global_batch, run["lanes"], run["sum"], budget, **more)
        self.replayed = LoggedCommits(self.history)

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        micro = self.history.run["micro"]
        if shares.micro != micro:
            raise CannotBeElastic(
                f"the samples of a lane's step are {shares.micro} here, and {micro} in the logs:"
                " give the same global batch"
            )
        return self.replayed
