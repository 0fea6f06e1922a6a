"""The loader's further options, each alone and together, and passes over 10 ** 12 samples."""

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import loader_datasets as sets
from support.numbered_samples import Made, in_threads
from support.products import examples
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from loaders import Cache, Device, LaneLoader, ReuseLoader, Workers
from loaders.errors import StateError
from loaders.order.reuse import MODES
from loaders.pixels.augmentation import Chain, Flip, PadCrop
from loaders.sources.datasets import PictureArrays
from loaders.workers import crew

AUGMENT = Chain([PadCrop(2), Flip()])


def looks(loader: ReuseLoader) -> dict[int, set[bytes]]:
    """What each sample looked like in a pass."""
    seen: dict[int, set[bytes]] = {}
    for pictures, labels in loader:
        for picture, label in zip(pictures, labels.tolist(), strict=True):
            seen.setdefault(label, set()).add(picture.numpy().tobytes())
    return seen


# ---- once ---------------------------------------------------------------------------------------


def test_all_serves_of_a_pass_share_what_was_drawn_once_and_passes_differ() -> None:
    with ReuseLoader(sets.Pictures(40), 4, 3, once=AUGMENT, workers=2) as loader:
        first, second = looks(loader), looks(loader)
    assert all(len(seen) == 1 for seen in [*first.values(), *second.values()])
    assert sum(first[i] != second[i] for i in range(40)) > 30


# ---- resumes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 7, 12, 19])
def test_a_loader_that_has_served_before_takes_a_state_of_the_middle_of_its_next_pass(
    batches: int,
) -> None:
    """What it decoded ahead is not what is still to be served."""

    def make() -> ReuseLoader:
        return ReuseLoader(sets.Pictures(40), 4, 2, buffer_batches=2, augment=AUGMENT, workers=2)

    with make() as saved, make() as loader, make() as whole:
        sets.served(saved)
        sets.served(saved, batches)
        sets.served(loader)  # and decodes the first samples of pass 1
        loader.load_state_dict(saved.state_dict())
        sets.served(whole)
        assert sets.served(loader) == sets.served(whole)[batches:]


def test_the_mean_age_goes_on_after_a_resume() -> None:
    with (
        ReuseLoader(sets.Pictures(40), 4, 3, workers=1) as whole,
        ReuseLoader(sets.Pictures(40), 4, 3, workers=1) as resumed,
    ):
        state: dict[str, Any] = {}
        for number, _ in enumerate(whole, 1):
            if number == 17:
                state = whole.state_dict()
        resumed.load_state_dict(state)
        list(resumed)
        assert resumed.stats.mean_age == whole.stats.mean_age
        assert resumed.stats.serves == whole.stats.serves


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 3), (4, 2)], ids=str)
def test_another_world_size_goes_on_where_a_pass_ends_with_every_sample(
    worlds: tuple[int, int],
) -> None:
    before, after = worlds

    def make(rank: int, world: int) -> ReuseLoader:
        return ReuseLoader(sets.Pictures(24), 2, 2, workers=1, rank=(rank, world))

    with make(0, before) as saved:
        list(saved)
        state = saved.state_dict()
        next(iter(saved))
        middle = saved.state_dict()
    ids: Counter[int] = Counter()
    for rank in range(after):
        with make(rank, after) as resumed:
            with pytest.raises(StateError, match=f"on {before} ranks, this run has {after}"):
                resumed.load_state_dict(middle)
            resumed.load_state_dict(state)
            ids.update(i for _, labels in resumed for i in labels.tolist())
    assert ids == Counter(dict.fromkeys(range(24), 2))


# ---- sampler, collate ---------------------------------------------------------------------------


def test_a_sampler_says_who_is_served_and_a_resume_asks_it_again() -> None:
    chosen = [3, 4, 9, 17, 18, 19, 30, 31]

    def make() -> ReuseLoader:
        sampler = SubsetRandomSampler(chosen)
        return ReuseLoader(sets.Pictures(40), 4, 3, sampler=sampler, augment=AUGMENT, workers=2)

    with make() as whole, make() as interrupted, make() as resumed:
        tail = sets.served(whole)
        assert Counter(i for ids, _ in tail for i in ids) == Counter(dict.fromkeys(chosen, 3))
        sets.served(interrupted, 4)
        resumed.load_state_dict(interrupted.state_dict())
        assert sets.served(resumed) == tail[4:]
        assert sets.served(resumed) == sets.served(whole), "the pass after it, too"


def test_a_sample_that_a_sampler_draws_again_is_augmented_anew() -> None:
    sampler = WeightedRandomSampler([1.0], 40)
    with ReuseLoader(sets.Pictures(1), 1, 1, sampler=sampler, augment=AUGMENT, workers=1) as loader:
        assert len(looks(loader)[0]) > 20


# ---- device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("augments", [False, True])
@pytest.mark.parametrize("reaugment", [False, True])
def test_on_a_device_batches_are_those_of_the_host_bit_for_bit(
    augments: bool, reaugment: bool
) -> None:
    options: dict[str, Any] = {"augment": AUGMENT, "workers": 2, "reaugment": reaugment}
    with (
        ReuseLoader(sets.Pictures(30), 4, 3, **options) as host,
        ReuseLoader(sets.Pictures(30), 4, 3, device=Device("cpu", augments), **options) as there,
    ):
        for _ in range(2):
            infos = []
            expected = []
            for pictures, labels in host:
                expected.append((tuple(labels.tolist()), pictures.numpy().tobytes()))
                assert host.last_batch is not None
                infos.append((host.last_batch.ids.tolist(), host.state_dict()["served_batches"]))
            for number, (pictures, labels) in enumerate(there):
                assert (tuple(labels.tolist()), pictures.numpy().tobytes()) == expected[number]
                assert there.last_batch is not None
                told = (there.last_batch.ids.tolist(), there.state_dict()["served_batches"])
                assert told == infos[number], "the batch that is sent ahead is not served yet"


# ---- words and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: {"on_error": "skipp"}, "on_error must be one of raise, skip, not 'skipp'"),
        (lambda: {"cache": "ram"}, "cache must be a Cache, such as .* not 'ram'"),
        (lambda: Workers(kind="processes"), "kind must be one of auto, thread, process"),
        (lambda: Workers(kind="thread", start_method="spawn"), "start_method='spawn' has no"),
        (lambda: Workers(0, "process"), "process.*no effect with workers=0"),
        (lambda: Workers(0, timeout=1), "timeout=1 has no effect without workers"),
        (lambda: Cache("memory", 100), "kind must be one of ram, disk, not 'memory'"),
        (lambda: Cache("ram", 0), "limit_bytes must be at least 1, not 0"),
        (lambda: Workers("two"), "workers must be a whole number from 0 on, or"),
        (lambda: Cache("disk", 100), "needs a folder"),
        (lambda: Cache("ram", 100, folder="kept"), "folder='kept' has no effect on a cache in RAM"),
    ],
)
def test_a_word_that_nobody_knows_or_that_has_no_effect_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        ReuseLoader(sets.Pictures(20), 4, 2, **wrong())


@pytest.mark.parametrize("batches", [0, -1])
def test_a_pass_has_at_least_one_batch(batches: int) -> None:
    with ReuseLoader(sets.Pictures(40), 4) as loader:
        with pytest.raises(ValueError, match=f"leaves of a pass must be at least 1, not {batches}"):
            loader.limit_pass(batches)
        assert len(loader) == len([*loader]) == 30


def test_a_worker_that_hangs_in_a_pass_that_was_left_does_not_write_into_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "JOIN_SECONDS", 0.05)
    hangs, go_on, old = threading.Event(), threading.Event(), []

    def read(i: int) -> tuple[torch.Tensor, int]:
        if i == 10 and not old:
            old.append(threading.current_thread())
            hangs.set()
            go_on.wait(60)
            return torch.full((3, 4, 4), 99, dtype=torch.uint8), 999
        return torch.full((3, 4, 4), i, dtype=torch.uint8), i

    class Hanging:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return read(index)

    loader = in_threads(Hanging(), 4, 3, buffer_batches=3, shuffle=False, workers=1)
    left = iter(loader)
    next(left)
    assert hangs.wait(60)
    left.close()  # type: ignore[attr-defined]
    ids = []
    for _pictures, labels in loader:
        ids += labels.tolist()
        if not go_on.is_set():
            go_on.set()
            old[0].join(60)
    loader.close()
    assert 999 not in ids


# ---- counters -----------------------------------------------------------------------------------


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_the_counters_add_up_whatever_was_done(data: st.DataObject) -> None:
    calls: list[int] = []
    count = calls.append  # what it has counted is no part of the data set, nor a change of it

    class Counted:
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: int) -> Any:
            count(index)
            return sets.pixels(index), index

    draw = data.draw
    batch_size = draw(st.integers(1, 5))
    size = draw(st.integers(batch_size, 30))
    resident = draw(st.booleans())
    options: dict[str, Any] = {
        "reuse": draw(st.integers(1, 4)),
        "buffer_batches": draw(st.integers(1, 4)),
        "mode": draw(st.sampled_from(MODES)),
        "workers": draw(st.integers(1, 3)),
        "device": draw(st.sampled_from([None, "cpu"])),
        **draw(st.sampled_from([{}, {"augment": AUGMENT}, {"once": AUGMENT}])),
        **draw(st.sampled_from([{}, {"cache": Cache("ram", 6000)}])),
    }
    resident = resident and not options.keys() & {"once", "cache"}
    arrays = PictureArrays(np.zeros((size, 8, 8, 3), np.uint8), np.arange(size), ("a", "b"))
    loader = in_threads(arrays if resident else Counted(), batch_size, **options)
    calls.clear()  # it has looked whether reading repeats itself
    served, resumed = 0, False
    for step in draw(st.lists(st.sampled_from(["pass", "leave", "resume", "close"]), max_size=6)):
        if step == "pass":
            served += sum(len(labels) for _, labels in loader)
        elif step == "leave":
            served += len(next(iter(loader))[1])
        elif step == "resume":
            loader.load_state_dict(loader.state_dict())
            resumed = True  # the counters are the saved run's: they know nothing of ours
        else:
            loader.close()
        stats = loader.stats
        assert stats.served == served == sum(stats.serves)
        assert stats.served == stats.decoded + stats.cached + stats.reused
        assert stats.serves[0:1] == ((stats.decoded + stats.cached,) if served else ())
        assert stats.extra_decodes >= 0
        assert (loader.stats.mean_age == 0) if options["reuse"] == 1 else stats.mean_age >= 0
    loader.close()
    if not resident and not resumed:
        # Beyond them, a sample is read to lay out the slots, which is used where it comes first.
        stats = loader.stats
        read = stats.decoded + stats.extra_decodes
        assert 0 <= len(calls) - read <= 7
    del loader


MANY = 10**12


ENDLESS = Made(MANY, lambda i: (torch.full((3, 2, 2), i % 251, dtype=torch.uint8), i))
"""Samples that say who they are."""


def loader(**changes: Any) -> ReuseLoader:
    return ReuseLoader(ENDLESS, **{"batch_size": 8, "workers": 0, **changes})


def at(state: dict[str, Any], batch: int) -> dict[str, Any]:
    """The state of a loader that has served so many batches of a pass."""
    return {**state, "served_batches": batch, "running": state["next"]}


def ids_of(loader: ReuseLoader, batches: int) -> list[list[int]]:
    found = []
    for _, ids in loader:
        found.append(ids.tolist())
        if len(found) == batches:
            return found
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"reuse": 1},
        {"reuse": 3},
        {"reuse": 3, "mode": "block"},
        {"reuse": 2, "mode": "immediate"},
        {"reuse": 3, "shuffle": False},
        {"reuse": 3, "rank": (500, 1000)},
        {"reuse": 3, "buffer_bytes": 1 << 20},
        {"reuse": 3, "cache": Cache("ram", 1 << 20)},
        {"reuse": 3, "on_error": "skip"},
        {"reuse": "auto"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_pass_of_any_length_is_begun_and_entered_anywhere(options: dict[str, Any]) -> None:
    with loader(**options) as first:
        assert all(0 <= i < MANY for ids in ids_of(first, 3) for i in ids)
        state = first.state_dict()
        for batch in (len(first) // 2, len(first) - 4):
            with loader(**options) as one, loader(**options) as other:
                one.load_state_dict(at(state, batch))
                served = ids_of(one, 3)
                other.load_state_dict(at(state, batch + 1))
                assert ids_of(other, 2) == served[1:]
                assert all(0 <= i < MANY for ids in served for i in ids)


def test_a_lane_of_any_length_is_entered_anywhere() -> None:
    with LaneLoader(loader(reuse=3), 64) as there, LaneLoader(loader(reuse=3), 64) as here:
        there.hold([5, 63])
        assert len(there.take(63).info.ids) == 8
        for step in (len(there) // 2, len(there) - 2):
            there.load_state_dict(there.state_dict() | {"step": step})
            there.take(5)
            there.advance()
            here.load_state_dict(there.state_dict())
            assert here.take(5).info.ids.tolist() == there.take(5).info.ids.tolist()
