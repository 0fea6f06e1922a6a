"""A run trained again in one process: every lane as the log says, and every digest compared."""

from functools import reduce

from torch import Tensor

from trainers.elastic.commits.commit import Commit, LaneWork
from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.errors import ReplayDiffers
from trainers.elastic.reducing import sum_in_order
from trainers.elastic.replaying.step_log import History
from trainers.elastic.working.digests import digest_of


class LoggedCommits:
    """It implements `Commits` (commits/commit.py)."""

    def __init__(self, history: History) -> None:
        self.compared = 0
        """The number of steps whose digests were equal."""
        self._history = history
        self._step = 0

    def next(self, work: LaneWork) -> Commit:
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
                f"step {self._step} comes to {digest} here, and the log says {logged.digest}: the"
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

    def ended(self) -> None:
        pass

    def close(self) -> None:
        pass
