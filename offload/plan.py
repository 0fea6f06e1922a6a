"""A TaskGraph and a budget -> `Plan`: what a run needs, and what a person wants to know before it.

budget |=================================================|
       | resident | scratch |  blocks that come and go   | reserve      copy mode: what kernels
                                                                        allocate by themselves
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from offload.caching import outside
from offload.costs import Costs
from offload.errors import BudgetTooSmall, GraphError
from offload.lowering.host_updates import CHOICES
from offload.lowering.host_updates import variants as host_variants
from offload.lowering.late_choice import rotations
from offload.lowering.late_updates import Rotation
from offload.lowering.micro_batches import orders
from offload.memgraph import MemGraph, Place
from offload.observed import Observed, observe
from offload.remake import Measurement, search_again, take_new
from offload.renaming import renamed_as
from offload.search import Found, Wanted, best_plan, peak_bytes
from offload.simulator import Bound, Simulation, least_seconds, simulate
from offload.sizes import parse_size, say_size
from offload.taskgraph import HOST, Role, Task, TaskGraph
from offload.trace import Trace
from offload.verify import verify

PLACEMENTS = ("auto", "shim", "copy")
Budget = str | int | Mapping[int, str | int] | None
"""Bytes, or a size such as 8GiB, of every device or of each by its number; None: no limit."""


@dataclass(frozen=True)
class Plan:
    """Where every byte of a step is and what waits for what, within a budget."""

    source: TaskGraph
    """What was planned; `graph` is what runs: some of its tasks may run twice."""
    found: Found
    budget: Mapping[int, int | None]
    host_budget: int | None
    costs: Costs
    placement: str
    """shim: kernels write at their planned addresses; copy: they allocate, and it is copied."""
    recompute: bool
    optimizer: str = "device"
    """Where updates may run: device, host, auto."""
    proven: bool = True
    """Whether it was verified before it was handed out."""
    rotation: Rotation | None = None
    """Where some updates wait for the next step's forward pass: this plan is of its `steady`."""
    measurement: Measurement | None = None
    """Of its first steps, where they were measured."""
    observed: Observed | None = None
    """What every task and copy took in them."""

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
        """Of a step."""
        return self.simulation.makespan

    @property
    def bound(self) -> Bound:
        """The least seconds that any order could take, and which engine says so."""
        return self.simulation.bound

    @property
    def device_bytes(self) -> int:
        """Of the fullest device: its arena, and what kernels allocate outside of it."""
        arenas = [nbytes for arena, nbytes in self.memgraph.arenas.items() if arena != HOST]
        return max(arenas, default=0) + self.reserve

    @property
    def host_bytes(self) -> int:
        return self.memgraph.arenas.get(HOST, 0)

    @property
    def reserve(self) -> int:
        """What kernels allocate outside of the arena at the most."""
        return reserve_bytes(self.source, self.placement)

    @cached_property
    def peak_bytes(self) -> int:
        """What the fullest device would need if nothing ever left it."""
        return max((peak_bytes(self.source, d) for d in self.source.devices), default=0)

    @cached_property
    def smallest_bytes(self) -> int:
        """The smallest budget that this step can be planned with."""
        from offload.explain import smallest

        return smallest(self)[0]

    @cached_property
    def resident_seconds(self) -> float:
        """Of a step that never waits for a copy."""
        return least_seconds(self.source, self.costs)

    def verify(self) -> None:
        """Raise `RaceFound` unless every legal order of this plan gives the step's own bits."""
        verify(self.memgraph)

    def explain(self) -> str:
        """One screen to read before the run."""
        from offload.explain import explain

        return explain(self)

    def draw(self, path: str | Path) -> None:
        """Memory over the step as a picture (.png or .svg)."""
        from offload.picture import draw

        draw(self, path)

    def measured(self, traces: Sequence[Trace]) -> "Plan":
        """The same plan, its tasks, its copies and its prediction as these steps were
        (`Runner.trace` of each, `Runner.measure()` before; steps of other plans, broken and untimed
        ones do not count). Who runs steps calls it after the first few, then `remade`."""
        known = [trace for trace in traces if trace.whole and trace.memgraph is self.memgraph]
        whole = [trace for trace in known if trace.timed]
        if not whole:
            raise GraphError(
                f"of {len(traces)} traces {len(known)} are of whole steps of this plan, and none of"
                " them says when its nodes ran"
            )
        seen = observe(self.memgraph, [trace.spans for trace in whole], self.costs.shared)
        found = _priced(self.found, seen, seen.costs(self.costs))
        told = Measurement(
            steps=seen.steps,
            seconds=seen.seconds,
            before=self.predicted_seconds,
            after=found.simulation.makespan,
            expected=self.simulation.busy,
        )
        return replace(
            self, source=seen.on(self.source), found=found, costs=seen.costs(self.costs),
            observed=seen, measurement=told,
        )  # fmt: skip

    def remade(self) -> "Plan":
        """After `measured`, once: this plan, or the best of another search with the measured costs
        where that is faster; `measurement` says why. If it was remade (`memgraph` is not this
        one's) its tensors lie elsewhere: it needs a new runner."""
        if self.observed is None or self.measurement is None:
            raise GraphError("this plan was not measured: plan.measured(traces) comes first")
        expected, alone = self.measurement.expected, self.found.alone
        again = search_again(expected, self.simulation.busy, alone)
        if not again.yes:
            return replace(self, measurement=replace(self.measurement, decision=again.why))
        asked = replace(self, observed=None, measurement=None)
        new = _planned(asked, self.source, {}, self.rotation is not None)
        new = replace(new, found=_priced(new.found, self.observed, self.costs))
        taken = take_new(self.predicted_seconds, new.predicted_seconds)
        chosen = new if taken.yes else self
        told = replace(self.measurement, decision=f"{again.why}: {taken.why}")
        return replace(chosen, measurement=told)

    def replan(self, graph: TaskGraph) -> "Plan":
        """The same step for another batch, or another over the same tensors: same budget, and
        persistent tensors stay where they are, those too that it does not touch. Where those on
        a device are in its way, they lie elsewhere, and move whenever the two steps alternate."""
        if self.graph.program is not None:
            graph = renamed_as(graph, self.graph.program.tensors)
        graph = _with_idle(graph, self.graph)
        places = {
            (buffer.tensor, buffer.start, buffer.nbytes): self.memgraph.starts[b]
            for b, buffer in enumerate(self.graph.buffers)
            if buffer.persistent and b in self.memgraph.starts
        }
        homes = {
            b: places[key]
            for b, buffer in enumerate(graph.buffers)
            if buffer.persistent and (key := (buffer.tensor, buffer.start, buffer.nbytes)) in places
        }
        try:
            return _planned(replace(self, observed=None, measurement=None), graph, homes)
        except BudgetTooSmall:
            on_host = {b: place for b, place in homes.items() if place.arena == HOST}
            if on_host == homes:
                raise
        moving = sum(place.nbytes for b, place in homes.items() if b not in on_host)
        note = f"what stays on the device for another step ({say_size(moving)}) moves for this one"
        return _planned(self, graph.with_tasks(graph.tasks, note=note), on_host)


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
    late: bool = False,
) -> Plan:
    """Fit a step into `budget` bytes of every device, and `host_budget` of the host.

    `placement`: auto takes the allocator shim where it can be built. `recompute`: activations may
    be computed once more instead of being kept or copied, where that is faster. `optimizer`: where
    updates run, device or host; auto plans both and takes the faster. `proven`: no plan is handed
    out that `verify` has not seen, which takes a part of the planning's time. `late`: where it is
    faster, updates may wait for the next step's forward pass, and `rotation` says how."""
    if placement not in PLACEMENTS:
        raise GraphError(f"placement={placement!r} is none of {', '.join(PLACEMENTS)}")
    if optimizer not in CHOICES:
        raise GraphError(f"optimizer={optimizer!r} is none of {', '.join(CHOICES)}")
    graph.check()
    asked = Plan(
        graph,
        None,  # pyright: ignore[reportArgumentType]  # found below
        _budgets(budget, graph.devices),
        None if host_budget is None else _size("host_budget", host_budget),
        costs or Costs(),
        _placement(placement, graph),
        recompute,
        optimizer,
        proven,
    )
    return _planned(asked, graph, {}, late)


def _priced(found: Found, seen: Observed, costs: Costs) -> Found:
    """The same nodes, by measured seconds."""
    memgraph = replace(found.memgraph, graph=seen.on(found.memgraph.graph))
    return replace(found, memgraph=memgraph, simulation=simulate(memgraph, costs))


def reserve_bytes(graph: TaskGraph, placement: str) -> int:
    """The most that a kernel allocates outside of the arena, and on a CUDA device what libraries
    keep there and what its allocator rounds up."""
    from offload.kernels import CPU, device_of

    tasks, device = graph.tasks, device_of(graph)
    if device != CPU:  # host tasks allocate there
        tasks = [task for task in tasks if task.engine != "host"]
    most = max((_outside(task, placement) for task in tasks), default=0)
    if device != CPU:
        return outside(most, graph.program.fixed)
    return graph.aligned(most) if most else 0


def _outside(task: Task, placement: str) -> int:
    calls = getattr(task.kernel, "calls", ())
    if placement == "copy" or any(call.allocations is None for call in calls):
        return task.unplaced
    return task.stray


def _planned(asked: Plan, graph: TaskGraph, homes: Mapping[int, Place], late: bool = False) -> Plan:
    capacities: dict[int, int] = {}
    alignment = graph.alignment
    planned, reserve = graph, reserve_bytes(graph, asked.placement)
    if asked.placement == "copy":
        planned = graph.with_tasks([replace(task, workspace=0) for task in graph.tasks])
    for device, nbytes in asked.budget.items():
        # Without a limit: room for the worst packing of everything.
        ends = (place.offset + place.nbytes for place in homes.values() if place.arena == device)
        most = 2 * peak_bytes(planned, device) + max(ends, default=0) + alignment
        capacity = most if nbytes is None else nbytes - reserve
        capacities[device] = min(capacity, most) // alignment * alignment
    if asked.host_budget is not None:
        capacities[HOST] = asked.host_budget // alignment * alignment
    fixed = [b for b, place in homes.items() if place.arena != HOST]
    (_, first), *others = [
        (", ".join(filter(None, (order, where))), variant)
        for order, ordered in orders(planned)
        for where, variant in host_variants(ordered, asked.costs, asked.optimizer, fixed)
    ]
    turned = rotations([("", first), *others], asked.costs) if late else []
    wanted = Wanted(
        first, capacities, asked.costs, homes, reserve, asked.recompute, others,
        [(name, rotation.steady) for name, rotation in turned],
    )  # fmt: skip
    found = best_plan(wanted)
    program = found.memgraph.graph.program
    rotation = next((r for _, r in turned if r.steady.program is program), None)
    if asked.proven:
        verify(found.memgraph)  # a mistake of ours must not become wrong bits of yours
    return replace(asked, source=graph, found=found, rotation=rotation)


def _with_idle(graph: TaskGraph, other: TaskGraph) -> TaskGraph:
    """With the persistent buffers of another step over the same tensors: nothing else may be put
    where they are. (Constants may: they are of one step only.)"""
    if graph.program is None or other.program is None:
        return graph
    known = {buffer.tensor for buffer in graph.buffers if buffer.persistent}
    idle = [
        buffer
        for buffer in other.buffers
        if buffer.persistent
        and buffer.role is not Role.CONSTANT
        and buffer.tensor not in known
        and buffer.tensor in other.program.tensors
    ]
    tensors = {buffer.tensor: other.program.tensors[buffer.tensor] for buffer in idle}
    found = graph.with_tasks(graph.tasks, [*graph.buffers, *idle])
    found.program = replace(graph.program, tensors={**graph.program.tensors, **tensors})
    return found


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
    from offload.cuda_shim import available_on, why_not_on
    from offload.kernels import device_of

    device = device_of(graph)
    if asked == "copy":
        return asked
    if available_on(device) is not None:
        return "shim"
    if asked == "shim":
        why = why_not_on(device)
        raise GraphError(f"placement='shim' cannot be had: {why}; use placement='copy'")
    return "copy"
