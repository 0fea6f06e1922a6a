"""The user's tensors as views of a runner's arenas. A tensor's place there is its home.

    module.conv.weight --.data--> [arena of device 0 ..|conv.weight|..]     resident
    optimizer's exp_avg --------> [host arena ........|exp_avg|.......]     streamed

So the module, `state_dict` and checkpoints see current values without a copy between two steps. The
user may point a tensor elsewhere (`p.data = ...`, another runner over the same module, an optimizer
that loads its state). So `settle` compares addresses before every step, copies such values to their
home and points the tensor there again. Where one step knows of more tensors over a storage than
another, they move together (`add_shared_tensors`). `park` moves residents to a waiting place
(waiting_place.py) while another job has the device. `release` gives every tensor memory of its own.

Only `.data` changes: the tensor object stays the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from offload.errors import StepError
from offload.graph.memgraph import MemGraph, Place, places_of
from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas
from offload.memory.home import Home
from offload.memory.passages import HomeMove, move_homes
from offload.memory.tensor_layout import TensorLayout, have_same_storage, move_out
from offload.memory.waiting_place import HandOver, ParkingHome, WaitingPlace, room_of
from offload.program.kernels import Source
from offload.torch_seams import address_of, is_held_by_others

APART = (
    "to memory that something else holds, too. They are apart from now on, and steps write into the"
    " first one only; plain PyTorch would write into both"
)
TOGETHER = (
    "to other memory. Other tensors over its old memory stay with it, and have its new values;"
    " plain PyTorch would leave them behind"
)
Tensors = Mapping[str, Source]
"""The user's tensors by `Buffer.tensor`."""


class Homes:
    """The homes of one MemGraph in its arenas."""

    def __init__(self, memgraph: MemGraph, arenas: Arenas, tensors: Tensors) -> None:
        self._arenas = arenas
        self._tensors = tensors
        self._joined: dict[str, list[torch.Tensor]] = {}
        """Tensors over the same storages that only other steps know."""
        self.places = {k: p for k, p in places_of(memgraph).items() if k in tensors and p.nbytes}
        self._homes = [
            Home(key, arenas.bytes(place), self._tensors_of(key))
            for key, place in self.places.items()
        ]
        for home in self._homes:
            arenas.origins.setdefault(home.key, home.tensors[0].device)
        self._all: list[torch.Tensor] = []
        self._at: list[int] = []
        self._list()
        self._way: tuple[WaitingPlace, HandOver, list[torch.Tensor], list[int]] | None = None
        """The last way to a waiting place, with the tensors of all homes and their addresses while
        some of them wait there."""

    def _list(self) -> None:
        """List all tensors and where they should be, after a home has changed."""
        self._all = [tensor for home in self._homes for tensor in self._tensors_of(home.key)]
        self._at = [at for home in self._homes for at in home.at]

    def _tensors_of(self, key: str) -> Sequence[torch.Tensor]:
        source = self._tensors[key]
        tensors = (source,) if isinstance(source, torch.Tensor) else source
        return (*tensors, *self._joined.get(key, ()))

    def shared_tensors(self) -> dict[str, Sequence[torch.Tensor]]:
        """Where several tensors lie over one storage: all of them, by the storage's name."""
        return {
            home.key: live for home in self._homes if len(live := self._tensors_of(home.key)) > 1
        }

    def add_shared_tensors(self, together: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take along tensors over the same storages that only another step knows. Whoever has such
        a tensor sees what a step writes, as in plain PyTorch."""
        changed = False
        for home in self._homes if together else ():
            if home.key not in together:
                continue
            live = self._tensors_of(home.key)
            known = set(map(id, live))
            others = [tensor for tensor in together[home.key] if id(tensor) not in known]
            if more := [tensor for tensor in others if have_same_storage(tensor, live[0])]:
                home.add(more)
                self._joined.setdefault(home.key, []).extend(more)
                changed = True
        if changed:
            self._way = None
            self._list()

    def _drop_separated(self) -> None:
        """Let go of joined tensors that their owner has pointed elsewhere."""
        for home in self._homes:
            for joined in list(self._joined.get(home.key, ())):
                live = self._tensors_of(home.key)
                number = next(n for n, tensor in enumerate(live) if tensor is joined)
                if (
                    not home.lie_together(live, 0, number)
                    and live[number].data_ptr() != home.at[number]
                ):
                    home.drop(number)
                    self._joined[home.key] = [
                        each for each in self._joined[home.key] if each is not joined
                    ]
                    self._list()

    def settle(self, waiting: WaitingPlace | None = None) -> None:
        """Bring every tensor home with its present values. `waiting`: where some may wait; it is
        empty afterwards."""
        some = waiting if waiting and waiting.waiting_bytes else None
        if some is not None and self._has_returned(some):
            some = None
        if some is None and self._is_at_home():
            return
        self._way = None
        if self._joined:
            self._drop_separated()
        strays: list[tuple[Home, Sequence[torch.Tensor]]] = []
        for home in self._homes:
            live = self._tensors_of(home.key)
            if _addresses(live) != home.at:
                _check(home, live, self._arenas.device)
                strays.append((home, live))
        self._arenas.synchronize()
        # A stray tensor may lie at the home of another one, in the same arenas.
        for home, live in strays:
            for tensor, at in zip(live, home.at, strict=True):
                if tensor.data_ptr() != at and self._arenas.contain(tensor.data_ptr()):
                    move_out([tensor])
        for home, live in strays:
            waits = some is not None and some.contains(live[0].data_ptr())
            home.bring(live, non_blocking=waits)
        if some is not None:
            self._arenas.synchronize()
            some.empty(self._arenas.origins)

    def move_from(
        self,
        old: "Homes",
        waiting: WaitingPlace | None,
        between: Callable[[], object],
    ) -> int:
        """Bring every tensor home from its home in `old`, whose arenas may be the same memory. Each
        byte is copied once, and who is at home already stays. `waiting`: where some may wait.
        `between` is called between two copies. Returns the bytes that moved."""
        left = {tuple(home.at): home for home in old._homes}
        moves: list[tuple[Home, HomeMove]] = []
        moved = 0
        for home in self._homes:
            live = self._tensors_of(home.key)
            before = left.get(at := tuple(_addresses(live)))
            if list(at) == home.at:
                left.pop(at, None)
                continue
            moved += home.memory.nbytes
            alike = before is not None and (
                before.memory.nbytes == home.memory.nbytes
                and [TensorLayout.from_tensor(tensor) for tensor in live] == home.layouts
            )
            if before is None or not alike:
                _check(home, live, self._arenas.device)
                continue
            del left[at]
            now = set(map(id, live))
            for seen in before.tensors:
                if id(seen) not in now and seen.data_ptr() in before.at:
                    move_out([seen])  # its owner has replaced it, and may still hold it
            moves.append((home, HomeMove(before.memory, home.memory, live, home.views)))

        def synchronize() -> None:
            old._arenas.synchronize()  # it may be another device's
            self._arenas.synchronize()

        synchronize()
        for home in left.values():
            move_out(old._tensors_at_home(home), old._arenas.origins[home.key])
        move_homes([move for _, move in moves], synchronize, between)
        for home, move in moves:
            home.tensors = list(move.tensors)
        self.settle(waiting)
        return moved

    def has(self, key: str, place: Place, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all these tensor objects are at home at this place."""
        return self.places.get(key) == place and {*map(id, tensors)} <= {
            *map(id, self._tensors_of(key))
        }

    def _is_at_home(self) -> bool:
        return _addresses(self._all) == self._at

    def find_repointed(self) -> Iterator[tuple[str, str]]:
        """Tensors that somebody has pointed elsewhere where not they alone are concerned: their
        names, and what becomes of it."""
        for home in [] if self._is_at_home() else self._homes:
            live = self._tensors_of(home.key)
            if _addresses(live) == home.at:
                continue
            if not all(home.lie_together(live, 0, n) for n in range(len(live))):
                yield home.key, TOGETHER
            elif not self._arenas.contain(live[0].data_ptr()) and is_held_by_others(live):
                yield home.key, APART

    def versioned_tensors(self) -> list[torch.Tensor]:
        """Tensors that count their versions: all but those made in inference mode."""
        return [t for home in self._homes for t in home.tensors if not t.is_inference()]

    def release(self, stays: "Homes | None" = None) -> None:
        """Give every tensor that is still at home memory of its own, with its present values.

        Tensors that have the same home in `stays` keep it."""
        for home in self._homes:
            if stays is None or not stays.has(home.key, self.places[home.key], home.tensors):
                move_out(self._tensors_at_home(home), self._arenas.origins[home.key])

    def park(self, waiting: WaitingPlace) -> int:
        """Move every tensor that is at home on a device to the waiting place. `settle` brings it
        back. Returns the bytes that moved."""
        if self._has_gone(waiting):
            return waiting.waiting_bytes
        parking = [
            ParkingHome(home.key, self.places[home.key], home.memory, there)
            for home in self._homes
            if self.places[home.key].arena != HOST and (there := self._tensors_at_home(home))
        ]
        if not parking:
            return 0
        self._arenas.synchronize()
        waiting.empty(self._arenas.origins)  # what an interrupted `settle` left there
        way = waiting.plan_hand_over(parking, self._arenas.bytes)
        waiting.take(way, self._arenas.synchronize)
        self._way = waiting, way, self._all, _addresses(self._all)
        return waiting.waiting_bytes

    def _has_gone(self, waiting: WaitingPlace) -> bool:
        """Whether all tensors could go the way that they went the last time."""
        if self._way is None or self._way[0] is not waiting or waiting.waiting_bytes:
            return False
        _, way, then, _ = self._way
        if then is not self._all or _addresses(then) != self._at:
            return False
        if not way.can_go():
            return False
        self._arenas.synchronize()
        waiting.take(way, self._arenas.synchronize)
        return True

    def _has_returned(self, waiting: WaitingPlace) -> bool:
        """Whether all tensors could come home the way that they went."""
        if self._way is None or self._way[0] is not waiting:
            return False
        _, way, then, at = self._way
        if then is not self._all or _addresses(then) != at:
            return False
        if not way.can_return():
            return False
        waiting.give_back(way, self._arenas.synchronize)
        return True

    def forget_device(self) -> None:
        """Drop what refers to the device's arena, after all tensors have left it. What is at home
        on the host can still be released."""
        self._way = None
        self._homes = [home for home in self._homes if self.places[home.key].arena == HOST]
        self._arenas = self._arenas.without_device()

    @property
    def resident_bytes(self) -> int:
        """What a waiting place needs for all homes on devices."""
        return _room_of(self.places[home.key] for home in self._homes)

    def _tensors_at_home(self, home: Home) -> list[torch.Tensor]:
        """The tensors of a home that are still at it."""
        there: dict[int, torch.Tensor] = {}
        for tensors in (home.tensors, self._tensors_of(home.key)):
            for tensor, at in zip(tensors, home.at, strict=False):
                if tensor.data_ptr() == at:
                    there[id(tensor)] = tensor
        return list(there.values())


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(address_of, tensors))


def _check(home: Home, live: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise unless the tensors fit the layout. Between two steps they may be on the host or on the
    kernels' device."""
    for given, layout in zip(live, home.layouts, strict=True):
        alike = (given.dtype, given.size()) == (layout.dtype, layout.size)
        if not alike or given.device.type not in ("cpu", device.type):
            raise StepError(
                f"tensor {home.key} is {given.dtype} {tuple(given.size())} on {given.device} now,"
                f" but the step was captured with {layout.dtype} {tuple(layout.size)} on {device}."
                " Capture it again"
            )
    strays = [n for n, tensor in enumerate(live) if tensor.data_ptr() != home.at[n]]
    if not all(home.lie_together(live, n, m) for n in strays for m in strays):
        raise StepError(
            f"tensors that lay over each other in the memory of {home.key} when the step was"
            " captured are apart now: they were pointed elsewhere (.data = ...). Write into them in"
            " place instead, or capture the step again"
        )


def resident_bytes(memgraph: MemGraph) -> int:
    """The bytes that a waiting place needs for all residents of a plan."""
    return _room_of(places_of(memgraph).values())


def _room_of(homes: Iterable[Place]) -> int:
    return sum(room_of(place.nbytes) for place in homes if place.arena != HOST)
