"""What exists once per device: its arena, its driver, the engine on it, and the lock of a step.

    Stage     device arena | driver | engine | lock         owned once, lent to one tenant at a time
    Runner    plans, bindings, an arena of its own on the host                  a tenant of a stage

`Runner(plan)` makes a stage of its own, and several runners may share one. Before a step of another
tenant the last tenant has to make way: its residents leave the device's arena. Steps take turns.
Jobs share nothing else. What these moves cost is in `swaps`.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from offload.errors import DeviceLost, MemoryTooSmall, OffloadError, StepError
from offload.gate import Gate
from offload.memory.arenas import DeviceArena, OutCopies
from offload.memory.workspaces import warm
from offload.program.kernels import CPU
from offload.running.drivers.cuda import Cuda
from offload.running.engine_choice import check_order, driver_for, engine_for, made_engine
from offload.running.engines.work import Engine, Record, StepWork
from offload.sizes import say_size

WORTH_KEEPING = 15 / 16
"""An arena is kept for a smaller plan that needs at least this part of it."""


@dataclass(frozen=True, slots=True)
class SwapTotals:
    """What hand-overs have cost since the stage was made. Take the difference of two of them."""

    out_bytes: int = 0
    """Residents that left the device's arena for another tenant."""
    in_bytes: int = 0
    """Residents that came back."""
    seconds: float = 0.0
    """Seconds of both."""

    def plus(self, out_bytes: int, in_bytes: int, seconds: float) -> "SwapTotals":
        return SwapTotals(
            self.out_bytes + out_bytes, self.in_bytes + in_bytes, self.seconds + seconds
        )


class Tenant(Protocol):
    """A user of the device's arena, such as a runner. The stage calls it under its lock."""

    def make_way(self) -> int:
        """Leave the device's arena. The values are kept elsewhere until it is lent again. Returns
        the bytes that moved."""
        ...

    def evict(self) -> int:
        """Make way, and drop everything that refers to the device's arena, because it will be
        freed."""
        ...


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`engine`: by default `threads` on the CPU and `cuda` on a device. `order="random"` takes
        any legal order, for tests. `driver`: for the engines `cuda` and `cudagraph`; by default the
        device's own. `gate`: lets guests use the device between two nodes; by default its own.
        `host_dir`: a folder for files that are the memory of the host; by default it is RAM."""
        self.host_dir = host_dir
        self.host_workers = host_workers
        self.swaps = SwapTotals()
        self.clock = clock
        self.gate = gate or Gate()
        name = engine_for(engine, device)
        check_order(order)
        self.driver = driver_for(name, device, driver)
        known = device if self.driver is None else self.driver.device
        self.device = known if known.type == device.type else device
        """With its number, which a driver knows."""
        self._new_engine = partial(made_engine, name, self.driver, order, seed, host_workers)
        self.engine = self._new_engine(self.gate)
        self._spare: tuple[Gate, Engine] | None = None
        """They run the steps of others while a step stands aside in the middle of its run."""
        self.step_thread: int | None = None
        """The thread whose step's nodes run now."""
        self._aside: OutCopies | None = None
        """Of a step that stands aside while others use the stage."""
        self._arena: DeviceArena | None = None
        self._borrows = False
        """Whether it is another stage's, which takes no other."""
        self._last: weakref.ref[Tenant] | None = None
        """The tenant that has the arena. A weak reference, so that the stage keeps no tenant
        alive."""
        self._tenants: weakref.WeakKeyDictionary[Tenant, Mapping[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Each with the most that it has asked for."""
        self._warmed: set[int] = set()
        self._lock, self._process = threading.Lock(), os.getpid()
        self._closed = False

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
        return self._lock

    # ---- the arena, under the lock --------------------------------------------------------------

    def lend(self, tenant: Tenant, sizes: Mapping[int, int]) -> DeviceArena | None:
        """Lend the device's arena to this tenant for a step, after the last tenant has parked.
        Returns None if the arena is too small; then call `grow`."""
        if self._closed:
            raise StepError("this stage is closed; make a new one")
        if self._arena is None or not self._arena.holds(sizes):
            return None
        if self._aside is not None:
            self._aside.wait()
        if not self.is_lent_to(tenant):
            before = self._last() if self._last else None
            if before is not None:
                self._time_move(before.make_way)
            self._tenants[tenant] = _most(sizes, self._tenants.get(tenant, {}))
            self._last = weakref.ref(tenant)
        return self._arena

    def grow(self, sizes: Mapping[int, int], check: Callable[[Mapping[int, int]], None]) -> None:
        """Replace the arena by one that is large enough for this and for all tenants. The old one
        is freed first. Then `check` gets the bytes that will be taken, and raises if there is no
        room."""
        self._check_whole(sizes)
        larger = _most(sizes, *self._tenants.values())
        self._free()
        check(larger)
        self._arena = DeviceArena(larger, self.device, self.host_dir)

    def _free(self) -> None:
        for tenant in list(self._tenants):
            self._time_move(tenant.evict)
        self._arena, self._last = None, None

    # ---- an arena of another size, for a tenant that moves to another plan ----------------------

    @property
    def arena_bytes(self) -> int:
        return sum(self._arena.sizes.values()) if self._arena else 0

    def sizes_for(self, tenant: Tenant, sizes: Mapping[int, int]) -> dict[int, int]:
        """The arena that this tenant needs together with the others that are here."""
        return _most(sizes, *(most for other, most in self._tenants.items() if other is not tenant))

    def keeps(self, sizes: Mapping[int, int]) -> bool:
        """Whether the arena is large enough, and too small to be worth another one; while a step
        stands aside in its middle, it cannot be another one."""
        if self._arena is None or not self._arena.holds(sizes):
            return False
        is_fixed = self._borrows or self._aside is not None
        return is_fixed or sum(sizes.values()) >= self.arena_bytes * WORTH_KEEPING

    def take_beside(self, tenant: Tenant, sizes: Mapping[int, int]) -> None:
        """Take an arena of these sizes and lend it to the tenant, whose tensors are still in the
        old one."""
        self._check_whole(sizes)
        arena = DeviceArena(sizes, self.device, self.host_dir)
        for other in list(self._tenants):
            if other is not tenant:
                self._time_move(other.evict)
        self._tenants[tenant] = sizes
        self._arena, self._last = arena, weakref.ref(tenant)

    def replace(self, tenant: Tenant, sizes: Mapping[int, int]) -> None:
        """Free the arena, and take one of these sizes for this tenant. All leave it before."""
        self._check_whole(sizes)
        self._free()
        self._tenants[tenant] = sizes
        self._arena = DeviceArena(sizes, self.device, self.host_dir)

    def park(self, tenant: Tenant) -> None:
        """Have the tenant leave the device's arena now, and not when another one comes."""
        self._time_move(tenant.make_way)

    def _time_move(self, leave: Callable[[], int]) -> None:
        begin = self.clock()
        moved = leave()
        self.swaps = self.swaps.plus(moved, 0, self.clock() - begin)

    def count_return(self, nbytes: int, seconds: float) -> None:
        """Note what it took to bring residents of a tenant home."""
        self.swaps = self.swaps.plus(0, nbytes, seconds)

    def is_lent_to(self, tenant: Tenant) -> bool:
        return self._last is not None and self._last() is tenant

    def leave(self, tenant: Tenant) -> None:
        """Say that this tenant no longer needs the stage. An arena that is larger than what the
        others need is freed, and so is one that nobody needs."""
        self._tenants.pop(tenant, None)
        if self.is_lent_to(tenant):
            self._last = None
        if self._aside is not None:
            return  # the step that stands aside needs this arena
        if not self._tenants:
            self._arena = None
        elif self._arena is not None and not self.keeps(_most(*self._tenants.values())):
            self._free()

    def _check_whole(self, sizes: Mapping[int, int]) -> None:
        """Raise if the arena cannot be replaced, because a step stands aside in its middle."""
        if self._aside is not None:
            raise MemoryTooSmall(
                f"a step needs {say_size(sum(sizes.values()))} of the device, and the arena has"
                f" {say_size(self.arena_bytes)} as long as another step stands aside in its middle:"
                " let that one end first",
                needed=sum(sizes.values()),
                left=self.arena_bytes,
            )

    # ---- guests, which the gate has let in ------------------------------------------------------

    @contextmanager
    def let_others_step(self) -> Iterator[OutCopies]:
        """Let other tenants make steps in this block, while the step under way stands aside between
        two of its nodes. What it has in the arena waits on the host: they get the arena as soon as
        the caller has `made` the copies that it is given here. Call it in another thread, whose
        gate was `granted(inside=True)`, while `step_thread` is not None."""
        tenant, arena = self._last() if self._last else None, self._arena
        if self.step_thread is None or tenant is None or arena is None:
            raise StepError("no step runs here that could stand aside")
        sizes = self._tenants[tenant]
        copies = arena.copies_of(sizes)
        step = self._lock, self.gate, self.engine, self.step_thread, self._last
        paused = self.driver.paused() if self.driver is not None else nullcontext()
        self.engine.pause()
        try:
            with paused:
                if self._spare is None:
                    gate = Gate()
                    self._spare = gate, self._new_engine(gate)
                self.gate, self.engine = self._spare
                self._lock, self.step_thread, self._last = threading.Lock(), None, None
                self._aside = copies
                del self._tenants[tenant]
                try:
                    yield copies
                finally:
                    with self.lock:
                        last = self._last() if self._last else None
                        if last is not None:
                            self._time_move(last.make_way)
                        self._lock, self.gate, self.engine, self.step_thread, self._last = step
                        self._tenants[tenant] = sizes
                        self._aside = None
                        copies.bring_back()
        finally:
            self.engine.resume()

    @contextmanager
    def lend_to_guest(self, sizes: Mapping[int, int]) -> Iterator[DeviceArena]:
        """Lend the first bytes of the arena to a guest, whose gate was `granted(inside=True)`. They
        are what they were when this block is left. Raises if the arena is too small."""
        arena = self._arena
        if arena is None or not arena.holds(sizes):
            needed, had = sum(sizes.values()), sum(arena.sizes.values()) if arena else 0
            raise MemoryTooSmall(
                f"a guest needs {say_size(needed)} of the device, and the arena that it would"
                f" borrow has {say_size(had)}: give it a smaller budget",
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
        """Have this arena in this block. Its tenant has left it afterwards."""
        with self.lock:
            self._arena, self._borrows = arena, True
        try:
            yield
        finally:
            with self.lock:
                for tenant in list(self._tenants):
                    self._time_move(tenant.make_way)
                self._arena, self._borrows, self._last = None, False, None

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
                self.driver.enqueue(self.driver.stream("compute"), partial(warm, self.device))
            finally:
                self.driver.end()  # otherwise the caller's current stream would be ours
        self._warmed.add(thread)

    def run(self, work: StepWork, record: Record) -> None:
        """Run the nodes of a step."""
        self.step_thread = threading.get_ident()
        try:
            self.engine.run(work, record)
        finally:
            self.step_thread = None

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a step that another thread runs, then end everything. It may be called again."""
        with self.lock:
            self._closed = True
            try:
                self._close_engines()
            finally:
                for tenant in list(self._tenants):
                    tenant.evict()
                self._arena, self._last = None, None

    def abandon(self) -> None:
        """Close after the device was lost: nothing can be read from it, so tensors stay in the
        arena."""
        with self.lock:
            self._closed, self._arena, self._last = True, None, None
            self._tenants.clear()
            with suppress(RuntimeError, OffloadError):  # it reports the lost device again
                self._close_engines()

    def _close_engines(self) -> None:
        if self._spare is not None:
            self._spare[1].close()
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


def _most(*all_sizes: Mapping[int, int]) -> dict[int, int]:
    """Return the sizes of an arena in which each of these has room."""
    numbers = {number for sizes in all_sizes for number in sizes}
    return {number: max(sizes.get(number, 0) for sizes in all_sizes) for number in numbers}
