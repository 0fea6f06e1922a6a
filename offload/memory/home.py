"""One storage of the user's in an arena, and the tensors over it."""

from collections.abc import Sequence

import torch

from offload.errors import GraphError
from offload.memory.tensor_layout import (
    TensorLayout,
    bytes_of,
    have_same_storage,
    may_overlap,
    move_out,
)
from offload.torch_seams import address_of


class Home:
    """One storage of the user's in an arena, and the tensors over it."""

    def __init__(self, key: str, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self.key = key
        self.memory = memory
        self.tensors = list(tensors)
        """The tensor objects that were last seen there."""
        self.layouts = [TensorLayout.from_tensor(tensor) for tensor in tensors]
        try:
            self.views = [layout.view_of(memory) for layout in self.layouts]
        except RuntimeError as error:
            raise GraphError(
                f"tensor {key}: {self.layouts} does not fit into its {len(memory)} bytes of the"
                " plan"
            ) from error
        self.at = [address_of(view) for view in self.views]
        """The addresses of the views' first elements."""

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add more tensors over this storage."""
        more = Home(self.key, self.memory, tensors)
        self.tensors += more.tensors
        self.layouts += more.layouts
        self.views += more.views
        self.at += more.at

    def drop(self, number: int) -> None:
        for each in (self.tensors, self.layouts, self.views, self.at):
            del each[number]

    def lie_together(self, live: Sequence[torch.Tensor], number: int, other: int) -> bool:
        """Whether two tensors are as far from each other as they are here, if they overlap here."""
        if not may_overlap(self.layouts[number], self.layouts[other]):
            return True
        apart = address_of(live[number]) - address_of(live[other])
        planned = self.at[number] - self.at[other]
        return have_same_storage(live[number], live[other]) and apart == planned

    def bring(self, live: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
        """Copy the values of these tensors here and point the tensors here. `non_blocking`: the
        caller waits for the device before their old memory is used again."""
        for seen, now, at in zip(self.tensors, live, self.at, strict=True):
            if seen is not now and address_of(seen) == at:
                move_out([seen])  # whoever still has the old object must not see the new values
        strays = [n for n, tensor in enumerate(live) if address_of(tensor) != self.at[n]]
        storages = {live[n].untyped_storage().data_ptr() for n in strays}
        alike = [TensorLayout.from_tensor(tensor) for tensor in live] == self.layouts
        whole = live[0].untyped_storage().nbytes() == self.memory.nbytes
        if len(strays) == len(live) and len(storages) == 1 and alike and whole:
            self.memory.copy_(bytes_of(live[0]), non_blocking=non_blocking)
        else:
            with torch.inference_mode():  # some may have been made in it
                for n in strays:
                    self.views[n].copy_(live[n].detach(), non_blocking=non_blocking)
        for n in strays:
            live[n].data = self.views[n]
        self.tensors = list(live)
