"""The reference engine: one node after the other, on the caller's thread.

With order `random` it draws a new legal order at every step, from its seed. Between two nodes it
only reads the clock and asks the gate: 0.1 us.
"""

import random
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from offload.gate import Gate
from offload.running.engines.work import LaneRecord, Record, StepWork


class Serial:
    """Runs in the order of the nodes, or in a random legal one."""

    captures = False

    def __init__(
        self,
        order: str = "priority",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        gate: Gate | None = None,
    ) -> None:
        self.measure = False  # every node is timed anyway
        self._random = random.Random(seed) if order == "random" else None
        self._clock = clock
        self._gate = gate or Gate()

    def run(self, work: StepWork, record: Record) -> None:
        if self._random is None:
            self._run_in(range(len(work.runs)), work, record)
        else:
            self._run_in(legal_order(work, self._random), work, record)

    def _run_in(self, order: "range | list[int]", work: StepWork, record: Record) -> None:
        runs = work.runs if isinstance(order, range) else [work.runs[node] for node in order]
        clock, gate = self._clock, self._gate
        stamps = [clock()]
        stamp = stamps.append
        later: dict[int, float] = {}
        try:
            for run in runs:
                if gate.wanted:
                    gate.pass_on()
                    later[len(stamps) - 1] = clock()
                run()
                stamp(clock())
        except BaseException:
            done = len(stamps) - 1
            record.failed = order[done] if done < len(order) else None
            raise
        finally:
            starts = [later.get(place, stamp) for place, stamp in enumerate(stamps)]
            record.lanes.append(LaneRecord("", list(order), starts, stamps[1:]))
            record.waited = sum(
                end - start
                for node, start, end in zip(order, starts, stamps[1:], strict=False)
                if not work.lane_of[node].startswith("compute")
            )

    def pause(self) -> None:
        """Nothing runs while the caller's thread stands aside."""

    def resume(self) -> None:
        """Nothing was held."""

    def close(self) -> None:
        """It has no threads to end."""


def legal_order(work: StepWork, rng: random.Random) -> list[int]:
    """Draw an order that keeps the edges. Every such order can come out."""
    rank = list(range(len(work.runs)))
    rng.shuffle(rank)
    node_of = [0] * len(rank)
    for node, at in enumerate(rank):
        node_of[at] = node
    pending = list(work.waits)
    ready = [rank[node] for node in work.first]
    heapify(ready)
    order: list[int] = []
    while ready:
        node = node_of[heappop(ready)]
        order.append(node)
        for after in work.successors[node]:
            pending[after] -= 1
            if not pending[after]:
                heappush(ready, rank[after])
    return order
