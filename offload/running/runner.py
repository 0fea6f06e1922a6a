"""One job on a stage: its plans, and where its tensors are. A batch goes in, outputs come out.

    runner(*batch)   settle the tensors -> batch to its places -> engine runs the nodes -> outputs

    Stage (stage.py)   Arenas (arenas.py)   Homes (homes.py)   Binding (binding.py)

A batch of another shape is captured and planned anew, once, with the same budget, and shares the
arenas. So do other steps over the same tensors (`add`, `run`): of several micro-batches the first
ones update nothing. Nothing is allocated between the first node and the last, but for what kernels
do.

A step that fails (an exception of a node, Ctrl-C) leaves its tensors half way between two steps.
The exception says so in a note (binding.py: `notes`). The engine ends what it began (crew.py:
`rest`, streams.py: `check`), and the runner can be used again.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from offload.errors import DeviceLost, StepError
from offload.graph.taskgraph import HOST, TaskGraph
from offload.memory.arenas import Arenas, HostArena
from offload.memory.homes import Homes, resident_bytes
from offload.memory.placement import Bindings
from offload.memory.room import check_room
from offload.memory.runnable import RunnablePlan
from offload.memory.waiting_place import WaitingPlace
from offload.running.binding import Binding, notes, program_of
from offload.running.drivers.driver import Driver
from offload.running.engines.tail_crew import HostTails, TailCrew
from offload.running.engines.work import Record
from offload.running.input_checks import Shape, check_stage, shape_of
from offload.running.stage import Stage
from offload.running.tailed_step import TailedStep
from offload.running.torch_modes import in_step_modes
from offload.running.trace import Trace


class Runner:
    """A context manager. `close()` gives every tensor memory of its own again."""

    def __init__(
        self,
        plan: RunnablePlan,
        engine: str | None = None,
        order: str = "priority",
        seed: int = 0,
        *,
        poison: bool = False,
        host_workers: int | None = None,
        key: Hashable = None,
        driver: Driver | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`engine`: `threads` for a step on the CPU and `cuda` for one on a device, if not given.
        `poison` fills dead bytes with NaN, and `order="random"` takes any legal order: both are
        for tests. `host_workers`: threads for tasks on the host, as many as the plan reckoned
        with if not given. `key`: what `run` calls the plan's step, as if it were added.
        `driver`: what engines `cuda` and `cudagraph` drive; of the program's device, if not
        given. `stage`: one that other runners use too; it has the engine already."""
        self._program = program_of(plan.graph)
        self._owns_stage = stage is None
        self._stage = stage or Stage(
            self._program.device,
            engine,
            order,
            seed,
            host_workers=plan.costs.host_workers if host_workers is None else host_workers,
            driver=driver,
        )
        check_stage(stage, self._program, engine=engine, host_workers=host_workers, driver=driver)
        self.trace = Trace()
        """The last step's."""
        self.placed = Bindings()
        """What became of the outputs of kernels: born at their address, or copied there."""
        self._plan = plan
        self._poison = poison
        self._first: Hashable = self._shape if key is None else key
        self._plans: dict[Hashable, RunnablePlan] = {self._first: plan}
        self._bindings: dict[Hashable, Binding] = {}
        self._rooms: dict[Hashable, int] = {}
        """Bytes that each plan's residents take while they are parked."""
        self._current: Homes | None = None
        """Where the last step left the tensors."""
        self._arenas: Arenas | None = None
        self._host: HostArena | None = None
        self._waiting: WaitingPlace | None = None
        """Taken with the arenas if others use the stage, so that no other job fails for want of
        it; else at the first `park`."""
        self._origins: dict[str, torch.device] = {}
        """Where each tensor of the user's was before, by its name."""
        self.tails: HostTails | None = None
        """If set, the next steps hand the stage on as soon as only their tails are left
        (tailed_step.py). Engine `cudagraph` captures such steps apart from others."""
        self._tail_crew: TailCrew | None = None
        self._closed = False
        with self._stage.lock:
            self._enter(self._first)

    def __call__(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step. The outputs are new tensors, in the order of the captured step."""
        return self._one_step(partial(self._planned, batch), batch)

    def _planned(self, batch: Sequence[torch.Tensor]) -> Hashable:
        """What the plan for a batch of this shape is called. It is made at the first call."""
        shape = shape_of(batch, self._program)
        if shape not in self._plans:
            self._plans[shape] = self._plan.replan(self._capture(batch))
        return shape

    # ---- plans ----------------------------------------------------------------------------------

    def add(self, key: Hashable, graph: TaskGraph) -> RunnablePlan:
        """Plan another step over the same tensors, with the same budget."""
        with self._stage.lock:
            self._check_open()
            plan = self._plan.replan(graph)
            self._forget(key)
            self._plans[key] = plan
            return plan

    def run(self, key: Hashable, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step of a plan that was added."""
        return self._one_step(partial(self._added, key, batch), batch)

    def _added(self, key: Hashable, batch: Sequence[torch.Tensor]) -> Hashable:
        if key not in self._plans:
            raise StepError(f"this runner has no step {key!r}: add(key, graph) comes first")
        program = program_of(self._plans[key].graph)
        shape = tuple(value.size for value in program.inputs)
        if shape_of(batch, program) != shape:
            raise StepError(f"the step is for inputs of shape {shape}")
        return key

    def forget(self, key: Hashable) -> None:
        """Drop a step that was added. It must be added again to be run."""
        with self._stage.lock:
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        self._plans.pop(key, None)
        self._rooms.pop(key, None)
        self._bindings.pop(key, None)  # its tensors stay where they are until the next step

    def _capture(self, batch: Sequence[torch.Tensor]) -> TaskGraph:
        if self._program.recapture is None:
            raise StepError(
                f"the step is for inputs of shape {self._shape} and cannot be captured anew;"
                f" {tuple(tuple(given.shape) for given in batch)} were given"
            )
        return self._program.recapture(*batch)

    @property
    def _shape(self) -> Shape:
        return tuple(value.size for value in self._program.inputs)

    # ---- a step ---------------------------------------------------------------------------------

    def measure(self, on: bool = True) -> None:
        """Whether `trace` has the nodes' own times in the next steps, where that costs something:
        engine `cuda` enqueues them, and knows nothing else of them. Others always measure."""
        self._stage.engine.measure = on

    def astray(self) -> str:
        """The name of a tensor that is not where the last step left it: somebody pointed it to
        other memory (`p.data = ...`) and may still hold what it was, which a step writes over.
        Empty: there is none."""
        with self._stage.lock:
            return self._current.astray(self._waiting) if self._current else ""

    def _check_open(self) -> None:
        if self._tail_crew:
            self._tail_crew.wait()  # another thread's step is not over
        if self._closed:
            raise StepError("this runner is closed: make another one from its plan")

    def _one_step(
        self, find: Callable[[], Hashable], batch: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """`find` returns the name of the plan. It is called under the stage's lock."""
        if self.tails is not None:
            return self._step_with_tail(find, batch, self.tails)
        with self._stage.lock:
            self._check_open()
            bound, outputs = self._step(find(), batch, None)
            bound.end()
            return outputs

    def _step_with_tail(
        self, find: Callable[[], Hashable], batch: Sequence[torch.Tensor], tails: HostTails
    ) -> tuple[Any, ...]:
        if self._tail_crew is None:
            self._tail_crew = TailCrew(self._stage.host_workers)
        step = TailedStep(self._tail_crew, tails)
        try:
            with self._stage.lock:
                self._check_open()
                bound, outputs = self._step(find(), batch, step)
                if not step.handed_on:
                    bound.end()
                    return outputs
            step.run_tail()
            bound.end()
            return outputs
        except BaseException as error:
            step.annotate(error)
            raise
        finally:
            try:
                self.trace = step.end() or self.trace
            finally:
                step.give_back()

    def _step(
        self, key: Hashable, batch: Sequence[torch.Tensor], step: TailedStep | None
    ) -> tuple[Binding, tuple[Any, ...]]:
        changed = program_of(self._plans[key].graph).changed
        if changed is not None and (what := changed()):
            raise StepError(
                f"{what}, but a captured step does what it did when it was captured. Capture it"
                " again, and make a new runner"
            )
        run = partial(self._run_nodes, key, batch, step)
        return in_step_modes({self._program.device.type}, run)

    def _run_nodes(
        self, key: Hashable, batch: Sequence[torch.Tensor], step: TailedStep | None
    ) -> tuple[Binding, tuple[Any, ...]]:
        self._stage.warm()
        bound = self._enter(key)
        bound.begin(batch)
        if step is not None and step.takes(bound):
            step.run_body(self._stage)
        else:
            self._run(bound)
            torch.autograd.graph.increment_version(bound.homes.counted())
        return bound, bound.outputs()

    def _run(self, bound: Binding) -> None:
        record = Record()
        try:
            self._stage.run(bound.pieces, record)
        except BaseException as error:
            for note in notes(bound.memgraph, record):
                error.add_note(note)
            raise
        finally:
            self.trace = Trace(bound.memgraph, record)

    # ---- where the tensors are, under the stage's lock ------------------------------------------

    def _enter(self, key: Hashable) -> Binding:
        """What runs this step; no tensor is at home anywhere else afterwards."""
        arenas = self._held(key)
        found = self._bindings.get(key)
        if found is None:
            found = self._bindings[key] = Binding(
                self._plans[key],
                arenas,
                self.placed,
                poison=self._poison,
                driver=self._stage.driver,
                captured=self._stage.engine.captures,
            )
        if found.homes is not self._current:
            if self._current:
                self._current.release(stays=found.homes)
            self._current = found.homes
        waiting = self._waiting.waiting_bytes if self._waiting else 0
        begin = self._stage.clock()
        found.homes.settle(self._waiting)
        if waiting:
            self._stage.came_back(waiting, self._stage.clock() - begin)
        return found

    def _held(self, key: Hashable) -> Arenas:
        """Arenas with room for this plan, the device's lent by the stage. Where one is too small,
        the old ones go before larger ones come."""
        plan = self._plans[key]
        if key not in self._rooms:
            self._rooms[key] = resident_bytes(plan.memgraph)
        needed = plan.memgraph.arenas
        on_device = {number: nbytes for number, nbytes in needed.items() if number != HOST}
        had = self._host.region.nbytes if self._host else -1, self.parked_bytes
        on_host = max(needed.get(HOST, 0), had[0])
        waiting = max(0 if self._owns_stage else self._rooms[key], had[1])
        lent = self._stage.lent(self, on_device)
        if lent is None or had != (on_host, waiting):
            self._leave()
            room = partial(check_room, plan, waiting=waiting)
            if lent is None:
                self._stage.grow(on_device, lambda larger: room({**larger, HOST: on_host}))
                lent = self._stage.lent(self, on_device)
                assert lent is not None
            else:
                room({HOST: on_host})
            self._host = HostArena(on_host, self._program.device)
            self._waiting = WaitingPlace(waiting, self._program.device) if waiting else None
            for note in {self._host.note, self._waiting.note if self._waiting else ""} - {""}:
                self._plan.remarks.say(note)
        assert self._host is not None
        if self._arenas is None or self._arenas.lent is not lent:
            self._bindings.clear()
            self._arenas = Arenas(lent, self._host, self._origins)
        return self._arenas

    @property
    def parked_bytes(self) -> int:
        """Bytes of the host that are kept for residents, whether they are parked now or not."""
        return self._waiting.nbytes if self._waiting else 0

    def park(self) -> None:
        """Have the residents leave the device's arena now. They wait on the host; the next step
        brings them back. What is at home in the host's arena stays there. Another runner's step on
        the same stage does this by itself."""
        with self._stage.lock:
            self._check_open()
            self._stage.park(self)

    def make_way(self) -> int:
        """A `Tenant`'s: another one needs the device's arena. The stage's lock is held."""
        needed = self._current.resident_bytes if self._current else 0
        if not (self._current and needed):
            return 0
        if self._waiting is None or self._waiting.nbytes < needed:
            check_room(self._plan, {}, needed)
            self._waiting = WaitingPlace(needed, self._program.device)
        return self._current.park(self._waiting)

    def evict(self) -> int:
        """A `Tenant`'s: the device's arena is about to be freed."""
        moved = self.make_way()
        if self._current:
            self._current.forget_device()
        self._bindings.clear()
        self._arenas = None
        return moved

    def _leave(self) -> None:
        """Every tensor gets memory of its own, where it was before; the arenas are given up."""
        if self._current and self._arenas:
            lent = self._stage.is_lent_to(self)
            self._arenas.forget(keep=self._current.places.values(), lent=lent)
        if self._current:
            self._current.release()
        if self._host:
            self._host.unlock()
        if self._waiting:
            self._waiting.unlock()
            self._waiting.empty(self._origins)
        self._current, self._arenas, self._host, self._waiting = None, None, None, None
        self._bindings.clear()

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Safe to call again. Waits for a step that another thread runs."""
        with self._stage.lock:
            self._closed = True
            try:
                if self._tail_crew:
                    self._tail_crew.close()
                if self._owns_stage:
                    self._stage.engine.close()
            finally:
                self._leave()
                self._stage.leave(self)
        if self._owns_stage:
            self._stage.close()

    def abandon(self) -> None:
        """Instead of `close`, where the device is lost: nothing can be read from it, so no tensor
        is moved out of the arenas."""
        with self._stage.lock:
            self._closed, self._current = True, None
            if self._tail_crew:
                self._tail_crew.close()
            self._bindings.clear()
            self._stage.leave(self)
        if self._owns_stage:
            self._stage.abandon()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DeviceLost):
            self.abandon()
        else:
            self.close()
