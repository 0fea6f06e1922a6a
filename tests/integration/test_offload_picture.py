"""The picture of a plan: it is written, it is quick, and it shows what the plan has. And picture
and table of a captured step."""

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

from offload.errors import GraphError
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.memgraph import Access, Block, MemGraph, Node, Place
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.lowering.passes import lower
from offload.planning.planner import Policy
from offload.planning.recompute import recomputed
from offload.planning.simulator import simulate
from offload.planning.wanted import FoundPlan
from offload.plans.palette import AGAIN, COLOURS
from offload.plans.picture import draw
from offload.plans.plan import Plan, plan

SIZE = 1 << 18


def step(count: int = 6, devices: int = 1, train: bool = True) -> TaskGraph:
    builder = GraphBuilder()
    before = builder.buffer("x", SIZE, Role.INPUT)
    weights: list[int] = []
    made = [before]
    for n in range(count):
        d = n * devices // count
        if builder.buffers[before].device != d:
            there = builder.buffer(f"sent{n}", SIZE, Role.TEMPORARY, d)
            builder.task(f"send{n}", [before], [there], lane="d2d", device=d, traffic=SIZE)
            before = there
        weights.append(builder.buffer(f"w$_{n}$", SIZE, Role.PARAMETER, d))
        made.append(builder.buffer(f"a{n}", SIZE, Role.ACTIVATION, d))
        builder.task(
            f"f{n}", [before, weights[n]], [made[-1]], device=d, traffic=SIZE, repeatable=True
        )
        before = made[-1]
    for n in reversed(range(count if train else 0)):
        d = builder.buffers[weights[n]].device
        g = builder.buffer(f"g{n}", SIZE, Role.GRADIENT, d)
        builder.task(f"b{n}", [made[n + 1], weights[n]], [g], device=d, phase="backward")
        builder.task(f"u{n}", [g, weights[n]], [weights[n]], device=d, phase="update")
    builder.output(before)
    return builder.graph()


def has(path: Path, colour: str) -> bool:
    """A hundred pixels of it, so that no letter and no edge counts."""
    pixels = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum()) > 100


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
@pytest.mark.parametrize("budget", [None, 6 * SIZE, "64MiB"])
def test_a_picture_is_written_by_the_suffix(
    tmp_path: Path, suffix: str, budget: int | str | None
) -> None:
    path = tmp_path / f"plan{suffix}"
    draw(plan(step(), budget, placement="copy"), path)
    begin = path.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") if suffix != ".svg" else b"<?xml" in begin


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.png.txt"])
def test_another_suffix_is_refused_with_the_two_that_there_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(GraphError, match=r"\.png or \.svg, not '.*" + name):
        plan(step(), placement="copy").draw(str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_the_lines_are_named_and_the_lanes_are_there(tmp_path: Path) -> None:
    made = plan(step(), 6 * SIZE, placement="copy", host_budget="4MiB")
    draw(made, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    for word in ("budget", "without offload", "offloaded", "free", "forward", "backward"):
        assert f">{word}" in text
    for lane in made.simulation.busy:
        assert f">{lane}<" in text
    assert "1.5 MiB" in text


def test_a_plan_that_moves_nothing_shows_nothing_offloaded(tmp_path: Path) -> None:
    draw(plan(step(), placement="copy"), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert ">offloaded<" not in text
    assert ">free<" not in text


def test_the_same_plan_gives_the_same_picture(tmp_path: Path) -> None:
    made = plan(step(), 6 * SIZE, placement="copy")
    for name in ("one.svg", "two.svg", "one.png", "two.png"):
        draw(made, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_roles_have_their_colours_and_only_those_that_the_plan_has(tmp_path: Path) -> None:
    draw(plan(step(), placement="copy"), tmp_path / "train.png")
    draw(plan(step(train=False), placement="copy"), tmp_path / "infer.png")
    for role in (Role.PARAMETER, Role.ACTIVATION):
        assert has(tmp_path / "train.png", COLOURS[role])
        assert has(tmp_path / "infer.png", COLOURS[role])
    assert has(tmp_path / "train.png", COLOURS[Role.GRADIENT])
    assert not has(tmp_path / "infer.png", COLOURS[Role.GRADIENT])
    assert not has(tmp_path / "train.png", COLOURS[Role.STATE])


def test_what_is_recomputed_has_a_colour_of_its_own(tmp_path: Path) -> None:
    graph = step()
    again = recomputed(graph, [b for b, buffer in enumerate(graph.buffers) if buffer.name == "a0"])
    made = plan(again, 6 * SIZE, placement="copy", recompute=False)
    draw(replace(made, source=graph), tmp_path / "plan.png")
    assert has(tmp_path / "plan.png", AGAIN)
    draw(plan(graph, 6 * SIZE, placement="copy", recompute=False), tmp_path / "plain.png")
    assert not has(tmp_path / "plain.png", AGAIN)


def test_every_device_has_a_panel(tmp_path: Path) -> None:
    draw(plan(step(devices=3), 4 * SIZE, placement="copy"), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert all(f">device {device}, " in text for device in range(3))


def test_an_empty_step_is_drawn_too(tmp_path: Path) -> None:
    draw(plan(TaskGraph(), placement="copy"), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    draw(plan(step(), placement="copy"), tmp_path / "plan.svg")
    assert dict(matplotlib.rcParams) == before


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
