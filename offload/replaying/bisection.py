"""Finds where a saved part's bits first differ from eager's: which pass, which task, which value.

capture -> + pass 1 -> ... -> + pass 9 -> + budget -> + engine      the first that differs
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any

import torch

from offload.errors import OffloadError
from offload.graph.taskgraph import Task, TaskGraph
from offload.live.planned_tapes import GraphPass
from offload.live.runner_plans import PlainPlanner, UnrunPlans
from offload.live.session import LiveSession
from offload.plans.plan import Budget, Plan
from offload.program.kernels import Value
from offload.replaying.issuing import StepMemory, issue, issue_in_session, result_name
from offload.replaying.node_watch import NodeWatch, difference
from offload.replaying.plain_memory import PlainMemory
from offload.replaying.saving import generator_states, set_generators
from offload.replaying.step_file import SavedPart
from offload.running.runner import Runner
from offload.sizes import is_share, parse_share

EVERYTHING = "100%"
"""A budget in which nothing has to move."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a planned run of a part made, and what differs from eager."""

    plan: Plan | None
    """None: the part ran as it was issued, so that no plan was tested."""
    differing: Mapping[str, str]
    """By the name of a result: where it differs."""
    results: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Where the bits of a part first differ from eager's."""

    stage: str
    task: str
    """Empty if no task could be named."""
    value: str


def replay(part: SavedPart, budget: Budget = None, engine: str | None = None) -> Replayed:
    """Run a part eagerly and by a plan, and compare."""
    return _compare(part, _run_eagerly(part), _RecordingPlanner(engine), budget or EVERYTHING)


def budget_bytes(parts: Sequence[SavedPart], budget: Budget) -> Budget:
    """A share as bytes: it is one of what the largest part needs if nothing ever moves."""
    if not isinstance(budget, str) or not is_share(budget):
        return budget
    needs: list[tuple[int, int]] = []
    for part in parts:
        memory = StepMemory(part)
        session = LiveSession(
            memory.module, memory.optimizer, budget=EVERYTHING, device=memory.device, runs=False
        )
        with session:
            issue_in_session(session, part, memory)
        assert isinstance(session.plans, UnrunPlans)
        needs += session.plans.needs
    return max(ceil(most * parse_share(budget)) + reserve for most, reserve in needs)


def bisect(part: SavedPart, budget: Budget = None, engine: str | None = None) -> Finding | None:
    """Return where the bits first differ from eager's; None if they do not."""
    right = _run_eagerly(part)
    if differing := _find_differences(part, right, _run_eagerly(part)):
        return Finding("eager, which differs in a second run", "", _first_of(differing))
    serial = "serial" if torch.device(part.device).type == "cpu" else None
    planner = _RecordingPlanner(serial)
    differing = _compare(part, right, planner, EVERYTHING).differing
    if planner.planned is None:
        if not differing:
            return None
        return Finding("the part, which has no plan", "", _first_of(differing))
    if finding := _find_in_passes(part, right, planner):
        return finding
    stages = [("the plan without a budget", EVERYTHING, serial)]
    stages += [(f"the plan for {budget}", budget, serial)] if budget else []
    stages += [(f"engine {engine or 'auto'}", budget or EVERYTHING, engine)]
    for stage, within, runs_on in stages:
        planner = _RecordingPlanner(runs_on, watches=True)
        if differing := _compare(part, right, planner, within).differing:
            return planner.find_first(stage) or Finding(stage, "", _first_of(differing))
    return None


def _first_of(differing: Mapping[str, str]) -> str:
    return next(f"{name}: {where}" for name, where in differing.items())


class _RecordingPlanner(PlainPlanner):
    """Plans with one engine, and keeps what a part begins with."""

    def __init__(self, engine: str | None, *, watches: bool = False) -> None:
        """`watches`: compare every task with its reference."""
        super().__init__()
        self._engine = engine
        self._watches = watches
        self._watch: NodeWatch | None = None
        self.graphs: list[TaskGraph] = []
        """The captured graph, and that after each pass."""
        self.names: list[str] = ["capture, before any pass"]
        """How each of them was made."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.batch: list[torch.Tensor] = []
        self.planned: Plan | None = None

    def record_passes(self, passes: Sequence[GraphPass]) -> Iterator[GraphPass]:
        """The passes, which note the graphs."""
        for each in passes:

            def run(graph: TaskGraph, run_pass: GraphPass = each) -> TaskGraph:
                self.graphs = self.graphs or [graph]
                self.names.append(f"pass {run_pass.__name__}")
                self.graphs.append(run_pass(graph))
                return self.graphs[-1]

            yield run

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        self.planned = super().plan(graph, budget)
        assert graph.program is not None
        for name, source in graph.program.tensors.items():
            first = source if isinstance(source, torch.Tensor) else source[0]
            self.tensors[name] = _storage_bytes(first).clone()
        return self.planned

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return Runner(plan, self._engine, key=key, watch=self._wrap if self._watches else None)

    def _wrap(self, memgraph: Any, arenas: Any, node: int, run: Any) -> Any:
        def run_watched() -> None:
            assert self._watch is not None
            self._watch.wrap(memgraph, arenas, node, run)()

        return run_watched

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        self.batch = [each.clone() for each in batch]
        if self._watches:
            assert self.planned is not None
            device = runner.stage.device
            states = generator_states(device)
            self._watch = NodeWatch(self.planned.graph, self.tensors, self.batch)
            set_generators(states)
        return super().run(runner, key, batch)

    def find_first(self, stage: str) -> Finding | None:
        """The first task that read or wrote anything else than its reference."""
        if self._watch is None or self._watch.found is None or self.planned is None:
            return None
        number, value, what = self._watch.found
        graph = self.planned.graph
        name = graph.buffers[value.buffer].name
        return Finding(stage, _title(number, graph.tasks[number]), f"{name} {what}")


def _run_eagerly(part: SavedPart) -> dict[int, torch.Tensor]:
    memory = StepMemory(part)
    issue(part, memory)
    return memory.results()


def _compare(
    part: SavedPart, right: Mapping[int, torch.Tensor], planner: _RecordingPlanner, budget: Budget
) -> Replayed:
    memory = StepMemory(part)
    session = LiveSession(
        memory.module, memory.optimizer, budget=budget, device=memory.device, planner=planner
    )
    session.hooks.user_line = lambda: memory.where
    session.tapes.passes = (*planner.record_passes(session.tapes.passes),)
    try:
        with session:
            issue_in_session(session, part, memory)
    except OffloadError:
        raise
    except Exception as error:  # eager raised none
        differing = {"the step": f"{type(error).__name__}: {error}"}
    else:
        differing = _find_differences(part, right, memory.results())
    return Replayed(planner.planned, differing, len(right))


def _find_differences(
    part: SavedPart, right: Mapping[int, torch.Tensor], made: Mapping[int, torch.Tensor]
) -> dict[str, str]:
    differing: dict[str, str] = {}
    for slot, expected in right.items():
        name, value = result_name(part, slot)
        if where := difference(_view_typed(expected, value), _view_typed(made[slot], value)):
            differing[name] = where
    return differing


def _view_typed(memory: torch.Tensor, value: Value) -> torch.Tensor:
    return memory.view(value.dtype).as_strided(value.size, value.stride, value.offset)


# ---- passes -------------------------------------------------------------------------------------


def _find_in_passes(
    part: SavedPart, right: Mapping[int, torch.Tensor], planner: _RecordingPlanner
) -> Finding | None:
    """Run the graph before and after every pass on memory of its own."""
    known = {result_name(part, slot)[0]: _digest(memory) for slot, memory in right.items()}
    eager = {_digest(memory) for memory in right.values()}
    before: _PlainRun | None = None
    for graph, name in zip(planner.graphs, planner.names, strict=True):
        set_generators(part.generators)
        after = _PlainRun(graph, planner)
        if before is None:
            made = after.results.items()
            wrong = [n for n, value in made if known.get(n, value) != value or value not in eager]
            if wrong:
                return after.finding(name, wrong[0], "is not what the operations make")
        elif after.results != before.results:
            return after.differs_from(before, name)
        before = after
    return None


class _PlainRun:
    """A graph that ran on memory of its own."""

    def __init__(self, graph: TaskGraph, planner: _RecordingPlanner) -> None:
        self._graph = graph
        self._memory = PlainMemory(graph, planner.tensors, planner.batch)
        for task in graph.tasks:
            self._memory.run(task)
        self._buffers = {b.tensor: n for n, b in enumerate(graph.buffers) if b.persistent}
        self._buffers |= {f"output {n}": buffer for n, buffer in enumerate(graph.outputs)}
        self.results = {name: self._digest(number) for name, number in self._buffers.items()}

    def _digest(self, buffer: int) -> bytes:
        return _digest(self._memory.bytes(buffer))

    def differs_from(self, before: "_PlainRun", stage: str) -> Finding:
        """Name the first task whose value is new, and was another one. A pass may give a value
        another buffer, and a buffer another value, so both must hold."""
        known = {before._digest(b) for task in before._graph.tasks for b in task.writes}
        last = {b: n for n, task in enumerate(self._graph.tasks) for b in task.writes}
        for buffer, number in sorted(last.items(), key=lambda item: item[1]):
            now = self._digest(buffer)
            if now not in known and now != before._digest(buffer):
                task, name = self._graph.tasks[number], self._graph.buffers[buffer].name
                return Finding(stage, _title(number, task), name)
        wrong = next(n for n, made in self.results.items() if before.results.get(n) != made)
        return Finding(stage, "", wrong)

    def finding(self, stage: str, result: str, what: str) -> Finding:
        """Name the task that wrote a result last."""
        buffer = self._buffers[result]
        writers = [n for n, task in enumerate(self._graph.tasks) if buffer in task.writes]
        title = _title(writers[-1], self._graph.tasks[writers[-1]]) if writers else ""
        return Finding(stage, title, f"{result} {what}")


def _digest(memory: torch.Tensor) -> bytes:
    return blake2b(memory.cpu().numpy().tobytes()).digest()


def _title(number: int, task: Task) -> str:
    return f"{number} {task.name}" + (f" ({task.where})" if task.where else "")


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
