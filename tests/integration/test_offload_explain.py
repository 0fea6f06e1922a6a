"""The table before the run: every number in it, counted a second time here."""

import re
from dataclasses import replace

import numpy as np
import pytest

from offload.errors import BudgetTooSmall
from offload.graph.builder import GraphBuilder
from offload.graph.costs import Costs
from offload.graph.taskgraph import HOST, Role, TaskGraph
from offload.memory import cuda_shim
from offload.planning.recompute import recomputed
from offload.planning.wanted import peak_bytes
from offload.plans.account import (
    at_home,
    dropped,
    format_seconds,
    format_share,
    highest,
    lives,
    moved,
    total,
    unmoved,
    usage,
)
from offload.plans.explain import WIDTH, explain
from offload.plans.plan import Plan, plan
from offload.plans.role_table import aligned
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
        if builder.buffers[before].device != d:
            there = builder.buffer(f"sent{n}", size, Role.TEMPORARY, d)
            builder.task(f"send{n}", [before], [there], lane="d2d", device=d, traffic=size)
            before = there
        weights.append(builder.buffer(f"w{n}", 2 * size, Role.PARAMETER, d))
        states.append(builder.buffer(f"s{n}", 2 * size, Role.STATE, d))
        made.append(builder.buffer(f"a{n}", size, Role.ACTIVATION, d))
        builder.task(
            f"f{n}", [before, weights[n]], [made[n]], device=d, traffic=size, repeatable=True
        )
        before = made[n]
    for n in reversed(range(count)):
        d = builder.buffers[weights[n]].device
        g = builder.buffer(f"g{n}", 2 * size, Role.GRADIENT, d)
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


def test_columns_of_the_table_keep_apart_whatever_is_in_them() -> None:
    usual = [("", "all", "b", "c", "d", "e", "f"), ("inputs", "5 1.0 MiB", *[""] * 5)]
    assert aligned(usual)[1] == f"{'inputs':16}{'5 1.0 MiB':>16}"
    cells = ["123,456,789 1023.9 MiB"] * 3 + ["1023.9 MiB"] * 3
    [*_, last] = aligned([*usual, ("a role with a long name", *cells)])
    assert re.split(r"\s{2,}", last) == ["a role with a long name", *cells]


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


def test_a_plan_without_a_budget_says_that_only_the_inputs_move() -> None:
    text = planned(layers()).explain()
    assert "only the inputs, 64.0 KiB" in line(text, "moves")
    assert "no budget" in line(text, "device")
    assert row(text, "parameters")["resident"] == "8 1.0 MiB"
    assert row(text, "parameters")["streamed"] == ""


def test_a_plan_without_inputs_and_copies_says_that_nothing_moves() -> None:
    builder = GraphBuilder()
    made = builder.buffer("y", 100)
    builder.task("make", [], [made])
    builder.output(made)
    graph = builder.graph()
    assert line(planned(graph).explain(), "moves") == "moves       nothing: everything is resident"


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


def test_what_persists_is_either_resident_or_streamed() -> None:
    made = planned(layers(), 0.6)
    here, there = (total(at_home(made.memgraph, [arena])) for arena in (0, HOST))
    assert here.count + there.count == 16
    assert here.nbytes + there.nbytes == 16 * 128 * KIB
    assert here.nbytes < 16 * 128 * KIB


def test_the_budget_and_the_share_of_the_peak_are_said() -> None:
    graph = layers()
    made = planned(graph, 0.5, host_budget="64MiB")
    budget = made.budget[0]
    assert budget is not None
    text = made.explain()
    assert f"budget {format_size(budget)}" in line(text, "device")
    share = round(100 * made.device_bytes / peak_bytes(graph, 0))
    assert f"{share} % of the {format_size(peak_bytes(graph, 0))}" in line(text, "device")
    assert line(text, "host") == f"host        {format_size(made.host_bytes)}, host_budget 64.0 MiB"


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


def test_every_device_has_a_line() -> None:
    text = planned(layers(devices=2), 0.6).explain()
    assert line(text, "device 0")
    assert line(text, "device 1")
    assert "of device" in line(text, "at least")
    assert "d2d0-1" in line(text, "busy")


def test_what_is_recomputed_is_named_and_counted() -> None:
    graph = layers()
    again = recomputed(graph, [b for b, buffer in enumerate(graph.buffers) if buffer.name == "a0"])
    costs = Costs(launch=1e-3)
    made = replace(planned(again, 0.6, costs=costs, recompute=False), source=graph)
    said = line(explain(made), "recomputed")
    assert said == "recomputed  1 task, 1.01 ms more, 64.0 KiB less to keep: f0"
    assert line(planned(layers()).explain(), "recomputed") == "recomputed  nothing"


def test_the_predicted_seconds_stand_beside_the_bound_and_the_resident_step() -> None:
    made = planned(layers(), 0.4, costs=Costs(h2d=1e7, d2h=1e7))
    text = made.explain()
    ratio = made.predicted_seconds / made.resident_seconds
    assert f"{format_seconds(made.predicted_seconds)} predicted: {ratio:.2f}x" in line(text, "step")
    assert f"{made.bound.lane} binds" in line(text, "bound")
    for lane, seconds in made.simulation.busy.items():
        share = format_share(seconds, made.predicted_seconds)
        assert f"{lane} {share}" in line(text, "busy")


def test_a_pass_that_changes_bits_is_named() -> None:
    graph = replace(layers(), notes=("2 groups are compiled",))
    assert line(planned(graph).explain(), "bits").startswith("bits        as eager")
    changing = "host_updates: the last bits differ"
    graph = replace(graph, notes=(*graph.notes, changing))
    said = line(planned(graph).explain(), "bits")
    assert said == "bits        NOT bit-equal to eager: host_updates"


def test_the_placement_and_why_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(layers())
    assert "copy; no C++ compiler was found" in line(made.explain(), "outputs")
    monkeypatch.setattr(cuda_shim, "why_not_on", lambda _: "")
    assert "copy; as asked for" in line(made.explain(), "outputs")
    assert "placement: shim" in line(replace(made, placement="shim").explain(), "outputs")


def test_the_number_of_plans_that_were_tried_is_said() -> None:
    made = planned(layers(), 0.4)
    assert f"fastest of {len(made.found.tried)} plans" in line(made.explain(), "chosen")
    assert "nothing to choose" in line(planned(layers()).explain(), "chosen")


def test_an_empty_graph_has_a_table_too() -> None:
    assert "0 tasks" in planned(TaskGraph()).explain()


@pytest.mark.parametrize("share", [None, 0.6, 0.35])
def test_use_is_what_the_blocks_at_hand_hold_at_that_moment(share: float | None) -> None:
    made = planned(layers(), share)
    lived = lives(made.memgraph, made.simulation.timeline)
    for arena in (0, HOST):
        use = usage(made.memgraph, lived, arena)
        for moment, held in zip(use.times, use.total, strict=True):
            there = {
                (life.block.place.offset, life.block.place.nbytes)
                for life in lived
                if life.block.place.arena == arena and life.start <= moment < life.end
            }
            if moment < made.predicted_seconds:
                assert held == sum(nbytes for _, nbytes in there)
        assert use.total.max() <= made.memgraph.arenas[arena]


@pytest.mark.parametrize("share", [None, 0.35])
def test_the_curve_without_offload_peaks_where_the_search_says(share: float | None) -> None:
    graph = layers()
    again = recomputed(graph, [b for b, buffer in enumerate(graph.buffers) if buffer.name == "a0"])
    made = replace(planned(again, share), source=graph)
    times, levels = unmoved(graph, made.memgraph, made.simulation.timeline, 0)
    assert len(times) == len(levels) == len(graph.tasks)
    assert max(levels) == peak_bytes(graph, 0)
    assert times == sorted(times)


def test_what_is_only_read_is_dropped_as_often_as_it_is_reloaded() -> None:
    builder = GraphBuilder()
    weights = [builder.buffer(f"w{n}", 64 * KIB, Role.PARAMETER) for n in range(4)]
    for turn in range(2):
        for n, weight in enumerate(weights):
            made = builder.buffer(f"y{turn}.{n}", KIB)
            builder.task(f"t{turn}.{n}", [weight], [made])
            builder.output(made)
    graph = builder.graph()
    found = plan(graph, "80KiB", placement="copy").memgraph
    clean = total(moved(found, "reload"))
    assert clean.count >= 4
    assert dropped(found).nbytes == clean.count * 64 * KIB
    assert moved(found, "offload").get(Role.PARAMETER) is None


def test_a_curve_with_more_moments_than_columns_keeps_its_peak() -> None:
    times = np.linspace(0.0, 1.0, 5000)
    sizes = np.zeros(5000, dtype=np.int64)
    sizes[[17, 4321]] = 9, 7
    kept = highest(times, sizes, 100)
    assert len(kept) <= 100
    assert {17, 4321} <= {*kept.tolist()}
    assert list(kept) == sorted(kept)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 us"),
        (2.5e-6, "2.5 us"),
        (0.0123, "12.3 ms"),
        (0.99961, "1 s"),
        (1.5, "1.5 s"),
        (4000.0, "4000 s"),
    ],
)
def test_seconds_are_said_in_the_unit_that_fits(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said


def test_a_share_that_is_not_nothing_is_not_said_to_be_nothing() -> None:
    assert format_share(1, 1000) == "<1 %"
    assert format_share(0, 1000) == "0 %"
    assert format_share(600, 1000) == "60 %"
    assert format_share(1, 0) == "0 %"
