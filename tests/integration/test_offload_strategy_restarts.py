"""With `plan_cache` the next start of a run takes its plans and costs from files: the same bits."""

import logging
from pathlib import Path
from typing import Any

import pytest
from support import offload_lightning as ol

from offload.caching.plan_cache import PlanCache
from offload.measuring import kept_costs
from offload.plans import kept_plans
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]

OPTIONS: dict[str, Any] = {"make": lambda: ol.Module("adam"), "accumulate_grad_batches": 2}
EARLIER = "by an earlier start of this run"


def started(folder: Path | None, budget: Any = "60%", **more: Any) -> ol.Result:
    strategy = OffloadStrategy(budget, plan_cache=folder, **more)
    return ol.train(strategy, **OPTIONS)


def test_a_second_start_takes_the_plan_of_the_first_and_another_budget_finds_its_own(
    tmp_path: Path,
) -> None:
    first, second = started(tmp_path), started(tmp_path)
    assert EARLIER not in first.strategy.explain()
    assert EARLIER in second.strategy.explain()
    assert second.strategy.plan.memgraph.nodes == first.strategy.plan.memgraph.nodes
    assert second.strategy.plan.predicted_seconds == first.strategy.plan.predicted_seconds
    assert ol.differences(ol.train(**OPTIONS), second) == []
    other = started(tmp_path, "80%").strategy
    assert EARLIER not in other.explain()
    for task, before in zip(other.plan.source.tasks, first.strategy.plan.source.tasks, strict=True):
        assert (task.seconds, task.workspace) == (before.seconds, before.workspace)


def test_another_version_of_ours_uses_nothing_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path)
    for module in (kept_costs, kept_plans):
        monkeypatch.setattr(module, "our_version", lambda: "another")
    assert EARLIER not in started(tmp_path).strategy.explain()


@pytest.mark.parametrize("kind", ["plan", "costs"])
def test_what_a_file_says_wrongly_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, plain = PlanCache.read, ol.train(**OPTIONS)
    started(tmp_path)

    def wrong(cache: PlanCache, of: str, key: Any) -> Any:
        data = read(cache, of, key)
        if of != kind or data is None:
            return data
        if kind == "plan":
            return {**data, "resident": [10**6]}
        return {name: {**cost, "workspace": -1} for name, cost in data.items()}

    monkeypatch.setattr(PlanCache, "read", wrong)
    with caplog.at_level(logging.WARNING):
        result = started(tmp_path)
    assert kind == "costs" or EARLIER not in result.strategy.explain()
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


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    started(None)
    assert not [*tmp_path.iterdir()]
    assert started(tmp_path).strategy.plan.cache is not None
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"plan", "costs"}
