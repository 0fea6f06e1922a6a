"""The policies that are worth trying for a graph. Pure.

    room                  what a device has beside the largest task
    95 %, 80 %, 60 % ...  the shares of it that resident weights may take
    64 tasks ahead, or 0  for each share: how long before they are in the way others are dropped

Two shares that would keep the same tensors are tried as one.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.planning.residency import Residency, find_exposed

DROPS = (64, 0)
"""For how many tasks ahead others are dropped."""
EXPOSED = 0.25
"""The share of the room for resident weights that a step's first inputs may take."""
Owner = int | tuple[int]
"""A buffer, or in a tuple the task of a workspace."""
ENDLESS = 1 << 40
"""So many host workers that an address which they free is held back for the whole step."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that a plan may be tried with."""

    resident: frozenset[int] = frozenset()
    """Persistent buffers that stay on their device for the whole step."""
    ahead: int = 64
    """How many tasks may get their places before they run, while there is room."""
    evict_ahead: int = 0
    """For how many tasks ahead other blocks may be evicted."""
    drop_ahead: int = 0
    """For how many tasks ahead other blocks may be dropped, if the host has them and they are
    needed later."""
    host_workers: int = 0
    """How many tasks the host runs at once. Host addresses that they free are held back for so
    many (arena.py: `HeldAddresses`); 0: not at all."""
    offsets: Mapping[Owner, int] = field(default_factory=dict)
    """Where buffers and workspaces lie on their device (resident_plan.py). Then no task is placed
    ahead."""

    @property
    def place_ahead(self) -> int:
        """For how many tasks ahead anything is done."""
        return max(self.ahead, self.evict_ahead, self.drop_ahead)

    def key_for(self, tasks: int) -> tuple[frozenset[int], int, int, int]:
        """A key: policies with the same one make the same plan of a graph of so many tasks."""
        horizons = (self.place_ahead, self.evict_ahead, self.drop_ahead)
        place, evict, drop = (min(ahead, tasks) for ahead in horizons)
        return self.resident, place, evict, drop


FURTHER = ((256, 16, 0), (256, 16, 256))
"""Horizons for steps in which the pieces of several micro-batches take turns: the next weight is
needed a hundred tasks later."""
OTHERS = ((16, 0, 0), (256, 0, 256), (64, 16, 0))


@dataclass(frozen=True, slots=True)
class Effort:
    """Which plans are tried."""

    shares: tuple[float, ...] = (0.95, 0.8, 0.6, 0.3, 0.0)
    """Shares of the room for resident weights."""
    drops: tuple[int, ...] = DROPS
    """Tried with each share. Values of `DROPS` that are missing here are tried with the best
    shares."""
    horizons: tuple[tuple[int, int, int], ...] = (*FURTHER, *OTHERS)
    """Tasks placed ahead, with eviction, and with dropping; tried with the best share."""
    recomputations: int = 5


EFFORTS = (
    (5_000, Effort()),
    (20_000, Effort((0.95, 0.6, 0.3, 0.0), DROPS[:1], horizons=FURTHER, recomputations=2)),
    (1 << 60, Effort((0.95, 0.3), DROPS[:1], horizons=(), recomputations=1)),
)
"""By the largest number of tasks; of several devices, as if each had so many."""


class Policies:
    """Makes policies for graphs of one step."""

    def __init__(
        self,
        capacities: Mapping[int, int],
        costs: Costs,
        shares: Sequence[float],
        tails: bool = False,
        homes: Collection[int] = (),
    ) -> None:
        """`capacities`: bytes of each device's arena. `shares`: of the room, what resident weights
        may take. `tails`: no host address is given out twice in a step, so that no copy to the host
        waits for an update there, and the device is done as early as it can be. `homes`: buffers
        that lie somewhere already, so that no policy decides where."""
        self._homes = frozenset(homes)
        self._capacities = capacities
        self._costs = costs
        self._shares = shares
        self._host_workers = ENDLESS if tails else costs.host_workers
        self._seen: tuple[TaskGraph, Residency, dict[int, int]] | None = None
        """Of the last graph, because it takes long to find: what could stay, and the room."""

    def list_policies(
        self, graph: TaskGraph, drops: Sequence[int] = DROPS
    ) -> Iterator[tuple[float, Policy]]:
        """From much resident to little: each share with its policies, one for each of `drops`."""
        seen: set[frozenset[int]] = set()
        for share in self._shares:
            policies = [self.make_policy(graph, share, drop) for drop in drops]
            if policies[-1].resident not in seen:
                seen.add(policies[-1].resident)
                yield from ((share, policy) for policy in policies)

    def make_policy(self, graph: TaskGraph, share: float, drop: int) -> Policy:
        """One policy. If it drops ahead, it also keeps the step's first inputs resident."""
        plain, first = self._choose_both(graph, share)
        resident = first if drop else plain
        return Policy(resident, drop_ahead=drop, host_workers=self._host_workers)

    def _choose_both(self, graph: TaskGraph, share: float) -> tuple[frozenset[int], frozenset[int]]:
        """What may stay in this share of the room, without and with the step's first inputs."""
        residency, most = self._look_at(graph)
        room = {device: int(nbytes * share) for device, nbytes in most.items()}
        plain = residency.choose(room)
        some = {device: int(nbytes * EXPOSED) for device, nbytes in room.items()}
        early = find_exposed(graph, self._costs, plain, some)
        first = residency.choose(room, early) if early else plain
        return plain - self._homes, first - self._homes

    def _look_at(self, graph: TaskGraph) -> tuple[Residency, dict[int, int]]:
        """What could stay in a graph, and the room for it."""
        if self._seen is None or self._seen[0] is not graph:
            residency = Residency(graph)
            room = {d: residency.find_room(d, self._capacities[d]) for d in graph.devices}
            self._seen = graph, residency, room
        return self._seen[1:]
