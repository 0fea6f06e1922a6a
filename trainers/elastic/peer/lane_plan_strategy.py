"""Plans a lane and the update, as a peer would at its first step, and ends there.

fit --> hooks, optimizer, first lane of the first step --> its plan --> update --> LanePlanned
"""

import lightning as L

from offload import Plan
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.commits import Commits
from trainers.elastic.peer.elastic_fit import ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.work.commit import Commit
from trainers.elastic.work.plain_work import PlainWork
from trainers.elastic.work.planned_work import PlannedWork


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
