"""Tries several plans, with other horizons and residents, and keeps the fastest in simulation.
Pure.

    nothing moves                            if the budget allows that, there is no other choice
    how much of the weights stays resident   then where updates run
    then what is computed once more          and then again how much stays resident
    then how far ahead tasks are placed

Making a plan takes about a second per 10,000 tasks, so large graphs get fewer tries. The search
ends when no other plan can be faster.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import NoReturn

from offload.errors import BudgetTooSmall, GraphError
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.policies import DROPS, EFFORTS, Policies, Policy
from offload.planning.recompute import variants as recompute_variants
from offload.planning.reduction import reduce_edges
from offload.planning.refusal import refuse, refuse_host, smallest_budget
from offload.planning.resident_plan import plan_without_copies
from offload.planning.simulator import least_seconds, least_seconds_with, simulate
from offload.planning.victims import NEVER
from offload.planning.wanted import FoundPlan, PlanChoice, Wanted, walk_graph
from offload.sizes import format_count

HOST_SLACK = (1.0, 1.1, 1.3, 2.0)
"""Limits of the host arena to try, as multiples of what a plan takes without a limit."""
CLOSER_HOST = 5
"""How often the distance to the nearest limit of the host arena that works is halved."""
EVICTING = 4
"""How many tasks ahead of its turn a task may evict others."""
CLOSER = 2
"""How many of the best plans are tried again with eviction ahead."""
WALKED, LEAST = 80_000, 6
"""Tasks that are walked in all plans together, and the least number of plans."""
ENOUGH = 1.002
"""Multiple of the busiest lane's seconds. A plan that is this fast ends the search."""
ROUNDING = 1e-9
"""What sums of the same seconds may differ by when they are added up in another order."""


def best_plan(wanted: Wanted, choice: PlanChoice | None = None) -> FoundPlan:
    """The plan that is fastest in simulation, with its edges reduced. `choice`: what an earlier
    search chose, so that there is none now. Raises `OffloadError` if that choice makes no plan."""
    wanted = _keep_fitting(wanted)
    plan = plan_without_copies(wanted)
    plan = plan or (_Search(wanted).find_best() if choice is None else _plan_again(wanted, choice))
    deps = reduce_edges([node.deps for node in plan.memgraph.nodes])
    nodes = tuple(
        replace(node, deps=before) for node, before in zip(plan.memgraph.nodes, deps, strict=True)
    )
    return replace(plan, memgraph=replace(plan.memgraph, nodes=nodes))


def _plan_again(wanted: Wanted, choice: PlanChoice) -> FoundPlan:
    if choice.graph >= len(wanted.graphs):
        raise GraphError(f"graph {choice.graph} was chosen of {len(wanted.graphs)}")
    graph = wanted.graphs[choice.graph]
    if choice.recomputed:
        variants = recompute_variants(graph, wanted.costs)
        other = next((other for name, other in variants if name == choice.recomputed), None)
        if other is None:
            raise GraphError(f"nothing recomputes {choice.recomputed}")
        graph = other
    known = len(graph.buffers)
    if any(b >= known or not graph.buffers[b].persistent for b in choice.policy.resident):
        raise GraphError("the choice keeps a buffer that is unknown or not persistent")
    memgraph = walk_graph(wanted, {}, choice.policy, graph)
    simulation = simulate(memgraph, wanted.costs)
    return FoundPlan(memgraph, choice.policy, simulation, choice.tried, choice=choice, known=True)


def _keep_fitting(wanted: Wanted) -> Wanted:
    """The same, with only the graphs whose largest task fits into the budget."""
    graphs = [("", wanted.graph), *wanted.others]
    lacks = [_find_lack(graph, wanted.capacities) for _, graph in graphs]
    fitting = [pair for pair, (lack, _) in zip(graphs, lacks, strict=True) if lack <= 0]
    if not fitting:
        least = min(range(len(graphs)), key=lambda n: lacks[n][0])
        refuse(graphs[least][1], wanted.capacities, lacks[least][1], wanted.reserve)
    return replace(wanted, graph=fitting[0][1], others=tuple(fitting[1:]))


def _find_lack(graph: TaskGraph, capacities: Mapping[int, int]) -> tuple[int, int]:
    """How many bytes of the largest task do not fit, and on which device."""
    lacks = [(smallest_budget(graph, d)[0] - capacities[d], d) for d in graph.devices]
    return max(lacks, key=lambda lack: lack[0], default=(0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """One try. `seconds`: inf if the plan does not fit."""

    seconds: float
    name: str
    share: float
    policy: Policy
    graph: TaskGraph


class _Search:
    """The best plan so far, and everything that was tried."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        size = len(wanted.graph.tasks) * len(wanted.graph.devices)
        self._effort = next(effort for most, effort in EFFORTS if size <= most)
        self._policies = Policies(
            wanted.capacities, wanted.costs, self._effort.shares, wanted.tails, wanted.homes
        )
        self._best: FoundPlan | None = None
        self._refused: BudgetTooSmall | None = None
        self._tried: list[str] = []
        self._seconds: dict[Hashable, float] = {}
        """By graph and settings: the seconds of each try, so that nothing is tried twice."""
        self._recomputed: dict[TaskGraph, tuple[TaskGraph, str]] = {}
        """By graph that recomputes: the graph that it was made of, and its name."""

    def find_best(self) -> FoundPlan:
        took = self._try_shares("", self._wanted.graph, self._effort.drops)
        if len(self._wanted.graph.devices) > 1:
            took = [min([*took, *self._try_orders()], key=lambda tried: tried.seconds)]
        else:
            self._try_other_graphs()
        if self._best is None:
            self._try_to_fit()
        if self._best is None:
            self._refuse()
        before = self._best
        if self._wanted.recompute and before.memgraph.graph not in self._recomputed:
            self._try_recomputing(before)
        if self._best is before:
            self._try_closer(took)
        else:  # activations take less room in that graph
            graph, drops = self._best.memgraph.graph, (before.policy.drop_ahead,)
            self._try_closer(self._try_shares("with that, ", graph, drops))
        self._try_nearby()
        plan = self._best
        graph, name = self._recomputed.get(plan.memgraph.graph, (plan.memgraph.graph, ""))
        number = next(n for n, other in enumerate(self._wanted.graphs) if other is graph)
        choice = PlanChoice(number, name, plan.policy, tuple(self._tried))
        return replace(plan, tried=choice.tried, choice=choice)

    def _try_shares(self, name: str, graph: TaskGraph, drops: Sequence[int]) -> list[Tried]:
        took: list[Tried] = []
        for share, policy in self._policies.list_policies(graph, drops):
            if self._is_enough(graph):
                break
            title = f"{name}{_describe_policy(share, policy)}"
            took.append(Tried(self._try(title, policy, graph), name, share, policy, graph))
        return took

    def _try_closer(self, took: Sequence[Tried]) -> None:
        """Try the best of these again with eviction ahead, and dropping at distances not tried
        yet."""
        left = [drop for drop in DROPS if drop not in {tried.policy.drop_ahead for tried in took}]
        for tried in sorted(took, key=lambda tried: tried.seconds)[:CLOSER]:
            others = [replace(tried.policy, evict_ahead=EVICTING)]
            others += [self._policies.make_policy(tried.graph, tried.share, drop) for drop in left]
            for policy in others:
                if not self._is_enough(tried.graph):
                    title = f"{tried.name}{_describe_policy(tried.share, policy)}"
                    self._try(title, policy, tried.graph)

    def _try_nearby(self) -> None:
        """Try the best plan again with tasks placed further ahead or less far."""
        for ahead, evict, drop in self._effort.horizons:
            assert self._best is not None
            graph = self._best.memgraph.graph
            if self._is_enough(graph):
                return
            policy = replace(self._best.policy, ahead=ahead, evict_ahead=evict, drop_ahead=drop)
            self._try(
                f"{format_count(ahead, 'task')} ahead, {evict} with eviction, {drop} dropping",
                policy,
                graph,
            )

    def _is_enough(self, graph: TaskGraph) -> bool:
        """Whether to try no more plans of this graph, or of one that recomputes more: enough were
        tried, or none could be faster than the best."""
        if self._best is None:
            return False
        used_up = len(self._tried) >= max(LEAST, WALKED // len(self._wanted.graph.tasks))
        work = least_seconds(graph, self._wanted.costs)
        return used_up or self._best.simulation.makespan <= ENOUGH * work

    def _try_orders(self) -> list[Tried]:
        """Try a plan of each other order of several devices."""
        took: list[Tried] = []
        for name, graph in self._wanted.others:
            share, policy = next(self._policies.list_policies(graph, self._effort.drops))
            title = f"{name}, {_describe_policy(share, policy)}"
            took.append(Tried(self._try(title, policy, graph), f"{name}, ", share, policy, graph))
        return took

    def _try_other_graphs(self) -> None:
        """Try a few plans of each other graph. What its host tasks touch is not resident."""
        for name, graph in self._wanted.others:
            policies = list(self._policies.list_policies(graph))
            most, less = policies[: len(DROPS)], policies[len(DROPS) :]
            for share, policy in (*most, *less[-len(DROPS) :]):
                self._try(f"{name}, {_describe_policy(share, policy)}", policy, graph)

    def _try_recomputing(self, before: FoundPlan) -> None:
        """Try less or more recomputing: placed as before, and with as much resident as fits."""
        graph, drops = before.memgraph.graph, (before.policy.drop_ahead,)
        if self._is_enough(graph):
            return
        variants = recompute_variants(graph, self._wanted.costs)
        others = ((name, other) for name, other in variants if other is not graph)
        for name, other in islice(others, self._effort.recomputations):
            self._recomputed[other] = graph, name
            self._try(f"recompute {name}", before.policy, other)
            share, policy = next(self._policies.list_policies(other, drops))
            self._try(f"recompute {name}, {_describe_policy(share, policy)}", policy, other)

    def _list_fits(self) -> Iterator[tuple[str, TaskGraph, Policy]]:
        """List all that is tried where the host's memory is short: what is computed again needs
        not wait there."""
        for graph in self._wanted.graphs:
            variants = recompute_variants(graph, self._wanted.costs)
            count = self._effort.recomputations if self._wanted.recompute else 0
            for name, other in islice(variants, 1 + count):
                if other is not graph:
                    self._recomputed[other] = graph, name
                for share, policy in self._policies.list_policies(other):
                    yield f"recompute {name}, {_describe_policy(share, policy)}", other, policy

    def _try_to_fit(self) -> None:
        """Try every graph with every policy, because those that were tried do not fit."""
        for name, graph, policy in self._list_fits():
            self._try(name, policy, graph)

    def _refuse(self) -> NoReturn:
        """Refuse, because no plan fits. Every budget that holds the largest task has a plan, so it
        is host memory that is missing: say how much would do."""
        assert self._refused is not None
        if HOST not in self._wanted.capacities:
            raise self._refused
        fits = [(graph, policy) for _, graph, policy in self._list_fits()]
        endless = [self._host_bytes(NEVER, *fit) for fit in fits]
        alignment, too_small = self._wanted.graph.alignment, self._wanted.capacities[HOST]
        for number in sorted(range(len(fits)), key=lambda number: endless[number]):
            for slack in HOST_SLACK:
                enough = int(endless[number] * slack) // alignment * alignment
                if self._host_bytes(enough, *fits[number]) > enough:
                    continue
                low = too_small
                for _ in range(CLOSER_HOST):
                    middle = (low + enough) // 2 // alignment * alignment
                    took = self._host_bytes(middle, *fits[number])
                    low, enough = (low, took) if took <= middle else (middle, enough)
                refuse_host(enough, too_small, self._refused.task)
        raise self._refused

    def _host_bytes(self, limit: int, graph: TaskGraph, policy: Policy) -> int:
        """The host memory that a plan within `limit` takes; NEVER if none fits."""
        policy = replace(policy, host_workers=0)
        with suppress(BudgetTooSmall):
            return walk_graph(self._wanted, {HOST: limit}, policy, graph).arenas[HOST]
        return NEVER

    def _try(self, name: str, policy: Policy, graph: TaskGraph) -> float:
        """Try one plan, unless it was tried before or cannot be the best. Returns its seconds; inf
        if it does not fit or was not tried."""
        key = graph, policy.key_for(len(graph.tasks))
        if key not in self._seconds:
            hopeless = self._is_hopeless(graph, policy)
            self._seconds[key] = math.inf if hopeless else self._walk(name, policy, graph)
        return self._seconds[key]

    def _is_hopeless(self, graph: TaskGraph, policy: Policy) -> bool:
        """Whether the copies that no such plan can do without take longer than the best plan."""
        if self._best is None:
            return False
        least = least_seconds_with(graph, self._wanted.costs, policy.resident, self._wanted.homes)
        return least > (1 + ROUNDING) * self._best.simulation.makespan

    def _walk(self, name: str, policy: Policy, graph: TaskGraph) -> float:
        try:
            memgraph = walk_graph(self._wanted, {}, policy, graph)
        except BudgetTooSmall as refused:
            self._refused = refused
            self._tried.append(f"{name}: does not fit")
            return math.inf
        plan = FoundPlan(memgraph, policy, simulate(memgraph, self._wanted.costs))
        if self._best is None or _cost(plan) < _cost(self._best):
            self._best = plan
        seconds = plan.simulation.makespan
        self._tried.append(f"{name}: {seconds:.3g} s")
        return seconds


def _cost(plan: FoundPlan) -> tuple[float, int]:
    """The seconds of a plan, then the bytes that it moves."""
    return plan.simulation.makespan, sum(node.nbytes for node in plan.memgraph.nodes)


def _describe_policy(share: float, policy: Policy) -> str:
    ahead = {"dropping": policy.drop_ahead, "evicting": policy.evict_ahead}
    words = [f"{how} {format_count(tasks, 'task')} ahead" for how, tasks in ahead.items() if tasks]
    return ", ".join([f"{share:.0%} of the room resident", *words])
