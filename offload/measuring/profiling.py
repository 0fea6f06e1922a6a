"""Runs every kernel on made-up tensors to find what it allocates and how long it takes.

Calls that differ only in their buffers run once for all (distinct_calls.py). They take turns in the
same memory, which has the size of the largest call. The random generator is put back afterwards.

The allocator shim logs what a call allocates, and allocation_log.py gives that its places.
Allocations on worker threads of an op are counted but cannot be placed. Without the shim nothing
can be placed. Then PyTorch's own profiler, or the statistics of its caching allocator, give the
bytes.

On a device a call runs once before it is measured, because libraries fill caches then. Its seconds
are those between two events behind a spin kernel, so the host's own time is not in them. What runs
on the host is measured on the host.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from offload.errors import CaptureError, OffloadError
from offload.gate import only_python, stand_aside
from offload.graph.memgraph import TASK, Access, Node, Place
from offload.graph.taskgraph import Task, TaskGraph
from offload.measuring.allocation_log import MARK, peaks_of, round_up
from offload.measuring.distinct_calls import end_of, move_to_zero, signature, sizes, values_of
from offload.measuring.kept_costs import Cost, KeptCosts, MeasuredCosts, cost_of
from offload.measuring.stopwatch import Cpu, Gpu
from offload.memory.cpu_shim import Shim
from offload.memory.cuda_shim import available_on
from offload.memory.device_memory import measuring
from offload.memory.placement import (
    COPY,
    SHIM,
    PlacementCounts,
    Run,
    bind_task,
    flatten_results,
    op_name,
)
from offload.memory.workspaces import kept_bytes, steady, warm
from offload.program.generators import default_generator, generators_in, generators_of
from offload.program.kernels import CPU, Call, Calls, device_of
from offload.program.trees import tensors_of
from offload.torch_seams import OpOverload, spin

SHORT = 0.005
"""Seconds. What takes less is run a second time, because the first may fill caches."""
BRIEF = 0.0001
"""Seconds. What takes less on the CPU is not timed apart from the run that shows what it
allocates."""
RUNS, ENOUGH = 3, 0.02
"""How often a call is timed, as other programs delay some runs; and the seconds that suffice."""
DRAWN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SPIN = 400_000
"""Cycles that a device spins, about a fifth of a millisecond, so that the host gets ahead."""
SEED, OFFSET = 0x5EED5EED, 64
"""A state that no kernel gives a generator."""
HOST_LANE = "host"


def measure_tasks(graph: TaskGraph, kept: KeptCosts | MeasuredCosts | None = None) -> TaskGraph:
    """The graph with the workspace and seconds of every task, and the allocations of its calls.
    `kept`: what was measured before, and is not measured again."""
    device = device_of(graph)
    calls: dict[torch.device, dict[int, Call]] = {device: {}, CPU: {}}
    wheres = [CPU if task.lane == HOST_LANE else device for task in graph.tasks]
    with only_python():
        known: dict[Any, int] = {}
        keys = [
            _add_calls(task, calls[where], known, where, graph.alignment)
            for task, where in zip(graph.tasks, wheres, strict=True)
        ]
        lines = _lines(graph, keys)
    costs: dict[int, Cost] = {}
    with (
        measuring("every kernel once", device, remedy=", or make the batch smaller"),
        torch.no_grad(),
        steady(device),
        _restore_random(device, generators_of(graph))
        if any(map(_may_draw, graph.tasks))
        else nullcontext(),  # other threads may draw at the same time
    ):
        for where, group in calls.items():
            costs |= {} if kept is None else kept.known_costs(where, group)
            new = {key: call for key, call in group.items() if key not in costs}
            times = kept is None or kept.times
            made = _Bench(where, new, graph.alignment, lines, times).measure(new) if new else {}
            costs |= made
            if kept is not None:
                kept.keep(made)
        fixed = kept_bytes(device)
    tasks = [
        _add_costs(task, [costs[key] for key in task_keys]) if task_keys else task
        for task, task_keys in zip(graph.tasks, keys, strict=True)
    ]
    program = None if graph.program is None else replace(graph.program, fixed=fixed)
    ops = {key: op_name(call.op) for group in calls.values() for key, call in group.items()}
    return replace(graph.with_tasks(tasks, None, *_notes(costs, ops)), program=program)


def _may_draw(task: Task) -> bool:
    return task.random or any(map(_is_seeded, getattr(task.kernel, "calls", ())))


def _is_seeded(call: Call) -> bool:
    """Whether a kernel may draw random numbers: one that does, and one of Python's."""
    op = call.of_torch
    return not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded in op.tags


@contextmanager
def _restore_random(device: torch.device, generators: Sequence[torch.Generator]) -> Iterator[None]:
    on_host, states = torch.get_rng_state(), [generator.get_state() for generator in generators]
    there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.set_rng_state(on_host)
        if there is not None:
            torch.cuda.set_rng_state(there, device)


def _add_calls(
    task: Task, calls: dict[int, Call], known: dict[Any, int], where: torch.device, alignment: int
) -> list[int]:
    """Add a task's calls to `calls`, and return their keys. Equal calls have equal keys."""
    if not isinstance(task.kernel, Call | Calls):
        return []
    keys = []
    for call in task.kernel.calls:
        key = known.setdefault((*signature(call, alignment), where), len(known))
        if key not in calls:
            calls[key] = move_to_zero(call, alignment)
        keys.append(key)
    return keys


def _lines(graph: TaskGraph, keys: Sequence[Sequence[int]]) -> dict[int, str]:
    """The user's line where a call comes first, and a colon; or nothing."""
    lines: dict[int, str] = {}
    for task, of_task in zip(graph.tasks, keys, strict=True):
        for key in of_task:
            lines.setdefault(key, f"{task.where}: " if task.where else "")
    return lines


def _add_costs(task: Task, costs: Sequence[Cost]) -> Task:
    pairs = zip(task.kernel.calls, costs, strict=True)
    calls = tuple(
        Call(call.op, call.args, call.kwargs, call.outputs, cost.allocations, cost.advance)
        for call, cost in pairs
    )
    seconds = [cost.seconds for cost in costs if cost.seconds is not None]
    return replace(
        task,
        kernel=calls[0] if isinstance(task.kernel, Call) else Calls(calls),
        workspace=max(cost.workspace for cost in costs),
        unplaced=max(cost.unplaced + cost.elsewhere for cost in costs),
        stray=max(cost.elsewhere for cost in costs),
        seconds=sum(seconds) if len(seconds) == len(costs) else task.seconds,
    )


def _notes(costs: Mapping[int, Cost], ops: Mapping[int, str]) -> list[str]:
    failed = {cost.failure for cost in costs.values() if cost.failure}
    lines = [f"did not run on made-up tensors, so outputs are copied: {f}" for f in failed]
    most = max((cost.elsewhere for cost in costs.values()), default=0)
    if most:
        apart = {ops[key] for key, cost in costs.items() if cost.elsewhere}
        lines.append(
            f"up to {most} bytes that threads of {', '.join(sorted(apart))} allocate lie outside of"
            " the arena; the plan counts them"
        )
    return sorted(lines)


class _DidNotRun(Exception):
    """An op failed on made-up tensors. In a step it may run all the same."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Bench:
    """Runs calls in memory that it uses again and again."""

    def __init__(
        self,
        device: torch.device,
        calls: Mapping[int, Call],
        alignment: int,
        lines: Mapping[int, str],
        times: bool,
    ) -> None:
        """Make memory for the largest of the calls. `times`: measure seconds, too."""
        self._device, self._alignment, self._lines = device, alignment, lines
        with only_python():
            self._places = {key: self._side_by_side(call) for key, call in calls.items()}
            ends = [last for places in self._places.values() for last in places[-1:]]
            nbytes = max((self._round_up(p.offset + p.nbytes) for p in ends), default=0)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._bindings = PlacementCounts()
        self._timer = Gpu(device) if device.type == "cuda" else Cpu(perf_counter)
        self._times = times
        self._took = 0.0
        """Seconds of the last run that was watched."""

    def measure(self, calls: Mapping[int, Call]) -> dict[int, Cost]:
        warm(self._device)
        shim = available_on(self._device)
        if shim is not None or self._device.type == "cuda":
            placed = functools.partial(self._measure_placed, shim) if shim else None
            measure = placed or self._measure_counted
            return {key: self._measure(measure, key, call) for key, call in calls.items()}
        watched: Any = profile(use_cpu=True, profile_memory=True)
        with watched:
            costs = [self._measure(self._measure_copied, key, call) for key, call in calls.items()]
        peaks = peaks_of(watched.kineto_results.events())
        return {
            key: cost if cost.failure else replace(cost, unplaced=peak)
            for key, cost, peak in zip(calls, costs, peaks, strict=True)
        }

    def _round_up(self, nbytes: int) -> int:
        return round_up(nbytes, self._alignment)

    def _side_by_side(self, call: Call) -> list[Place]:
        """Places for the call's buffers, one after the other."""
        places, end = [], 0
        for nbytes in sizes(call):
            places.append(Place(0, end, nbytes))
            end += self._round_up(nbytes)
        return places

    def _measure(self, measure: Callable[[int, Call], Cost], key: int, call: Call) -> Cost:
        stand_aside()
        with record_function(MARK):
            self._fill(key, call)
        try:
            return replace(measure(key, call), advance=self._find_advance(key, call))
        except _DidNotRun as failed:
            error = failed.error
            failure = f"{op_name(call.op)}: {type(error).__name__}: {error}".splitlines()[0]
            outputs = self._round_up(sum(end_of(value) for value in filter(None, call.outputs)))
            return Cost(None, outputs, outputs, None, failure=failure)
        except OffloadError:
            raise
        except Exception as error:
            error.add_note(f"{self._lines[key]}while {op_name(call.op)} was measured")
            raise

    def _find_advance(self, key: int, call: Call) -> int | None:
        """How far the call moves the device's default generator on. It is unknown of what may also
        draw otherwise, or seed."""
        if not _is_seeded(call):
            return 0
        if self._device.type != "cuda" or not isinstance(call.of_torch, OpOverload):
            return None
        default, on_host = default_generator(self._device), torch.get_rng_state()
        default.manual_seed(SEED).set_offset(OFFSET)
        self._watch(key, call)()
        moved = default.get_offset() - OFFSET
        seeded = default.initial_seed() != SEED or not torch.equal(torch.get_rng_state(), on_host)
        return None if seeded or generators_in(call) else moved

    def _measure_placed(self, shim: Shim, key: int, call: Call) -> Cost:
        run = self._watch(key, call)
        if self._device.type == "cuda":
            run()
        homes, log = shim.record(run, _home_addresses)
        if self._took < SHORT:  # the first run may have filled caches
            homes, log = shim.record(run, _home_addresses)
        outputs = {n: homes[n] for n, value in enumerate(call.outputs) if value is not None}
        cost = cost_of(log, outputs, self._alignment, self._took)
        if self._times and (self._took >= BRIEF or self._device.type == "cuda"):
            placed = replace(call, allocations=cost.allocations)
            run = self._bind(key, placed, cost.workspace, SHIM)
            is_first = self._took >= SHORT or self._device.type == "cuda"
            seconds = self._median_seconds(run, [] if is_first else [self._took])
            cost = replace(cost, seconds=seconds)
        return cost

    def _measure_copied(self, key: int, call: Call) -> Cost:
        self._watch(key, call)()
        return Cost(None, 0, 0, self._median_seconds(self._bind(key, call, 0, COPY)))

    def _measure_counted(self, key: int, call: Call) -> Cost:
        """Use the statistics of the device's allocator, which rounds what it gives out."""
        self._watch(key, call)()
        run = self._bind(key, call, 0, COPY)
        run()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        return Cost(None, 0, peak, self._median_seconds(run))

    def _watch(self, key: int, call: Call) -> Run:
        """Return a run of the call. It raises `_DidNotRun` if the op itself fails, and
        `CaptureError` if the op gives one of its arguments another size."""
        run = self._bind(key, replace(call, outputs=()), 0, COPY)
        arguments = (run.args, run.keywords) if isinstance(run, functools.partial) else ()
        given = tensors_of(arguments)
        before = [(tensor.size(), tensor.data_ptr()) for tensor in given]

        def run_watched() -> Any:
            begin = perf_counter()
            try:
                result = run()
                self._took = perf_counter() - begin
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise _DidNotRun(error) from error
            for tensor, (size, address) in zip(given, before, strict=True):
                if (tensor.size(), tensor.data_ptr()) != (size, address):
                    raise CaptureError(
                        f"{self._lines[key]}{op_name(call.op)}: it gives an argument of size"
                        f" {tuple(size)} the size {tuple(tensor.size())}, and a planned tensor"
                        " cannot grow. If only the first call does that, as that of an observer"
                        " does, make one eager call before the capture"
                    )
            return result

        return run_watched

    def _median_seconds(self, run: Run, known: Sequence[float] = ()) -> float:
        """The median of some runs: the fastest would promise more than a busy machine can keep.
        `known`: the seconds of earlier runs of the same call."""
        taken = [*known, self._time(run)]
        while len(taken) < RUNS and sum(taken) < ENOUGH:
            taken.append(self._time(run))
        return median_low(taken)

    def _time(self, run: Run) -> float:
        if self._device.type == "cuda":
            spin(SPIN)
        return self._timer.time_once(run)

    def _bind(self, key: int, call: Call, workspace: int, mode: str) -> Run:
        """The call on made-up tensors with arbitrary contents."""
        if workspace > self._workspace.numel():
            self._workspace = torch.empty(workspace, dtype=torch.uint8, device=self._device)
        places = self._places[key]
        task = Task("call", tuple(range(len(places))), (), kernel=call, workspace=workspace)
        graph = TaskGraph(tasks=(task,))
        accesses = [Access(place, b, True, True) for b, place in enumerate(places)]
        if workspace:
            accesses.append(Access(Place(1, 0, workspace), None, True, True))
        node = Node(TASK, "compute", tuple(accesses), (), task=0)
        arenas = {0: self._memory, 1: self._workspace}
        return bind_task(graph, node, arenas, mode, None, self._bindings)

    def _fill(self, key: int, call: Call) -> None:
        """Set floats to 1 and everything else to 0, as an index must be.

        On a device floats are random: with equal numbers matrix products take less power and a
        tenth less time."""
        places = self._places[key]
        for value in values_of(call):
            place = places[value.buffer]
            whole = place.nbytes // value.dtype.itemsize * value.dtype.itemsize
            memory = self._memory[place.offset : place.offset + whole].view(value.dtype)
            if not value.dtype.is_floating_point:
                memory.fill_(0)
            elif self._device.type == "cuda" and value.dtype in DRAWN:
                memory.normal_(generator=torch.Generator(self._device).manual_seed(0))
            else:
                memory.fill_(1)


def _home_addresses(returned: Any) -> list[int]:
    """The addresses of the storages of what a kernel returned; 0 for what is no tensor."""
    return [
        result.untyped_storage().data_ptr() if isinstance(result, torch.Tensor) else 0
        for result in flatten_results(returned)
    ]
