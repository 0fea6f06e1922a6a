"""Plans a lane beside the update, as a peer would at its first step, and makes no step.

fit --> hooks, optimizer, first lane of the first step --> its plan --> LanePlanned
"""

import lightning as L

from offload import Plan
from trainers.elastic.commits.commit import Commit, Commits, LaneWork
from trainers.elastic.peer.elastic_fit import ElasticFit
from trainers.elastic.peer.lane_shares import LaneShares
from trainers.elastic.planned.planned_work import PlannedWork


class LanePlanned(Exception):
    """Leaves the fit, because the plan is made."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("the plan of a lane is made")
        self.plan = plan


class LanePlanStrategy(ElasticFit):
    """`fit` raises `LanePlanned` with the plan where the first step would be made."""

    strategy_name = "lane_plan"

    def _begin(self, trainer: L.Trainer, shares: LaneShares) -> Commits:
        return _FirstLane()


class _FirstLane:
    """It implements `Commits` (commits/commit.py), and commits nothing."""

    def next(self, work: LaneWork) -> Commit:
        assert isinstance(work, PlannedWork), "a lane has a plan only by a budget"
        work.begin(0)
        work.compute(work.lanes())
        assert work.planning.plan is not None
        raise LanePlanned(work.planning.plan)

    def applied(self, commit: Commit) -> None:
        pass

    def ended(self) -> None:
        pass

    def close(self) -> None:
        pass
