"""Capture and replay on a CPU, as strict as on CUDA: the twin of cuda_graph.py.

    enqueue(compute, run)   run() under a mode: every op of torch becomes a node and does NOT run;
                            its outputs are tensors of their shapes, kept for the replay
    edges                   the node before it on its stream, and what the stream waits for
    replay                  all nodes in a legal order, by priority or drawn anew each time; those
                            of a held stream as late as the edges allow

A node keeps the tensors and numbers that the op was given, but not the Python code around it. So
later changes there are not seen, as on a device. Copies are nodes, too; other code of the host runs
once, at capture. As on a device it refuses values for Python, asking captured events, waiting for
the device, and streams that did not fork or are not joined.
"""

import random
from collections.abc import Callable, Collection, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.twins.twin_streams import Twin, TwinEvent, TwinStream
from offload.program.layouts import KernelLayouts
from offload.running.drivers.driver import Run
from offload.torch_seams import (
    DynamicOutputShapeException,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    schema_of,
)

REFUSED = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
ISOLATION = "CUDA error: dependency created on uncaptured work in another stream"
Frontier = frozenset[int]


@dataclass(slots=True, eq=False)
class Capture:
    """The state of a capture that is going on."""

    origin: TwinStream
    nodes: list[Run] = field(default_factory=list)
    waits: list[Frontier] = field(default_factory=list)
    """For every node: the nodes that come first."""
    held: list[bool] = field(default_factory=list)
    """For every node: whether it comes late."""
    last: dict[TwinStream, Frontier] = field(default_factory=dict)
    """For every stream that takes part: what its next node waits for."""
    events: dict["GraphEvent", Frontier] = field(default_factory=dict)
    stream: TwinStream | None = None
    """The stream on which something is enqueued now."""
    broken: bool = False

    def add(self, run: Run) -> None:
        """Add a node to the current stream."""
        assert self.stream is not None
        number = len(self.nodes)
        self.nodes.append(run)
        self.waits.append(self.last[self.stream])
        self.held.append(self.stream.held)
        self.last[self.stream] = frozenset((number,))

    def refuse(self, why: str) -> RuntimeError:
        self.broken = True
        return RuntimeError(why)

    def joined(self) -> bool:
        """Whether all nodes come before the end of the origin."""
        reached: set[int] = set()
        left = [*self.last[self.origin]]
        while left:
            node = left.pop()
            if node not in reached:
                reached.add(node)
                left.extend(self.waits[node])
        return all(last <= reached for last in self.last.values())


class GraphTwin(Twin):
    """A twin that can capture. With `order="random"` every replay draws a legal order from its
    seed."""

    def __init__(self, hold: Collection[str] = (), order: str = "priority", seed: int = 0) -> None:
        super().__init__(hold)
        self._rng = random.Random(seed) if order == "random" else None
        self._capture: Capture | None = None
        self._fakes = FakeTensorMode()

    @property
    def capturing(self) -> Capture | None:
        return self._capture

    def event(self, timing: bool = False) -> TwinEvent:
        return GraphEvent(self)

    def wait(self, stream: TwinStream, event: TwinEvent) -> None:
        capture = self._unbroken_capture()
        if capture is None:
            super().wait(stream, event)
        elif isinstance(event, GraphEvent) and event in capture.events:
            known = capture.last.get(stream, frozenset())
            capture.last[stream] = known | capture.events[event]
        elif stream in capture.last and getattr(event, "recorded", True):
            raise capture.refuse(ISOLATION)
        else:
            super().wait(stream, event)

    def enqueue(self, stream: TwinStream, run: Run) -> None:
        capture = self._unbroken_capture()
        if capture is None:
            super().enqueue(stream, run)
            return
        if stream not in capture.last:
            raise capture.refuse(f"{ISOLATION}: stream {stream.lane} did not fork")
        capture.stream = stream
        try:
            with torch.no_grad(), _Recorder(capture, self._fakes):
                run()
        except BaseException:
            capture.broken = True
            raise
        finally:
            capture.stream = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        move = _Move(target.data_ptr(), source.data_ptr(), target.nbytes)
        return _Copy(self, move)

    def begin(self) -> None:
        self._forbid()
        super().begin()

    def synchronize(self) -> None:
        self._forbid()
        super().synchronize()

    def _forbid(self) -> None:
        if self._capture is not None:
            raise self._capture.refuse(REFUSED)

    def _unbroken_capture(self) -> Capture | None:
        if self._capture is not None and self._capture.broken:
            raise RuntimeError(BROKEN)
        return self._capture

    def begin_capture(self, origin: TwinStream) -> None:
        self.synchronize()
        self._capture = Capture(origin, last={origin: frozenset()})

    def end_capture(self) -> Run:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("CUDA error: no capture is going on")
        if capture.broken:
            raise RuntimeError(BROKEN)
        if not capture.joined():
            raise RuntimeError(UNJOINED)
        return TwinReplay(capture.nodes, capture.waits, capture.held, self._rng)

    def drop_capture(self) -> None:
        self._capture = None


class GraphEvent(TwinEvent):
    """An event that may be recorded in a capture."""

    def __init__(self, driver: GraphTwin) -> None:
        super().__init__(driver._state)
        self._driver = driver
        self.recorded = False

    def record(self, stream: TwinStream) -> None:
        capture = self._driver._unbroken_capture()
        if capture is not None and stream in capture.last:
            capture.events[self] = capture.last[stream]
        else:
            self.recorded = True
            super().record(stream)

    def done(self) -> bool:
        self._ask()
        return super().done()

    def synchronize(self) -> None:
        self._ask()
        super().synchronize()

    def _ask(self) -> None:
        capture = self._driver.capturing
        if capture is not None and self in capture.events:
            raise capture.refuse(REFUSED)


class TwinReplay:
    """The nodes of a capture, which one thread runs."""

    def __init__(
        self,
        nodes: Sequence[Run],
        waits: Sequence[Frontier],
        held: Sequence[bool],
        rng: random.Random | None,
    ) -> None:
        self._nodes = nodes
        self._waits = waits
        self._held = held
        self._rng = rng

    def __len__(self) -> int:
        return len(self._nodes)

    def __call__(self) -> None:
        for node in self._order() if self._rng or any(self._held) else range(len(self._nodes)):
            self._nodes[node]()

    def _order(self) -> list[int]:
        """An order that keeps the edges: by priority, or a random one."""
        left = [len(waits) for waits in self._waits]
        after: list[list[int]] = [[] for _ in self._nodes]
        for node, waits in enumerate(self._waits):
            for first in waits:
                after[first].append(node)
        ready = [node for node, count in enumerate(left) if not count]
        order: list[int] = []
        while ready:
            early = [node for node in ready if not self._held[node]] or ready
            node = self._rng.choice(early) if self._rng else min(early)
            ready.remove(node)
            order.append(node)
            for follower in after[node]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)
        return order


# ---- what becomes a node ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    target: int
    source: int
    nbytes: int

    def __call__(self) -> None:
        memmove(self.target, self.source, self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy that runs at once or is captured."""

    driver: GraphTwin
    move: _Move

    def __call__(self) -> None:
        if self.driver.capturing is None:
            self.move()
        else:
            self.driver.capturing.add(self.move)


@dataclass(frozen=True, slots=True, eq=False)
class _Op:
    """An op of torch with the tensors and numbers that it was given."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Sequence[tuple[int, torch.Tensor]]
    """New tensors among its results, by position. Later nodes refer to them."""

    def __call__(self) -> None:
        results = pytree.tree_leaves(self.function(*self.args, **self.kwargs))
        for position, output in self.outputs:
            output.copy_(results[position])


class _Recorder(TorchDispatchMode):
    """Turns ops into nodes without running them."""

    def __init__(self, capture: Capture, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._capture = capture
        self._fakes = fakes
        self._layouts = KernelLayouts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if not schema.is_mutable and any(r.alias_info is not None for r in schema.returns):
            return func(*args, **kwargs)  # a view computes nothing
        returned = self._shapes(func, args, kwargs)
        changed = _changed(schema, args, kwargs)
        leaves, structure = pytree.tree_flatten(returned)
        outputs: list[tuple[int, torch.Tensor]] = []
        made: list[Any] = []
        for position, leaf in enumerate(leaves):
            if changed and isinstance(leaf, torch.Tensor) and position < len(changed):
                made.append(changed[position])
            elif isinstance(leaf, torch.Tensor):
                made.append(torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype))
                outputs.append((position, made[-1]))
            else:
                made.append(leaf)
        self._capture.add(_Op(func, args, kwargs, tuple(outputs)))
        return pytree.tree_unflatten(made, structure)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the op returns, without values."""
        fakes = self._fakes

        def fake(leaf: Any) -> Any:
            return fakes.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        asks = torch.Tag.data_dependent_output in func.tags
        try:
            with fakes:
                if not asks:
                    given, named = pytree.tree_map(fake, (args, kwargs))
                    result = func(*given, **named)
                    name = schema_of(func).name.split("::")[1]
                    return self._layouts.as_it_is(func, name, given, named, result)
        except DynamicOutputShapeException:
            asks = True
        raise self._capture.refuse(f"{REFUSED}: {func} needs a value of the device")


def _changed(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that the op changes and returns, in their order."""
    returned = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
    found: list[torch.Tensor] = []
    for names in returned:
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.before_set == names:
                found.append(args[number] if number < len(args) else kwargs[argument.name])
    return found
