"""A runner's memory: what it has of a stage's device and of the host, and where its tensors are.

    stage's arena  |residents ....|        lent to one tenant at a time
    host arena     |streamed ..........|   its own, as long as the runner lives
    waiting place  |residents, parked|     its own, if others use the stage

`move` goes over to another plan, on this stage or on another one:

    in place       the arena is large enough: tensors change places in it (shifts.py)
    beside         another arena is taken while the tensors are still in the old one
    by the host    no room for both: residents wait on the host while the arena is replaced

Nothing has moved where `move` raises `MemoryTooSmall`.
"""

import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offload.errors import MemoryTooSmall
from offload.gate import stand_aside
from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas, HostArena
from offload.memory.collector import collector_paused
from offload.memory.homes import Homes, resident_bytes
from offload.memory.placement import PlacementCounts
from offload.memory.room import check_move, check_room
from offload.memory.runnable import RunnablePlan
from offload.memory.waiting_place import WaitingPlace
from offload.running.binding import Binding, Watch
from offload.running.stage import Stage

IN_PLACE, BESIDE, BY_HOST = "in place", "beside", "by the host"
_POINTED = "{} was pointed (p.data = other) {}. Copy the values instead: p.data.copy_(other)"


@dataclass(frozen=True, slots=True)
class Migration:
    """What it took to go over to another plan."""

    nbytes: int
    """Bytes of tensors that changed their place."""
    seconds: float
    way: str
    """in place, beside, or by the host"""


@dataclass(slots=True, eq=False)
class _KnownStep:
    """A step of the runner."""

    room: int
    """Bytes that its plan's residents take while they are parked."""
    binding: Binding | None = None


class RepointWarnings:
    """Warns once of each tensor that somebody has pointed to other memory."""

    def __init__(self) -> None:
        self._is_first = True
        self._warned: set[str] = set()

    def check(self, homes: Homes) -> None:
        """Warn of tensors that are not where plain PyTorch would have them after `p.data = ...`."""
        if self._is_first:  # before the first step, weights may still be loaded or replaced
            self._is_first = False
            return
        for name, what in homes.find_repointed():
            if name not in self._warned:
                self._warned.add(name)
                warnings.warn(_POINTED.format(name, what), RuntimeWarning, stacklevel=2)


class RunnerMemory:
    """The tenant of a stage. All methods are called under the stage's lock."""

    def __init__(
        self,
        stage: Stage,
        plan: RunnablePlan,
        placed: PlacementCounts,
        *,
        poison: bool,
        watch: Watch | None,
        alone: bool,
    ) -> None:
        """`placed`, `poison`, `watch`: as in `Binding`. `alone`: no other tenant will come to the
        stage."""
        self.stage = stage
        self.plan = plan
        self.alone = alone
        self.current: Homes | None = None
        """Where the last step left the tensors."""
        self.arenas: Arenas | None = None
        self.host: HostArena | None = None
        self.waiting: WaitingPlace | None = None
        """Taken with the arenas if others use the stage, so that no other job fails for want of
        it; else at the first `park`."""
        self._new_binding = partial(Binding, placed=placed, poison=poison, watch=watch)
        self._steps: dict[Hashable, _KnownStep] = {}
        self._together: Mapping[str, Sequence[torch.Tensor]] = {}
        """By storage: the tensors over it that any step has known, where there are several."""
        self._repoint_warnings = RepointWarnings()
        self._origins: dict[str, torch.device] = {}
        """Where each tensor of the user's was before, by its name."""

    # ---- a step ---------------------------------------------------------------------------------

    def enter(self, key: Hashable, plan: RunnablePlan) -> Binding:
        """Bring every tensor to its home in the step's plan, and return what runs the step."""
        arenas = self._take_arenas(key, plan)
        step = self._steps[key]
        binding = step.binding
        if binding is None:
            binding = step.binding = self._bind(plan, arenas, self.stage)
        if binding.homes is not self.current:
            self._keep_together(binding.homes)
            if self.current:
                self.current.release(stays=binding.homes)
            self.current = binding.homes
        waiting = self.waiting.waiting_bytes if self.waiting else 0
        if not waiting:
            self._repoint_warnings.check(binding.homes)
        begin = time.perf_counter()
        binding.homes.settle(self.waiting)
        if waiting:
            self.stage.lender.count_return(waiting, time.perf_counter() - begin)
        return binding

    def _keep_together(self, homes: Homes) -> None:
        """Make these homes and the present ones know the same tensors over each storage."""
        homes.add_shared_tensors(self._together)
        self._together = homes.shared_tensors()
        if self.current:
            self.current.add_shared_tensors(self._together)

    def _bind(self, plan: RunnablePlan, arenas: Arenas, stage: Stage) -> Binding:
        with collector_paused():
            captured = stage.engine.captures
            return self._new_binding(plan, arenas, driver=stage.driver, captured=captured)

    def _drop_bindings(self) -> None:
        for step in self._steps.values():
            step.binding = None

    def _take_arenas(self, key: Hashable, plan: RunnablePlan) -> Arenas:
        """Arenas with room for this plan, the device's lent by the stage. Where one is too small,
        the old ones go before larger ones come."""
        if key not in self._steps:
            self.stage.drive(plan.graph.devices)
            self._steps[key] = _KnownStep(resident_bytes(plan.memgraph))
        on_device = _device_sizes(plan)
        had = self.host.region.nbytes if self.host else -1, self.parked_bytes
        on_host = max(plan.memgraph.arenas.get(HOST, 0), had[0])
        waiting = max(0 if self.alone else self._steps[key].room, had[1])
        lent = self.stage.lender.lend(self, on_device)
        if lent is None or had != (on_host, waiting):
            self.leave()
            room = partial(check_room, plan, waiting=waiting, host_dir=self.stage.lender.host_dir)
            if lent is None:
                self.stage.lender.grow(on_device, lambda larger: room({**larger, HOST: on_host}))
                lent = self.stage.lender.lend(self, on_device)
                assert lent is not None
            else:
                room({HOST: on_host})
            self.host = HostArena(on_host, self.stage.device, self.stage.lender.host_dir)
            self.waiting = _waiting_place(self.stage, waiting) if waiting else None
            for note in {self.host.note, self.waiting.note if self.waiting else ""} - {""}:
                self.plan.remarks.add(note)
        assert self.host is not None
        if self.arenas is None or self.arenas.lent is not lent:
            self._drop_bindings()
            self.arenas = Arenas(lent, self.host, self._origins)
        return self.arenas

    def forget(self, key: Hashable) -> None:
        self._steps.pop(key, None)  # its tensors stay where they are until the next step

    # ---- another plan ---------------------------------------------------------------------------

    def move(
        self, key: Hashable, plan: RunnablePlan, stage: Stage, *, alone: bool, beside: bool = True
    ) -> Migration:
        """Go over to this plan, and to this stage. The locks of both stages are held. `beside`:
        whether the old arena and a new one may be there at once."""
        begin = time.perf_counter()
        stage.drive(plan.graph.devices)
        on_host, on_device = plan.memgraph.arenas.get(HOST, 0), _device_sizes(plan)
        keeps = self.host is not None and self.host.serves(on_host, stage.device)
        room = 0 if alone else resident_bytes(plan.memgraph)
        room = room if room > self.parked_bytes else 0
        sizes = stage.lender.sizes_for(self, on_device)
        taken = {} if keeps else {HOST: on_host}
        way = self._choose_way(plan, stage, sizes, taken, room, beside=beside)
        host = self.host if keeps else HostArena(on_host, stage.device, stage.lender.host_dir)
        assert host is not None
        if way == BESIDE and not stage.lender.is_worth_keeping(sizes):
            stage.lender.take_beside(self, sizes)
        elif way == BY_HOST:
            stage.lender.replace(self, sizes)
        lent = stage.lender.lend(self, on_device)
        assert lent is not None
        before, old_waiting = self.current, self.waiting
        room = room if room > self.parked_bytes else 0
        waiting = _waiting_place(stage, room) if room else old_waiting
        arenas = self.arenas
        if arenas is None or arenas.lent is not lent or arenas.host is not host:
            arenas = Arenas(lent, host, self._origins)
        binding = self._bind(plan, arenas, stage)
        self._keep_together(binding.homes)
        try:
            if before is None:
                binding.homes.settle(old_waiting)
                nbytes = 0
            else:
                nbytes = binding.homes.move_from(before, old_waiting, stand_aside)
        except BaseException:
            for memory in (self.arenas, arenas):
                if memory is not None:
                    memory.synchronize()
            binding.homes.release()  # what has come leaves again; the old plan brings it home
            if stage is not self.stage:
                stage.lender.leave(self)
            raise
        for given_up, kept in ((self.host, host), (old_waiting, waiting)):
            if given_up is not None and given_up is not kept:
                given_up.unlock()
        if stage is not self.stage:
            self.stage.lender.leave(self)
        for note in {host.note, waiting.note if waiting else ""} - {""}:
            plan.remarks.add(note)
        self.plan, self.stage, self.alone = plan, stage, alone
        self.current, self.arenas, self.host, self.waiting = binding.homes, arenas, host, waiting
        self._steps = {key: _KnownStep(resident_bytes(plan.memgraph), binding)}
        return Migration(nbytes, time.perf_counter() - begin, way)

    def _choose_way(
        self,
        plan: RunnablePlan,
        stage: Stage,
        sizes: Mapping[int, int],
        taken: Mapping[int, int],
        waiting: int,
        *,
        beside: bool,
    ) -> str:
        """How the tensors get to the new arenas. Raises `MemoryTooSmall` if there is no room.
        `taken`: an arena of the host, if a new one is needed."""
        check = partial(check_move, plan, host_dir=stage.lender.host_dir)
        if stage.lender.is_worth_keeping(sizes):
            check(taken, waiting)
            return IN_PLACE if stage is self.stage else BESIDE
        try:
            check({**taken, **sizes}, waiting)
            if beside or not stage.lender.nbytes:
                return BESIDE
        except MemoryTooSmall:
            if not stage.lender.nbytes:
                raise
        parked = self.current.resident_bytes if self.current and stage is self.stage else 0
        parked = parked if parked > self.parked_bytes else 0
        check({**taken, **sizes}, waiting + parked, stage.lender.sizes)
        return BY_HOST

    # ---- other tenants --------------------------------------------------------------------------

    @property
    def parked_bytes(self) -> int:
        """Bytes of the host that are kept for residents, whether they are parked now or not."""
        return self.waiting.nbytes if self.waiting else 0

    def make_way(self) -> int:
        """Leave the device's arena, because another tenant needs it (`Tenant`)."""
        needed = self.current.resident_bytes if self.current else 0
        if not (self.current and needed):
            return 0
        if self.waiting is None or self.waiting.nbytes < needed:
            check_room(self.plan, {}, needed, self.stage.lender.host_dir)
            self.waiting = _waiting_place(self.stage, needed)
        return self.current.park(self.waiting)

    def evict(self) -> int:
        """Leave the device's arena, because it is about to be freed (`Tenant`)."""
        moved = self.make_way()
        if self.current:
            self.current.forget_device()
        self._drop_bindings()
        self.arenas = None
        return moved

    # ---- the end --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give every tensor memory of its own, where it was before, and give up the arenas."""
        if self.current and self.arenas:
            lent = self.stage.lender.is_lent_to(self)
            self.arenas.forget(keep=self.current.places.values(), lent=lent)
        if self.current:
            self.current.release()
        if self.host:
            self.host.unlock()
        if self.waiting:
            self.waiting.unlock()
            self.waiting.empty(self._origins)
        self.current, self.arenas, self.host, self.waiting = None, None, None, None
        self._drop_bindings()

    def abandon(self) -> None:
        """Leave every tensor in the arenas, because the device is lost."""
        self.current = None
        self._drop_bindings()


def _waiting_place(stage: Stage, nbytes: int) -> WaitingPlace:
    return WaitingPlace(nbytes, stage.device, stage.lender.host_dir)


def _device_sizes(plan: RunnablePlan) -> dict[int, int]:
    return {number: n for number, n in plan.memgraph.arenas.items() if number != HOST}
