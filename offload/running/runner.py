"""One job on a stage: its plans, and where its tensors are. A batch goes in, outputs come out.

    runner(*batch)   settle the tensors -> batch to its places -> engine runs the nodes -> outputs

    Stage (stage.py)   RunnerMemory (runner_memory.py)   Homes (homes.py)   Binding (binding.py)

A batch of another shape is captured and planned anew, once, with the same budget, and shares the
arenas. So do other steps over the same tensors (`add`, `run`): of several micro-batches the first
ones update nothing. Nothing is allocated between the first node and the last, but for what kernels
do.

A step that fails (an exception of a node, Ctrl-C) leaves its tensors half way between two steps.
The exception says so in a note (binding.py: `notes_on_failure`). The engine ends what it began
(crew.py: `wait_idle`, streams.py: `check`), and the runner can be used again.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import DeviceLost, StepError
from offload.gate import Gate
from offload.graph.taskgraph import TaskGraph
from offload.memory.placement import PlacementCounts
from offload.memory.runnable import RunnablePlan
from offload.running.binding import Watch, notes_on_failure, program_of
from offload.running.drivers.cuda import Cuda
from offload.running.drivers.device_loss import naming_loss
from offload.running.engines.tail_crew import HostTails, TailCrew
from offload.running.engines.work import Record
from offload.running.input_checks import check_stage
from offload.running.runner_memory import Migration, RunnerMemory
from offload.running.stage import Stage
from offload.running.step_plans import StepPlans
from offload.running.tailed_step import TailedStep
from offload.running.torch_modes import in_step_modes
from offload.running.trace import Trace

_OTHER_KIND = (
    "the steps moved from {} to {}: the weights are equal, and later bits are those of the new"
    " device's kernels"
)


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
        watch: Watch | None = None,
        host_workers: int | None = None,
        key: Hashable = None,
        driver: Cuda | None = None,
        stage: Stage | None = None,
        gate: Gate | None = None,
        host_dir: Path | None = None,
    ) -> None:
        """`engine`: by default `threads` for a step on the CPU and `cuda` for one on a device.
        `poison` fills dead bytes with NaN, and `order="random"` takes any legal order: both are for
        tests. `watch` puts something around the run of every node. `host_workers`: threads for
        tasks on the host; by default as many as the plan reckoned with. `key`: the name of the
        plan's step for `run`. `driver`: for the engines `cuda` and `cudagraph`; by default that of
        the program's device, which also drives the next ones for a plan of several. `stage`: one
        that other runners use too; it has the engine already. `gate`: lets guests use the device
        between two nodes (gate.py); by default the stage's own. `host_dir`: a folder for a file
        that is the host's memory (file_memory.py), on the CPU."""
        program = program_of(plan.graph)
        self._owns_stage = stage is None
        of_stage: dict[str, Any] = {"engine": engine, "driver": driver, "host_dir": host_dir}
        check_stage(stage, program, host_workers=host_workers, **of_stage)
        workers = plan.costs.host_workers if host_workers is None else host_workers
        self.stage = stage or Stage(
            program.device, order=order, seed=seed, host_workers=workers, gate=gate, **of_stage
        )
        """The stage whose tenant it is."""
        self.trace = Trace()
        """The trace of the last step."""
        self.placed = PlacementCounts()
        """What became of the outputs of kernels: written at their address, or copied there."""
        self._plans = StepPlans(plan, key)
        self._memory = RunnerMemory(
            self.stage, plan, self.placed, poison=poison, watch=watch, alone=self._owns_stage
        )
        self.tails: HostTails | None = None
        """If set, the next steps hand the stage on as soon as only their tails are left
        (tailed_step.py). Engine `cudagraph` captures such steps apart from others."""
        self._tail_crew: TailCrew | None = None
        self._closed = False
        with self.stage.lock:
            self._memory.enter(self._plans.first, plan)

    def __call__(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step. The outputs are new tensors, in the order of the captured step."""
        return self._one_step(partial(self._plans.key_for_batch, batch), batch)

    # ---- plans ----------------------------------------------------------------------------------

    def add(self, key: Hashable, graph: TaskGraph) -> RunnablePlan:
        """Plan another step over the same tensors, with the same budget."""
        with self._hold_stages():
            self._check_open()
            plan = self._plans.add(key, graph)
            self._memory.forget(key)
            return plan

    def run(self, key: Hashable, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step of a plan that was added."""
        return self._one_step(partial(self._plans.check_added, key, batch), batch)

    def forget(self, key: Hashable) -> None:
        """Drop a step that was added. It must be added again to be run."""
        with self._hold_stages():
            self._plans.forget(key)
            self._memory.forget(key)

    # ---- a step ---------------------------------------------------------------------------------

    def measure(self, on: bool = True) -> None:
        """Whether `trace` has the nodes' own times in the next steps, where that costs something:
        engine `cuda` enqueues them, and knows nothing else of them. Others always measure."""
        self.stage.engine.measure = on

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
        with self._hold_stages() as stage, stage.gate.hold():
            self._check_open()
            return self._step(find(), batch, None)

    def _step_with_tail(
        self, find: Callable[[], Hashable], batch: Sequence[torch.Tensor], tails: HostTails
    ) -> tuple[Any, ...]:
        if self._tail_crew is None:
            self._tail_crew = TailCrew(self.stage.host_workers)
        step = TailedStep(self._tail_crew, tails)
        try:
            with self._hold_stages() as stage, stage.gate.hold():
                self._check_open()
                outputs = self._step(find(), batch, step)
            if step.has_tail:
                step.run_tail()
            return outputs
        except BaseException as error:
            step.annotate(error)
            raise
        finally:
            try:
                self.trace = step.end() or self.trace
            finally:
                step.notify_end()

    def _step(
        self, key: Hashable, batch: Sequence[torch.Tensor], step: TailedStep | None
    ) -> tuple[Any, ...]:
        run = partial(self._run_nodes, key, batch, step)
        with naming_loss(*self.stage.devices):
            return in_step_modes(self._plans.program.device.type, run)

    def _run_nodes(
        self, key: Hashable, batch: Sequence[torch.Tensor], step: TailedStep | None
    ) -> tuple[Any, ...]:
        self.stage.warm()
        bound = self._memory.enter(key, self._plans[key])
        bound.begin(batch)
        if step is not None and step.prepare(bound):
            step.run_body(self.stage)
            return bound.outputs()
        record = Record()
        try:
            self.stage.run(bound.work, record)
        except BaseException as error:
            for note in notes_on_failure(bound.memgraph, record):
                error.add_note(note)
            raise
        finally:
            self.trace = Trace(bound.memgraph, record)
        torch.autograd.graph.increment_version(bound.homes.versioned_tensors())
        return bound.outputs()

    # ---- where the tensors are ------------------------------------------------------------------

    def park(self) -> None:
        """Make the residents leave the device's arena now. They wait on the host; the next step
        brings them back. What is at home in the host's arena stays there. Another runner's step on
        the same stage does this by itself."""
        with self._hold_stages():
            self._check_open()
            self.stage.lender.park(self._memory)

    def move_to(
        self,
        plan: RunnablePlan,
        key: Hashable = None,
        stage: Stage | None = None,
        *,
        owned: bool = False,
        beside: bool = True,
    ) -> Migration:
        """Go on with another plan over the same tensors: of another budget, or on another stage.
        Waits for a step that another thread runs. Only what has another home moves, once. Steps
        that were added are planned again when they are run, but not those of another device.
        `owned`: the runner closes the new stage at its end, and nobody else uses it. `beside`:
        whether the old arena may stay while a new one comes.

        Raises `MemoryTooSmall` if there is no room; then nothing has moved. On a stage of the same
        kind of device later steps have the same bits. A plan for another kind must be captured for
        it; the weights are equal, and later bits are those of its kernels."""
        target, program = stage or self.stage, program_of(plan.graph)
        check_stage(target, program)
        with self._hold_stages(target) as old, old.gate.hold(), target.gate.hold():
            self._check_open()
            alone = owned or (self._owns_stage and target is old)
            first = tuple(value.size for value in program.inputs) if key is None else key
            moved = self._memory.move(first, plan, target, alone=alone, beside=beside)
            if target.device.type != old.device.type:
                plan.remarks.add(message := _OTHER_KIND.format(old.device.type, target.device.type))
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._plans.go_over(plan, first)
            self.stage = target
            leaves_own = self._owns_stage and target is not old
            self._owns_stage = alone
            crew, self._tail_crew = self._tail_crew, None
        if crew is not None:
            crew.close()
        if leaves_own:
            old.close()
        return moved

    @contextmanager
    def _hold_stages(self, target: Stage | None = None) -> Iterator[Stage]:
        """Hold the lock of the present stage, which this returns, and that of another one, in an
        order that is the same for all. The runner may have moved while this waited."""
        while True:
            old = self.stage
            first, last = sorted((old, target or old), key=id)
            with first.lock, last.lock if last is not first else nullcontext():
                if old is self.stage:
                    yield old
                    return

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Safe to call again. Waits for a step that another thread runs."""
        with self._hold_stages():
            self._closed = True
            try:
                if self._tail_crew:
                    self._tail_crew.close()
                if self._owns_stage:
                    self.stage.engine.close()
            finally:
                self._memory.leave()
                self.stage.lender.leave(self._memory)
        if self._owns_stage:
            self.stage.close()

    def abandon(self) -> None:
        """Instead of `close`, where the device is lost: nothing can be read from it, so no tensor
        is moved out of the arenas."""
        with self._hold_stages():
            self._closed = True
            if self._tail_crew:
                self._tail_crew.close()
            self._memory.abandon()
            self.stage.lender.leave(self._memory)
        if self._owns_stage:
            self.stage.abandon()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeviceLost):
            self.abandon()
        else:
            self.close()
