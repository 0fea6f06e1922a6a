"""A net, or a training step, that has the device whenever it asks, between two nodes of a training.

    training   | F1 F2 |  stands aside  | F3 F4 ...
    request          ^ asks | answer |      from any thread; the higher priority first

Its memory is one of two:

    a reserve    asked for before the training was planned, whose budget is smaller by it. Its
                 weights stay there
    borrowed     asked for later, beside a training with a budget: for every answer the first bytes
                 of the training's arena go to the host and come back, and so do its own weights

An answer has the bits that it has alone. Who draws random numbers, is captured, or borrows memory
comes only while a step stands aside (gate.py), and rolls dice of its own: between two steps the
training's thread may draw too, or read its tensors. While no training runs nobody stands aside, so
only the thread that opened the block may be captured or draw then.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

import offload
from offload import Costs, OffloadError, Runner, TaskGraph
from offload.gate import Gate
from offload.graph.taskgraph import HOST
from offload.running.drivers.driver import Driver
from offload.running.stage import Stage
from offload.torch_seams import pytree
from trainers.dice import Dice
from trainers.sharing.waits import Waits

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Of the inputs of a request, with their types: what a graph is captured for."""


class Host(Protocol):
    """The training whose device is used."""

    @property
    def gate(self) -> Gate: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def costs(self) -> Costs | None: ...

    @property
    def stage(self) -> Stage | None:
        """The stage of its steps; None before the first one and after the last."""
        ...

    def guest_driver(self) -> Driver | None:
        """A driver of the device for a guest; None: the engine's own."""
        ...


class HighPriority:
    """A context manager. Call it with the net's inputs, or with a batch, from any thread."""

    def __init__(
        self,
        host: Host,
        capture: Callable[..., TaskGraph],
        budget: int | None,
        *,
        priority: int = 0,
        seed: int = 0,
        borrows: bool = False,
        left: Callable[["HighPriority"], object],
    ) -> None:
        """`capture` returns the graph for some inputs; its first output is the answer. `budget`:
        the bytes of the device that it may take. `borrows`: whether it has no memory of its own.
        `left` is called at the end."""
        self._host = host
        self._capture = capture
        self._budget = budget
        self._priority = priority
        self._seed = seed
        self._borrows = borrows
        self._left = left
        self._stage: Stage | None = None
        self._runner: Runner | None = None
        self._graphs: dict[Shape, TaskGraph] = {}
        self._sizes: dict[int, int] = {}
        """What all its plans need of the device."""
        self._dice: Dice | None = None
        """Its own, once it has been captured."""
        self._draws = False
        """Whether a graph of it draws random numbers."""
        self._opened_by = threading.get_ident()
        self._starts: list[float] = []
        self._answers: list[float] = []
        self._captures = 0
        self._aside = host.gate.stood_aside
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waits(self) -> Waits:
        """How long the requests took so far."""
        with self._lock:
            starts, answers = tuple(self._starts), tuple(self._answers)
        aside = self._host.gate.stood_aside - self._aside
        return Waits(starts, answers, self._captures, aside)

    def __call__(self, *inputs: torch.Tensor, priority: int | None = None) -> Any:
        """Return what the net makes of these inputs, or the loss of a training step."""
        self._check_open()
        shape = _shape_of(inputs)
        inside = self._comes_inside(shape)
        priority = self._priority if priority is None else priority
        with self._host.gate.granted(priority, inside=inside) as guest:
            self._check_open()
            if not guest.inside:
                self._check_thread(shape)
            with self._own_dice() if inside else nullcontext():
                answer = self._answer(shape, inputs)
        with self._lock:
            self._starts.append(guest.granted - guest.asked)
            self._answers.append(guest.ended - guest.asked)
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError("this use of high priority is over: its block was left")

    def _comes_inside(self, shape: Shape) -> bool:
        return self._borrows or self._uses_dice(shape)

    def _uses_dice(self, shape: Shape) -> bool:
        return self._draws or shape not in self._graphs

    def _check_thread(self, shape: Shape) -> None:
        """Raise if the program may draw random numbers beside this request, which does it, too."""
        if not self._uses_dice(shape) or threading.get_ident() == self._opened_by:
            return
        why = "its net draws random numbers" if shape in self._graphs else "it is captured first"
        raise OffloadError(
            f"no training runs, and this request uses the process's random generators, because"
            f" {why}: nobody keeps the rest of the program from drawing beside it. Ask from the"
            " thread that opened high_priority(), or while the training runs"
        )

    # ---- while it has the gate -------------------------------------------------------------------

    def _answer(self, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> Any:
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._add(shape, inputs)
        with self._memory():
            assert self._runner is not None
            outputs = self._runner.run(shape, *inputs)
        assert graph.program is not None
        _, tree = pytree.tree_flatten(graph.program.outputs)
        return pytree.tree_unflatten(list(outputs), tree)[0]

    def _add(self, shape: Shape, inputs: tuple[torch.Tensor, ...]) -> TaskGraph:
        """Capture and plan for inputs of this shape."""
        graph = self._capture(*inputs)
        self._captures += 1
        if self._runner is None:
            plan = offload.plan(graph, self._budget, self._host.costs)
            self._note_sizes(plan.memgraph.arenas)
            self._stage = self._new_stage()
            with self._memory():
                self._runner = Runner(plan, key=shape, stage=self._stage)
        else:
            plan = self._runner.add(shape, graph)
            self._note_sizes(plan.memgraph.arenas)
        self._draws = self._draws or any(task.random for task in graph.tasks)
        self._graphs[shape] = graph
        return graph

    def _note_sizes(self, arenas: Mapping[int, int]) -> None:
        for number, nbytes in arenas.items():
            if number != HOST:
                self._sizes[number] = max(nbytes, self._sizes.get(number, 0))

    def _new_stage(self) -> Stage:
        device = self._host.device
        engine = "threads" if device.type == "cpu" else "cuda"
        driver = self._host.guest_driver()
        return Stage(device, "cuda" if driver is not None else engine, driver=driver)

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Borrow the training's arena for this block, as long as there is a training."""
        assert self._stage is not None
        lender = self._host.stage if self._borrows else None
        if lender is None:
            yield
            return
        with lender.lent_out(self._sizes) as arena, self._stage.borrowing(arena):
            yield

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        """Roll its own dice for this block, and leave the training's as they lay."""
        device = self._host.device
        training = Dice.now(device)
        try:
            if self._dice is None:
                _seed_all(self._seed)
            else:
                self._dice.roll(device)
            yield
            self._dice = Dice.now(device)
        finally:
            training.roll(device)

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Give its tensors memory of their own again. It may be called again."""
        with self._host.gate.granted(self._priority) if not self._closed else nullcontext():
            self._closed = True
            runner, self._runner = self._runner, None
            stage, self._stage = self._stage, None
            if runner is not None:
                runner.close()
            if stage is not None:
                stage.close()
            self._graphs.clear()  # they keep the net's tensors alive
        self._left(self)

    def __enter__(self) -> "HighPriority":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shape_of(inputs: tuple[Any, ...]) -> Shape:
    for number, one in enumerate(inputs):
        if not isinstance(one, torch.Tensor):
            raise OffloadError(
                f"input {number} is a {type(one).__name__}; a tensor is expected: make one of it"
            )
    return tuple((tuple(one.shape), one.dtype) for one in inputs)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
