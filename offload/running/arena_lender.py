"""The arena of a stage's device, which is lent to one tenant at a time.

    another tenant comes   the last one makes way: its residents leave the arena
    a larger plan comes    all tenants leave, the arena is freed, and a larger one is taken
    a tenant moves         it may take another arena while its tensors are still in the old one

What these moves cost is in `swaps`. All methods are called under the stage's lock.
"""

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offload.errors import MemoryTooSmall, StepError
from offload.memory.arenas import DeviceArena, OutCopies
from offload.sizes import format_size

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

    def add(self, out_bytes: int, in_bytes: int, seconds: float) -> "SwapTotals":
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


@dataclass(frozen=True, slots=True, eq=False)
class PausedLoan:
    """The loan of a tenant whose step stands aside in its middle."""

    tenant: Tenant
    sizes: Mapping[int, int]
    copies: OutCopies
    """What the tenant has in the arena, on the host."""


class ArenaLender:
    """Lends the arena, and replaces it by one of another size."""

    def __init__(self, device: torch.device, host_dir: Path | None = None) -> None:
        """`host_dir`: a folder for files that are the memory of the host; by default it is RAM."""
        self.device, self.host_dir = device, host_dir
        self.swaps = SwapTotals()
        self.arena: DeviceArena | None = None
        self.is_closed = False
        self._borrows = False
        """Whether the arena is another stage's. Then it cannot be replaced."""
        self._aside: OutCopies | None = None
        """The bytes of a step that stands aside while others use the stage."""
        self._last: weakref.ref[Tenant] | None = None
        """The tenant that has the arena. A weak reference, so that the stage keeps no tenant
        alive."""
        self._tenants: weakref.WeakKeyDictionary[Tenant, Mapping[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        """Each with the most that it has asked for."""

    def lend(self, tenant: Tenant, sizes: Mapping[int, int]) -> DeviceArena | None:
        """Lend the device's arena to this tenant for a step, after the last tenant has parked.
        Returns None if the arena is too small; then call `grow`."""
        if self.is_closed:
            raise StepError("this stage is closed; make a new one")
        if self.arena is None or not self.arena.holds(sizes):
            return None
        if self._aside is not None:
            self._aside.wait()
        if not self.is_lent_to(tenant):
            self._make_last_leave()
            self._tenants[tenant] = _largest(sizes, self._tenants.get(tenant, {}))
            self._last = weakref.ref(tenant)
        return self.arena

    def grow(self, sizes: Mapping[int, int], check: Callable[[Mapping[int, int]], None]) -> None:
        """Replace the arena by one that is large enough for this and for all tenants. The old one
        is freed first. Then `check` gets the bytes that will be taken, and raises if there is no
        room."""
        self._check_replaceable(sizes)
        larger = _largest(sizes, *self._tenants.values())
        self._free()
        check(larger)
        self.arena = DeviceArena(larger, self.device, self.host_dir)

    def _make_last_leave(self) -> None:
        last = self._last() if self._last else None
        if last is not None:
            self._time_move(last.make_way)

    def _free(self) -> None:
        for tenant in list(self._tenants):
            self._time_move(tenant.evict)
        self.arena, self._last = None, None

    # ---- an arena of another size, for a tenant that moves to another plan ----------------------

    @property
    def sizes(self) -> dict[int, int]:
        return self.arena.sizes if self.arena else {}

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def sizes_for(self, tenant: Tenant, sizes: Mapping[int, int]) -> dict[int, int]:
        """The arena that this tenant needs together with the others that are here."""
        others = (most for other, most in self._tenants.items() if other is not tenant)
        return _largest(sizes, *others)

    def is_worth_keeping(self, sizes: Mapping[int, int]) -> bool:
        """Whether the arena is large enough, and a smaller one is not worth taking. One that is
        borrowed, or has the bytes of a step that stands aside, cannot be replaced."""
        if self.arena is None or not self.arena.holds(sizes):
            return False
        is_fixed = self._borrows or self._aside is not None
        return is_fixed or sum(sizes.values()) >= self.nbytes * WORTH_KEEPING

    def take_beside(self, tenant: Tenant, sizes: Mapping[int, int]) -> None:
        """Take an arena of these sizes and lend it to the tenant, whose tensors are still in the
        old one."""
        self._check_replaceable(sizes)
        arena = DeviceArena(sizes, self.device, self.host_dir)
        for other in list(self._tenants):
            if other is not tenant:
                self._time_move(other.evict)
        self._tenants[tenant] = sizes
        self.arena, self._last = arena, weakref.ref(tenant)

    def replace(self, tenant: Tenant, sizes: Mapping[int, int]) -> None:
        """Free the arena, which all tenants leave first, and take one of these sizes."""
        self._check_replaceable(sizes)
        self._free()
        self._tenants[tenant] = sizes
        self.arena = DeviceArena(sizes, self.device, self.host_dir)

    def park(self, tenant: Tenant) -> None:
        """Make the tenant leave the device's arena now, and not when another one comes."""
        self._time_move(tenant.make_way)

    def _time_move(self, leave: Callable[[], int]) -> None:
        begin = time.perf_counter()
        moved = leave()
        self.swaps = self.swaps.add(moved, 0, time.perf_counter() - begin)

    def count_return(self, nbytes: int, seconds: float) -> None:
        """Note what it took to bring residents of a tenant home."""
        self.swaps = self.swaps.add(0, nbytes, seconds)

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
            self.arena = None
        elif self.arena and not self.is_worth_keeping(_largest(*self._tenants.values())):
            self._free()

    def _check_replaceable(self, sizes: Mapping[int, int]) -> None:
        """Raise if the arena cannot be replaced, because a step stands aside in its middle."""
        if self._aside is not None:
            raise MemoryTooSmall(
                f"a step needs {format_size(sum(sizes.values()))} of the device, and the arena has"
                f" {format_size(self.nbytes)} as long as another step stands aside in its middle:"
                " let that one end first",
                needed=sum(sizes.values()),
                left=self.nbytes,
            )

    # ---- loans to others ------------------------------------------------------------------------

    def pause_loan(self) -> PausedLoan:
        """Take room on the host for what the present tenant has in the arena."""
        tenant = self._last() if self._last else None
        if tenant is None or self.arena is None:
            raise StepError("no step runs here that could stand aside")
        sizes = self._tenants[tenant]
        return PausedLoan(tenant, sizes, self.arena.copies_of(sizes))

    def begin_pause(self, paused: PausedLoan) -> None:
        """Lend the arena to others from now on, as soon as the copies are made."""
        self._last, self._aside = None, paused.copies
        del self._tenants[paused.tenant]

    def end_pause(self, paused: PausedLoan) -> None:
        """Give the arena back to the tenant whose step goes on."""
        self._make_last_leave()
        self._last, self._aside = weakref.ref(paused.tenant), None
        self._tenants[paused.tenant] = paused.sizes
        paused.copies.bring_back()

    def begin_borrowing(self, arena: DeviceArena) -> None:
        self.arena, self._borrows = arena, True

    def end_borrowing(self) -> None:
        for tenant in list(self._tenants):
            self._time_move(tenant.make_way)
        self.arena, self._borrows, self._last = None, False, None

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Make every tenant leave, and free the arena."""
        for tenant in list(self._tenants):
            tenant.evict()
        self.arena, self._last = None, None

    def abandon(self) -> None:
        """Forget the arena and the tenants: the device is lost."""
        self.is_closed, self.arena, self._last = True, None, None
        self._tenants.clear()


def _largest(*all_sizes: Mapping[int, int]) -> dict[int, int]:
    """Return the sizes of an arena in which each of these has room."""
    numbers = {number for sizes in all_sizes for number in sizes}
    return {number: max(sizes.get(number, 0) for sizes in all_sizes) for number in numbers}
