"""Training steps of any number of tasks, made up: nothing of them ever runs.

    forward   norm -> linear (-> sum with the layer before the last)      a layer: 6 or 7 tasks
    backward  d weight, d input, d norm                                   update  w, its state

Sizes are drawn evenly over the powers between their limits, as they are in real models. What a
norm makes can be recomputed; linear ones have a workspace now and then.
"""

import random
from dataclasses import dataclass

from offload import GraphBuilder, TaskGraph

WEIGHTS = (4 << 10, 8 << 20)
ACTIVATIONS = (32 << 10, 4 << 20)
TASKS_A_LAYER = 6.5


@dataclass(frozen=True, slots=True)
class Layer:
    """Buffers of a layer."""

    weight: int
    state: int
    read: int
    normed: int
    made: int


def training_step(tasks: int, seed: int = 0) -> TaskGraph:
    """Of about so many tasks."""
    rng = random.Random(seed)
    builder = GraphBuilder()
    stream = builder.buffer("x", 1 << 20, "input")
    layers: list[Layer] = []
    for number in range(max(1, round(tasks / TASKS_A_LAYER))):
        layer = _forward(builder, rng, number, stream)
        layers.append(layer)
        stream = layer.made
        if number % 2:
            stream = builder.buffer(f"sum{number}", _bytes(builder, layer.made), "activation")
            builder.task(f"sum{number}", [layer.made, layers[-2].made], [stream], pointwise=True,
                       repeatable=True, traffic=3 * _bytes(builder, stream))  # fmt: skip
    loss = builder.buffer("loss", 64)
    builder.task("loss", [stream], [loss])
    builder.output(loss)
    gradient = builder.buffer("d loss", _bytes(builder, stream), "gradient")
    builder.task("d loss", [stream, loss], [gradient], phase="backward")
    for number, layer in reversed(list(enumerate(layers))):
        gradient = _backward(builder, number, layer, gradient)
    return builder.graph()


def _forward(builder: GraphBuilder, rng: random.Random, number: int, read: int) -> Layer:
    nbytes = _drawn(rng, WEIGHTS)
    weight = builder.buffer(f"w{number}", nbytes, "parameter")
    state = builder.buffer(f"m{number}", 2 * nbytes, "state")
    normed = builder.buffer(f"normed{number}", _bytes(builder, read), "activation")
    made = builder.buffer(f"a{number}", _drawn(rng, ACTIVATIONS), "activation")
    builder.task(
        f"norm{number}", [read], [normed], repeatable=True, traffic=2 * _bytes(builder, read)
    )
    builder.task(
        f"linear{number}", [normed, weight], [made], repeatable=True, flops=100.0 * nbytes,
        traffic=nbytes + _bytes(builder, made), workspace=(128 << 10) * (number % 8 == 0),
    )  # fmt: skip
    return Layer(weight, state, read, normed, made)


def _backward(builder: GraphBuilder, number: int, layer: Layer, gradient: int) -> int:
    nbytes = _bytes(builder, layer.weight)
    d_weight = builder.buffer(f"dw{number}", nbytes, "gradient")
    d_normed = builder.buffer(f"dn{number}", _bytes(builder, layer.normed), "gradient")
    d_read = builder.buffer(f"dx{number}", _bytes(builder, layer.read), "gradient")
    more = {"phase": "backward", "flops": 100.0 * nbytes, "traffic": 2 * nbytes}
    builder.task(f"linear{number}.dw", [gradient, layer.normed], [d_weight], **more)
    builder.task(f"linear{number}.dx", [gradient, layer.weight], [d_normed], **more)
    builder.task(f"norm{number}.dx", [d_normed, layer.read], [d_read], phase="backward",
               traffic=3 * _bytes(builder, d_read))  # fmt: skip
    both = [layer.weight, layer.state]
    builder.task(f"update{number}", [*both, d_weight], both, phase="update", traffic=7 * nbytes)
    return d_read


def _bytes(builder: GraphBuilder, buffer: int) -> int:
    return builder.buffers[buffer].nbytes


def _drawn(rng: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return int(low * (high / low) ** rng.random())
