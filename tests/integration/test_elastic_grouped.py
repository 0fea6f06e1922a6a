"""Lanes of a peer that run in groups have the bits of lanes one by one, and of a plain peer.

deals of 1 to 9 lanes, in any order    k = 1 ... 4    plain Lightning, lane after lane
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dealt_peer import (
    LANES,
    SAMPLES,
    Bare,
    Deal,
    DealtRun,
    Wide,
    always,
    assert_same,
    dealt,
)
from support.planned_peer import alone, assert_equal, data
from torch.utils.data import TensorDataset

from trainers.elastic.errors import GenerationEnded, SwarmStopped
from trainers.elastic.peer.anchor_link import AnchorOrders
from trainers.elastic.work.planned_work import PlannedWork

pytestmark = [pytest.mark.filterwarnings("ignore")]


ALL: Deal = [[range(LANES)]]


def deals() -> list[Deal]:
    """One peer with all lanes; then two, of which one has 1, 2, ... 8 lanes in any order, and
    gets what it has in one or in two parts."""
    dice, found = random.Random(5), [ALL]
    for count in range(1, LANES):
        lanes = dice.sample(range(LANES), LANES)
        mine, others = lanes[:count], sorted(lanes[count:])
        at = dice.randrange(count + 1)
        found.append([[mine[:at], mine[at:]], [others]])
    return found


DEALS = deals()
SHORT = 4
"""The step with which a pass ends."""


def explained(run: DealtRun) -> str:
    """What the plan of the latest lanes says."""
    return run.notes.told


@cache
def plain(kind: Any, clip: str) -> DealtRun:
    return dealt(DEALS, module=kind(), clip=clip)


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind", "clip"),
    [
        (1, Wide, "norm"),
        (2, Wide, "norm"),
        (3, Wide, "value"),
        (4, Wide, "norm"),
        (3, Bare, "none"),
    ],
)
def test_groups_have_the_bits_of_single_lanes_and_of_a_plain_peer(
    size: int, kind: Any, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, size)
    grouped = dealt(DEALS, "60%", module=kind(), clip=clip)
    notes = grouped.notes
    assert_same(grouped, plain(kind, clip))
    assert {*notes.sizes(0)} == {1}  # nothing is known of the update yet
    assert {n for step in range(1, len(DEALS)) for n in notes.sizes(step)} == {1, size}
    assert {*notes.sizes(SHORT)} == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_groups_on_a_gpu_have_the_bits_of_a_plain_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, 3)
    grouped = dealt(DEALS, "60%", device="cuda:0")
    assert [c.digest for c in grouped.commits] == [
        c.digest for c in dealt(DEALS, device="cuda:0").commits
    ]
    assert 3 in {n for _, n in grouped.notes.runs}


def test_exact_sums_round_each_lane_and_so_lanes_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, 2)
    steps = DEALS[:3]
    planned = dealt(steps, "60%", sum="exact")
    assert_same(planned, dealt(steps, sum="exact"))
    assert {n for _, n in planned.notes.runs} == {1}
    assert "sum='exact' rounds the gradients of each lane" in explained(planned)


class Rolls(Wide):
    """It draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator()
        self.dice.manual_seed(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        noise = torch.rand(inputs.shape, generator=self.dice)
        return super().training_step((inputs + noise, labels), batch_idx)


def test_a_generator_of_the_modules_own_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, 2)
    planned = dealt([ALL] * 2, "60%", module=Rolls())
    assert_same(planned, dealt([ALL] * 2, module=Rolls()))
    assert {n for _, n in planned.notes.runs} == {1}
    assert "the Python of a lane needs values in its middle" in explained(planned)


class Turned(Wide):
    """Some of its batches come in another layout, and so have another tape."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        inputs = inputs + 0.1 * torch.rand(())
        return (inputs.t().contiguous().t() if len(labels) < 4 else inputs), labels


def test_lanes_whose_batches_are_changed_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, 2)
    planned = dealt([ALL] * 6, "60%", module=Turned())
    assert_same(planned, dealt([ALL] * 6, module=Turned()))
    assert {n for _, n in planned.notes.runs} == {1, 2}


def test_of_a_group_the_lane_whose_loss_is_not_finite_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, 4)
    inputs, labels = data(SAMPLES).tensors
    inputs = inputs.clone()
    inputs[40] = torch.inf
    words: list[str] = []
    for budget in (None, "60%"):
        with pytest.raises(SwarmStopped) as stopped:
            dealt([ALL] * 4, budget, module=Bare(), dataset=TensorDataset(inputs, labels))
        words.append(str(stopped.value))
    assert words[0] == words[1]
    assert "40" in words[0] and "its loss is not finite" in words[0]


def test_a_newcomer_whose_first_lanes_are_small_has_groups_from_the_next_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, 3)
    before = plain(Wide, "norm")
    told = before.commits[:SHORT]
    comes = dealt(DEALS, "60%", told=told)
    assert [c.digest for c in comes.commits] == [c.digest for c in before.commits]
    for a, b in zip(comes.notes.states, before.notes.states, strict=True):
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert not any(comes.notes.sizes(step) for step in range(SHORT))
    assert {*comes.notes.sizes(SHORT)} == {1}
    assert 3 in comes.notes.sizes(SHORT + 2)


# ---- in a swarm ---------------------------------------------------------------------------------


def test_a_generation_that_ends_in_the_middle_of_a_step_loses_no_lane_and_takes_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, 3)
    before = alone(tmp_path / "plain", None, 4, module=Wide())
    compute, check = PlannedWork.compute, AnchorOrders.check_generation
    ran: list[int] = []
    due: list[int] = []

    def counts(work: PlannedWork, lanes: Any) -> int:
        count = compute(work, lanes)
        if count > 1:
            ran.append(count)
            if len(ran) == 4:
                due.append(1)
        return count

    def ends_once(orders: AnchorOrders) -> None:
        if due:
            due.clear()
            raise GenerationEnded("another member died")
        check(orders)

    monkeypatch.setattr(PlannedWork, "compute", counts)
    monkeypatch.setattr(AnchorOrders, "check_generation", ends_once)
    after = alone(tmp_path / "planned", "60%", 4, module=Wide())
    assert_equal(after, before)
    assert after.digests == before.digests
    log = tmp_path / "planned" / "elastic" / "one.jsonl"
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["why"] for line in told if "why" in line] == ["another member died"]
    for line in told:
        if "commit" in line:
            assert sorted(line["added"][0][1]) == list(range(8))


# ---- how many -----------------------------------------------------------------------------------
