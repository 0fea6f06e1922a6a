"""Steps of large language models as graphs by hand, and machines of several cards.

    x --qkv--> q k v --attention--> o --out--> y --gate, up--> g u --down--> x of the next layer
    |__________________________________^       |________________________^    residuals

Each of these six is a task of a layer and a micro-batch, and another one backward. What a task
makes is kept for backward tasks. A backward task adds to its weight's sum, in the order of the
micro-batches, so that no bit depends on the devices. At the end, each weight has an update.

Every rate here is an assumption, unless it says `calibrated`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from offload import Costs, GraphBuilder, Role, TaskGraph
from offload.graph.topology import Topology

GB = 10**9
GRADIENT, WEIGHT, STATE = 2, 2, 12
"""Bytes of a parameter: bf16 sums of gradients, bf16 weights, fp32 weights and Adam's moments."""
ADAM = 28
"""Bytes of a parameter that an update reads and writes."""
ENDS = ("embedding", "down", "head")
"""Parts whose results are kept where layers are computed again."""
SHORT = 1e-5
"""Seconds of a task without matrix products."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """Layers with gated MLPs. Widths are elements of a token."""

    name: str
    layers: int
    wide: int
    queries: int
    keys: int
    inner: int
    words: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.list_parts(1))

    def list_parts(self, length: int) -> Iterator["Part"]:
        """From the embedding to the head, for sequences of this length."""
        wide, queries = self.wide, self.queries
        seen = length * queries
        yield Part("embedding", self.words * wide, 0, 0, 2 * wide)
        for _ in range(self.layers):
            yield _matmul("qkv", wide, queries + 2 * self.keys)
            yield Part("attention", 0, 2 * seen, 5 * seen, 2 * queries)
            yield _matmul("out", queries, wide, adds=(3,))
            yield _matmul("gate", wide, self.inner)
            yield _matmul("up", wide, self.inner, reads=(2,))
            yield _matmul("down", self.inner, wide, reads=(1, 2), adds=(3,))
        head = 2 * self.words * wide
        yield Part("head", self.words * wide, head, head, 4)


@dataclass(frozen=True, slots=True)
class Part:
    """One task of a layer. Operations and bytes are those of a token."""

    name: str
    parameters: int
    forward: float
    backward: float
    """Without the gradient of the weight."""
    made: int
    """Bytes that it makes."""
    reads: tuple[int, ...] = (1,)
    """Its inputs: so many parts before it made them. Its backward task reads them, too."""
    adds: tuple[int, ...] = ()
    """Other inputs, that are only added to its result."""


def _matmul(
    name: str, rows: int, columns: int, reads: tuple[int, ...] = (1,), adds: tuple[int, ...] = ()
) -> Part:
    flops = 2 * rows * columns
    return Part(name, rows * columns, flops, flops, 2 * columns, reads, adds)


LLAMA_8B = LanguageModel("Llama 3.1 8B", 32, 4096, 4096, 1024, 14336, 128256)
QWEN_32B = LanguageModel("Qwen3 32B", 64, 5120, 8192, 1024, 25600, 151936)


@dataclass(frozen=True, slots=True)
class Machine:
    """Cards of one kind in one host."""

    name: str
    cards: int
    memory: int
    """Bytes of a card that a step may take."""
    flops: float
    """What a card sustains."""
    costs: Costs


def rtx4090(cards: int = 8) -> Machine:
    """Calibrated: RoundPipe on one card, 3,142 tokens a second with layers computed again."""
    pairs = tuple((card, card + 1) for card in range(0, cards, 2))
    wires = Topology(dram=200 * GB, uplinks=pairs, uplink=25 * GB)
    return Machine(f"{cards} x RTX 4090", cards, 22 * GB, 193e12, _costs(25, 1000, 160, wires))


def h100(cards: int = 8) -> Machine:
    wires = Topology(dram=400 * GB, between=300 * GB)
    return Machine(f"{cards} x H100", cards, 76 * GB, 600e12, _costs(50, 3000, 300, wires))


def _costs(link: int, memory: int, host: int, wires: Topology) -> Costs:
    """Rates in GB a second."""
    rate = link * GB
    return Costs(
        memory=memory * GB, h2d=rate, d2h=rate, d2d=rate, host_memory=host * GB, topology=wires
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """A step, and how it is done."""

    model: LanguageModel
    micro_batches: int = 128
    tokens: int = 2048
    """Of a micro-batch, which is one sequence."""
    frozen: bool = False
    """LoRA: weights get no gradients, and its own small ones are left out."""
    again: bool = False
    """Whether a backward pass computes its layer again, from what came into it."""

    @property
    def all_tokens(self) -> int:
        return self.micro_batches * self.tokens


def step_of(work: Workload, flops: float) -> TaskGraph:
    """The whole step on one card that sustains so many operations a second."""
    return _Step(work, flops).build()


class _Step:
    def __init__(self, work: Workload, flops: float) -> None:
        self._work, self._speed = work, work.tokens / flops
        self._parts = list(work.model.list_parts(work.tokens))
        self._builder = GraphBuilder()
        self._weights = self._list_buffers("w", WEIGHT, Role.PARAMETER)
        self._sums = self._list_buffers("g", GRADIENT, Role.GRADIENT)
        self._states = self._list_buffers("s", STATE, Role.STATE)

    def _list_buffers(self, name: str, size: int, role: Role) -> list[tuple[int, ...]]:
        """Of each part: one buffer, or none if it has no weight (that is trained)."""
        has = [
            p.parameters and (role is Role.PARAMETER or not self._work.frozen) for p in self._parts
        ]
        return [
            (self._builder.buffer(f"{name}{n}", size * part.parameters, role),) if there else ()
            for n, (part, there) in enumerate(zip(self._parts, has, strict=True))
        ]

    def build(self) -> TaskGraph:
        for turn in range(self._work.micro_batches):
            self._add_micro_batch(turn)
        for n, sums in enumerate(self._sums):
            if sums:
                changed = (*self._weights[n], *self._states[n])
                traffic = ADAM * self._parts[n].parameters
                self._builder.task(
                    f"U{n}", (*sums, *self._states[n]), changed, phase="update", traffic=traffic
                )
        return self._builder.graph()

    def _add_micro_batch(self, turn: int) -> None:
        made = [self._builder.buffer(f"ids{turn}", 8 * self._work.tokens, Role.INPUT)]
        """The inputs, then what each part has made: number 0 has made `made[1]`."""
        for n in range(len(self._parts)):
            made.append(self._add_forward(turn, n, made))
        gradients: dict[int, int] = {}
        for n in reversed(range(len(self._parts))):
            if self._work.again and self._parts[n].name == "down":
                for again in range(n - 5, n):
                    made[again + 1] = self._add_forward(turn, again, made, again=True)
            self._add_backward(turn, n, made, gradients)

    def _add_forward(self, turn: int, n: int, made: list[int], again: bool = False) -> int:
        part, tokens = self._parts[n], self._work.tokens
        stays = part.name in ENDS or not self._work.again
        role = Role.ACTIVATION if stays else Role.TEMPORARY
        result = self._builder.buffer(f"{part.name}{n}.{turn}", part.made * tokens, role)
        read = [made[n + 1 - before] for before in (*part.reads, *part.adds)]
        phase = "backward" if again else "forward"
        self._builder.task(
            f"{'R' if again else 'F'}{n}.{turn} {part.name}", (*read, *self._weights[n]), (result,),
            turn=turn, phase=phase, seconds=part.forward * self._speed or SHORT,
        )  # fmt: skip
        return result

    def _add_backward(self, turn: int, n: int, made: list[int], gradients: dict[int, int]) -> None:
        """`gradients`: of everything made, by its number in `made`."""
        part, sums = self._parts[n], self._sums[n]
        read = [made[n + 1 - before] for before in part.reads]
        read += [*self._weights[n], *(sums if turn else ())]
        read += [made[n + 1]] if part.name == "attention" else []
        read += [gradients[n + 1]] if n + 1 in gradients else []
        written = [*sums]
        for before in (*part.reads, *part.adds) if n else ():
            into = n + 1 - before
            if into in gradients:
                read.append(gradients[into])  # and adds to it
            else:
                nbytes = self._parts[into - 1].made * self._work.tokens
                gradients[into] = self._builder.buffer(f"d{into}.{turn}", nbytes)
            written.append(gradients[into])
        flops = part.backward + (2 * part.parameters if sums and part.forward else 0)
        self._builder.task(
            f"B{n}.{turn} {part.name}", read, written,
            turn=turn, phase="backward", seconds=flops * self._speed or SHORT,
        )  # fmt: skip
