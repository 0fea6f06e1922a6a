"""Training steps of any number of tasks, made up: nothing of them ever runs.

    forward   norm -> linear (-> sum with the layer before the last)      a layer: 6 or 7 tasks
    backward  d weight, d input, d norm                                   update  w, its state

Sizes are drawn evenly over the powers between their limits, as they are in real models. What a
norm makes can be recomputed; linear ones have a workspace now and then.
"""

import random
from dataclasses import dataclass

from offload import TaskGraph

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
    graph = TaskGraph()
    stream = graph.buffer("x", 1 << 20, "input")
    layers: list[Layer] = []
    for number in range(max(1, round(tasks / TASKS_A_LAYER))):
        layer = _forward(graph, rng, number, stream)
        layers.append(layer)
        stream = layer.made
        if number % 2:
            stream = graph.buffer(f"sum{number}", _bytes(graph, layer.made), "activation")
            graph.task(f"sum{number}", [layer.made, layers[-2].made], [stream], pointwise=True,
                       repeatable=True, traffic=3 * _bytes(graph, stream))  # fmt: skip
    loss = graph.buffer("loss", 64)
    graph.task("loss", [stream], [loss])
    graph.output(loss)
    gradient = graph.buffer("d loss", _bytes(graph, stream), "gradient")
    graph.task("d loss", [stream, loss], [gradient], phase="backward")
    for number, layer in reversed(list(enumerate(layers))):
        gradient = _backward(graph, number, layer, gradient)
    return graph


def _forward(graph: TaskGraph, rng: random.Random, number: int, read: int) -> Layer:
    nbytes = _drawn(rng, WEIGHTS)
    weight = graph.buffer(f"w{number}", nbytes, "parameter")
    state = graph.buffer(f"m{number}", 2 * nbytes, "state")
    normed = graph.buffer(f"normed{number}", _bytes(graph, read), "activation")
    made = graph.buffer(f"a{number}", _drawn(rng, ACTIVATIONS), "activation")
    graph.task(f"norm{number}", [read], [normed], repeatable=True, traffic=2 * _bytes(graph, read))
    graph.task(
        f"linear{number}", [normed, weight], [made], repeatable=True, flops=100.0 * nbytes,
        traffic=nbytes + _bytes(graph, made), workspace=(128 << 10) * (number % 8 == 0),
    )  # fmt: skip
    return Layer(weight, state, read, normed, made)


def _backward(graph: TaskGraph, number: int, layer: Layer, gradient: int) -> int:
    nbytes = _bytes(graph, layer.weight)
    d_weight = graph.buffer(f"dw{number}", nbytes, "gradient")
    d_normed = graph.buffer(f"dn{number}", _bytes(graph, layer.normed), "gradient")
    d_read = graph.buffer(f"dx{number}", _bytes(graph, layer.read), "gradient")
    more = {"phase": "backward", "flops": 100.0 * nbytes, "traffic": 2 * nbytes}
    graph.task(f"linear{number}.dw", [gradient, layer.normed], [d_weight], **more)
    graph.task(f"linear{number}.dx", [gradient, layer.weight], [d_normed], **more)
    graph.task(f"norm{number}.dx", [d_normed, layer.read], [d_read], phase="backward",
               traffic=3 * _bytes(graph, d_read))  # fmt: skip
    both = [layer.weight, layer.state]
    graph.task(f"update{number}", [*both, d_weight], both, phase="update", traffic=7 * nbytes)
    return d_read


def _bytes(graph: TaskGraph, buffer: int) -> int:
    return graph.buffers[buffer].nbytes


def _drawn(rng: random.Random, limits: tuple[int, int]) -> int:
    low, high = limits
    return int(low * (high / low) ** rng.random())
