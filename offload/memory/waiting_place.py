"""Where a job's residents wait on the host while another job has the device.

    device's arena  |w1|w2|####### another job's #######|
                      v  v                                 park: copied out, tensors point here
    waiting place   |w1|w2|                                next step: copied in, tensors point home

It is taken once and used at every hand-over. For a CUDA device it is page-locked, so that both
copies run at the rate of the link. The user may read and change a tensor that waits, or point it
elsewhere: a tensor waits as long as it has the address that it was given here. A second tensor over
the same memory (`p.detach()`) sees what lies here later, as it does when the tensor is at home.

Invariant: after `empty` nothing of the user's lies here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offload.graph.memgraph import ALIGNMENT, Place
from offload.memory.arenas import HostArena
from offload.memory.tensor_layout import TensorLayout, move_out


@dataclass(frozen=True, slots=True)
class ParkingHome:
    """A home that is left: its place, its bytes, and the tensors that are at it."""

    key: str
    place: Place
    memory: torch.Tensor
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Waiting:
    nbytes: int
    tensors: Sequence[torch.Tensor]
    at: list[int]
    """The addresses that the tensors were given here."""


@dataclass(frozen=True, slots=True, eq=False)
class HandOver:
    """The way of some tensors to their waiting place and back, found once and gone often."""

    spans: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Bytes of the device's arena, and where they wait. Homes that lie side by side are one."""
    seats: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """A tensor, a view of its home, and a view of where it waits."""
    waiting: Mapping[str, _Waiting]

    def can_go(self) -> bool:
        """Whether all tensors are at home as they were when the way was found."""
        return all(_is_at(tensor, home) for tensor, home, _ in self.seats)

    def can_return(self) -> bool:
        """Whether all tensors wait as they were put."""
        return all(_is_at(tensor, place) for tensor, _, place in self.seats)

    def go(self, synchronize: Callable[[], object]) -> None:
        for device, host in self.spans:
            host.copy_(device, non_blocking=True)
        synchronize()  # nobody may see a tensor whose bytes have not arrived
        for tensor, _, place in self.seats:
            tensor.data = place

    def come_back(self, synchronize: Callable[[], object]) -> None:
        for device, host in self.spans:
            device.copy_(host, non_blocking=True)
        synchronize()
        for tensor, home, _ in self.seats:
            tensor.data = home


def _is_at(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return tensor.dtype is view.dtype and tensor.is_set_to(view)


def room_of(nbytes: int) -> int:
    """The bytes that a home of `nbytes` takes in a waiting place."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class WaitingPlace:
    """Memory for `nbytes` of residents."""

    def __init__(self, nbytes: int, device: torch.device, host_dir: Path | None = None) -> None:
        """`device`: where kernels run. `host_dir`: see `HostArena`."""
        self.nbytes = nbytes
        self._host = HostArena(nbytes, device, host_dir)
        self._waiting: dict[str, _Waiting] = {}
        """By the name of the home."""

    @property
    def note(self) -> str:
        """Why the memory is not page-locked; empty where it is, or need not be."""
        return self._host.note

    @property
    def waiting_bytes(self) -> int:
        """How much lies here now."""
        return sum(waiting.nbytes for waiting in self._waiting.values())

    def contains(self, address: int) -> bool:
        return self._host.region.contains(address)

    def plan_hand_over(
        self, parking: Sequence[ParkingHome], bytes_at: Callable[[Place], torch.Tensor]
    ) -> HandOver:
        """Find where these tensors would wait. `bytes_at` returns the bytes of a place."""
        at = 0
        seats: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        waiting: dict[str, _Waiting] = {}
        joined: list[tuple[Place, int]] = []
        for home in sorted(parking, key=lambda home: (home.place.arena, home.place.offset)):
            memory = self._host.region.bytes(at, home.memory.nbytes)
            views: list[torch.Tensor] = []
            for tensor in home.tensors:
                layout = TensorLayout.from_tensor(tensor)
                views.append(layout.view_of(memory))
                seats.append((tensor, layout.view_of(home.memory), views[-1]))
            addresses = [view.data_ptr() for view in views]
            waiting[home.key] = _Waiting(home.memory.nbytes, home.tensors, addresses)
            joined = _join_span(joined, home.place, at)
            at += room_of(home.memory.nbytes)
        spans = [(bytes_at(place), self._host.region.bytes(n, place.nbytes)) for place, n in joined]
        return HandOver(spans, seats, waiting)

    def take(self, way: HandOver, synchronize: Callable[[], object]) -> None:
        """Copy the bytes here and point the tensors here. `synchronize` waits for the copies."""
        self._waiting = dict(way.waiting)  # first: a Ctrl-C may leave some here and some at home
        way.go(synchronize)

    def give_back(self, way: HandOver, synchronize: Callable[[], object]) -> None:
        """Copy the bytes of all that wait here home, and point the tensors there."""
        way.come_back(synchronize)
        self._waiting = {}

    def empty(self, origins: Mapping[str, torch.device]) -> None:
        """Give every tensor that still waits memory of its own, where it was at first."""
        for key, waiting in self._waiting.items():
            pairs = zip(waiting.tensors, waiting.at, strict=True)
            move_out([tensor for tensor, at in pairs if tensor.data_ptr() == at], origins[key])
        self._waiting.clear()

    def unlock(self) -> None:
        """Unlock the memory before it is given up. Safe to call again."""
        self._host.unlock()


def _join_span(spans: list[tuple[Place, int]], place: Place, at: int) -> list[tuple[Place, int]]:
    """The spans with one more place, which waits at `at`. It is a part of the last one if it lies
    behind it here and there, with nothing but padding between them."""
    if spans:
        last, begin = spans[-1]
        near = place.offset - last.offset == at - begin
        if near and place.arena == last.arena:
            whole = Place(last.arena, last.offset, place.offset + place.nbytes - last.offset)
            return [*spans[:-1], (whole, begin)]
    return [*spans, (place, at)]
