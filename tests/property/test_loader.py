"""The laws of `ReuseLoader`: a DataLoader that serves more than once."""

import json
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_samples import (
    AUGMENT,
    Numbered,
    in_threads,
    loader,
    settings_of_a_loader,
    take,
    watch,
)
from support.products import examples
from torch.utils.data import DataLoader

from loaders import ReuseLoader
from loaders.errors import StateError
from loaders.order.reuse import MODES

law = settings(max_examples=examples(25), deadline=None)


@law
@given(
    size=st.integers(1, 23),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_without_reuse_every_sample_comes_once_and_the_tail_as_in_a_dataloader(
    size: int, batch_size: int, drop_last: bool, mode: Any
) -> None:
    if drop_last and batch_size > size:
        with pytest.raises(ValueError, match="nothing would be served"):
            loader(size, batch_size=batch_size, drop_last=True)
        return
    theirs = DataLoader(list(range(size)), batch_size, shuffle=True, drop_last=drop_last)
    ours = loader(size, batch_size=batch_size, reuse=1, drop_last=drop_last, mode=mode)
    served = list(watch(ours))
    assert len(ours) == len(theirs) == len(served)
    assert [len(batch.ids) for batch in served] == [len(batch) for batch in theirs]
    ids = Counter(i for batch in served for i in batch.ids)
    assert set(ids.values()) == {1}
    assert len(ids) == size - (size % batch_size if drop_last else 0)


@law
@given(
    size=st.integers(1, 5), more=st.integers(1, 9), reuse=st.integers(1, 3), world=st.integers(1, 3)
)
def test_where_a_batch_is_larger_than_the_data_set_each_batch_has_all_of_it(
    size: int, more: int, reuse: int, world: int
) -> None:
    share = -(-size // world)
    for rank in range(world):
        ours = loader(size, batch_size=size + more, reuse=reuse, rank=(rank, world))
        served = list(watch(ours))
        assert len(ours) == len(served) == reuse
        assert [len({*batch.ids}) for batch in served] == [share] * reuse
        again = loader(size, batch_size=1, reuse=reuse, rank=(rank, world))
        again.set_reuse(reuse, batch_size=size + more)
        assert [batch.ids for batch in watch(again)] == [batch.ids for batch in served]


def test_a_batch_is_the_consumers_own() -> None:
    # Writing into a batch must not reach the buffer, nor must the buffer reach the batch.
    ours = loader(8, batch_size=4, reuse=3, augment=None, shuffle=False)
    data, kept = Numbered(8), []
    for pixels, ids in ours:
        assert torch.equal(pixels, data.pixels[ids])
        kept.append((pixels.clone(), pixels))
        pixels.zero_()
        assert all(not written.any() for _, written in kept)
    [(first, _), *_] = kept
    assert first.any()


# ---- reuse --------------------------------------------------------------------------------------


@law
@given(settings_of_a_loader())
def test_each_sample_is_served_reuse_times_with_its_own_pixels(options: dict[str, Any]) -> None:
    size, reuse = options["size"], options["reuse"]
    ours = loader(**{**options, "augment": None, "drop_last": False})
    pixels = {i: sample.numpy().tobytes() for i, sample in enumerate(Numbered(size).pixels)}
    served: Counter[int] = Counter()
    for batch in watch(ours):
        assert batch.pixels == b"".join(pixels[i] for i in batch.ids)
        served.update(batch.ids)
    assert served == Counter(dict.fromkeys(range(size), reuse))


@pytest.mark.parametrize("mode", MODES)
def test_passes_differ_in_order_and_in_augmentation(mode: str) -> None:
    ours = loader(20, mode=mode, reuse=1)
    first, second = list(watch(ours)), list(watch(ours))
    assert [set(b.ids) for b in first] != [set(b.ids) for b in second]
    one_sample = loader(1, batch_size=1, reuse=1, buffer_batches=1)
    assert len({served.pixels for served in take(one_sample, 12)}) > 6


def test_another_seed_gives_another_order_and_other_augmentation() -> None:
    assert list(watch(loader(20, seed=1))) == list(watch(loader(20, seed=1)))
    assert list(watch(loader(20, seed=1))) != list(watch(loader(20, seed=2)))
    fixed = {"batch_size": 5, "shuffle": False, "reuse": 1}
    one, two = (list(watch(loader(20, seed=s, **fixed))) for s in (1, 2))
    assert [b.ids for b in one] == [b.ids for b in two]
    assert all(a.pixels != b.pixels for a, b in zip(one, two, strict=True))


def test_a_serve_is_augmented_anew_unless_reaugment_is_off() -> None:
    def looks(reaugment: bool) -> list[int]:
        ours = loader(12, reuse=4, reaugment=reaugment)
        seen: dict[int, set[bytes]] = {}
        for pixels, ids in ours:
            for image, i in zip(pixels, ids.tolist(), strict=True):
                seen.setdefault(i, set()).add(image.numpy().tobytes())
        return [len(s) for s in seen.values()]

    assert set(looks(False)) == {1}
    assert sum(looks(True)) > 40  # of 48 serves


# ---- ranks --------------------------------------------------------------------------------------


@law
@given(
    settings_of_a_loader().filter(lambda options: not options["drop_last"]),
    st.integers(1, 4),
)
def test_ranks_share_the_set_evenly(options: dict[str, Any], world_size: int) -> None:
    share = -(-options["size"] // world_size)
    options["batch_size"] = min(options["batch_size"], share)
    ranks = [loader(**options, rank=(r, world_size)) for r in range(world_size)]
    passes = [list(watch(each)) for each in ranks]
    assert {len(each) for each in ranks} == {len(batches) for batches in passes}
    assert len({len(batches) for batches in passes}) == 1
    shares = [{i for batch in batches for i in batch.ids} for batches in passes]
    assert set().union(*shares) == set(range(options["size"]))
    # Shares are disjoint but for the few samples that fill the last round.
    assert sum(len(s) for s in shares) - options["size"] < world_size
    if options["size"] % world_size == 0:
        assert sum(len(s) for s in shares) == options["size"]


def test_ranks_shuffle_their_buffers_differently() -> None:
    orders = [[b.serves for b in watch(loader(24, rank=(rank, 2)))] for rank in range(2)]
    assert orders[0] != orders[1]


# ---- passes, changes, counters ------------------------------------------------------------------


def test_a_change_of_reuse_counts_from_the_next_pass() -> None:
    ours = loader(12, augment=None)
    list(ours)
    ours.set_reuse(1)
    assert len(ours) == 3
    assert Counter(i for b in watch(ours) for i in b.ids) == Counter(range(12))
    ours.set_reuse(2, batch_size=6)
    assert len(ours) == 4
    assert [len(b.ids) for b in watch(ours)] == [6] * 4


@pytest.mark.parametrize(("reuse", "later"), [(3, 1), (1, 3)])
def test_a_change_of_reuse_within_a_pass_leaves_that_pass_alone(reuse: int, later: int) -> None:
    untouched = list(watch(loader(40, reuse=reuse)))
    ours = loader(40, reuse=reuse)
    served = []
    for batch in watch(ours):
        if len(served) == 1:
            ours.set_reuse(later, reaugment=False)
        served.append(batch)
    assert served == untouched
    assert len(list(watch(ours))) == 10 * later


def test_leaving_a_pass_early_and_iterating_again_gives_the_next_pass() -> None:
    whole = loader(20)
    list(whole)
    second = list(watch(whole))
    left = loader(20)
    take(left, 3)
    assert list(watch(left)) == second


def test_an_iterator_that_was_never_asked_costs_no_pass() -> None:
    ours = loader(20)
    iter(ours)
    assert list(watch(ours)) == list(watch(loader(20)))


def test_a_limited_pass_ends_after_so_many_batches_and_the_next_pass_follows() -> None:
    whole = loader(20)
    first, second = list(watch(whole)), list(watch(whole))
    ours = loader(20)
    ours.limit_pass(4)
    assert len(ours) == 4
    assert list(watch(ours)) == first[:4]
    ours.limit_pass(None)
    assert list(watch(ours)) == second


# ---- resume -------------------------------------------------------------------------------------


@law
@given(settings_of_a_loader(), st.integers(0, 40), st.sampled_from([1, 3]))
def test_a_resume_after_any_batch_gives_the_same_tail(
    options: dict[str, Any], batches: int, workers: int
) -> None:
    whole = take(loader(**options), batches + 15)
    interrupted = loader(**options)
    head = take(interrupted, batches)
    state = interrupted.state_dict()
    resumed = loader(**options, workers=workers)
    resumed.load_state_dict(state)
    assert head + take(resumed, 15) == whole


def test_a_state_is_a_few_numbers_and_words() -> None:
    ours = loader(2000)
    take(ours, 4)
    text = json.dumps(ours.state_dict())
    assert json.loads(text) == ours.state_dict()
    assert len(text) < 1000, "ids and pixels are no part of it"


def test_a_resumed_pass_decodes_only_what_is_still_to_be_served() -> None:
    interrupted = loader(40, batch_size=4)
    take(interrupted, 25)
    calls: list[int] = []

    class Counting(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            calls.append(index)
            return super().__getitem__(index)

    resumed = in_threads(
        Counting(40), batch_size=4, reuse=3, buffer_batches=2, augment=AUGMENT, workers=1
    )
    resumed.load_state_dict(interrupted.state_dict())
    calls.clear()  # the loader has looked, when it was made, whether reading repeats itself
    rest = {i for batch in watch(resumed) for i in batch.ids}
    assert set(calls[: len(rest)]) == rest
    # While it drained, the first samples of the next pass were decoded into the slots left free.
    assert len(calls) - len(rest) <= resumed.buffer_batches * resumed.batch_size


def test_a_resume_goes_on_across_a_change_of_reuse() -> None:
    def change(ours: ReuseLoader) -> None:
        ours.set_reuse(1, reaugment=False, batch_size=5)

    uninterrupted = loader(20)
    take(uninterrupted, len(uninterrupted))
    change(uninterrupted)
    tail = take(uninterrupted, 7)
    for batches in range(8):
        interrupted = loader(20)
        take(interrupted, len(interrupted))
        change(interrupted)
        take(interrupted, batches)
        resumed = loader(20)
        resumed.load_state_dict(interrupted.state_dict())
        assert take(resumed, 7 - batches) == tail[batches:], batches


def test_a_resume_keeps_the_limit_of_a_pass() -> None:
    interrupted = loader(20)
    interrupted.limit_pass(6)
    head = take(interrupted, 4)
    resumed = loader(20)
    resumed.load_state_dict(interrupted.state_dict())
    assert len(resumed) == 6
    rest = list(watch(resumed))
    assert head + rest == take(loader(20), 6)
    again = loader(20)
    again.limit_pass(6)
    assert take(resumed, 3) == take(again, 9)[6:]


@pytest.mark.parametrize(
    "other",
    [
        {"size": 21},
        {"seed": 1},
        {"mode": "block"},
        {"buffer_batches": 3},
        {"shuffle": False},
        {"drop_last": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_state_of_another_loader_is_refused_and_says_what_differs(other: dict[str, Any]) -> None:
    saved = loader(20)
    take(saved, 3)
    mine = loader(**{"size": 20, **other})
    key = {"size": "samples"}.get(next(iter(other)), next(iter(other)))
    with pytest.raises(StateError, match=f"{key}=.*{key}="):
        mine.load_state_dict(saved.state_dict())
    assert take(mine, 2) == take(loader(**{"size": 20, **other}), 2), "and nothing was taken over"


def test_a_state_of_another_version_of_the_order_may_resume_between_passes_only() -> None:
    saved = loader(20)
    batches = len(saved)
    take(saved, batches - 1)
    state = saved.state_dict()
    for old in (
        {k: v for k, v in state.items() if k != "order_version"},
        state | {"order_version": 1},
    ):
        with pytest.raises(StateError, match=r"middle of pass 0 of order version 1.*end of a pass"):
            loader(20).load_state_dict(old)
    whole = loader(20)
    take(whole, batches)
    state = whole.state_dict()
    del state["order_version"]
    resumed = loader(20)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == take(loader(20), batches + 5)[batches:]
