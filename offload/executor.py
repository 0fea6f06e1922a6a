"""Runs a plan: the user's tensors live in its arenas, a batch goes in, the outputs come out.

    runner(*batch)   settle the tensors -> batch to its places -> engine runs the nodes -> outputs

    Arenas (memory.py)   Homes (homes.py)   Engine (engines/)   Trace (trace.py)

A batch of another shape is captured and planned anew, once, with the same budget, and shares the
arenas. So do other steps over the same tensors (`add`, `run`): of several micro-batches the first
ones update nothing. Nothing is allocated between the first node and the last, but for what kernels
do.

A step that fails (an exception of a node, Ctrl-C) leaves its tensors half way between two steps;
the exception says so in a note, and the runner can be used again.
"""

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from offload.binding import Binding, notes, program_of
from offload.device_memory import check_device, device_left
from offload.drivers import Driver
from offload.drivers.capturing import Capturing
from offload.drivers.cuda import Cuda
from offload.drivers.cuda_graph import GraphCuda
from offload.engines import ORDERS, Engine, Record
from offload.engines.cudagraph import CudaGraph
from offload.engines.serial import Serial
from offload.engines.streams import Streams
from offload.engines.threads import Threads
from offload.errors import DeviceLost, OffloadError, StepError
from offload.kernels import Program
from offload.machine import check_memory, memory_left
from offload.memory import Arenas, give_cached_back
from offload.placement import Bindings
from offload.runnable import Plan
from offload.taskgraph import TaskGraph
from offload.trace import Trace
from offload.workspaces import warm

CUDA, CUDAGRAPH = "cuda", "cudagraph"
ENGINES = ("threads", "serial", CUDA, CUDAGRAPH)
Shape = tuple[tuple[int, ...], ...]
T = TypeVar("T")


class Runner:
    """A context manager. `close()` gives every tensor memory of its own again."""

    def __init__(
        self,
        plan: Plan,
        engine: str | None = None,
        order: str = "priority",
        seed: int = 0,
        *,
        poison: bool = False,
        host_workers: int | None = None,
        key: Hashable = None,
        driver: Driver | None = None,
    ) -> None:
        """`engine`: `threads` for a step on the CPU and `cuda` for one on a device, if not given.
        `poison` fills dead bytes with NaN, and `order="random"` takes any legal order: both are
        for tests. `host_workers`: threads for tasks on the host, as many as the plan reckoned
        with if not given. `key`: what `run` calls the plan's step, as if it were added.
        `driver`: what engines `cuda` and `cudagraph` drive; of the program's device, if not
        given."""
        engine = _suited(engine, program_of(plan.graph).device)
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r}: one of {', '.join(ENGINES)} is needed")
        if order not in ORDERS:
            raise ValueError(f"order {order!r}: one of {', '.join(ORDERS)} is needed")
        self._driver = _driver(engine, program_of(plan.graph), driver)
        self.trace = Trace()
        """Of the last step."""
        self.placed = Bindings()
        """What became of the outputs of kernels: born at their address, or copied there."""
        self._plan = plan
        self._poison = poison
        self._program = program_of(plan.graph)
        self._first: Hashable = self._shape if key is None else key
        self._plans: dict[Hashable, Plan] = {self._first: plan}
        self._bindings: dict[Hashable, Binding] = {}
        self._current: Binding | None = None
        self._warmed: set[int] = set()
        check_room(plan, plan.memgraph.arenas)
        self._arenas = self._taken(plan.memgraph.arenas)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._closed = False
        workers = plan.costs.host_workers if host_workers is None else host_workers
        self._engine = _engine(engine, self._driver, order, seed, workers)
        self._enter(self._first)

    def __call__(self, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step. The outputs are new tensors, in the order of the captured step."""
        with self._step_lock:
            self._check_open()
            shape = _checked(batch, self._program)
            if shape not in self._plans:
                self._plans[shape] = self._plan.replan(self._capture(batch))
            return self._step(shape, batch)

    def add(self, key: Hashable, graph: TaskGraph) -> Plan:
        """Another step over the same tensors, planned with the same budget."""
        with self._step_lock:
            self._check_open()
            plan = self._plan.replan(graph)
            self._forget(key)
            self._plans[key] = plan
            return plan

    def run(self, key: Hashable, *batch: torch.Tensor) -> tuple[Any, ...]:
        """One step that was added."""
        with self._step_lock:
            self._check_open()
            if key not in self._plans:
                raise StepError(f"this runner has no step {key!r}: add(key, graph) comes first")
            program = program_of(self._plans[key].graph)
            shape = tuple(value.size for value in program.inputs)
            if _checked(batch, program) != shape:
                raise StepError(f"the step is for inputs of shape {shape}")
            return self._step(key, batch)

    def measure(self, on: bool = True) -> None:
        """Whether `trace` has the nodes' own times in the next steps, where that costs something:
        engine `cuda` enqueues them, and knows nothing else of them. Others always measure."""
        if isinstance(self._engine, Streams | CudaGraph):
            self._engine.measure = on

    def astray(self) -> str:
        """The name of a tensor that is not where the last step left it: somebody pointed it to
        other memory (`p.data = ...`) and may still hold what it was, which a step writes over.
        Empty: there is none."""
        with self._step_lock:
            return self._current.homes.astray() if self._current else ""

    def forget(self, key: Hashable) -> None:
        """A step that was added. It must be added again to be run."""
        with self._step_lock:
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        self._plans.pop(key, None)
        self._bindings.pop(key, None)  # its tensors stay where they are until the next step

    @property
    def _step_lock(self) -> threading.Lock:
        """Held by who uses this runner, which no process can that is forked from its own. (There,
        nobody gives the lock back that another thread held.)"""
        if os.getpid() != self._process:
            raise StepError(
                f"this Runner belongs to process {self._process}, and process {os.getpid()}, forked"
                " from it, has none of its threads and not its device: make one in the child"
                " (which must be spawned if it is to use CUDA)"
            )
        return self._lock

    def _check_open(self) -> None:
        if self._closed:
            raise StepError("this runner is closed: make another one from its plan")

    def _step(self, key: Hashable, batch: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        bound, outputs = self._run_nodes(key, batch)
        for call in bound.program.after_step:
            call()
        return outputs

    def _run_nodes(
        self, key: Hashable, batch: Sequence[torch.Tensor]
    ) -> tuple[Binding, tuple[Any, ...]]:
        """Without autograd, and without autocast: the captured ops have the right types already."""
        inner = partial(self._run_without_autograd, key, batch)
        for kind in sorted({"cpu", self._program.device.type}):
            inner = partial(_without_autocast, kind, inner)
        return inner()

    def _run_without_autograd(
        self, key: Hashable, batch: Sequence[torch.Tensor]
    ) -> tuple[Binding, tuple[Any, ...]]:
        """A Ctrl-C inside the `__exit__` of `torch.no_grad()` would leave the caller without
        autograd: a plain call in a `finally` cannot be struck before it is done."""
        autograd = torch.is_grad_enabled()
        benchmark = torch.backends.cudnn.benchmark  # it would choose other sizes than were measured
        try:
            torch._C._set_grad_enabled(False)
            torch.backends.cudnn.benchmark = False
            self._warm()
            bound = self._enter(key)
            bound.begin(batch)
            self._run(bound)
            torch.autograd.graph.increment_version(bound.homes.counted())
            return bound, bound.outputs()
        finally:
            try:
                torch._C._set_grad_enabled(autograd)
            finally:  # struck between the two; the property's setter is Python, and can be struck
                torch._C._set_cudnn_benchmark(benchmark)

    def _warm(self) -> None:
        """What libraries keep for this thread is there before a kernel is served."""
        thread, device = threading.get_ident(), self._program.device
        if device.type != "cuda" or thread in self._warmed:
            return
        driver = self._driver
        if driver is None:
            warm(device)
        else:
            try:
                driver.begin()
                driver.enqueue(driver.stream("compute"), partial(warm, device))
            finally:
                driver.end()  # or the caller's current stream would be ours
        self._warmed.add(thread)

    def _run(self, bound: Binding) -> None:
        record = Record()
        try:
            self._engine.run(bound.work, record)
        except BaseException as error:
            for note in notes(bound.memgraph, record):
                error.add_note(note)
            raise
        finally:
            self.trace = Trace(bound.memgraph, record)

    @property
    def _shape(self) -> Shape:
        return tuple(value.size for value in self._program.inputs)

    def _capture(self, batch: Sequence[torch.Tensor]) -> TaskGraph:
        if self._program.recapture is None:
            raise StepError(
                f"the step is for inputs of shape {self._shape} and cannot be captured anew;"
                f" {tuple(tuple(given.shape) for given in batch)} were given"
            )
        return self._program.recapture(*batch)

    def _enter(self, key: Hashable) -> Binding:
        """What runs this step; no tensor is at home anywhere else afterwards."""
        memgraph = self._plans[key].memgraph
        found = self._bindings.get(key)
        if found is None:
            if not self._arenas.hold(memgraph.arenas):
                self._grow(self._plans[key])
            found = Binding(
                self._plans[key],
                self._arenas,
                self.placed,
                poison=self._poison,
                driver=self._driver,
                captured=isinstance(self._engine, CudaGraph),
            )
            self._bindings[key] = found
        if found is not self._current:
            if self._current:
                self._current.homes.release(stays=found.homes)
            self._current = found
        found.homes.settle()
        return found

    def _grow(self, plan: Plan) -> None:
        """For this one. The old arenas go before the new ones come."""
        needed = plan.memgraph.arenas
        sizes = {
            arena: max(needed.get(arena, 0), self._arenas.sizes.get(arena, 0))
            for arena in {*needed, *self._arenas.sizes}
        }
        self._leave()
        self._bindings.clear()
        self._arenas = Arenas({}, self._program.device)
        check_room(plan, sizes)
        self._arenas = self._taken(sizes)

    def _taken(self, sizes: Mapping[int, int]) -> Arenas:
        arenas = Arenas(sizes, self._program.device)
        notes = self._plan.graph.notes
        if arenas.note and arenas.note not in notes:
            notes.insert(0, arenas.note)
        return arenas

    def _leave(self) -> None:
        if self._current:
            self._arenas.forget(keep=self._current.homes.places.values())
            self._current.homes.release()
        self._current = None

    def close(self) -> None:
        """Safe to call again. Waits for a step that another thread runs."""
        with self._step_lock:
            self._closed = True
            try:
                self._engine.close()
            finally:
                if self._current:  # not after `abandon`
                    self._leave()
                    self._bindings.clear()
                    self._arenas = Arenas({}, self._program.device)

    def abandon(self) -> None:
        """Instead of `close`, where the device is lost: nothing can be read from it, so no tensor
        is moved out of the arenas."""
        with self._step_lock:
            self._closed, self._current = True, None
            self._bindings.clear()
            with suppress(RuntimeError, OffloadError):  # it says once more that the device is lost
                self._engine.close()

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


def check_room(plan: Plan, arenas: Mapping[int, int]) -> None:
    """Raise `MemoryTooSmall` unless the arenas of a plan, or larger ones, may be taken now."""
    check_memory(plan, arenas, memory_left())
    device = program_of(plan.graph).device
    if device.type == "cuda":
        give_cached_back(device)
        check_device(plan, arenas, device_left(device))


def _without_autocast(kind: str, run: Callable[[], T]) -> T:
    before = torch.is_autocast_enabled(kind)
    try:
        torch.set_autocast_enabled(kind, False)
        return run()
    finally:
        torch.set_autocast_enabled(kind, before)


def _suited(engine: str | None, device: torch.device) -> str:
    """To where the kernels run."""
    if device.type == "cpu":
        return engine or "threads"
    if engine in ("threads", "serial"):
        raise OffloadError(
            f"engine {engine!r} runs on the CPU, and this step was captured on {device}: take"
            f" engine {CUDA!r}"
        )
    return engine or CUDA


def _driver(engine: str, program: Program, driver: Driver | None) -> Driver | None:
    """Before anything is allocated."""
    if engine == CUDA:
        return Cuda(program.device) if driver is None else driver
    if engine == CUDAGRAPH:
        if driver is not None and not hasattr(driver, "begin_capture"):
            raise ValueError(f"engine {engine!r} needs a driver that captures: {driver} does not")
        return GraphCuda(program.device) if driver is None else driver
    if driver is not None:
        raise ValueError(f"engine {engine!r} has no use for a driver: {CUDA}, {CUDAGRAPH} have")
    return None


def _engine(engine: str, driver: Driver | None, order: str, seed: int, host_workers: int) -> Engine:
    if driver is not None:
        streams = Streams(driver, order, seed, host_workers)
        return CudaGraph(cast(Capturing, driver), streams) if engine == CUDAGRAPH else streams
    return Serial(order, seed) if engine == "serial" else Threads(order, seed, host_workers)


def _checked(batch: Sequence[Any], program: Program) -> Shape:
    """The shape of a batch; raise `StepError` where it is none for this step."""
    wanted = program.inputs
    if len(batch) != len(wanted):
        raise StepError(f"{len(batch)} tensors were given; the step takes {len(wanted)}")
    for number, (given, value) in enumerate(zip(batch, wanted, strict=True)):
        if not isinstance(given, torch.Tensor):
            raise StepError(f"input {number} is a {type(given).__name__}; a tensor is expected")
        if given.dtype != value.dtype or given.device.type not in ("cpu", program.device.type):
            raise StepError(
                f"input {number} is {given.dtype} on {given.device}; {value.dtype} on"
                f" {program.device} is expected"
            )
    return tuple(tuple(given.shape) for given in batch)
