"""With `plan_cache` the next start of a run measures and searches nothing: the same bits."""

import logging
from pathlib import Path
from typing import Any

import pytest
from support import offload_lightning as ol

from offload.live import planned_tapes
from offload.measuring import profiling
from offload.planning.search import _Search
from offload.plans import kept_plans
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]

OPTIONS: dict[str, Any] = {"make": lambda: ol.Module("adam"), "accumulate_grad_batches": 2}


def started(folder: Path | None, budget: Any = "60%", **more: Any) -> ol.Result:
    strategy = OffloadStrategy(budget, plan_cache=folder, **more)
    return ol.train(strategy, **OPTIONS)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many calls were measured, and how many searches found a plan."""
    found = {"measured": 0, "searched": 0}
    cost, search = profiling._Bench._cost, _Search.best

    def one(*args: Any) -> Any:
        found["measured"] += 1
        return cost(*args)

    def searched(*args: Any) -> Any:
        plan = search(*args)  # what raises is not kept
        found["searched"] += 1
        return plan

    monkeypatch.setattr(profiling._Bench, "_cost", one)
    monkeypatch.setattr(_Search, "best", searched)
    return found


def test_a_second_start_neither_measures_nor_searches(
    tmp_path: Path, counted: dict[str, int]
) -> None:
    first = started(tmp_path)
    assert counted["measured"] > 0 and counted["searched"] > 0
    assert "earlier start" not in first.strategy.explain()
    counted.update(measured=0, searched=0)
    second = started(tmp_path)
    assert counted == {"measured": 0, "searched": 0}
    assert "by an earlier start of this run" in second.strategy.explain()
    assert second.strategy.plan.memgraph.nodes == first.strategy.plan.memgraph.nodes
    assert second.strategy.plan.predicted_seconds == first.strategy.plan.predicted_seconds
    assert ol.differences(ol.train(**OPTIONS), second) == []


def test_another_budget_is_searched_and_measured_once(
    tmp_path: Path, counted: dict[str, int]
) -> None:
    started(tmp_path)
    counted.update(measured=0, searched=0)
    other = started(tmp_path, "80%")
    assert counted["measured"] == 0 and counted["searched"] > 0
    assert other.strategy.plan.device_bytes > 0


def test_another_version_of_ours_uses_nothing_of_the_last_one(
    tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.measuring import kept_costs

    started(tmp_path)
    before = {**counted}
    for module in (kept_costs, kept_plans):
        monkeypatch.setattr(module, "our_version", lambda: "another")
    started(tmp_path)
    assert counted == {name: 2 * count for name, count in before.items()}


@pytest.mark.parametrize("kind", ["plan", "costs"])
def test_what_a_file_says_wrongly_is_not_used(
    kind: str, tmp_path: Path, counted: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    from offload.caching.plan_cache import PlanCache

    read, plain = PlanCache.read, ol.train(**OPTIONS)
    started(tmp_path)

    def wrong(cache: PlanCache, of: str, key: Any) -> Any:
        data = read(cache, of, key)
        if of != kind or data is None:
            return data
        if kind == "plan":
            return {**data, "resident": [10**6]}
        return {name: {**cost, "workspace": -1} for name, cost in data.items()}

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(PlanCache, "read", wrong)
        counted.update(measured=0, searched=0)
        result = started(tmp_path)
    assert counted["searched" if kind == "plan" else "measured"] > 0
    assert str(tmp_path) in caplog.text
    assert ol.differences(plain, result) == []


def test_a_plan_from_a_file_is_proved_though_the_proof_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[Any] = []
    verify = kept_plans.verify
    monkeypatch.setattr(kept_plans, "verify", lambda m: (proved.append(m), verify(m)))
    started(tmp_path, verify=False)
    assert not proved
    started(tmp_path, verify=False)
    assert proved


def test_kept_costs_are_those_of_every_kernel_that_is_torchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    measured = planned_tapes.measured
    monkeypatch.setattr(
        planned_tapes, "measured", lambda *args: graphs.append(measured(*args)) or graphs[-1]
    )
    started(tmp_path)
    first, graphs[:] = list(graphs), []
    started(tmp_path)
    assert first
    for before, after in zip(first, graphs, strict=True):
        assert [task.seconds for task in before.tasks] == [task.seconds for task in after.tasks]
        assert [task.workspace for task in before.tasks] == [task.workspace for task in after.tasks]


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    started(None)
    assert not [*tmp_path.iterdir()]
    assert started(tmp_path).strategy.plan.cache is not None
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"plan", "costs"}
