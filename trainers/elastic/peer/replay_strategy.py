"""Trains a swarm's run again in one process, from its logs, and compares every step's digest."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from offload import Plan
from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.errors import CannotBeElastic, ReplayDiffers
from trainers.elastic.peer.elastic_fit import Commits, ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.peer.step_log import History, read_history
from trainers.elastic.reducing.canonical import sum_in_order
from trainers.elastic.work.digests import Commit, digest_of
from trainers.elastic.work.plain_work import PlainWork
from trainers.elastic.work.planned_work import PlannedWork


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
        """`logs`: of a peer that was there from the first step, or of several that together were.
        `global_batch`: that of the swarm; the loader's batch size if not given. `budget`: as of
        `ElasticStrategy`; the swarm may have had another."""
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


class LoggedCommits(Commits):
    """Computes every step's lanes as the logs say."""

    def __init__(self, history: History) -> None:
        self.compared = 0
        self._history = history
        self._step = 0

    def next(self, work: PlainWork) -> Commit:
        logged = self._history.commits.get(self._step)
        if logged is None:
            raise ReplayDiffers(
                f"the logs end before step {self._step + 1}: give the logs of more peers"
            )
        sums: list[Tensor] = []
        logs: list[LaneLogs] = []
        buffers: tuple[Tensor, ...] = ()
        for _, lanes in logged.added:
            work.begin(self._step)
            left = lanes
            while left:
                left = left[work.compute(left) :]
            sums.append(work.sums.clone())
            logs.append(work.logs)
            if work.lanes()[0] in lanes:
                buffers = work.buffers()
        total = sum_in_order(sums)
        digest = digest_of([total, *buffers])
        if digest != logged.digest:
            raise ReplayDiffers(
                f"step {self._step} comes to {digest} here, and to {logged.digest} in the log: the"
                " data, the code or the machine differ, or a peer computed wrongly"
            )
        self.compared += 1
        return Commit(
            step=self._step,
            added=logged.added,
            total=work.as_floats(total),
            logs=reduce(LaneLogs.plus, logs),
            buffers=buffers,
            digest=digest,
        )

    def applied(self, commit: Commit) -> None:
        self._step = commit.step + 1


class LanePlanned(Exception):
    """Leaves the fit, because the plan is made."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("the plan of a lane is made")
        self.plan = plan


class LanePlanStrategy(ElasticFit):
    """`fit` raises `LanePlanned` with the plan of a lane when it has made an update, too."""

    strategy_name = "lane_plan"

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        return OneLaneCommits()


class OneLaneCommits(Commits):
    """Commits the first lane of the first step."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def next(self, work: PlainWork) -> Commit:
        assert isinstance(work, PlannedWork), "a lane has a plan only by a budget"
        work.begin(0)
        work.compute(work.lanes()[:1])
        self._plan = work.planning.plan
        return Commit(0, (), work.as_floats(work.sums), work.logs, work.buffers(), "")

    def applied(self, commit: Commit) -> None:
        if self._plan is None:
            raise CannotBeElastic("the first lane ran without a plan, so no budget can be kept")
        raise LanePlanned(self._plan)
