"""Where the user's tensors live while a runner has them: views of its arenas, at their home.

    module.conv.weight --.data--> [arena of device 0 ..|conv.weight|..]     resident
    optimizer's exp_avg --------> [host arena ........|exp_avg|.......]     streamed

So the module, `state_dict` and checkpoints see current values without a copy between two steps.
The user may point a tensor elsewhere (`p.data = ...`, another runner over the same module, an
optimizer that loads its state): `settle` compares addresses before every step, copies such values
to their home and points the tensor there again. `release` gives every tensor memory of its own.

Only `.data` changes: a tensor stays the object that it was.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import GraphError, StepError
from offload.kernels import Source
from offload.memgraph import MemGraph, Place
from offload.memory import Arenas

Tensors = Mapping[str, Source]
"""By `Buffer.tensor`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage: the kernels are bound to that."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class Home:
    """One storage of the user's, in an arena, and the tensors over it."""

    def __init__(self, key: str, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self.key = key
        self.memory = memory
        self.tensors = list(tensors)
        """As they were last seen."""
        self.layouts = [Layout.of(tensor) for tensor in tensors]
        try:
            self.views = [layout.over(memory) for layout in self.layouts]
        except RuntimeError as error:
            raise GraphError(
                f"tensor {key}: {self.layouts} does not fit its {len(memory)} bytes in the plan"
            ) from error
        self.at = [view.data_ptr() for view in self.views]
        """The addresses of their first elements."""

    def bring(self, live: Sequence[torch.Tensor]) -> None:
        """Values and all."""
        for seen, now, at in zip(self.tensors, live, self.at, strict=True):
            if seen is not now and seen.data_ptr() == at:
                move_out([seen])  # whoever still has the old object must not see the new values
        strays = [n for n, tensor in enumerate(live) if tensor.data_ptr() != self.at[n]]
        storages = {live[n].untyped_storage().data_ptr() for n in strays}
        alike = [Layout.of(tensor) for tensor in live] == self.layouts
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

    def _source(self, key: str) -> Sequence[torch.Tensor | Callable[[], torch.Tensor]]:
        found = self._tensors[key]
        return (found,) if isinstance(found, torch.Tensor) or callable(found) else found

    def _live(self, key: str) -> Sequence[torch.Tensor]:
        return _asked(self._source(key))

    def settle(self) -> None:
        """Every tensor is at home afterwards, with the values that it has now."""
        if self._at_home():
            return
        strays: list[tuple[Home, Sequence[torch.Tensor]]] = []
        for home in self._homes:
            live = self._live(home.key)
            if _addresses(live) != home.at:
                _check(home, live, self._arenas.device)
                strays.append((home, live))
        self._arenas.rest()
        # One that is in these arenas, and not at home, may lie where another has its home.
        for home, live in strays:
            for tensor, at in zip(live, home.at, strict=True):
                if tensor.data_ptr() != at and self._arenas.contain(tensor.data_ptr()):
                    move_out([tensor])
        for home, live in strays:
            home.bring(live)

    def has(self, key: str, place: Place, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, no other objects, are at home at this place."""
        if self.places.get(key) != place:
            return False
        live = self._live(key)
        return len(live) == len(tensors) and all(map(operator.is_, live, tensors))

    def astray(self) -> str:
        """The name of a tensor that somebody pointed elsewhere since; empty: all are at home. Not
        of one whose owner makes another object of it."""
        if self._at_home():
            return ""
        known = [home for home in self._homes if not callable(self._tensors[home.key])]
        return next((h.key for h in known if _addresses(self._live(h.key)) != h.at), "")

    def _at_home(self) -> bool:
        return _addresses(_asked(self._sources)) == self._at

    def counted(self) -> list[torch.Tensor]:
        """Those that count their versions: all but what was made in inference mode."""
        return [t for home in self._homes for t in home.tensors if not t.is_inference()]

    def release(self, stays: "Homes | None" = None) -> None:
        """Memory of its own, with the values of now, for every tensor that is still at home; but
        for those that `stays` has there too."""
        for home in self._homes:
            if stays is not None and stays.has(home.key, self.places[home.key], home.tensors):
                continue
            there: dict[int, torch.Tensor] = {}
            # What is found by asking is not asked for: its owner may have given it up.
            live = () if callable(self._tensors[home.key]) else self._live(home.key)
            for tensors in (home.tensors, live):
                for tensor, at in zip(tensors, home.at, strict=False):
                    if tensor.data_ptr() == at:
                        there[id(tensor)] = tensor
            move_out(list(there.values()), self._arenas.origins[home.key])


def _asked(
    sources: Sequence[torch.Tensor | Callable[[], torch.Tensor]],
) -> list[torch.Tensor]:
    return [found if isinstance(found, torch.Tensor) else found() for found in sources]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _check(home: Home, live: Sequence[torch.Tensor], device: torch.device) -> None:
    """Between two steps it may be on the host or where kernels run."""
    for found, layout in zip(live, home.layouts, strict=True):
        alike = (found.dtype, found.size()) == (layout.dtype, layout.size)
        if not alike or found.device.type not in ("cpu", device.type):
            raise StepError(
                f"tensor {home.key} is {found.dtype} {tuple(found.size())} on {found.device} now;"
                f" the step was captured with {layout.dtype} {tuple(layout.size)} on {device}:"
                " capture it again"
            )


def places(memgraph: MemGraph) -> dict[str, Place]:
    """The home of every tensor: its pieces lie side by side."""
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
    """These, which share a storage, to ordinary memory of their own; on this device, if given."""
    if tensors:
        memory = _bytes(tensors[0]).to(device or tensors[0].device, copy=True)
        for tensor in tensors:
            tensor.data = Layout.of(tensor).over(memory)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
