"""Makes a `Plan` from a TaskGraph and a budget: all that a run needs and a person wants to know.

budget |=================================================|
       | resident | scratch |  blocks that come and go   | reserve      copy mode: memory that
                                                                        kernels allocate outside
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from offload.caching.plan_cache import PlanCache
from offload.errors import BudgetTooSmall, GraphError
from offload.graph.costs import Costs
from offload.graph.memgraph import MemGraph, Place, places_of
from offload.graph.remarks import Remarks
from offload.graph.taskgraph import HOST, TaskGraph
from offload.lowering.chunks import chunk_tasks
from offload.lowering.device_order import list_device_orders
from offload.lowering.device_placing import place_tasks
from offload.lowering.fitting_states import find_fitting_states
from offload.lowering.host_updates import CHOICES, move_updates_to_host
from offload.lowering.host_updates import variants as host_variants
from offload.lowering.micro_batches import list_orders
from offload.planning.refusal import advise
from offload.planning.simulator import Bound, Simulation, least_seconds
from offload.planning.verify import verify
from offload.planning.wanted import FoundPlan, Wanted, peak_bytes
from offload.plans.explain import explain, find_largest_task
from offload.plans.kept_plans import proved_plan
from offload.plans.reserve import reserve_bytes
from offload.plans.same_tensors import add_idle, rename_as
from offload.sizes import format_size, parse_size

log = logging.getLogger(__name__)

PLACEMENTS = ("auto", "shim", "copy")
AT_ONCE = 8
"""Of the largest chunks, as many fit into a device: some run, others come in."""
Budget = str | int | Mapping[int, str | int] | None
"""Bytes or a size such as 8GiB, for every device or by device number; None: no limit."""


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """What a plan is asked for. `Plan` has the same fields, so it can be made again."""

    budget: Mapping[int, int | None]
    host_budget: int | None
    costs: Costs
    placement: str
    recompute: bool
    optimizer: str
    proven: bool
    tails: bool
    cache: PlanCache | None = None
    given: tuple[object, object] = (None, None)
    """The budget and host_budget as the user wrote them: refusals use the same units."""

    @classmethod
    def from_plan(cls, plan: "Plan") -> "PlanningOptions":
        return cls(**{option.name: getattr(plan, option.name) for option in fields(cls)})


@dataclass(frozen=True)
class Plan:
    """Where every byte of a step lies and what waits for what, within a budget."""

    source: TaskGraph
    """The graph that was planned. `graph` is the one that runs: it may run some tasks twice."""
    found: FoundPlan
    budget: Mapping[int, int | None]
    host_budget: int | None
    costs: Costs
    placement: str
    """shim: kernels write at their planned addresses; copy: their outputs are copied there."""
    recompute: bool
    optimizer: str = "device"
    """Where updates may run: device, host or auto."""
    proven: bool = True
    """Whether the plan was verified when it was made."""
    tails: bool = False
    """Whether it leaves the device as early as it can, for a stage that several jobs share."""
    cache: PlanCache | None = field(default=None, compare=False)
    """Where it is kept what was chosen, for later starts of the same run."""
    given: tuple[object, object] = field(default=(None, None), compare=False)
    remarks: Remarks = field(default_factory=Remarks, compare=False)
    """What its runs said."""

    def __repr__(self) -> str:
        return (
            f"<Plan: {len(self.graph.tasks)} tasks, {format_size(self.device_bytes)} of the device,"
            f" {format_size(self.host_bytes)} of the host, {self.predicted_seconds:.3g} s"
            " predicted>"
        )

    @property
    def memgraph(self) -> MemGraph:
        return self.found.memgraph

    @property
    def graph(self) -> TaskGraph:
        return self.memgraph.graph

    @property
    def simulation(self) -> Simulation:
        return self.found.simulation

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.simulation.makespan

    @property
    def bound(self) -> Bound:
        """The least seconds that any order could take, and the lane that sets them."""
        return self.simulation.bound

    @property
    def device_bytes(self) -> int:
        """Bytes of the fullest device: its arena, and what kernels allocate outside of it."""
        arenas = [nbytes for arena, nbytes in self.memgraph.arenas.items() if arena != HOST]
        return max(arenas, default=0) + self.reserve

    @property
    def host_bytes(self) -> int:
        return self.memgraph.arenas.get(HOST, 0)

    @property
    def reserve(self) -> int:
        """The most bytes that kernels allocate outside of the arena."""
        return reserve_bytes(self.source, self.placement)

    @cached_property
    def peak_bytes(self) -> int:
        """The bytes that the fullest device would need if nothing ever left it."""
        return largest_peak(self.source)

    @cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget that this step can be planned with."""
        return find_largest_task(self)[0]

    @cached_property
    def resident_seconds(self) -> float:
        """Seconds of a step that never waits for a copy."""
        return least_seconds(self.source, self.costs)

    def verify(self) -> None:
        """Raise `RaceFound` unless every legal order of this plan gives the step's own bits."""
        verify(self.memgraph)

    def explain(self) -> str:
        """A description of the plan on one screen."""
        return explain(self)

    def draw(self, path: str | Path) -> None:
        """Memory over the step as a picture (.png or .svg)."""
        from offload.plans.picture import draw

        draw(self, path)

    def replan(self, graph: TaskGraph) -> "Plan":
        """A plan of another graph over the same tensors: another batch, or another step.

        It keeps the budget. Persistent tensors stay where they are, even those that the graph does
        not use. If those on a device leave too little room, the new plan has them elsewhere, and
        they move whenever the two steps alternate."""
        if more := {*graph.devices} - {*self.budget}:
            raise GraphError(
                f"the graph has tasks on devices {sorted(more)}, and this plan is for devices"
                f" {sorted(self.budget)}: plan it anew, with a runner of its own"
            )
        if self.graph.program is not None:
            graph = rename_as(graph, self.graph.program.tensors)
        graph = add_idle(graph, self.graph)
        places, sizes = places_of(self.memgraph), dict[str, int]()
        for buffer in graph.buffers:
            size = buffer.start + buffer.nbytes
            sizes[buffer.tensor] = max(size, sizes.get(buffer.tensor, 0))
        changed = {b: task.device for task in graph.tasks for b in task.writes}
        homes = {
            b: Place(home.arena, home.offset + buffer.start, buffer.nbytes)
            for b, buffer in enumerate(graph.buffers)
            if buffer.persistent
            and (home := places.get(buffer.tensor)) is not None
            and sizes[buffer.tensor] <= home.nbytes  # a tensor that has grown needs another one
            and home.arena in (HOST, changed.get(b, home.arena))
        }
        options = PlanningOptions.from_plan(self)
        try:
            return _make_plan(options, graph, homes)
        except BudgetTooSmall:
            on_host = {b: place for b, place in homes.items() if place.arena == HOST}
            if on_host == homes:
                raise
        moving = sum(place.nbytes for b, place in homes.items() if b not in on_host)
        note = f"{format_size(moving)} that stay on the device in another step move for this one"
        return _make_plan(options, graph.with_tasks(graph.tasks, None, note), on_host)


def plan(
    graph: TaskGraph,
    budget: Budget = None,
    costs: Costs | None = None,
    host_budget: str | int | None = None,
    *,
    placement: str = "auto",
    recompute: bool = True,
    optimizer: str = "device",
    proven: bool = True,
    tails: bool = False,
    cache: PlanCache | None = None,
    devices: int = 1,
) -> Plan:
    """Fit a step into `budget` bytes of every device, and `host_budget` bytes of the host.

    `placement`: auto uses the allocator shim if it can be built. `recompute`: activations may be
    computed again instead of being kept or copied, where that is faster. `optimizer`: where updates
    run, device or host; auto plans both and takes the faster. `proven`: verify the plan, which
    takes a part of the planning's time. `tails`: for a stage that several jobs share. The device is
    done earlier, before updates on the host are, and the host's memory is used more. `cache`: where
    it is kept what is chosen, so that the next start of the same run does not search again.
    `devices`: spread the step over so many, to the same bits."""
    if placement not in PLACEMENTS:
        raise GraphError(
            f"placement={placement!r} is unknown; choose one of {', '.join(PLACEMENTS)}"
        )
    if optimizer not in CHOICES:
        raise GraphError(f"optimizer={optimizer!r} is unknown; choose one of {', '.join(CHOICES)}")
    graph.check()
    costs = costs or Costs()
    graph = place_tasks(graph, devices, costs)
    options = PlanningOptions(
        _budgets(budget, graph.devices),
        None if host_budget is None else _size("host_budget", host_budget),
        costs,
        _placement(placement, graph),
        recompute,
        optimizer,
        proven,
        tails,
        cache,
        (budget, host_budget),
    )
    return _make_plan(options, graph, {})


def largest_peak(graph: TaskGraph) -> int:
    """The bytes that the fullest device needs if nothing ever leaves it."""
    return max((peak_bytes(graph, device) for device in graph.devices), default=0)


def reserve_of(graph: TaskGraph) -> int:
    """The reserve of a plan of this graph."""
    return reserve_bytes(graph, _placement("auto", graph))


def _make_plan(options: PlanningOptions, graph: TaskGraph, homes: Mapping[int, Place]) -> Plan:
    planned, reserve = graph, reserve_bytes(graph, options.placement)
    if options.placement == "copy":
        planned = graph.with_tasks([replace(task, workspace=0) for task in graph.tasks])
    capacities = _find_capacities(options, planned, homes, reserve)
    room = min(capacities[device] for device in graph.devices) // AT_ONCE
    if (chunked := chunk_tasks(planned, room)) is not planned:
        planned = graph = chunked
    fixed = {b for b, place in homes.items() if place.arena != HOST}
    if len(graph.devices) > 1:
        limits = {d: nbytes - reserve for d, nbytes in options.budget.items() if nbytes is not None}
        orders = list_device_orders(planned, options.costs, limits)
        capacities = _find_capacities(options, orders[0][1], homes, reserve)
        (_, first), *others = [
            (name, _move_updates(ordered, capacities, options, fixed)) for name, ordered in orders
        ]
    else:
        orders = []
        (_, first), *others = [
            (", ".join(filter(None, (order, where))), variant)
            for order, ordered in list_orders(planned)
            for where, variant in host_variants(ordered, options.costs, options.optimizer, fixed)
        ]
    wanted = Wanted(
        first, capacities, options.costs, homes, reserve, options.recompute, others,
        options.tails,
    )  # fmt: skip
    try:
        found_plan = proved_plan(wanted, options.cache, options.proven)
    except BudgetTooSmall as refused:
        raise advise(refused, *options.given) from None
    if orders:
        graph = orders[found_plan.choice.graph if found_plan.choice else 0][1]
    same = {option.name: getattr(options, option.name) for option in fields(options)}
    plan = Plan(source=graph, found=found_plan, **same)
    log.info("%r, bound by %s", plan, plan.bound.lane)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", plan.explain())
    return plan


def _move_updates(
    graph: TaskGraph,
    capacities: Mapping[int, int],
    options: PlanningOptions,
    fixed: Collection[int],
) -> TaskGraph:
    """Move the updates to the host whose states do not fit on their devices."""
    staying = {*fixed, *find_fitting_states(graph, capacities)}
    return move_updates_to_host(graph, options.costs, options.optimizer, staying)


def _find_capacities(
    options: PlanningOptions, graph: TaskGraph, homes: Mapping[int, Place], reserve: int
) -> dict[int, int]:
    """The bytes of each device's arena, and of the host's if it has a limit."""
    capacities: dict[int, int] = {}
    alignment = graph.alignment
    for device, nbytes in options.budget.items():
        # Without a limit there is room for the worst packing of everything.
        ends = (place.offset + place.nbytes for place in homes.values() if place.arena == device)
        most = 2 * peak_bytes(graph, device) + max(ends, default=0) + alignment
        capacity = most if nbytes is None else nbytes - reserve
        capacities[device] = min(capacity, most) // alignment * alignment
    if options.host_budget is not None:
        capacities[HOST] = options.host_budget // alignment * alignment
    return capacities


def _budgets(budget: Budget, devices: list[int]) -> dict[int, int | None]:
    if isinstance(budget, Mapping):
        if set(budget) != set(devices):
            raise GraphError(f"budget names devices {sorted(budget)}, the graph has {devices}")
        return {device: _size("budget", budget[device]) for device in devices}
    nbytes = None if budget is None else _size("budget", budget)
    return dict.fromkeys(devices, nbytes)


def _size(name: str, given: str | int) -> int:
    try:
        return parse_size(given)
    except ValueError as error:
        raise GraphError(f"{name}: {error}") from None


def _placement(asked: str, graph: TaskGraph) -> str:
    from offload.memory.cuda_shim import available_on, why_not_on
    from offload.program.kernels import device_of

    device = device_of(graph)
    if asked == "copy":
        return asked
    if available_on(device) is not None:
        return "shim"
    if asked == "shim":
        why = why_not_on(device)
        raise GraphError(f"placement='shim' is not possible: {why}. Use placement='copy'")
    return "copy"
