"""Steps of GPT-3, made up: sizes and FLOPs are the model's, and nothing runs.

    one micro-batch of 2,048 tokens                     x  the input of a block      qkv 3, o 1,
    forward    qkv  attend  proj  up  down                 (one "wide")              x2 1, u 4 wides
    backward   down: dx, dw   up: dx, dw   proj: dx, dw   attend   qkv: dx, dw

A peer adds up the gradients of several micro-batches, as a captured step does: a gradient is made,
then the first micro-batch copies it to the sum, and the others add it. No update is in the graph:
the sums go to the host, for all peers to add up. Weights and sums lie on the host before and after.
Norms, biases, GELU and residuals are part of the kernel of the matrix product beside them.

Embedding and head have tables of their own, as in minGPT, which ATOM ran. If the two are `tied`, as
in GPT-3, the head's gradient waits in each micro-batch for the embedding's, and then both are added
to the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from offload import GraphBuilder, TaskGraph

LENGTH = 2048
"""Tokens of a micro-batch: one text."""
WORDS = 50257
STATE = 12
"""Bytes a weight on the host beside the weight and its sum: a copy in float32 and Adam's two
averages."""


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT-3 of one size."""

    name: str
    depth: int
    width: int
    words: int = WORDS
    length: int = LENGTH
    tied: bool = False
    """Whether embedding and head share one table."""

    @property
    def ends(self) -> dict[str, int]:
        """Weights of the embedding (of words and places) and of the head."""
        words = self.words * self.width
        embed = {"embed": words + self.length * self.width}
        return embed if self.tied else embed | {"head": words}

    @property
    def block(self) -> dict[str, int]:
        """Weights of a block, with the vectors of biases and norms that go with each matrix."""
        square = self.width**2
        return {
            "qkv": 3 * square + 5 * self.width, "proj": square + self.width,
            "up": 4 * square + 6 * self.width, "down": 4 * square + self.width,
        }  # fmt: skip

    @property
    def weights(self) -> int:
        return sum(self.ends.values()) + self.depth * sum(self.block.values())

    def cut(self, host: int, element: int) -> "Model":
        """The model with as many blocks as `host` bytes hold. `element`: bytes of a number."""
        each = 2 * element + STATE
        most = (host // each - sum(self.ends.values())) // sum(self.block.values())
        return replace(self, depth=min(self.depth, most))


MODELS = (
    Model("Small", 12, 768),
    Model("Medium", 24, 1024),
    Model("Large", 24, 1536),
    Model("XL", 24, 2048),
    Model("2.7B", 32, 2560),
    Model("6.7B", 32, 4096),
    Model("13B", 40, 5120),
    Model("175B", 96, 12288),
)


def step(model: Model, micro_batches: int, element: int, carried: bool = False) -> TaskGraph:
    """The micro-batches of a step, one after the other. `element`: bytes of a number. `carried`:
    sums of earlier micro-batches are on the host, and these add to them."""
    builder = GraphBuilder()
    tensors = _Tensors(builder, model, element)
    for turn in range(micro_batches):
        _MicroBatch(builder, model, element, tensors, turn, carried or turn > 0).build()
    return builder.graph()


class _Tensors:
    """The weights and their sums, by name."""

    def __init__(self, builder: GraphBuilder, model: Model, element: int) -> None:
        self.weight: dict[str, int] = {}
        self.sum: dict[str, int] = {}
        self.nbytes: dict[str, int] = {}
        self._builder = builder
        for name, count in model.ends.items():
            self._add(name, element * count)
        for block in range(model.depth):
            for name, count in model.block.items():
                self._add(f"{name}{block}", element * count)

    def _add(self, name: str, nbytes: int) -> None:
        self.nbytes[name] = nbytes
        self.weight[name] = self._builder.buffer(name, nbytes, "parameter")
        self.sum[name] = self._builder.buffer(f"sum {name}", nbytes, "state")


@dataclass(slots=True)
class _MicroBatch:
    """Builds the tasks of one micro-batch."""

    builder: GraphBuilder
    model: Model
    element: int
    tensors: _Tensors
    turn: int
    adds: bool
    """Whether its gradients are added to sums, or make them."""
    kept: list[dict[str, int]] = field(default_factory=list)
    """By block: what the backward pass needs."""

    @property
    def wide(self) -> int:
        """Bytes of a number for each token and column."""
        return self.element * self.model.length * self.model.width

    def build(self) -> None:
        x = self._buffer("x0", self.wide, "activation")
        tokens = self._buffer("tokens", 8 * self.model.length, "input")
        self._task("embed", [tokens, self.tensors.weight["embed"]], [x], traffic=2 * self.wide)
        for block in range(self.model.depth):
            x = self._forward(block, x)
        head, d = self._head(x)
        for block in reversed(range(self.model.depth)):
            d = self._backward(block, d)
        into = head if self.model.tied else self._gradient("embed")
        also = [into] if self.model.tied else []
        self._task("embed dw", [tokens, d, *also], [into], "backward", traffic=3 * self.wide)
        self._sum("embed", into)

    def _forward(self, block: int, x: int) -> int:
        wide = self.wide
        kept = {"x": x}
        for name, size in (("qkv", 3), ("o", 1), ("x2", 1), ("u", 4)):
            kept[name] = self._buffer(f"{name}{block}", size * wide, "activation")
        self._product(block, "qkv", [x], kept["qkv"], 4)
        self._task(
            f"attend{block}", [kept["qkv"]], [kept["o"]], flops=self._attention, traffic=4 * wide,
            repeatable=True,
        )  # fmt: skip
        self._product(block, "proj", [kept["o"], x], kept["x2"], 3)
        self._product(block, "up", [kept["x2"]], kept["u"], 5)
        after = self._buffer(f"x{block + 1}", wide, "activation")
        self._product(block, "down", [kept["u"], kept["x2"]], after, 6)
        self.kept.append(kept)
        return after

    def _head(self, x: int) -> tuple[int, int]:
        """Returns the gradients of the table and of `x`."""
        model, nbytes = self.model, self.element * self.model.length * self.model.words
        key = "embed" if model.tied else "head"
        flops = 2.0 * model.words * model.width * model.length
        table = self.tensors.weight[key]
        scores = self._buffer("d scores", nbytes, "gradient")
        loss = self._buffer("loss", 64)
        d = self._buffer("d", self.wide, "gradient")
        traffic = self.tensors.nbytes[key] + nbytes + self.wide
        self._task("head", [x, table], [scores, loss], flops=flops, traffic=traffic + 2 * nbytes)
        self._task("head dx", [scores, table], [d], "backward", flops=flops, traffic=traffic)
        made = self._gradient(key)
        self._task("head dw", [scores, x], [made], "backward", flops=flops, traffic=traffic)
        if not model.tied:
            self._sum("head", made)
        self.builder.output(loss)
        return made, d

    def _backward(self, block: int, d: int) -> int:
        kept, wide = self.kept[block], self.wide
        du = self._buffer(f"du{block}", 4 * wide, "gradient")
        self._product(block, "down", [d, kept["u"]], du, 9, "backward")
        self._weight(block, "down", [d, kept["u"]], 5)
        dx2 = self._buffer(f"dx2 {block}", wide, "gradient")
        self._product(block, "up", [du, kept["x2"], d], dx2, 7, "backward")
        self._weight(block, "up", [du, kept["x2"]], 5)
        do = self._buffer(f"do{block}", wide, "gradient")
        self._product(block, "proj", [dx2], do, 2, "backward")
        self._weight(block, "proj", [dx2, kept["o"]], 2)
        dqkv = self._buffer(f"dqkv{block}", 3 * wide, "gradient")
        self._task(
            f"attend{block} d", [do, kept["qkv"], kept["o"]], [dqkv], "backward",
            flops=2.5 * self._attention, traffic=8 * wide,
        )  # fmt: skip
        dx = self._buffer(f"dx{block}", wide, "gradient")
        self._product(block, "qkv", [dqkv, kept["x"], dx2], dx, 6, "backward")
        self._weight(block, "qkv", [dqkv, kept["x"]], 4)
        return dx

    @property
    def _attention(self) -> float:
        """FLOPs of two products of all pairs of tokens, of which a half is masked."""
        return 2.0 * self.model.length**2 * self.model.width

    def _product(
        self, block: int, name: str, reads: Sequence[int], result: int, wides: int,
        phase: str = "forward",
    ) -> None:  # fmt: skip
        key = f"{name}{block}"
        self._task(
            f"{key} dx" if phase == "backward" else key, [*reads, self.tensors.weight[key]],
            [result], phase, flops=self._flops(name), repeatable=phase == "forward",
            traffic=self.tensors.nbytes[key] + wides * self.wide,
            workspace=(4 if name == "down" else 1) * self.wide,
        )  # fmt: skip

    def _weight(self, block: int, name: str, reads: Sequence[int], wides: int) -> None:
        """The gradient of a weight, and its sum."""
        key = f"{name}{block}"
        made, traffic = self._gradient(key), self.tensors.nbytes[key] + wides * self.wide
        flops = self._flops(name)
        self._task(f"{key} dw", reads, [made], "backward", flops=flops, traffic=traffic)
        self._sum(key, made)

    def _gradient(self, key: str) -> int:
        return self._buffer(f"d {key}", self.tensors.nbytes[key], "gradient")

    def _sum(self, key: str, made: int) -> None:
        """Copy a gradient to the sum, or add it."""
        into, nbytes = self.tensors.sum[key], self.tensors.nbytes[key]
        reads = [made, into] if self.adds else [made]
        self._task(f"{key} sum", reads, [into], "backward", traffic=(len(reads) + 1) * nbytes)

    def _flops(self, name: str) -> float:
        return 2.0 * self.model.block[name] * self.model.length

    def _buffer(self, name: str, nbytes: int, role: str = "temporary") -> int:
        return self.builder.buffer(f"{name} [{self.turn}]", nbytes, role)

    def _task(
        self, name: str, reads: Sequence[int], writes: Sequence[int], phase: str = "forward",
        **more: float | bool,
    ) -> None:  # fmt: skip
        self.builder.task(
            f"{name} [{self.turn}]", reads, writes, phase=phase, turn=self.turn, **more
        )
