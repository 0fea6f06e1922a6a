"""A `ReuseLoader` resumes anywhere, with the same batches; a state of another one is refused."""

import json
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

from loaders import ReuseLoader
from loaders.errors import StateError

law = settings(max_examples=examples(25), deadline=None)


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


def test_a_resume_gives_the_same_tail_after_every_batch_of_two_passes() -> None:
    passes = len(loader(10)) * 2
    whole = take(loader(10), passes + 3)
    for batches in range(passes + 1):
        interrupted = loader(10)
        take(interrupted, batches)
        resumed = loader(10)
        resumed.load_state_dict(interrupted.state_dict())
        assert take(resumed, passes + 3 - batches) == whole[batches:], batches


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


def test_another_number_of_ranks_may_resume_between_passes_only() -> None:
    saved = loader(20, rank=(0, 2))
    batches = len(saved)
    take(saved, batches - 1)
    with pytest.raises(StateError, match="middle of pass 0 on 2 ranks"):
        loader(20, rank=(0, 1)).load_state_dict(saved.state_dict())
    whole = loader(20, rank=(0, 2))
    take(whole, batches)
    alone = loader(20, rank=(0, 1))
    alone.load_state_dict(whole.state_dict())
    uninterrupted = loader(20, rank=(0, 1))
    list(uninterrupted)
    assert take(alone, 5) == take(uninterrupted, 5)


def test_counters_go_on_after_a_resume() -> None:
    saved = loader(20)
    take(saved, 5)
    resumed = loader(20)
    resumed.load_state_dict(saved.state_dict())
    list(resumed)
    assert resumed.stats.served == 60
    assert resumed.stats.decoded == 20
    assert resumed.stats.reused == 40
