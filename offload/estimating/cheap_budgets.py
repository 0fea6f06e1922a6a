"""The smallest budgets within which a step is nearly as fast as without one. Pure.

    smallest |--|--|--|--|--|--|--|--| whole     rungs: budgets that all cards share
               1.5x  1.2x   1.05x                the first one with a plan that is fast enough

Every budget that is named has a plan that was really made: of chunks of the step's tasks, with a
few policies, without a proof. Cards whose steps have the same bytes share these plans, and each
simulates them with its own seconds.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from offload.errors import BudgetTooSmall, GraphError
from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, TASK, MemGraph
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.lowering.chunks import chunk_tasks
from offload.lowering.host_updates import move_updates_to_host
from offload.memory.collector import collector_paused
from offload.planning.policies import Policies
from offload.planning.recompute import list_choices, recompute_buffers
from offload.planning.refusal import smallest_budget
from offload.planning.resident_plan import plan_without_copies
from offload.planning.simulator import simulate
from offload.planning.wanted import Wanted, peak_bytes, walk_graph
from offload.plans.reserve import reserve_bytes

FACTORS = (1.05, 1.2, 1.5)
SHARES = (0.3, 0.0, 0.8)
"""Of the room, what resident weights may take; tried in this order."""
DROP, CHUNKS = 64, 400
RUNG = 2 ** (1 / 6)
"""Each rung is so many times the one below it. What frees less than a rung is not tried."""
CROWDING = 4.0
"""For each byte that a link copies, kernels lose the time in which they read or write so many: it
passes the memory and the L2 cache that they use. Measured on an H200, where 24.6 GiB of copies cost
0.016 to 0.033 s at 4.19 TB/s (7B LoRA in 8 GiB, 2026-11-22)."""


@dataclass(frozen=True, slots=True)
class CardStep:
    """A step with a card's seconds, and the card. `host_bytes` None: the host has no limit."""

    graph: TaskGraph
    costs: Costs
    capacity: int
    host_bytes: int | None = None
    crowding: float = CROWDING


@dataclass(frozen=True, slots=True, order=True)
class CheapBudget:
    """A budget, the step within it, and what makes room for it."""

    budget: int
    seconds: float
    factor: float
    """Seconds, divided by those without a budget."""
    host_bytes: int = 0
    recomputed: float = 0.0
    """The share of the bytes of activations that are computed again."""
    activations: int = 0
    """Bytes that the step makes and that wait on the host. Weights and states live there."""
    weights: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class CheapBudgets:
    """What a step needs of a card. `within`: the fastest that was found within the card's memory;
    None if nothing fits, because of `largest_task` or of the host."""

    whole: CheapBudget
    smallest: int
    largest_task: str
    cheap: tuple[tuple[float, CheapBudget], ...]
    """By factor that was asked: the smallest budget that costs no more."""
    within: CheapBudget | None

    @property
    def fits_whole(self) -> bool:
        return self.within == self.whole


def find_cheap_budgets(steps: Sequence[CardStep]) -> list[CheapBudgets]:
    """For each card: what the step needs, and the smallest budgets that slow it down little."""
    shared = dict[Hashable, _SharedWalks]()
    found: list[CheapBudgets] = []
    with collector_paused():
        for step in steps:
            graph = step.graph
            shape = graph.buffers, *((t.reads, t.writes, t.workspace) for t in graph.tasks)
            if shape not in shared:
                shared[shape] = _SharedWalks(step)
            found.append(_BudgetSearch(step, shared[shape]).find())
    return found


class _SharedWalks:
    """The plans of one step, each made when it is first asked for."""

    def __init__(self, step: CardStep) -> None:
        graph, self._costs = step.graph, step.costs
        room = {0: 2 * peak_bytes(graph, 0) + graph.alignment}
        whole = plan_without_copies(Wanted(graph, room, step.costs, {}))
        if whole is None or len(graph.devices) > 1:
            raise GraphError(f"{graph} is placed on the host or several devices: give it unplaced")
        self.whole, self._reserve = whole.memgraph, reserve_bytes(graph, "shim")
        on_host = move_updates_to_host(graph, step.costs, "host")
        least, self.largest_task = smallest_budget(on_host, 0)
        self.rungs = [self.whole.arenas[0] + self._reserve]
        while self.rungs[0] > least + self._reserve:
            self.rungs.insert(0, max(least + self._reserve, int(self.rungs[0] / RUNG)))
        self._again = next((chosen for _, chosen in list_choices(graph, step.costs)), frozenset())
        self._made: dict[tuple[int, int, float], MemGraph | None] = {}
        self._policies: dict[int, Policies] = {}
        self._variants = self.list_variants(step)

    def list_variants(self, step: CardStep) -> list[tuple[TaskGraph, float]]:
        """As it is, with updates on the host, and each with activations computed again; each with
        the share of these."""
        graph, buffers = step.graph, step.graph.buffers
        on_host, needed = move_updates_to_host(graph, step.costs, "host"), smallest_budget(graph, 0)
        states = sum(b.nbytes for b in buffers if b.role is Role.STATE)
        made = sum(b.nbytes for b in buffers if b.role is Role.ACTIVATION)
        again = sum(buffers[b].nbytes for b in self._again)
        least = self.rungs[-1] * (1 - 1 / RUNG)
        leaves = states >= least or needed[0] + self._reserve > self.rungs[0]
        variants: list[tuple[TaskGraph, float]] = []
        for base in (graph, on_host) if leaves else (graph,):
            bare = base.with_tasks([replace(task, kernel=None) for task in base.tasks])
            variants.append((chunk_tasks(bare, 0, CHUNKS), 0.0))
            if again >= least:
                repeated = chunk_tasks(recompute_buffers(bare, self._again), 0, CHUNKS)
                variants.append((repeated, min(1.0, again / max(1, made))))
        return variants

    def walk(self, rung: int, variant: int, share: float) -> MemGraph | None:
        """The plan of a variant in which weights may take a share; None if it does not fit."""
        key, (graph, _) = (rung, variant, share), self._variants[variant]
        if key not in self._made:
            self._made[key] = None
            room = (self.rungs[rung] - self._reserve) // graph.alignment * graph.alignment
            policies = Policies({0: room}, self._costs, SHARES)
            policy = self._policies.setdefault(rung, policies).make_policy(graph, share, DROP)
            with suppress(BudgetTooSmall):
                self._made[key] = walk_graph(Wanted(graph, {0: room}, self._costs, {}), {}, policy)
        return self._made[key]


class _BudgetSearch:
    """What was found for one card."""

    def __init__(self, step: CardStep, walks: _SharedWalks) -> None:
        self._step, self._walks, self._variants = step, walks, walks.list_variants(step)
        plan = replace(walks.whole, graph=step.graph)
        seconds = simulate(plan, step.costs).makespan
        self._found = [CheapBudget(walks.rungs[-1], seconds, 1.0, plan.arenas[HOST])]
        self._tried = set[tuple[int, int, float]]()

    def find(self) -> CheapBudgets:
        walks, whole, capacity = self._walks, self._found[0], self._step.capacity
        high = len(walks.rungs) - 1
        for factor in FACTORS:
            low = -1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._reaches(middle, factor) else (middle, high)
        below = [rung for rung, budget in enumerate(walks.rungs) if budget <= capacity]
        if below and capacity < whole.budget:
            self._reaches(below[-1], 0.0)
        fitting = [found for found in self._found if found.budget <= capacity]
        within = min(fitting, key=lambda found: found.seconds, default=None)
        if whole.budget <= capacity:
            within = whole
        cheap = [(f, min(found for found in self._found if found.factor <= f)) for f in FACTORS]
        return CheapBudgets(whole, walks.rungs[0], walks.largest_task, tuple(cheap), within)

    def _reaches(self, rung: int, factor: float) -> bool:
        """Whether a plan within this rung is fast enough. 0: try all of them."""
        for variant, share in product(range(len(self._variants)), SHARES):
            if self._is_reached(rung, factor):
                return True
            if (key := (rung, variant, share)) not in self._tried:
                self._tried.add(key)
                self._try(*key)
        return self._is_reached(rung, factor)

    def _is_reached(self, rung: int, factor: float) -> bool:
        budget = self._walks.rungs[rung]
        return any(f.budget <= budget and f.factor <= factor for f in self._found)

    def _try(self, rung: int, variant: int, share: float) -> None:
        made, step, whole = self._walks.walk(rung, variant, share), self._step, self._found[0]
        if made is None or (step.host_bytes is not None and made.arenas[HOST] > step.host_bytes):
            return
        graph, recomputed = self._variants[variant]
        copied = sum(node.nbytes for node in made.nodes if node.kind != TASK)
        seconds = simulate(replace(made, graph=graph), step.costs).makespan
        seconds += step.crowding * copied / step.costs.memory
        out = [graph.buffers[b] for b in {n.buffer for n in made.nodes if n.kind == OFFLOAD}]
        away = [graph.buffers[b] for b, place in made.starts.items() if place.arena == HOST]
        states = sum(b.nbytes for b in away if b.role is Role.STATE)
        found = CheapBudget(
            self._walks.rungs[rung],
            seconds,
            seconds / whole.seconds if whole.seconds else 1.0,
            made.arenas[HOST],
            recomputed,
            sum(b.nbytes for b in out if not b.persistent),
            sum(b.nbytes for b in away if b.persistent) - states,
            states,
        )
        self._found.append(found)
