"""OffloadStrategy on a GPU: what the first runs of a plan say, and a device that is lost."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.accelerators import kept_of_each, only_on_gpu
from support.fake_gpu import losable_device, lose_device, only_on_a_fake_gpu

from offload import DeviceLost, MemoryTooSmall, Runner
from offload.graph.memgraph import TASK
from offload.optimizer import updates
from offload.running import runner_memory
from offload.running.drivers.cuda_graph import GraphCuda
from offload.running.stage import Stage
from trainers import OffloadStrategy
from trainers.offloading.hardware.meter import FIRST
from trainers.offloading.steps.comparison import DifferenceFound
from trainers.offloading.steps.step_graphs import TRIAL_RUNS

replayed = ol.replayed
plans = importlib.import_module("offload.plans.plan")
target = importlib.import_module("trainers.offloading.hardware.target")
pytestmark = [only_on_gpu, *(pytest.mark.filterwarnings(line) for line in ol.QUIET)]
UNCHECKED: dict[str, Any] = {"check_first_steps": 0}


@kept_of_each
def plain(epochs: int = 2) -> ol.Result:
    return ol.train(max_epochs=epochs)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """Those that are made from now on."""
    found: list[Stage] = []
    make = Stage.__init__

    def made(self: Stage, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        found.append(self)

    monkeypatch.setattr(Stage, "__init__", made)
    return found


# ---- a device that is lost ---------------------------------------------------------------------


class Loses(L.Callback):
    """The device falls off its bus before a step; then callbacks want to save."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.refused: list[BaseException] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self._folder / "good.ckpt")
        if batch_idx == 4:
            lose_device()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with pytest.raises(DeviceLost) as refused:
            trainer.save_checkpoint(self._folder / "bad.ckpt")
        self.refused.append(refused.value)


@only_on_a_fake_gpu("the test loses the device")
@pytest.mark.parametrize("budget", [None, "60%"])
def test_a_lost_device_ends_the_run_and_nothing_is_saved_of_it(
    budget: str | None, tmp_path: Path
) -> None:
    loses = Loses(tmp_path)
    with (
        losable_device(),
        pytest.raises(DeviceLost, match="is lost: a kernel used an address") as ended,
    ):
        ol.train(OffloadStrategy(budget, **UNCHECKED), callbacks=[loses])
    assert loses.refused and "checkpoint" in str(ended.value)
    assert not (tmp_path / "bad.ckpt").exists()
    good = torch.load(tmp_path / "good.ckpt", weights_only=False, map_location="cpu")
    plainly = ol.train("auto", max_steps=good["global_step"])
    assert ol._unequal("", good["state_dict"], plainly.module.state_dict()) == []


# ---- what the first runs say -------------------------------------------------------------------


def test_a_plan_is_made_anew_once_by_what_its_first_runs_took(
    monkeypatch: pytest.MonkeyPatch, stages: list[Stage]
) -> None:
    asked: list[int] = []

    def remade(plan: Any) -> Any:
        asked.append(plan.observed.steps)
        return plans._planned(plans.PlanningOptions.of(plan), plan.source, {})

    monkeypatch.setattr(plans.Plan, "remade", remade)
    assert ol.differences(plain(), ol.train(OffloadStrategy("60%", **UNCHECKED))) == []
    assert asked == [TRIAL_RUNS - 1]
    assert len(stages) == 1  # the tensors move, and the device stays


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy takes much longer than any planner would believe, which has its default rates. The
    times of a run are made up, because a busy machine would have kernels be as slow."""
    monkeypatch.setattr(target, "kept_rates", lambda *_: None)
    observe = plans.observe

    def observed(memgraph: Any, runs: Any, shared: Any) -> Any:
        return observe(memgraph, [made_up_times(memgraph, spans) for spans in runs], shared)

    monkeypatch.setattr(plans, "observe", observed)


def made_up_times(memgraph: Any, spans: list[Any]) -> list[Any]:
    """The spans of a run in which a copy takes 1 ms, a task 10 us, and nobody waits for long."""
    ends: dict[int, float] = {}
    free: dict[int, float] = {}
    timed = []
    for span in sorted(spans, key=lambda span: span.node):
        node = memgraph.nodes[span.node]
        start = max([free.get(span.worker, 0.0), *(ends[before] for before in node.deps)])
        ends[span.node] = free[span.worker] = start + (1e-5 if node.kind == TASK else 1e-3)
        timed.append(replace(span, start=start, end=ends[span.node]))
    return timed


@pytest.mark.usefixtures("slow_link")
def test_copies_that_take_much_longer_than_believed_have_the_plan_remade(
    replayed: list[Any], stages: list[Stage]
) -> None:
    strategy = OffloadStrategy("80%", engine="cudagraph", **UNCHECKED)
    result = ol.train(strategy, max_epochs=3)
    assert ol.differences(plain(3), result) == []
    assert "remade: " in strategy.explain()
    assert len(stages) == 1 and replayed
    first, _ = (plan.plan for plan in strategy.plans if plan.part == "whole step")
    assert first is strategy.plan


@pytest.mark.usefixtures("slow_link")
def test_where_a_remade_plan_finds_no_room_the_first_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is: nothing of it is planned anew."""
    refused: list[Any] = []

    def is_refused(*given: Any, **_: Any) -> None:
        refused.append(given)
        raise MemoryTooSmall("somebody else was quicker", needed=2, left=1)

    monkeypatch.setattr(runner_memory, "check_move", is_refused)
    added: list[Any] = []
    add = Runner.add

    def noted(self: Runner, key: Any, graph: Any) -> Any:
        added.append(key)
        return add(self, key, graph)

    monkeypatch.setattr(Runner, "add", noted)
    strategy = OffloadStrategy("80%", engine="cudagraph", **UNCHECKED)
    with pytest.warns(UserWarning, match="keeps its first plan, .*: somebody else was quicker"):
        result = ol.train(strategy)
    assert ol.differences(plain(), result) == []
    assert refused and len(added) == len(set(added))


def test_a_plan_that_is_kept_keeps_its_runner(stages: list[Stage]) -> None:
    strategy = OffloadStrategy(**UNCHECKED)
    assert ol.differences(plain(), ol.train(strategy)) == []
    assert "kept: there was nothing to choose" in strategy.explain()
    assert len(stages) == 1


@pytest.mark.parametrize(
    ("budget", "decision"), [(None, "kept: "), ("60%", "no update waits"), ("80%", "remade: ")]
)
def test_why_a_step_could_not_be_captured_is_in_what_explain_says(
    budget: str | None,
    decision: str,
    replayed: list[Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a plan that was kept, of one with updates on the host, whose graph is not the one that was
    captured, and of one that took the place of the first. A driver may be too old for graphs."""

    def refuse(driver: GraphCuda) -> Any:
        driver.drop_capture()
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(GraphCuda, "end_capture", refuse)
    if decision == "remade: ":
        request.getfixturevalue("slow_link")
    where: Any = "host" if decision == "no update waits" else "device"
    looped, captured = (
        OffloadStrategy(budget, engine=engine, optimizer=where) for engine in ("cuda", "cudagraph")
    )
    expected = plain(3) if where == "device" else ol.train(looped, max_epochs=3)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        result = ol.train(captured, max_epochs=3)
    assert ol.differences(expected, result) == []
    assert not replayed
    said = captured.explain()
    assert "cannot be captured: RuntimeError: operation not supported" in said and decision in said
    assert ("no update waits" in said) == (where == "host")


def test_runs_that_nobody_looks_at_count_as_the_latest_that_was() -> None:
    strategy = OffloadStrategy(**UNCHECKED)
    ol.train(strategy, max_epochs=4, validate=False)
    whole, _ = sorted(strategy.plans, key=lambda plan: -plan.spent.runs)
    assert whole.spent.runs == 20 > FIRST
    assert 0 < whole.spent.compute_seconds <= whole.spent.seconds
    assert whole.held_bytes > 0


# ---- first steps that are compared -------------------------------------------------------------


def test_a_kernel_that_differs_from_eagers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = updates.adam
    broken: Any = lambda *a, lr, **k: real(*a, lr=lr * (1 + 1e-6), **k)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(updates, "adam", broken)
        with pytest.raises(DifferenceFound, match="differs after a planned and an eager step"):
            ol.train(OffloadStrategy("100%"))
        with pytest.warns(UserWarning, match="trains eagerly, without offloading: .* differs"):
            ours = ol.train(OffloadStrategy())
    assert ol.differences(plain(), ours) == []


def test_a_kernel_that_varies_is_named_once_and_a_wrong_one_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, chance, much = updates.adam, torch.Generator("cuda").manual_seed(0), [1.0]

    def noisy(params: Any, *a: Any, lr: float, **k: Any) -> None:
        real(params, *a, lr=lr * much[0], **k)
        noise = torch.randn(params[0].shape, generator=chance, device=params[0].device)
        params[0].mul_(1 + 1e-6 * noise)

    monkeypatch.setattr(updates, "adam", noisy)
    with pytest.warns(UserWarning, match=r"two runs .* differ in the last bits of .* and \d+ more"):
        ol.train(OffloadStrategy(), max_steps=2, validate=False)
    much[0] = 1.1
    with (
        pytest.warns(UserWarning, match="differ in the last bits"),
        pytest.raises(DifferenceFound, match=r"They are .* apart, .* would pass"),
    ):
        ol.train(OffloadStrategy("100%"), max_steps=2, validate=False)
