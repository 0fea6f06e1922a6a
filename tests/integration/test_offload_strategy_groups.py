"""Gradient accumulation with one graph for all micro-batches, against plain Lightning."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_groups
from support import offload_lightning as ol
from support.offload_groups import RUNS, Module, plain, smallest, together, train
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainers import OffloadStrategy
from trainers.offloading.steps import groups

taken_where_it_can_be = offload_groups.taken_where_it_can_be
pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
FULL = [pytest.param(name, "least", marks=pytest.mark.full) for name in ("clipped", "lora")]


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, "60%") for name in RUNS), ("4", "least"), *FULL]
)
def test_a_run_is_plain_lightnings_to_the_last_bit(name: str, budget: str) -> None:
    bytes_or_share: Any = smallest(RUNS[name]) if budget == "least" else budget
    ours = train(OffloadStrategy(budget=bytes_or_share), **RUNS[name])
    assert ol.differences(plain(name), ours) == []
    assert max(together(ours)) == RUNS[name].get("accumulate_grad_batches", 2)
    assert "at a time" in ours.strategy.explain()
    assert ours.strategy.plan.device_bytes <= ours.strategy.plan.budget[0]


def test_steps_that_are_checked_first_are_run_one_by_one() -> None:
    ours = train(OffloadStrategy(budget="60%"), **RUNS["3"])
    assert ol.differences(plain("3"), ours) == []
    assert together(ours) == {3, 2}


class Endless(IterableDataset[Any]):
    """Nobody knows how many."""

    def __iter__(self) -> Iterator[Any]:
        yield from ol.data(88, 8)


def test_a_loader_without_a_length_ends_with_a_smaller_group() -> None:
    def loader() -> Any:
        return DataLoader(Endless(), batch_size=None)

    options = {"loader": loader, "accumulate_grad_batches": 3}
    ours = train(OffloadStrategy(budget="60%"), **options)
    assert ol.differences(train(**options), ours) == []
    assert together(ours) == {3, 2}


class Refilled(IterableDataset[Any]):
    """One batch, again and again with other contents."""

    def __iter__(self) -> Iterator[Any]:
        one: Any = None
        for x, y in ol.data(88, 8):
            one = (x.clone(), y.clone()) if one is None else one
            one[0].copy_(x)
            one[1].copy_(y)
            yield one


def test_a_loader_may_use_the_memory_of_its_batches_again() -> None:
    def loader() -> Any:
        return DataLoader(Refilled(), batch_size=None)

    options = {"loader": loader, "accumulate_grad_batches": 3, "limit_train_batches": 9}
    ours = train(OffloadStrategy(budget="60%"), **options)
    assert together(ours) == {3}
    assert ol.differences(train(**options), ours) == []


# ---- where somebody could see it -----------------------------------------------------------------


class Looks(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # type: ignore[override]
        pass


class LooksItself(Module):
    def on_train_batch_start(self, *_: Any) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"callbacks": [Looks()]}, "callback Looks has on_train_batch_end (.*groups.py:"),
        ({"make": LooksItself}, "LooksItself overrides on_train_batch_start (.*groups.py:"),
        ({"val_check_interval": 3}, "validation every 3 batches"),
        ({"max_time": "01:00:00:00"}, "Timer"),
    ],
)
def test_where_somebody_looks_between_micro_batches_they_are_run_one_by_one(
    options: dict[str, Any], why: str
) -> None:
    ours = train(OffloadStrategy(budget="60%"), **options)
    assert together(ours) == set()
    line = ours.strategy.explain().splitlines()[-1]
    assert re.search(f"one by one: .*{why.replace('(', '[(]')}", line)
    assert ol.differences(train(**options), ours) == []


def test_validation_that_is_due_between_two_groups_is_no_reason() -> None:
    options = {"val_check_interval": 4}
    ours = train(OffloadStrategy(budget="60%"), **options)
    assert together(ours) == {2}
    assert ol.differences(train(**options), ours) == []


def test_weights_that_are_resident_are_no_reason_to_wait() -> None:
    ours = train(OffloadStrategy(budget="100%"))
    assert together(ours) == set()
    assert "all weights are resident" in ours.strategy.explain()
    ours = train(OffloadStrategy())
    assert "all weights are resident" in ours.strategy.explain()


def test_what_is_not_faster_by_the_simulator_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "FASTER", 0.0)
    ours = train(OffloadStrategy(budget="60%"))
    assert together(ours) == set()
    assert "one by one: together" in ours.strategy.explain()
    assert ol.differences(plain("2"), ours) == []


class Noisy(Dataset[Any]):
    """Draws of its own, between the batches."""

    def __len__(self) -> int:
        return 88

    def __getitem__(self, number: int) -> Any:
        return torch.randn(12), torch.tensor(number % 5)


def test_random_numbers_of_the_loader_are_drawn_where_they_were() -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), 8)

    ours = train(OffloadStrategy(budget="60%"), loader=loader)
    assert together(ours) == set()
    assert ol.differences(train(loader=loader), ours) == []
    assert "the step and the loader both draw random numbers" in ours.strategy.explain()


class Later(Noisy):
    """Not at once: after five batches of the second epoch."""

    calls = 0

    def __getitem__(self, number: int) -> Any:
        Later.calls += 1
        x = torch.full((12,), float(number))
        return torch.randn(12) if Later.calls > 88 + 36 else x, torch.tensor(number % 5)


def test_a_loader_that_begins_to_draw_in_mid_run_is_told_once() -> None:
    Later.calls = 0
    strategy = OffloadStrategy(budget="60%")
    with pytest.warns(UserWarning, match="drawn between two micro-batches") as warned:
        ours = train(strategy, loader=lambda: DataLoader(Later(), 8))
    assert len([w for w in warned if "micro-batches" in str(w.message)]) == 1
    assert together(ours) == {2}
    assert "the step and the loader both draw random numbers" in ours.strategy.explain()


def test_callbacks_of_lightning_are_no_reason(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import (
        EarlyStopping,
        LearningRateMonitor,
        ModelCheckpoint,
        TQDMProgressBar,
    )

    found = []
    for name, strategy in (
        ("ours", OffloadStrategy(budget="60%")),
        ("theirs", "auto"),
    ):
        keep = ModelCheckpoint(tmp_path / name, every_n_train_steps=3, save_top_k=-1)
        callbacks = [keep, EarlyStopping("val_loss", patience=1), LearningRateMonitor("step"),
                     TQDMProgressBar()]  # fmt: skip
        more = {"enable_checkpointing": True, "enable_progress_bar": True}
        result = train(strategy, callbacks=callbacks, accumulate_grad_batches=3, **more)
        found.append(result)
    ours, theirs = found
    assert together(ours) == {3, 2}
    assert ol.differences(theirs, ours) == []
    names = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "ours").iterdir())
    for name in names:
        one, other = (torch.load(tmp_path / who / name, weights_only=False)
                      for who in ("ours", "theirs"))  # fmt: skip
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
            assert ol._unequal(part, other[part], one[part]) == []
