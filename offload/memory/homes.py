"""The user's tensors as views of a runner's arenas. A tensor's place there is its home.

    module.conv.weight --.data--> [arena of device 0 ..|conv.weight|..]     resident
    optimizer's exp_avg --------> [host arena ........|exp_avg|.......]     streamed

So the module, `state_dict` and checkpoints see current values without a copy between two steps. The
user may point a tensor elsewhere (`p.data = ...`, another runner over the same module, an optimizer
that loads its state). So `settle` compares addresses before every step, copies such values to their
home and points the tensor there again. `release` gives every tensor memory of its own.

Only `.data` changes: the tensor object stays the same.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import GraphError, StepError
from offload.graph.memgraph import MemGraph, Place
from offload.graph.taskgraph import HOST
from offload.memory.arenas import Arenas
from offload.program.kernels import CPU, Source

Tensors = Mapping[str, Source]
"""The user's tensors by `Buffer.tensor`."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies in its storage. Kernels are bound to that."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLayout":
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class Home:
    """One storage of the user's in an arena, and the tensors over it."""

    def __init__(self, key: str, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self.key = key
        self.memory = memory
        self.tensors = list(tensors)
        """The tensor objects that were last seen there."""
        self.layouts = [TensorLayout.of(tensor) for tensor in tensors]
        try:
            self.views = [layout.over(memory) for layout in self.layouts]
        except RuntimeError as error:
            raise GraphError(
                f"tensor {key}: {self.layouts} does not fit into its {len(memory)} bytes of the"
                " plan"
            ) from error
        self.at = [view.data_ptr() for view in self.views]
        """The addresses of the views' first elements."""

    def bring(self, live: Sequence[torch.Tensor]) -> None:
        """Copy the values of these tensors here and point the tensors here."""
        for seen, now, at in zip(self.tensors, live, self.at, strict=True):
            if seen is not now and seen.data_ptr() == at:
                move_out([seen])  # whoever still has the old object must not see the new values
        strays = [n for n, tensor in enumerate(live) if tensor.data_ptr() != self.at[n]]
        storages = {live[n].untyped_storage().data_ptr() for n in strays}
        alike = [TensorLayout.of(tensor) for tensor in live] == self.layouts
        whole = live[0].untyped_storage().nbytes() == len(self.memory)
        if len(strays) == len(live) and len(storages) == 1 and alike and whole:
            self.memory.copy_(_bytes(live[0]))
        else:
            for n in strays:
                self.views[n].copy_(live[n].detach())
        for n in strays:
            live[n].data = self.views[n]
        self.tensors = list(live)


class Homes:
    """The homes of one MemGraph in its arenas."""

    def __init__(self, memgraph: MemGraph, arenas: Arenas, tensors: Tensors) -> None:
        self._arenas = arenas
        self._tensors = tensors
        self.places = {k: p for k, p in places(memgraph).items() if k in tensors and p.nbytes}
        self._homes = [
            Home(key, arenas.bytes(place), self._live(key)) for key, place in self.places.items()
        ]
        for home in self._homes:
            arenas.origins.setdefault(home.key, home.tensors[0].device)
        self._sources = [source for home in self._homes for source in self._source(home.key)]
        self._at = [at for home in self._homes for at in home.at]
        self._parked: list[tuple[str, list[torch.Tensor]]] = []
        """Tensors that `park` moved to the host, by the name of their home."""

    def _source(self, key: str) -> Sequence[torch.Tensor | Callable[[], torch.Tensor]]:
        found = self._tensors[key]
        return (found,) if isinstance(found, torch.Tensor) or callable(found) else found

    def _live(self, key: str) -> Sequence[torch.Tensor]:
        return _found(self._source(key))

    def settle(self) -> None:
        """Bring every tensor home with its present values."""
        self._parked.clear()
        if self._at_home():
            return
        strays: list[tuple[Home, Sequence[torch.Tensor]]] = []
        for home in self._homes:
            live = self._live(home.key)
            if _addresses(live) != home.at:
                _check(home, live, self._arenas.device)
                strays.append((home, live))
        self._arenas.rest()
        # A stray tensor may lie at the home of another one, in the same arenas.
        for home, live in strays:
            for tensor, at in zip(live, home.at, strict=True):
                if tensor.data_ptr() != at and self._arenas.contain(tensor.data_ptr()):
                    move_out([tensor])
        for home, live in strays:
            home.bring(live)

    def has(self, key: str, place: Place, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether exactly these tensor objects are at home at this place."""
        if self.places.get(key) != place:
            return False
        live = self._live(key)
        return len(live) == len(tensors) and all(map(operator.is_, live, tensors))

    def astray(self) -> str:
        """The name of a tensor that somebody has pointed elsewhere; empty if all are at home.

        Tensors whose owners replace the object do not count."""
        if self._at_home():
            return ""
        known = [home for home in self._homes if not callable(self._tensors[home.key])]
        return next((h.key for h in known if _addresses(self._live(h.key)) != h.at), "")

    def _at_home(self) -> bool:
        return _addresses(_found(self._sources)) == self._at

    def counted(self) -> list[torch.Tensor]:
        """Tensors that count their versions: all but those made in inference mode."""
        return [t for home in self._homes for t in home.tensors if not t.is_inference()]

    def release(self, stays: "Homes | None" = None) -> None:
        """Give every tensor that is still at home memory of its own, with its present values.

        Tensors that have the same home in `stays` keep it."""
        for home in self._homes:
            if stays is None or not stays.has(home.key, self.places[home.key], home.tensors):
                move_out(self._there(home), self._arenas.origins[home.key])

    def park(self) -> None:
        """Move every tensor that is at home on a device to ordinary memory of the host. `settle`
        brings it back."""
        self._arenas.rest()
        for home in self._homes:
            if self.places[home.key].arena != HOST:
                there = self._there(home)
                move_out(there, CPU)
                self._parked += [(home.key, there)] if there else []

    def bring_back(self) -> None:
        """Move parked tensors that have not come home since to where they were at first."""
        for key, tensors in self._parked:
            move_out(tensors, self._arenas.origins[key])
        self._parked.clear()

    def _there(self, home: Home) -> list[torch.Tensor]:
        """The tensors of a home that are still at it."""
        there: dict[int, torch.Tensor] = {}
        # A function is not called to find a tensor: its owner may have given it up.
        live = () if callable(self._tensors[home.key]) else self._live(home.key)
        for tensors in (home.tensors, live):
            for tensor, at in zip(tensors, home.at, strict=False):
                if tensor.data_ptr() == at:
                    there[id(tensor)] = tensor
        return list(there.values())


def _found(
    sources: Sequence[torch.Tensor | Callable[[], torch.Tensor]],
) -> list[torch.Tensor]:
    return [found if isinstance(found, torch.Tensor) else found() for found in sources]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _check(home: Home, live: Sequence[torch.Tensor], device: torch.device) -> None:
    """Raise unless the tensors fit the layout. Between two steps they may be on the host or on the
    kernels' device."""
    for found, layout in zip(live, home.layouts, strict=True):
        alike = (found.dtype, found.size()) == (layout.dtype, layout.size)
        if not alike or found.device.type not in ("cpu", device.type):
            raise StepError(
                f"tensor {home.key} is {found.dtype} {tuple(found.size())} on {found.device} now,"
                f" but the step was captured with {layout.dtype} {tuple(layout.size)} on {device}."
                " Capture it again"
            )


def places(memgraph: MemGraph) -> dict[str, Place]:
    """The home of every tensor. Its pieces lie side by side."""
    pieces: dict[str, list[tuple[int, Place]]] = {}
    for number, buffer in enumerate(memgraph.graph.buffers):
        if buffer.persistent and number in memgraph.starts:
            pieces.setdefault(buffer.tensor, []).append((buffer.start, memgraph.starts[number]))
    return {key: _joined(key, sorted(found, key=_start)) for key, found in pieces.items()}


def _start(piece: tuple[int, Any]) -> int:
    return piece[0]


def _joined(key: str, pieces: list[tuple[int, Place]]) -> Place:
    first, home = pieces[0]
    end = first
    for start, place in pieces:
        apart = place.offset - start != home.offset - first or place.arena != home.arena
        if first or start != end or apart:
            raise GraphError(f"the pieces of tensor {key} do not lie side by side: {pieces}")
        end = start + place.nbytes
    return Place(home.arena, home.offset, end)


def move_out(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
    """Give tensors that share a storage ordinary memory of their own, on `device` if given."""
    if tensors:
        memory = _bytes(tensors[0]).to(device or tensors[0].device, copy=True)
        for tensor in tensors:
            tensor.data = TensorLayout.of(tensor).over(memory)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
