"""Tensors of the host as payloads: raw bytes, with type and shape in the header.

channel.send("state", payloads_of(tensors))
tensors = tensors_of(channel.receive(10, limit=n))
"""

import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from trainers.elastic.wire.message import Message, Payload, PayloadForm
from trainers.elastic.wire.wire_errors import BadFrame


def payloads_of(tensors: Iterable[Tensor]) -> list[Payload]:
    """Return the tensors' bytes. A tensor whose elements lie one after the other is not copied."""
    return [_payload(number, tensor) for number, tensor in enumerate(tensors)]


def tensors_of(message: Message) -> list[Tensor]:
    """Return the payloads of a message as tensors, which share their memory."""
    return [_tensor(message.kind, n, payload) for n, payload in enumerate(message.payloads)]


def _payload(number: int, tensor: Tensor) -> Payload:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise BadFrame(
            f"tensor {number} is on {tensor.device} with layout {tensor.layout}: only dense tensors"
            " of the host are sent"
        )
    data = _bytes(tensor.detach().contiguous().resolve_conj().resolve_neg())
    return Payload(data, PayloadForm(len(data), _name(tensor.dtype), tuple(tensor.shape)))


def _bytes(tensor: Tensor) -> memoryview:
    if sys.byteorder != "little":
        raise BadFrame("tensors are sent in little-endian order, and this machine has the other")
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(kind: str, number: int, payload: Payload) -> Tensor:
    form = payload.form
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadFrame(f"payload {number} of {kind!r} is no tensor: its type is {form.dtype!r}")
    if math.prod(form.shape) * dtype.itemsize != form.size:
        raise BadFrame(
            f"tensor {number} of {kind!r} has {form.size} bytes, which is not {form.dtype}"
            f" {list(form.shape)}"
        )
    try:
        if not form.size:
            return torch.empty(form.shape, dtype=dtype)
        return torch.frombuffer(payload.data, dtype=dtype).reshape(form.shape)
    except RuntimeError as error:  # A type without dense tensors, or an empty one that overflows.
        raise BadFrame(f"torch makes no tensor of {form.dtype} {list(form.shape)}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
