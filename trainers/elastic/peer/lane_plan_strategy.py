"""Plans a lane and the update, as a peer would at its first step, and ends there.

fit --> hooks, optimizer, first lane of the first step --> its plan --> update --> LanePlanned
"""

import lightning as L

from offload import Plan
from trainers.elastic.commits.commit import Commit, Commits, LaneWork
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.elastic_fit import ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.planned.planned_work import PlannedWork


class LanePlanned(Exception):
    """Leaves the fit, because the plan is made."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("the plan of a lane is made")
        self.plan = plan


class LanePlanStrategy(ElasticFit):
    """`fit` raises `LanePlanned` with the plan of a lane when it has made an update, too."""

    strategy_name = "lane_plan"

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        return _FirstLane()


class _FirstLane:
    """It implements `Commits` (commits/commit.py), and commits one lane."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def next(self, work: LaneWork) -> Commit:
        assert isinstance(work, PlannedWork), "a lane has a plan only by a budget"
        work.begin(0)
        work.compute(work.lanes()[:1])
        self._plan = work.planning.plan
        return Commit(0, (), work.as_floats(work.sums), work.logs, work.buffers(), "")

    def applied(self, commit: Commit) -> None:
        if self._plan is None:
            raise CannotBeElastic("the first lane ran without a plan, so no budget can be kept")
        raise LanePlanned(self._plan)

    def ended(self) -> None:
        pass

    def close(self) -> None:
        pass
