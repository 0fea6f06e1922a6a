"""One line that says what a loader does, and where the seed of an adopted DataLoader comes from."""

import logging
from typing import Any

import pytest
import torch
from support.numbered_samples import Made
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from loaders import Cache, ReuseLoader, Workers

TEN: Any = list(range(10))


def adopt(dataset: Any = TEN, changes: Any = None, **how: Any) -> ReuseLoader:
    loader = DataLoader(dataset, 2, **{"num_workers": 1, **how})
    return ReuseLoader.from_dataloader(loader, **{"reuse": 2, **(changes or {})})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"workers": Workers(4, "thread")}, "read by 4 threads;"),
        ({"workers": Workers(2, "process")}, "read by 2 processes;"),
        ({"workers": 0}, "read by the loop itself, nothing ahead"),
        ({"cache": Cache("ram", limit_bytes=1 << 20)}, "kept in the cache (ram)"),
        ({"reaugment": False}, "reuse 2 with the same draws;"),
        ({"rank": (1, 2)}, "rank 1 of 2"),
    ],
)
def test_a_summary_says_how_a_loader_was_made(
    change: dict[str, Any], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    adopt(changes=change)
    assert part in caplog.text


# ---- logged once ---------------------------------------------------------------------------


def test_an_adopted_loader_says_one_line_and_warns_only_of_what_is_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    with adopt(changes={"reuse": 1}) as loader:
        list(loader), list(loader)
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "cached: what list reads; reuse 1; a buffer of 3 batches; seed" in record.getMessage()
    caplog.clear()
    with adopt(changes={"reuse": 3}) as loader:
        assert len(loader) == 15
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    longer = "15 batches a pass (DataLoader: 5): divide max_epochs and schedules by epoch by 3"
    assert longer in record.getMessage()
    caplog.clear()
    given: dict[str, Any] = {"persistent_workers": True, "in_order": False}
    with adopt(**given) as loader:
        list(loader)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for name in given:
        assert record.getMessage().count(name) == 1


def test_a_draw_that_no_rank_can_compare_makes_the_line_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    loader = ReuseLoader(TEN, 2, 1, sampler=TEN, workers=1, rank=(0, 2))
    with loader:
        list(loader), list(loader)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().count("list names no rank, so every one of 2 ranks takes") == 1


def test_a_loader_made_by_hand_says_its_line_when_its_first_pass_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    pictures = datasets.FakeData(
        6, (3, 8, 8), 2, transforms.Compose([transforms.Resize(6), transforms.ToTensor()])
    )
    loader = ReuseLoader(pictures, 2, reuse=2, workers=1, buffer_bytes=10**6, seed=5)
    assert caplog.records == []
    with loader:
        list(loader)
        loader.set_reuse(3, batch_size=3)
        list(loader)
    [record] = caplog.records
    assert record.levelno == logging.INFO
    said = record.getMessage()
    assert said.startswith("cached: Resize; redone at every serve: ToTensor (")
    assert "; reuse 2; a buffer of 3 batches (696 bytes); seed 5; read by 1 process (" in said
    assert said.endswith("; ranks as torch.distributed says")


# ---- the buffer ---------------------------------------------------------------------------------


LARGE: Any = Made(1000, lambda i: torch.full((1000, 1000), i % 251, dtype=torch.uint8))
"""1 MB a sample."""


@pytest.mark.parametrize("adopted", [True, False])
def test_a_buffer_above_a_quarter_of_the_free_memory_is_warned_of_once(
    adopted: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "loaders")

    def served(free: int) -> list[logging.LogRecord]:
        monkeypatch.setattr("loaders.summary.free_memory", lambda: free)
        caplog.clear()
        how: Any = {"reuse": 2, "rank": (0, 1)}
        loader = ReuseLoader(LARGE, 2, workers=1, **how)
        if adopted:
            loader = ReuseLoader.from_dataloader(DataLoader(LARGE, 2, num_workers=1), **how)  # type: ignore[arg-type]
        with loader:
            for _ in range(2):
                loader.limit_pass(2)
                list(loader)
        return caplog.records

    [record] = served(97_000_000)
    about = "about " if adopted else ""
    assert f"a buffer of 12 batches ({about}24 MB)" in record.getMessage()
    assert "more than a quarter" not in record.getMessage()
    *_, record = served(95_000_000)
    assert record.levelno == logging.WARNING
    said = "the buffer takes 24 MB, more than a quarter of the memory that is free (95 MB)"
    assert said in record.getMessage()
    assert "size=" in record.getMessage() and "buffer_bytes=" in record.getMessage()


# ---- the seed -----------------------------------------------------------------------------------


def test_a_seed_that_is_not_torchs_is_told_with_where_it_comes_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "loaders")
    seed = adopt(shuffle=True, generator=torch.Generator().manual_seed(77)).seed
    assert f"seed {seed} (drawn from its generator)" in caplog.text
    sampler = DistributedSampler(TEN, num_replicas=2, rank=1, seed=9)
    assert adopt(sampler=sampler).seed == 9
    assert "seed 9 (of its DistributedSampler)" in caplog.text
    assert adopt(changes={"seed": 3}).seed == 3
    assert "seed 3;" in caplog.text


@pytest.mark.draws_seeds
def test_ranks_that_are_given_cannot_compare_seeds_and_so_have_the_same() -> None:
    for rank in range(2):
        assert adopt(changes={"rank": (rank, 2)}).seed == 0
