"""How a tensor lies over the bytes of its storage, and how it gets other bytes.

    storage  |..[ tensor ]..|     offset, size, stride: the same over any other bytes

Only `.data` changes: the tensor object stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies in its storage. Kernels are bound to that."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    of_inference: bool
    """Whether it was made in inference mode: it counts no versions, whatever bytes it has."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "TensorLayout":
        offset, of_inference = int(tensor.storage_offset()), tensor.is_inference()
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, of_inference)

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(self.of_inference):
            empty = torch.empty(0, dtype=self.dtype, device=memory.device)
            return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)

    @property
    def span(self) -> tuple[int, int]:
        """The first byte, and the one after the last."""
        if 0 in self.size:
            return 0, 0
        steps = ((n - 1) * stride for n, stride in zip(self.size, self.stride, strict=True))
        count = self.dtype.itemsize
        return self.offset * count, (self.offset + sum(steps) + 1) * count


def may_overlap(layout: TensorLayout, other: TensorLayout) -> bool:
    """Whether two tensors over the same storage may have a byte in common."""
    (begin, end), (first, last) = layout.span, other.span
    return begin < last and first < end


def have_same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def move_out(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> None:
    """Give tensors that share a storage ordinary memory of their own, on `device` if given."""
    if tensors:
        memory = bytes_of(tensors[0]).to(device or tensors[0].device, copy=True)
        for tensor in tensors:
            tensor.data = TensorLayout.from_tensor(tensor).view_of(memory)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
