"""The table and the picture of a plan before the run: what they say, counted a second time here."""

from dataclasses import replace
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from support.counted_calls import calls_of
from support.live_training import training_graph

from offload.errors import BudgetTooSmall, GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import Access, Block, MemGraph, Node, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.graph.topology import Topology
from offload.lowering.passes import lower
from offload.memory import cuda_shim
from offload.planning.planner import Policy
from offload.planning.recompute import recompute_buffers
from offload.planning.simulator import simulate
from offload.planning.wanted import FoundPlan, peak_bytes
from offload.plans.device_table import describe_part
from offload.plans.explain import WIDTH, explain
from offload.plans.palette import COLOURS
from offload.plans.picture import draw
from offload.plans.plan import Plan, plan
from offload.sizes import format_size

KIB = 1024


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_shim, "why_not_on", lambda _: "no C++ compiler was found")


def layers(count: int = 8, size: int = 64 * KIB, devices: int = 1) -> TaskGraph:
    """A step that trains `count` layers: forward, backward, update."""
    builder = GraphBuilder()
    before = builder.buffer("x", size, Role.INPUT)
    weights, states, made = [], [], []
    for n in range(count):
        d = n * devices // count
        weights.append(builder.buffer(f"w{n}", 2 * size, Role.PARAMETER))
        states.append(builder.buffer(f"s{n}", 2 * size, Role.STATE))
        made.append(builder.buffer(f"a{n}", size, Role.ACTIVATION))
        builder.task(
            f"f{n}", [before, weights[n]], [made[n]], device=d, traffic=size, repeatable=True
        )
        before = made[n]
    for n in reversed(range(count)):
        d = n * devices // count
        g = builder.buffer(f"g{n}", 2 * size, Role.GRADIENT)
        builder.task(f"b{n}", [made[n], weights[n]], [g], device=d, phase="backward", traffic=size)
        changed = [weights[n], states[n]]
        builder.task(f"u{n}", [g, *changed], changed, device=d, phase="update", traffic=size)
    builder.output(before)
    return builder.graph()


def planned(graph: TaskGraph, share: float | None = None, **more: object) -> Plan:
    budget = None if share is None else int(peak_bytes(graph, 0) * share)
    return plan(graph, budget, placement="copy", **more)  # pyright: ignore[reportArgumentType]


def line(text: str, label: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(label))


def row(text: str, role: str) -> dict[str, str]:
    """A row of the table by the headings' right edges."""
    lines = text.splitlines()
    head = next(each for each in lines if "at the peak" in each)
    cells, begin = {}, 16
    for name in ("all", "resident", "streamed", "at the peak", "offloaded", "reloaded"):
        end = head.index(name) + len(name)
        cells[name] = " ".join(line(text, role)[begin:end].split())
        begin = end
    return cells


@pytest.mark.parametrize("share", [None, 0.6, 0.35])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_table_fits_on_one_screen(share: float | None, devices: int) -> None:
    notes = [f"note {n} " + "of many words " * 20 for n in range(30)]
    graph = replace(layers(devices=devices), notes=tuple(notes))
    text = planned(graph, share).explain()
    assert len(text.splitlines()) <= 37
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(each == each.rstrip() for each in text.splitlines())


def test_what_one_device_sends_to_another_is_told() -> None:
    text = planned(layers(devices=2)).explain()
    assert "sent from device to device 64.0 KiB in 1 copy" in text
    assert "sent from" not in planned(layers()).explain()


def test_each_of_several_devices_has_a_row() -> None:
    made = plan(layers(devices=2), 20 * 64 * KIB, Costs(topology=Topology(dram=1e9)))
    text = explain(made)
    for device in (0, 1):
        into = sum(
            node.nbytes for node in made.memgraph.nodes
            if node.kind != "task" and node.accesses[1].place.arena == device
        )  # fmt: skip
        out = sum(
            node.nbytes for node in made.memgraph.nodes
            if node.kind != "task" and node.accesses[0].place.arena == device
        )  # fmt: skip
        (row,) = [line for line in text.splitlines() if line.startswith(f"device {device}")][1:]
        assert row.split()[-4:] == [*format_size(into).split(), *format_size(out).split()]
    assert "device 0" not in explain(plan(layers())).replace("the peak    device 0", "")


@pytest.mark.parametrize(
    "part, words",
    [
        ("compute", "the kernels of device 0"),
        ("compute12", "the kernels of device 12"),
        ("d2h3", "the link from device 3"),
        ("h2d", "the link to device 0"),
        ("uplink 1 h2d", "uplink 1, to its devices"),
        ("DRAM", "the host's memory"),
        ("host", "the tasks of the host"),
        ("critical path", "critical path"),
    ],
)
def test_what_sets_the_bound_of_several_devices_is_said_in_words(part: str, words: str) -> None:
    assert describe_part(part) == words


def test_a_plan_without_a_budget_says_that_only_the_inputs_move() -> None:
    text = planned(layers()).explain()
    assert "only the inputs, 64.0 KiB" in line(text, "moves")
    assert "no budget" in line(text, "device")
    assert row(text, "parameters")["resident"] == "8 1.0 MiB"
    assert row(text, "parameters")["streamed"] == ""


def test_the_bytes_of_each_role_are_those_of_its_buffers_and_of_its_copies() -> None:
    made = planned(layers(), 0.5)
    text = made.explain()
    buffers = made.graph.buffers
    names = {Role.PARAMETER: "parameters", Role.STATE: "optimizer state", Role.ACTIVATION: "activ"}
    for role, name in names.items():
        for kind, column in (("offload", "offloaded"), ("reload", "reloaded")):
            nbytes = 0
            for node in made.memgraph.nodes:
                if node.kind == kind and buffers[node.buffer].role is role:
                    nbytes += node.nbytes
            assert row(text, name)[column] == (format_size(nbytes) if nbytes else "")
        count = sum(buffer.role is role for buffer in made.source.buffers)
        assert row(text, name)["all"].startswith(f"{count} ")


def test_the_smallest_budget_is_the_one_that_a_refusal_names() -> None:
    graph = layers()
    graph = graph.with_tasks(
        [replace(t, unplaced=3000 if t.name == "f3" else 0) for t in graph.tasks]
    )
    with pytest.raises(BudgetTooSmall) as refused:
        plan(graph, 1, placement="copy")
    said = line(planned(graph).explain(), "at least")
    assert format_size(refused.value.needed) in said
    assert refused.value.task in said


def test_what_is_recomputed_is_named_and_counted() -> None:
    graph = layers()
    named = [b for b, buffer in enumerate(graph.buffers) if buffer.name == "a0"]
    again = recompute_buffers(graph, named)
    costs = Costs(launch=1e-3)
    made = replace(planned(again, 0.6, costs=costs, recompute=False), source=graph)
    said = line(explain(made), "recomputed")
    assert said == "recomputed  1 task, 1.01 ms more, 64.0 KiB less to keep: f0"
    assert line(planned(layers()).explain(), "recomputed") == "recomputed  nothing"


def test_a_pass_that_changes_bits_is_named() -> None:
    graph = replace(layers(), notes=("2 groups are compiled",))
    assert line(planned(graph).explain(), "bits").startswith("bits        as eager")
    changing = "host_updates: the last bits differ"
    graph = replace(graph, notes=(*graph.notes, changing))
    said = line(planned(graph).explain(), "bits")
    assert said == "bits        NOT bit-equal to eager: host_updates"


def has(path: Path, colour: str) -> bool:
    """A hundred pixels of it, so that no letter and no edge counts."""
    pixels = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum()) > 100


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
@pytest.mark.parametrize("share", [None, 0.5])
def test_a_picture_is_written_by_the_suffix(
    tmp_path: Path, suffix: str, share: float | None
) -> None:
    path = tmp_path / f"plan{suffix}"
    draw(planned(layers(), share), path)
    begin = path.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") if suffix != ".svg" else b"<?xml" in begin


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.png.txt"])
def test_another_suffix_is_refused_with_the_two_that_there_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(GraphError, match=r"\.png or \.svg, not '.*" + name):
        planned(layers()).draw(str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_the_same_plan_gives_the_same_picture(tmp_path: Path) -> None:
    made = planned(layers(), 0.5)
    for name in ("one.svg", "two.svg", "one.png", "two.png"):
        draw(made, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_every_device_has_a_panel(tmp_path: Path) -> None:
    draw(planned(layers(devices=3)), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert all(f">device {device}, " in text for device in range(3))


def long_plan(count: int) -> Plan:
    """Without a planner: `count` tasks, each reads what the one before has written."""
    builder = GraphBuilder()
    nodes, blocks = [], []
    for n in range(count):
        builder.buffer(f"a{n}", 64, Role.ACTIVATION)
        builder.task(f"t{n}", [n - 1] if n else [], [n], traffic=64)
        place = Place(0, n % 100 * 64, 64)
        accesses = (Access(place, n, False, True),)
        nodes.append(Node("task", "compute", accesses, (n - 1,) if n else (), n))
        blocks.append(Block(place, n, (n, n + 1) if n + 1 < count else (n,)))
    graph = builder.graph()
    memgraph = MemGraph(graph, tuple(nodes), {0: 6400, HOST: 0}, {}, {}, tuple(blocks), {})
    found = FoundPlan(memgraph, Policy(), simulate(memgraph, Costs()))
    return Plan(graph, found, {0: 6400}, None, Costs(), "copy", False)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_ten_thousand_tasks_are_one_small_picture(tmp_path: Path, suffix: str) -> None:
    few, many = (long_plan(count) for count in (1_000, 10_000))

    def drawn(made: Plan) -> int:
        return calls_of(lambda: draw(made, tmp_path / f"plan{suffix}"))

    assert drawn(few) * 13 >= drawn(many)
    assert (tmp_path / f"plan{suffix}").stat().st_size < 4e6


def captured() -> TaskGraph:
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 40, bias=False))
    optimizer = torch.optim.AdamW(module.parameters())
    batch = torch.randn(12, 8), torch.randint(0, 40, (12,))
    return training_graph(module, torch.nn.functional.cross_entropy, optimizer, *batch)


def test_a_captured_step_is_explained_and_drawn(tmp_path: Path) -> None:
    made = plan(lower(captured()), placement="copy")
    assert "as eager" in made.explain()
    made.draw(tmp_path / "plan.png")
    assert has(tmp_path / "plan.png", COLOURS[Role.STATE])
