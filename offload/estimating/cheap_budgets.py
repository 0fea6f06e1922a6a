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
from math import inf

from offload.errors import BudgetTooSmall, GraphError
from offload.graph.costs import Costs
from offload.graph.memgraph import OFFLOAD, TASK, MemGraph
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.lowering.chunks import chunk_tasks
from offload.lowering.host_updates import move_updates_to_host
from offload.memory.collector import collector_paused
from offload.planning.policies import Policies, Policy
from offload.planning.recompute import list_choices, recompute_buffers
from offload.planning.refusal import smallest_budget
from offload.planning.resident_plan import plan_without_copies
from offload.planning.simulator import least_seconds_with, simulate
from offload.planning.wanted import Wanted, peak_bytes, walk_graph
from offload.plans.reserve import reserve_bytes
from offload.sizes import format_size

FACTORS = (1.05, 1.2, 1.5)
SHARES = (0.3, 0.6, 0.0, 0.95)
"""Of the room, what resident weights may take; tried in this order."""
DROPS = (64,)
RUNG = 2 ** (1 / 8)
"""Each rung is so many times the one below it."""
CHUNKS = 1_000
"""About so many tasks are planned."""
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


@dataclass(frozen=True, slots=True)
class CheapBudget:
    """A budget, the step within it, and what makes room for it."""

    budget: int
    seconds: float
    factor: float
    """Seconds, divided by those without a budget."""
    host_bytes: int = 0
    recomputed: float = 0.0
    """The share of the bytes of activations that are computed again."""
    waiting: int = 0
    """Bytes of activations, and of what else a step makes, that wait on the host."""
    weights: int = 0
    """Bytes of weights, buffers and constants that live on the host."""
    states: int = 0
    """Bytes of the optimizer's states that live on the host."""

    def __repr__(self) -> str:
        host = {"activations": self.waiting, "weights": self.weights, "states": self.states}
        parts = [f"{format_size(nbytes)} of {name} on the host" for name, nbytes in host.items()]
        again = f"{self.recomputed:.0%} of the activations again"
        return f"<{format_size(self.budget)}: {self.factor:.2f}x, {again}, {', '.join(parts)}>"


@dataclass(frozen=True, slots=True)
class CheapBudgets:
    """What a step needs of a card."""

    whole: CheapBudget
    """Without a budget: only inputs move."""
    smallest: int
    """The smallest budget of any plan."""
    largest_task: str
    """The task that sets it."""
    cheap: tuple[tuple[float, CheapBudget], ...]
    """By factor that was asked: the smallest budget that costs no more."""
    within: CheapBudget | None
    """The fastest that was found within the card's memory; None if nothing fits."""

    @property
    def fits_whole(self) -> bool:
        return self.within == self.whole

    def __repr__(self) -> str:
        fits = "whole" if self.fits_whole else f"{self.within or f'not: {self.largest_task}'}"
        cheap = ", ".join(f"{factor}x {format_size(b.budget)}" for factor, b in self.cheap)
        return f"<needs {format_size(self.whole.budget)}, fits {fits}; {cheap}>"


def find_cheap_budgets(steps: Sequence[CardStep]) -> list[CheapBudgets]:
    """For each card: what the step needs, and the smallest budgets that slow it down little."""
    shared = dict[Hashable, _Walks]()
    found: list[CheapBudgets] = []
    with collector_paused():
        for step in steps:
            graph = step.graph
            if len(graph.devices) > 1 or any(task.lane != "compute" for task in graph.tasks):
                raise GraphError(
                    f"{graph} is placed on several devices or on the host; give the graph as it was"
                    " before"
                )
            shape = graph.buffers, *((t.reads, t.writes, t.workspace) for t in graph.tasks)
            walks = shared[shape] if shape in shared else _Walks(step)
            shared[shape] = walks
            found.append(_Search(step, walks).find())
    return found


Variant = tuple[TaskGraph, float]
"""A graph to plan, and the share of its activations that it computes again."""


class _Walks:
    """The plans of one step, each made when it is first asked for."""

    def __init__(self, step: CardStep) -> None:
        graph, self._costs = step.graph, step.costs
        whole = plan_without_copies(
            Wanted(graph, {0: 2 * peak_bytes(graph, 0) + graph.alignment}, step.costs, {})
        )
        if whole is None:
            raise GraphError(f"{graph} has no plan in which nothing moves, to compare others with")
        self.whole, self._reserve = whole.memgraph, reserve_bytes(graph, "shim")
        on_host = move_updates_to_host(graph, step.costs, "host")
        least, self.largest_task = smallest_budget(on_host, 0)
        self.smallest = least + self._reserve
        self.rungs = [self.whole.arenas[0] + self._reserve]
        while self.rungs[-1] / RUNG > self.smallest:
            self.rungs.append(int(self.rungs[-1] / RUNG))
        self.rungs = sorted({*self.rungs, min(self.smallest, self.rungs[0])})
        self._again = next((chosen for _, chosen in list_choices(graph, step.costs)), frozenset())
        self._variants = self.list_variants(step)
        self._policies: dict[tuple[int, int], list[Policy]] = {}
        self._made: dict[tuple[int, int, int], MemGraph | None] = {}

    def list_variants(self, step: CardStep) -> list[Variant]:
        """As it is, with updates on the host, and each with activations computed again. What frees
        less than a rung is left out, unless nothing else fits into the smallest budget."""
        graph, variants = step.graph, list[Variant]()
        on_host = move_updates_to_host(graph, step.costs, "host")
        gone = {b for t in on_host.tasks if t.lane == "host" for b in t.touches}
        sizes = [buffer.nbytes for buffer in graph.buffers]
        enough = self.rungs[-1] * (1 - 1 / RUNG)
        moves = sum(sizes[b] for b in gone if graph.buffers[b].role is Role.STATE) >= enough
        moves = moves or smallest_budget(graph, 0)[0] + self._reserve > self.smallest
        nbytes = sum(sizes[b] for b in self._again)
        made = sum(b.nbytes for b in graph.buffers if b.role is Role.ACTIVATION)
        for base in (graph, on_host) if moves else (graph,):
            bare = base.with_tasks([replace(task, kernel=None) for task in base.tasks])
            variants.append((chunk_tasks(bare, 0, CHUNKS), 0.0))
            if nbytes >= enough:
                again = chunk_tasks(recompute_buffers(bare, self._again), 0, CHUNKS)
                variants.append((again, min(1.0, nbytes / max(1, made))))
        return variants

    def list_policies(self, rung: int, variant: int) -> list[Policy]:
        if (rung, variant) not in self._policies:
            policies = Policies({0: self._capacity(rung)}, self._costs, SHARES)
            found = policies.list_policies(self._variants[variant][0], DROPS)
            self._policies[rung, variant] = [policy for _, policy in found]
        return self._policies[rung, variant]

    def walk(self, rung: int, variant: int, number: int) -> MemGraph | None:
        """The plan of a variant by one of its policies; None if it does not fit."""
        key = rung, variant, number
        if key not in self._made:
            self._made[key] = None
            graph, policy = self._variants[variant][0], self.list_policies(rung, variant)[number]
            wanted = Wanted(graph, {0: self._capacity(rung)}, self._costs, {})
            with suppress(BudgetTooSmall):
                self._made[key] = walk_graph(wanted, {}, policy)
        return self._made[key]

    def _capacity(self, rung: int) -> int:
        alignment = self.whole.graph.alignment
        return (self.rungs[rung] - self._reserve) // alignment * alignment


class _Search:
    """What was found for one card."""

    def __init__(self, step: CardStep, walks: _Walks) -> None:
        self._step, self._walks = step, walks
        self._variants = walks.list_variants(step)
        plan = replace(walks.whole, graph=step.graph)
        seconds = simulate(plan, step.costs).makespan
        self._whole = CheapBudget(walks.rungs[-1], seconds, 1.0, plan.arenas[HOST])
        self._found, self._tried = [self._whole], set[tuple[int, int, int]]()

    def find(self) -> CheapBudgets:
        walks, high = self._walks, len(self._walks.rungs) - 1
        for factor in FACTORS:
            low = -1
            while high - low > 1:
                middle = (low + high) // 2
                enough = self._reaches(middle, factor * self._whole.seconds)
                low, high = (low, middle) if enough else (middle, high)
        within = self._find_within()
        cheap = tuple((factor, self._find_cheapest(factor)) for factor in FACTORS)
        return CheapBudgets(self._whole, walks.smallest, walks.largest_task, cheap, within)

    def _find_cheapest(self, factor: float) -> CheapBudget:
        enough = [found for found in self._found if found.factor <= factor]
        return min(enough, key=lambda found: (found.budget, found.seconds))

    def _find_within(self) -> CheapBudget | None:
        capacity = self._step.capacity
        below = [n for n, budget in enumerate(self._walks.rungs) if budget <= capacity]
        if below and below[-1] < len(self._walks.rungs) - 1:
            self._reaches(below[-1], 0.0)
        fitting = [found for found in self._found if found.budget <= capacity]
        return min(fitting, key=lambda found: (found.seconds, found.budget), default=None)

    def _reaches(self, rung: int, enough: float) -> bool:
        """Whether a step within this rung takes at most so many seconds. 0: try all plans that may
        be the fastest."""
        budget, costs = self._walks.rungs[rung], self._step.costs
        for variant, (graph, _) in enumerate(self._variants):
            for number, policy in enumerate(self._walks.list_policies(rung, variant)):
                inside = [found.seconds for found in self._found if found.budget <= budget]
                best = min(inside, default=inf)
                if best <= enough:
                    return True
                least = least_seconds_with(graph, costs, policy.resident, {})
                if least <= (enough or best) and (rung, variant, number) not in self._tried:
                    self._tried.add((rung, variant, number))
                    self._try(rung, variant, number)
        return any(found.budget <= budget and found.seconds <= enough for found in self._found)

    def _try(self, rung: int, variant: int, number: int) -> None:
        made, most = self._walks.walk(rung, variant, number), self._step.host_bytes
        if made is None or (most is not None and made.arenas[HOST] > most):
            return
        graph, recomputed = self._variants[variant]
        plan, costs = replace(made, graph=graph), self._step.costs
        copied = sum(node.nbytes for node in plan.nodes if node.kind != TASK)
        seconds = simulate(plan, costs).makespan + CROWDING * copied / costs.memory
        at_home = [graph.buffers[b] for b, place in plan.starts.items() if place.arena == HOST]
        states = sum(b.nbytes for b in at_home if b.role is Role.STATE)
        out = [graph.buffers[b] for b in {n.buffer for n in plan.nodes if n.kind == OFFLOAD}]
        found = CheapBudget(
            self._walks.rungs[rung],
            seconds,
            seconds / self._whole.seconds if self._whole.seconds else 1.0,
            plan.arenas[HOST],
            recomputed,
            sum(b.nbytes for b in out if not b.persistent),
            sum(b.nbytes for b in at_home if b.persistent) - states,
            states,
        )
        self._found.append(found)
