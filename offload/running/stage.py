"""What exists once per device: its arena, its driver, the engine on it, and the lock of a step.
Devices over which steps are spread share one of each, and the arena has a region on every device.

    Stage     arena lender | driver | engine | lock         owned once, used by one tenant at a time
    Runner    plans, bindings, an arena of its own on the host                  a tenant of a stage

`Runner(plan)` makes a stage of its own, and several runners may share one. Before a step of another
tenant the last tenant has to make way: its residents leave the device's arena. Steps take turns.
Jobs share nothing else.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from offload.errors import DeviceLost, MemoryTooSmall, OffloadError, StepError
from offload.gate import Gate
from offload.graph.memgraph import lane_name
from offload.memory.arenas import DeviceArena, OutCopies
from offload.memory.workspaces import warm
from offload.program.kernels import CPU
from offload.running.arena_lender import ArenaLender, PausedLoan, SwapTotals
from offload.running.drivers.cuda import COMPUTE, Cuda
from offload.running.engine_choice import check_order, driver_for, engine_for, make_engine
from offload.running.engines.work import Engine, Record, StepWork
from offload.sizes import format_size


@dataclass(slots=True, eq=False)
class _StageTurn:
    """What the step under way has, and nobody else. Another step on the stage has another turn."""

    gate: Gate
    engine: Engine
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the stage is used."""
    step_thread: int | None = None
    """The thread whose step's nodes run now."""


class Stage:
    """A context manager. `close()` makes every tenant leave and ends the engine's threads."""

    def __init__(
        self,
        device: torch.device = CPU,
        engine: str | None = None,
        order: str = "priority",
        seed: int = 0,
        *,
        host_workers: int = 1,
        driver: Cuda | None = None,
        gate: Gate | None = None,
        host_dir: Path | None = None,
    ) -> None:
        """`engine`: by default `threads` on the CPU and `cuda` on a device. `order="random"` takes
        any legal order, for tests. `driver`: for the engines `cuda` and `cudagraph`; by default the
        device's own. `gate`: lets guests use the device between two nodes; by default its own.
        `host_dir`: a folder for files that are the memory of the host; by default it is RAM."""
        self.host_workers = host_workers
        name = engine_for(engine, device)
        check_order(order)
        self.driver = driver_for(name, device, driver)
        known = device if self.driver is None else self.driver.device
        self.device = known if known.type == device.type else device
        """With its number, which a driver knows."""
        self.lender = ArenaLender(self.device, host_dir)
        self._new_engine = partial(make_engine, name, self.driver, order, seed, host_workers)
        self._turn = self._new_turn(gate or Gate())
        self._guest_turn: _StageTurn | None = None
        """The turn of others, while a step stands aside in the middle of its run."""
        self._warmed: set[int] = set()
        self._process = os.getpid()

    def _new_turn(self, gate: Gate) -> _StageTurn:
        return _StageTurn(gate, self._new_engine(gate))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Those of the driver: of so many devices a plan was run."""
        return (self.device,) if self.driver is None else self.driver.devices

    def drive(self, numbers: Sequence[int]) -> None:
        """Have the devices of a plan, which it numbers from this one on. On the CPU an arena is a
        device."""
        if self.driver is not None:
            self.driver.drive(max(numbers, default=0) + 1)

    @property
    def gate(self) -> Gate:
        return self._turn.gate

    @property
    def engine(self) -> Engine:
        return self._turn.engine

    @property
    def step_thread(self) -> int | None:
        """The thread whose step's nodes run now."""
        return self._turn.step_thread

    @property
    def swaps(self) -> SwapTotals:
        """What hand-overs have cost since the stage was made."""
        return self.lender.swaps

    @property
    def lock(self) -> threading.Lock:
        """Held by whoever uses the stage. Raises in a forked process, where nobody would release a
        lock that another thread held."""
        if os.getpid() != self._process:
            raise StepError(
                f"this Runner belongs to process {self._process}. Process {os.getpid()} was forked"
                " from it and has neither its threads nor its device: make a Runner in the child"
                " (and spawn the child instead of forking it if it uses CUDA)"
            )
        return self._turn.lock

    # ---- guests, which the gate has let in ------------------------------------------------------

    @contextmanager
    def let_others_step(self) -> Iterator[OutCopies]:
        """Let other tenants make steps in this block, while the step under way stands aside between
        two of its nodes. What it has in the arena waits on the host: they get the arena when the
        caller has made the copies that this yields (`OutCopies.make`). Call it in another thread,
        whose gate was `granted(inside=True)`, while `step_thread` is not None."""
        if self.step_thread is None:
            raise StepError("no step runs here that could stand aside")
        loan = self.lender.pause_loan()
        paused = self.driver.paused() if self.driver is not None else nullcontext()
        self.engine.pause()
        try:
            with paused, self._hand_over(loan):
                yield loan.copies
        finally:
            self.engine.resume()

    @contextmanager
    def _hand_over(self, loan: PausedLoan) -> Iterator[None]:
        """Give the stage to others for this block. When they have left, the step under way gets
        back its turn, and with it its place in the lock."""
        self._guest_turn = self._guest_turn or self._new_turn(Gate())
        of_step, self._turn = self._turn, self._guest_turn
        self.lender.begin_pause(loan)
        try:
            yield
        finally:
            with self.lock:
                try:
                    self.lender.end_pause(loan)
                finally:
                    self._turn = of_step

    @contextmanager
    def lend_to_guest(self, sizes: Mapping[int, int]) -> Iterator[DeviceArena]:
        """Lend the first bytes of the arena to a guest, whose gate was `granted(inside=True)`.
        After this block they are what they were before. Raises if the arena is too small."""
        arena = self.lender.arena
        if arena is None or not arena.holds(sizes):
            needed, had = sum(sizes.values()), sum(arena.sizes.values()) if arena else 0
            raise MemoryTooSmall(
                f"a guest needs {format_size(needed)} of the device, and the arena that it would"
                f" borrow has {format_size(had)}: give it a smaller budget",
                needed=needed,
                left=had,
            )
        self.engine.pause()
        try:
            with arena.lend(sizes) as lent:
                yield lent
        finally:
            self.engine.resume()

    @contextmanager
    def borrow(self, arena: DeviceArena) -> Iterator[None]:
        """Use another stage's arena in this block. Afterwards no tenant of this stage is in it."""
        with self.lock:
            self.lender.begin_borrowing(arena)
        try:
            yield
        finally:
            with self.lock:
                self.lender.end_borrowing()

    # ---- steps, under the lock ------------------------------------------------------------------

    def warm(self) -> None:
        """Make the memory that libraries keep for this thread, before a kernel is served."""
        thread = threading.get_ident()
        if self.device.type != "cuda" or thread in self._warmed:
            return
        if self.driver is None:
            warm(self.device)
        else:
            try:
                self.driver.begin()
                for number, device in enumerate(self.devices):
                    stream = self.driver.stream(lane_name(COMPUTE, number))
                    self.driver.enqueue(stream, partial(warm, device))
            finally:
                self.driver.end()  # otherwise the caller's current stream would be ours
        self._warmed.add(thread)

    def run(self, work: StepWork, record: Record) -> None:
        """Run the nodes of a step."""
        turn = self._turn
        turn.step_thread = threading.get_ident()
        try:
            turn.engine.run(work, record)
        finally:
            turn.step_thread = None

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a step that another thread runs, then end everything. It may be called again."""
        with self.lock:
            self.lender.is_closed = True
            try:
                self._close_engines()
            finally:
                self.lender.close()

    def abandon(self) -> None:
        """Close after the device was lost: nothing can be read from it, so tensors stay in the
        arena."""
        with self.lock:
            self.lender.abandon()
            with suppress(RuntimeError, OffloadError):  # it reports the lost device again
                self._close_engines()

    def _close_engines(self) -> None:
        if self._guest_turn is not None:
            self._guest_turn.engine.close()
        self.engine.close()

    def __enter__(self) -> "Stage":
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
