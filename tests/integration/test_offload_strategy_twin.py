"""OffloadStrategy with a GPU's engines, over the CPU's twin of a device's streams: the same bits.

CPU graphs --> engine cuda, cudagraph --> Twin: a thread a stream, ordered by events alone
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from products import every_pair, only_first
from support import offload_lightning as ol

from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from offload import DeviceLost, MemoryTooSmall, Runner
from offload.graph.memgraph import TASK
from offload.optimizer import updates
from offload.running import runner_memory
from trainers import OffloadStrategy
from trainers.offloading.hardware.meter import FIRST
from trainers.offloading.hardware.target import Target
from trainers.offloading.steps.comparison import DifferenceFound
from trainers.offloading.steps.step_graphs import TRIAL_RUNS

replayed = ol.replayed
plans = importlib.import_module("offload.plans.plan")
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


TWINS = {"cuda": Twin, "cudagraph": GraphTwin}
EPOCHS = {"cuda": 2, "cudagraph": 4}
"""The first runs of a plan are looked at, and those of the remade one: no graph is captured yet."""


class OnTwin(OffloadStrategy):
    """Its steps are driven as a GPU's are."""

    def __init__(self, make: Callable[[], Twin] = Twin, **more: Any) -> None:
        self.twins: list[Twin] = []
        self._make = make
        super().__init__(**{"engine": "cuda", "check_first_steps": 0, **more})

    @property
    def _driver(self) -> Any:
        def made() -> Twin:
            self.twins.append(self._make())
            return self.twins[-1]

        return made


@functools.cache
def plain(name: str, epochs: int = 2) -> ol.Result:
    return ol.train(**RUNS[name], max_epochs=epochs)


@functools.cache
def smallest(name: str) -> int:
    return ol.smallest(**RUNS[name])


@pytest.mark.parametrize("name, budget, engine", every_pair(RUNS, [None, "60%", "smallest"], TWINS))
def test_a_run_on_a_gpus_engines_is_plain_lightnings_to_the_last_bit(
    name: str, budget: str | None, engine: str, replayed: list[Any]
) -> None:
    limit: Any = smallest(name) if budget == "smallest" else budget
    strategy = OnTwin(TWINS[engine], engine=engine, budget=limit)
    result = ol.train(strategy, **RUNS[name], max_epochs=EPOCHS[engine])
    assert ol.differences(plain(name, EPOCHS[engine]), result) == []
    assert strategy.twins and strategy.spent.runs
    assert bool(replayed) == (engine == "cudagraph")
    if budget == "smallest":
        assert strategy.plan.device_bytes <= limit


def test_an_exception_in_a_kernel_arrives_as_it_is_with_the_users_line() -> None:
    loader = ol.data()
    loader.dataset.tensors[1][20] = 99  # type: ignore[attr-defined]
    module = ol.Module()
    strategy = OnTwin(budget="60%")
    with pytest.raises(IndexError) as failed:
        ol.train(strategy, lambda: module, loader=loader)
    assert any("training_step" in note for note in failed.value.__notes__)
    for tensor in module.state_dict().values():
        tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 8)
    assert torch.is_grad_enabled()


def test_the_first_steps_are_compared_on_streams_too(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = OnTwin(check_first_steps=2)
    assert ol.differences(plain("plain"), ol.train(strategy)) == []
    real = updates.adam
    broken: Any = lambda *a, lr, **k: real(*a, lr=lr * (1 + 1e-6), **k)  # noqa: E731
    monkeypatch.setattr(updates, "adam", broken)
    with pytest.raises(DifferenceFound, match="differs after a planned and an eager step"):
        ol.train(OnTwin(check_first_steps=2, budget="100%"))
    with pytest.warns(UserWarning, match="trains eagerly, without offloading: .* differs after"):
        ours = ol.train(OnTwin(check_first_steps=2))
    monkeypatch.setattr(updates, "adam", real)
    assert ol.differences(plain("plain"), ours) == []


# ---- a device that is lost ---------------------------------------------------------------------


class Loses(L.Callback):
    """The device falls off its bus between two batches; then callbacks want to save."""

    def __init__(self, strategy: OnTwin, folder: Path) -> None:
        self._strategy, self._folder = strategy, folder
        self.refused: list[BaseException] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self._folder / "good.ckpt")
        if batch_idx == 3:
            self._strategy.twins[-1].lose("an illegal memory access was encountered")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with pytest.raises(DeviceLost) as refused:
            trainer.save_checkpoint(self._folder / "bad.ckpt")
        self.refused.append(refused.value)


@pytest.mark.parametrize("budget", [None, "60%"])
def test_a_lost_device_ends_the_run_and_nothing_is_saved_of_it(
    budget: str | None, tmp_path: Path
) -> None:
    strategy = OnTwin(budget=budget)
    loses = Loses(strategy, tmp_path)
    with pytest.raises(DeviceLost, match="is lost: a kernel used an address") as ended:
        ol.train(strategy, callbacks=[loses])
    assert loses.refused and "checkpoint" in str(ended.value)
    assert not (tmp_path / "bad.ckpt").exists()
    good = torch.load(tmp_path / "good.ckpt", weights_only=False)
    plainly = ol.train("auto", max_steps=good["global_step"])
    assert ol._unequal("", good["state_dict"], plainly.module.state_dict()) == []


# ---- what the first runs say -------------------------------------------------------------------


def test_a_plan_is_made_anew_once_by_what_its_first_runs_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def remade(plan: Any) -> Any:
        asked.append(plan.observed.steps)
        return plans._planned(plans.PlanningOptions.of(plan), plan.source, {})

    monkeypatch.setattr(plans.Plan, "remade", remade)
    strategy = OnTwin(budget="60%", optimizer="device")
    assert ol.differences(plain("plain"), ol.train(strategy)) == []
    assert asked == [TRIAL_RUNS - 1]
    assert len(strategy.twins) == 1  # the tensors move, and the device stays


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy takes much longer than any planner would believe. The times of a run are made up,
    because a busy machine would have kernels be as slow."""
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
    replayed: list[Any],
) -> None:
    """With optimizer states that stay on the host, say."""
    strategy = OnTwin(GraphTwin, engine="cudagraph", budget="60%", optimizer="auto")
    result = ol.train(strategy, max_epochs=3)
    assert ol.differences(plain("plain", 3), result) == []
    assert "remade: " in strategy.explain()
    assert len(strategy.twins) == 1 and replayed
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
    strategy = OnTwin(GraphTwin, engine="cudagraph", budget="60%", optimizer="auto")
    with pytest.warns(UserWarning, match="keeps its first plan, .*: somebody else was quicker"):
        result = ol.train(strategy)
    assert ol.differences(plain("plain"), result) == []
    assert refused and len(added) == len(set(added))


def test_a_plan_that_is_kept_keeps_its_runner() -> None:
    strategy = OnTwin()
    assert ol.differences(plain("plain"), ol.train(strategy)) == []
    assert "kept: there was nothing to choose" in strategy.explain()
    assert len(strategy.twins) == 1


class Refusing(GraphTwin):
    """A driver too old for graphs, say."""

    def end_capture(self) -> Any:
        self.drop_capture()
        raise RuntimeError("operation not supported")


@pytest.mark.parametrize(
    ("optimizer", "decision"), [("device", "kept: "), ("host", ""), ("auto", "remade: ")]
)
def test_why_a_step_could_not_be_captured_is_in_what_explain_says(
    optimizer: str, decision: str, replayed: list[Any], request: pytest.FixtureRequest
) -> None:
    """Of a plan that was kept, of one whose graph is not the one that was captured, and of one
    that took the place of the first."""
    if decision == "remade: ":
        request.getfixturevalue("slow_link")
    budget = None if decision == "kept: " else "60%"
    strategy = OnTwin(Refusing, engine="cudagraph", budget=budget, optimizer=optimizer)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        result = ol.train(strategy, max_epochs=3)
    assert ol.differences(plain("plain", 3), result) == []
    assert "cannot be captured: RuntimeError: operation not supported" in strategy.explain()
    assert decision in strategy.explain() and not replayed
    assert strategy.plan is not None
    on_host = any(task.lane == "host" for task in strategy.plan.graph.tasks)
    assert on_host or optimizer != "host"
    assert ("no update waits" in strategy.explain()) == on_host


def test_runs_that_nobody_looks_at_count_as_the_latest_that_was() -> None:
    strategy = OnTwin(budget="60%")
    ol.train(strategy, max_epochs=4, validate=False)
    whole, _ = sorted(strategy.plans, key=lambda plan: -plan.spent.runs)
    assert whole.spent.runs == 20 > FIRST
    assert 0 < whole.spent.compute_seconds <= whole.spent.seconds
    assert whole.held_bytes > 0


# ---- kernels that vary ---------------------------------------------------------------------------


@pytest.fixture
def varying(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: every checked step has two turns."""
    monkeypatch.setattr(Target, "may_vary", True)


@pytest.mark.usefixtures("varying")
@pytest.mark.parametrize("name", only_first("accumulated", "plain"))
def test_a_second_turn_leaves_no_mark(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*OffloadStrategy.*")
        result = ol.train(OnTwin(check_first_steps=2, budget="60%"), **RUNS[name])
    assert ol.differences(plain(name), result) == []


@pytest.mark.usefixtures("varying")
def test_a_kernel_that_varies_is_named_once_and_a_wrong_one_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, chance, much = updates.adam, torch.Generator().manual_seed(0), [1.0]

    def noisy(params: Any, *a: Any, lr: float, **k: Any) -> None:
        real(params, *a, lr=lr * much[0], **k)
        params[0].mul_(1 + 1e-6 * torch.randn(params[0].shape, generator=chance))

    monkeypatch.setattr(updates, "adam", noisy)
    with pytest.warns(UserWarning, match=r"two runs .* differ in the last bits of .* and \d+ more"):
        ol.train(OnTwin(check_first_steps=2), max_steps=2, validate=False)
    much[0] = 1.1
    with (
        pytest.warns(UserWarning, match="differ in the last bits"),
        pytest.raises(DifferenceFound, match=r"They are .* apart, .* would pass"),
    ):
        ol.train(OnTwin(check_first_steps=2, budget="100%"), max_steps=2, validate=False)
