"""Graphs that are made by hand, and plans of them that are proved."""

from offload.graph.builder import GraphBuilder
from offload.graph.memgraph import MemGraph
from offload.graph.taskgraph import HOST, TaskGraph
from offload.planning.planner import Policy, build_memgraph
from offload.planning.verify import verify

UNIT = 64


def planned(
    graph: TaskGraph, units: int, policy: Policy | None = None, host: int | None = None
) -> MemGraph:
    """Of a device of so many units, proved."""
    capacities = {0: units * UNIT} | ({} if host is None else {HOST: host * UNIT})
    memgraph = build_memgraph(graph, capacities, policy or Policy())
    verify(memgraph)
    assert memgraph.arenas[0] <= units * UNIT
    return memgraph


def copies(memgraph: MemGraph, kind: str) -> list[str]:
    """Whom they move, in the order of the plan."""
    buffers = memgraph.graph.buffers
    return [buffers[node.buffer].name for node in memgraph.nodes if node.kind == kind]


def training(layers: int, units: int = 4) -> TaskGraph:
    """Forward, backward, and an update of each weight and its state."""
    builder = GraphBuilder()
    nbytes = units * UNIT
    made = [builder.buffer("x", nbytes, "input")]
    weights = [builder.buffer(f"w{n}", nbytes, "parameter") for n in range(layers)]
    states = [builder.buffer(f"m{n}", nbytes, "state") for n in range(layers)]
    for n, w in enumerate(weights):
        made.append(builder.buffer(f"a{n}", nbytes, "activation"))
        builder.task(f"f{n}", [made[-2], w], made[-1:])
    g = builder.buffer("g", nbytes, "gradient")
    builder.task("loss", made[-1:], [g], phase="backward")
    for n in reversed(range(layers)):
        d = builder.buffer(f"d{n}", nbytes, "gradient")
        builder.task(f"b{n}", [g, made[n], weights[n]], [d], phase="backward")
        builder.task(f"c{n}", [g, weights[n]], [g], phase="backward")
        changed = [weights[n], states[n]]
        builder.task(f"u{n}", [d, *changed], changed, phase="update")
    builder.output(g)
    return builder.graph()


def uses(order: str, names: str = "abcd", units: int = 1) -> TaskGraph:
    """Tensors made in a row; then each task reads one: `order`."""
    builder = GraphBuilder()
    made = {name: builder.buffer(name, units * UNIT, "activation") for name in names}
    for name in names:
        builder.task(f"make {name}", writes=[made[name]])
    for number, name in enumerate(order):
        builder.task(f"read {name} {number}", [made[name]])
    return builder.graph()
