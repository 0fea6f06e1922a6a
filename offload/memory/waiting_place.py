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

import torch

from offload.graph.memgraph import ALIGNMENT
from offload.memory.arenas import HostArena
from offload.memory.tensor_layout import TensorLayout, move_out


@dataclass(frozen=True, slots=True)
class Leaver:
    """A home that is left: its bytes, and the tensors that are at it."""

    key: str
    memory: torch.Tensor
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Waiting:
    nbytes: int
    tensors: Sequence[torch.Tensor]
    at: list[int]
    """The addresses that the tensors were given here."""


def room_of(nbytes: int) -> int:
    """The bytes that a home of `nbytes` takes in a waiting place."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class WaitingPlace:
    """Memory for `nbytes` of residents."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`device`: where kernels run."""
        self.nbytes = nbytes
        self._host = HostArena(nbytes, device)
        self._waiting: dict[str, _Waiting] = {}
        """By the name of the home."""

    @property
    def note(self) -> str:
        """Why the memory is not page-locked; empty where it is, or need not be."""
        return self._host.note

    @property
    def waiting_bytes(self) -> int:
        """How much lies here now."""
        return sum(one.nbytes for one in self._waiting.values())

    @property
    def at(self) -> dict[str, list[int]]:
        """The addresses of the tensors that wait, by the name of their home."""
        return {key: one.at for key, one in self._waiting.items()}

    def contains(self, address: int) -> bool:
        return self._host.region.contains(address)

    def take(self, leavers: Sequence[Leaver], rest: Callable[[], object]) -> None:
        """Copy their bytes here and point the tensors here. `rest` waits for the copies: nobody
        may see a tensor whose bytes have not arrived."""
        at, views = 0, list[list[torch.Tensor]]()
        for leaver in leavers:
            place = self._host.region.bytes(at, leaver.memory.nbytes)
            place.copy_(leaver.memory, non_blocking=True)
            views.append([TensorLayout.of(tensor).over(place) for tensor in leaver.tensors])
            at += room_of(leaver.memory.nbytes)
        rest()
        for leaver, new in zip(leavers, views, strict=True):
            addresses = [view.data_ptr() for view in new]
            self._waiting[leaver.key] = _Waiting(leaver.memory.nbytes, leaver.tensors, addresses)
            for tensor, view in zip(leaver.tensors, new, strict=True):
                tensor.data = view

    def empty(self, origins: Mapping[str, torch.device]) -> None:
        """Give every tensor that still waits memory of its own, where it was at first."""
        for key, one in self._waiting.items():
            pairs = zip(one.tensors, one.at, strict=True)
            move_out([tensor for tensor, at in pairs if tensor.data_ptr() == at], origins[key])
        self._waiting.clear()

    def unlock(self) -> None:
        """Unlock the memory before it is given up. Safe to call again."""
        self._host.unlock()
