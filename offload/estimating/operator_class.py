"""What kind of work a kernel call is, and how many operations and bytes it takes.

    aten.mm(64x64, 64x64)   ->   Work("product", 524288 operations, 49152 bytes, float32)

Bytes are those of the tensors that are read and written: a view counts its part, an expanded
dimension counts once, and what is changed in place counts twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from offload.measuring.distinct_calls import values_of
from offload.program.kernels import Call, Value, values_in
from offload.torch_seams import OpOverload, name_of, schema_of

OperatorClass = Literal[
    "product", "odd_product", "thin_product", "attention_forward", "attention_backward",
    "convolution_forward", "convolution_backward", "recurrent", "pointwise", "reduction", "softmax",
    "norm", "cast", "embedding", "optimizer", "copy",
]  # fmt: skip
BLOCK, COLOURS = 16, 3
"""Channels of a block; as many channels are not copied."""
THIN = 64
"""A matrix product with a dimension below this is thin."""
WHOLE = 8
"""Dimensions of a matrix product that are no multiples of this make it odd."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mv", "addmv", "dot"})
RECURRENT = frozenset({
    "_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
})  # fmt: skip
EMBEDDINGS = frozenset({"embedding", "index_select", "gather", "index"})
"""They read as much of their first tensor as they write."""
COPIES = frozenset({
    "clone", "copy_", "cat", "stack", "fill_", "zero_", "zeros", "ones", "full", "zeros_like",
    "ones_like", "full_like", "select_backward", "slice_backward", "constant_pad_nd",
})  # fmt: skip
REDUCTIONS = frozenset({
    "sum", "mean", "var", "std", "var_mean", "amax", "amin", "max", "min", "argmax", "argmin",
    "prod", "cumsum", "norm", "linalg_vector_norm", "nll_loss_forward", "nll_loss_backward",
    "nll_loss2d_forward", "nll_loss2d_backward", "logsumexp",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """What a call costs on any card."""

    kind: OperatorClass
    flops: float
    nbytes: int
    dtype: str
    """The type that it computes in, as torch writes it without `torch.`."""
    blocked: int = 0
    """Of a convolution: bytes of its tensors in blocks of channels, as oneDNN copies them."""

    @property
    def copied(self) -> int:
        """Bytes that a library may copy to compute."""
        return self.blocked or self.nbytes


def work_of(call: Call) -> Work:
    """Find out what a call does."""
    op = _op_of(call)
    name = "" if op is None else name_of(op)
    given = values_of(call)
    first = next(iter([*given, *filter(None, call.outputs)]), None)
    dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
    if name in PRODUCTS and len(given) >= 2:
        flops, kind = _product(name, given)
    elif "scaled_dot_product" in name and "attention" in name:
        backward = name.endswith("backward")
        kind = "attention_backward" if backward else "attention_forward"
        flops = _attention(call, given, backward)
    elif "convolution" in name:
        backward = name.endswith("backward")
        kind = "convolution_backward" if backward else "convolution_forward"
        flops = _convolution(call, given, backward)
    elif name in RECURRENT:
        flops, kind = _recurrent(name, given), "recurrent"
    else:
        flops, kind = 0.0, _moving_class(name)
    blocked = _blocked_bytes(call, given) if kind.startswith("convolution") else 0
    return Work(kind, flops, bytes_of(call, name), dtype, blocked)


def _op_of(call: Call) -> Any:
    """Torch's op, which something of ours may hold; None for a function that is no op."""
    op = call.of_torch
    op = op if isinstance(op, OpOverload) else getattr(op, "op", None)
    return op if isinstance(op, OpOverload) else None


def bytes_of(call: Call, name: str) -> int:
    """Bytes that the call reads and writes."""
    given = [part_of(value) for value in values_of(call)]
    made = sum(part_of(value) for value in filter(None, call.outputs))
    if name in EMBEDDINGS and given:
        given[0] = made
    return sum(given) + made + sum(part_of(value) for value in _changed(call))


def part_of(value: Value) -> int:
    """Bytes of the elements that the tensor shows, each once."""
    shown = (n for n, step in zip(value.size, value.stride, strict=True) if step or not n)
    return prod(shown) * value.dtype.itemsize


def _changed(call: Call) -> list[Value]:
    """The arguments that the call writes, by the op's own description."""
    written = [each for each in _described(call) if each.alias_info and each.alias_info.is_write]
    # A fused update writes gradients only where a scaler's factor has to be taken off.
    names = [each.name for each in written if each.name != "grads"]
    return [*values_in([_argument(call, name) for name in names])]


def _described(call: Call) -> Sequence[Any]:
    op = _op_of(call)
    return () if op is None else schema_of(op).arguments


def _argument(call: Call, name: str) -> Any:
    """An argument by its name; None if the call leaves it out."""
    for n, described in enumerate(_described(call)):
        if described.name == name:
            return call.args[n] if n < len(call.args) else call.kwargs.get(name)
    return None


def _product(name: str, given: list[Value]) -> tuple[float, OperatorClass]:
    a, b = (given[0], given[1]) if name == "linear" else (given[-2], given[-1])
    if name == "linear":
        rows, columns = prod(a.size[:-1]), b.size[0]
    else:
        rows = prod(a.size[:-1]) if len(a.size) > 1 else 1
        columns = b.size[len(b.size) - 1] if len(b.size) > 1 else 1
    inner = a.size[len(a.size) - 1]
    dims = (a.size[-2] if len(a.size) > 2 else rows, inner, columns)
    kind: OperatorClass = "product"
    if min(dims) < THIN:
        kind = "thin_product"
    elif any(n % WHOLE for n in dims):
        kind = "odd_product"
    return 2.0 * rows * inner * columns, kind


def _attention(call: Call, given: list[Value], backward: bool) -> float:
    """Two products forwards, five backwards; half of each where later keys are left out."""
    q, k, v = given[1:4] if backward else given[:3]
    over = prod(q.size[:-1]) * k.size[-2] * (q.size[-1] + v.size[-1])
    causal = 0.5 if _argument(call, "is_causal") else 1.0
    return 2.0 * over * causal * (2.5 if backward else 1.0)


def _convolution(call: Call, given: list[Value], backward: bool) -> float:
    transposed = bool(_argument(call, "transposed"))
    shape, x, weight = given[:3] if backward else (None, *given[:2])
    if transposed:
        rows = prod(x.size) // x.size[1]
    else:
        out = shape or next(filter(None, call.outputs))
        rows = prod(out.size) // out.size[1]
    mask = _argument(call, "output_mask") if backward else (True,)
    asked = sum(map(bool, mask[:2]))
    return 2.0 * rows * prod(weight.size) * asked


def _blocked_bytes(call: Call, given: list[Value]) -> int:
    """What comes and goes, its channels filled up to blocks; and the weights, twice backwards.
    Pictures of three colours are read as they are."""
    *ends, weight = given[: 3 if _is_backward(call) else 2]
    if not _is_backward(call):
        ends += filter(None, call.outputs)
    channels = [value.size[1] for value in ends]
    copied = [
        part_of(value) // count * (-(-count // BLOCK) * BLOCK)
        for value, count in zip(ends, channels, strict=True)
        if count > COLOURS
    ]
    return sum(copied) + part_of(weight) * (1 + _is_backward(call))


def _is_backward(call: Call) -> bool:
    op = _op_of(call)
    return op is not None and name_of(op).endswith("backward")


def _recurrent(name: str, given: list[Value]) -> float:
    x = given[0]
    weights = [v for v in given[1:] if len(v.size) == 2]
    if name.startswith("mkldnn"):
        weights = given[1:3]
    rows = prod(x.size[:-1])
    return 2.0 * rows * sum(prod(w.size) for w in weights) * (2 if "backward" in name else 1)


def _moving_class(name: str) -> OperatorClass:
    """The class of a call that moves bytes rather than computes."""
    if name.startswith(("_foreach", "_fused")):
        return "optimizer"
    if "softmax" in name:
        return "softmax"
    if name in REDUCTIONS:
        return "reduction"
    if "_norm" in name:
        return "norm"
    if name in EMBEDDINGS or name.startswith(("embedding", "index_", "scatter")):
        return "embedding"
    if name in COPIES:
        return "copy"
    return "cast" if name == "_to_copy" else "pointwise"
