"""The laws of `ReuseLoader`: a DataLoader that serves more than once."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numbered_samples import (
    Made,
    Numbered,
    in_threads,
    loader,
    settings_of_a_loader,
    take,
    watch,
)
from support.products import examples
from torch.utils.data import DataLoader

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


@law
@given(settings_of_a_loader())
def test_the_order_does_not_depend_on_the_number_of_workers(options: dict[str, Any]) -> None:
    one, two, five = (take(loader(**options, workers=n), 12) for n in (1, 2, 5))
    assert one == two == five


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


@law
@given(st.integers(1, 20), st.integers(2, 4), st.integers(1, 3), st.sampled_from(MODES))
def test_a_batch_larger_than_a_ranks_share_is_refused_or_served_whole(
    size: int, world_size: int, reuse: int, mode: Any
) -> None:
    try:
        ours = loader(size, batch_size=size, reuse=reuse, mode=mode, rank=(0, world_size))
        served = Counter(i for batch in watch(ours) for i in batch.ids)
    except ValueError as error:
        assert "batch_size" in str(error)
        return
    assert len(served) == -(-size // world_size)
    assert set(served.values()) == {reuse}


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


@law
@given(settings_of_a_loader(), st.integers(1, 3))
def test_the_counters_count_what_was_served(options: dict[str, Any], passes: int) -> None:
    ours = loader(**options)
    served = take(ours, passes * len(ours)) if len(ours) else []
    serves = [serve for batch in served for serve in batch.serves]
    stats = ours.stats
    assert stats.served == len(serves)
    assert stats.decoded == serves.count(0)
    assert stats.reused == stats.served - stats.decoded
    assert stats.stall_seconds >= 0
    if not options["drop_last"]:
        assert stats.decoded == passes * options["size"]
        assert stats.extra_decodes == 0


def test_decodes_that_were_not_served_are_counted_apart() -> None:
    calls: list[int] = []
    data = Made(40, lambda i: calls.append(i) or (Numbered(40)[i]))
    ours = in_threads(data, batch_size=4, reuse=1, buffer_batches=3, workers=1)
    for _ in ours:
        break
    stats = ours.stats
    assert stats.decoded == 4
    assert stats.decoded + stats.extra_decodes == len(calls)
    list(ours)
    ours.close()
    stats = ours.stats
    assert stats.decoded == 44
    assert stats.decoded + stats.extra_decodes == len(calls)


def test_counters_read_like_a_mapping() -> None:
    stats = loader(20).stats
    assert dict(stats)["decoded"] == stats["decoded"] == stats.decoded
    assert len(stats) == len(dict(stats))
