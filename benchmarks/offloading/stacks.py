"""Training steps of stacks like GPT-2 XL, made up: sizes and FLOPs are the model's, nothing runs.

forward   attention | mlp       48 times, then the head        a unit: w 2 bytes a weight (bf16)
backward  the same, computed once more from the unit's input   s 12 (a copy in float32, Adam's
update    of each weight, at once or after all norms are known     two averages), g 2
"""

from dataclasses import dataclass

from offload import GraphBuilder, TaskGraph

WEIGHT, STATE, GRADIENT = 2, 12, 2
"""Bytes a weight."""
UPDATED = 2 * STATE + WEIGHT + GRADIENT
"""Bytes that an update reads and writes for a weight."""
PARTS = 4
"""Of the head."""
AGAIN = 3
"""Times the FLOPs of the forward pass that a backward pass takes with what it computes again."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A model and its batch."""

    batch: int
    depth: int = 48
    width: int = 1600
    words: int = 50257
    length: int = 1024

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def units(self) -> list[int]:
        """The weights of each unit: attention and mlp of every block, and the head, in parts as
        planned updates are."""
        head = [self.words * self.width // PARTS] * PARTS
        return [4 * self.width**2, 8 * self.width**2] * self.depth + head

    @property
    def activation(self) -> int:
        return 2 * self.tokens * self.width


@dataclass(frozen=True, slots=True)
class Way:
    """How a stack is trained."""

    clipped: bool
    """Updates wait for the norm of all gradients."""
    on_host: bool
    """Updates run on the host."""


class _Units:
    """The buffers of all units."""

    def __init__(self, builder: GraphBuilder, stack: Stack, gradients: str) -> None:
        units = list(enumerate(stack.units))
        self.w = [builder.buffer(f"w{n}", WEIGHT * p, "parameter") for n, p in units]
        self.s = [builder.buffer(f"s{n}", STATE * p, "state") for n, p in units]
        self.g = [builder.buffer(f"g{n}", GRADIENT * p, gradients) for n, p in units]
        norms = "temporary" if gradients == "gradient" else gradients
        self.n = [builder.buffer(f"n{n}", 64, norms) for n, _ in units]


def step(stack: Stack, way: Way) -> TaskGraph:
    """A whole step."""
    builder = GraphBuilder()
    units = _Units(builder, stack, "gradient")
    loss = _passes(builder, stack, units, None if way.clipped else way)
    if way.clipped:
        _clipped(builder, stack, units, way)
    builder.output(loss)
    return builder.graph()


def halves(stack: Stack) -> tuple[TaskGraph, TaskGraph]:
    """A clipped step in two: forward and backward passes, and updates on the device. Gradients
    outlive the first one."""
    first, second = GraphBuilder(), GraphBuilder()
    first.output(_passes(first, stack, _Units(first, stack, "state"), None))
    _clipped(second, stack, _Units(second, stack, "state"), Way(clipped=True, on_host=False))
    return first.graph(), second.graph()


def _passes(builder: GraphBuilder, stack: Stack, units: _Units, way: Way | None) -> int:
    """Forward and backward passes, with updates if `way` is given. Returns the loss."""
    inputs = [builder.buffer("x", stack.activation, "input")]
    wide = 4 * stack.activation
    for n, p in enumerate(stack.units):
        inputs.append(builder.buffer(f"a{n}", stack.activation, "activation"))
        builder.task(
            f"forward{n}", [inputs[n], units.w[n]], [inputs[n + 1]], flops=_flops(stack, p),
            traffic=WEIGHT * p + 10 * stack.activation, workspace=wide,
        )  # fmt: skip
    loss = builder.buffer("loss", 64)
    builder.task("loss", [inputs[-1]], [loss])
    d = builder.buffer("d", stack.activation, "gradient")
    builder.task("start", [inputs[-1], loss], [d], phase="backward")
    for n, p in reversed(list(enumerate(stack.units))):
        builder.task(
            f"backward{n}", [d, inputs[n], units.w[n]], [d, units.g[n], units.n[n]],
            phase="backward", flops=AGAIN * _flops(stack, p),
            traffic=3 * WEIGHT * p + 30 * stack.activation, workspace=2 * wide,
        )  # fmt: skip
        if way is not None:
            _update(builder, units, n, p, [], way)
    return loss


def _clipped(builder: GraphBuilder, stack: Stack, units: _Units, way: Way) -> None:
    norm = builder.buffer("norm", 64)
    builder.task("norm", units.n, [norm], phase="backward")
    for n, p in enumerate(stack.units):
        _update(builder, units, n, p, [norm], way)


def _update(
    builder: GraphBuilder, units: _Units, n: int, p: int, more: list[int], way: Way
) -> None:
    both = [units.w[n], units.s[n]]
    builder.task(
        f"update{n}", [*both, units.g[n], *more], both, phase="update", traffic=UPDATED * p,
        lane="host" if way.on_host else "compute",
    )  # fmt: skip


def _flops(stack: Stack, weights: int) -> float:
    """Of the matrix products, and of the half of the attention that is not masked."""
    attention = 2.0 * stack.tokens * stack.length * stack.width
    is_attention = weights == 4 * stack.width**2
    return 2.0 * weights * stack.tokens + (attention if is_attention else 0.0)
