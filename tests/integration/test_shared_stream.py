"""A shared stream with consumers in threads, that die, that never take, that fork; its errors."""

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.loader_datasets import served
from support.shared_streams import (
    BATCH,
    BATCHES,
    SIZE,
    Counted,
    lone,
    passes,
    story_of_a_bad_sample,
)

from loaders import SharedStream
from loaders.errors import PassEnded, SharingError, StateError
from loaders.sharing import shared_stream
from loaders.sharing.shared_view import SharedView
from loaders.sharing.view_batches import cut_batch
from loaders.stats import BatchInfo

JOIN_SECONDS = 60


@pytest.fixture
def stream() -> Iterator[SharedStream]:
    with SharedStream(lone(), window=2 * BATCHES) as made:
        yield made


def in_threads(*jobs: Callable[[], None]) -> list[BaseException | None]:
    """Run each in a thread of its own, and return what each raised."""
    raised: list[BaseException | None] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            jobs[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive(), "a consumer waits for ever"
    return raised


# ---- consumers in threads -----------------------------------------------------------------------


def test_consumers_in_threads_get_what_each_gets_alone_from_one_decode_a_sample() -> None:
    data = Counted(SIZE)
    taken: dict[str, list[Any]] = {}
    with SharedStream(lone(dataset=data, reuse=2), window=3) as stream:
        data.reads.clear()  # the loader has looked whether reading repeats itself
        views = [stream.view(name=name) for name in "abc"]

        def take(view: SharedView) -> None:
            with view:
                taken[view.name] = passes(view, 3)

        raised = in_threads(*(lambda view=view: take(view) for view in views))
        assert raised == [None] * 3
        assert stream.stats.decoded == 3 * SIZE
    with lone(reuse=2) as expected:
        whole = passes(expected, 3)
    assert taken == dict.fromkeys("abc", whole)
    ahead = len(data.reads) - 3 * SIZE
    assert 0 <= ahead <= 3 * BATCH, "beyond the passes, what was decoded ahead for a fourth"


def test_a_consumer_that_dies_frees_the_others() -> None:
    with SharedStream(lone(), window=2) as stream:
        views = [stream.view(name=name) for name in ("dies", "leaves", "stays")]
        together = threading.Barrier(3)
        taken: list[Any] = []

        def dies() -> None:
            together.wait()
            for _ in views[0]:
                raise RuntimeError("a model exploded")

        def leaves() -> None:
            together.wait()
            for _ in views[1]:
                break
            views[1].close()

        def stays() -> None:
            together.wait()
            taken.extend(passes(views[2], 3))

        first, *others = in_threads(dies, leaves, stays)
        assert str(first) == "a model exploded"
        assert others == [None, None]
        with lone() as expected:
            assert taken == passes(expected, 3)


def test_others_wait_for_a_view_that_never_takes_and_it_is_said_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_stream, "PATIENCE_SECONDS", 0.0)
    with SharedStream(lone(), window=2) as stream:
        slow, fast = stream.view(name="sleeper"), stream.view(name="runner")
        taken: list[Any] = []
        worker = threading.Thread(target=lambda: taken.extend(served(fast)), daemon=True)
        with caplog.at_level(logging.WARNING):
            worker.start()
            while not caplog.records:
                worker.join(0.05)
            assert "runner has waited" in caplog.text
            assert "for sleeper, which is 2 batches behind" in caplog.text
        assert worker.is_alive()
        assert len(taken) == 0
        slow.close()
        worker.join(JOIN_SECONDS)
        assert len(taken) == BATCHES
        assert stream.waited_for["sleeper"] > 0
        assert fast.stats.stall_seconds > 0
        fast.close()


def test_a_view_that_rests_while_it_is_asked_to_wait_goes_on_afterwards() -> None:
    with SharedStream(lone(), window=1) as stream, lone() as expected:
        slow, fast = stream.view(name="slow"), stream.view(name="fast")
        behind = iter(slow)

        def turn(names: tuple[str, ...]) -> None:
            fast.rest()
            next(behind)

        fast.on_wait = turn
        assert served(fast) == served(expected)
        slow.close()
        fast.close()


def test_one_thread_that_would_wait_for_itself_is_told_so(stream: SharedStream) -> None:
    one, other = stream.view(name="one"), stream.view(name="other")
    first = iter(other)
    next(first)
    state = one.state_dict()
    with pytest.raises(SharingError, match=r"one is 12 batches ahead of other, and one thread"):
        passes(one, 4)
    other.close()
    one.load_state_dict(state)
    with lone() as expected:
        assert passes(one, 4) == passes(expected, 4), "and nothing is lost"


@pytest.mark.parametrize(("kept_bytes", "ahead"), [(None, 4), (3, 3), (99, 4), (0, 1)])
def test_a_view_is_ahead_by_the_window_or_by_the_bytes_that_may_be_kept(
    kept_bytes: int | None, ahead: int
) -> None:
    """`kept_bytes`: here in batches."""
    with lone() as loader:
        batch = sum(part.nbytes for part in next(iter(loader)))
    most = None if kept_bytes is None else kept_bytes * batch
    with SharedStream(lone(), window=4, kept_bytes=most) as stream:
        slow, fast = iter(stream.view(name="slow")), iter(stream.view(name="fast"))
        next(slow)
        for _ in range(1 + ahead):
            next(fast)
        with pytest.raises(SharingError, match=f"fast is {ahead} batches ahead of slow"):
            next(fast)
        assert stream.most_bytes == ahead * batch


# ---- errors -------------------------------------------------------------------------------------


def test_every_view_gets_the_error_of_a_sample_at_its_batch_and_the_next_pass_after_it() -> None:
    options = {"shuffle": False, "dataset": Counted(SIZE, bad=(9,))}

    with SharedStream(lone(**options), window=99) as stream:
        views = stream.view(), stream.view(batch_size=2)
        first, second = map(story_of_a_bad_sample, views)
        for view in views:
            view.close()
    with lone(**options) as expected:
        assert first == story_of_a_bad_sample(expected) == [[0, 1, 2, 3], [4, 5, 6, 7], 2] * 2
    assert second == [[0, 1], [2, 3], [4, 5], [6, 7], 4] * 2


def test_a_first_batch_that_could_not_be_read_is_read_again() -> None:
    data = Counted(SIZE, bad=(1,))
    with SharedStream(lone(dataset=data, shuffle=False)) as stream:
        one, other = stream.view(), stream.view()
        with pytest.raises(OSError, match="sector 1"):
            served(one)
        data.bad = frozenset()
        with lone(shuffle=False) as expected:
            whole = passes(expected, 2)
        assert passes(one, 2) == whole
        one.close()
        with pytest.raises(OSError, match="sector 1"):
            served(other)
        assert passes(other, 2) == whole
        other.close()


def test_a_ctrl_c_in_one_view_stops_no_other() -> None:
    strikes = [1]

    def collate(samples: list[Any]) -> Any:
        if samples[0][1] == 8 and strikes:
            strikes.pop()
            raise KeyboardInterrupt
        return torch.utils.data.default_collate(samples)

    options = {"shuffle": False, "collate": collate}
    with SharedStream(lone(**options)) as shared:
        one, other = shared.view(), shared.view()
        with pytest.raises(KeyboardInterrupt):
            served(one)
        state = one.state_dict()
        assert state["served_batches"] == 2
        with lone(**options) as expected:
            whole = served(expected)
        assert served(other) == whole
        one.load_state_dict(state)
        assert served(one) == whole[2:]
        one.close()
        other.close()


def test_what_cannot_be_shared_is_refused_by_name(stream: SharedStream) -> None:
    with pytest.raises(TypeError, match="shares a ReuseLoader, not list"):
        SharedStream([1])  # type: ignore[arg-type]
    with pytest.raises(SharingError, match='reuse="auto" measures one training loop'):
        SharedStream(lone(reuse="auto"))
    with pytest.raises(SharingError, match=r"batch_size 3 does not divide 4.*one of 1, 2, 4"):
        stream.view(batch_size=3)
    with pytest.raises(SharingError, match=r"batch_size 8 does not divide 4"):
        stream.view(batch_size=8)
    with pytest.raises(ValueError, match="join must be one of next pass, now, not 'later'"):
        stream.view(join="later")  # type: ignore[arg-type]
    first = stream.view(name="a")
    with pytest.raises(SharingError, match="two views are called 'a'"):
        stream.view(name="a")
    first.close()
    collated = lone(collate=torch.utils.data.default_collate)
    with pytest.raises(SharingError, match=r"collate function, whose batches of 4 cannot be cut"):
        SharedStream(collated).view(batch_size=2)


def test_a_view_is_not_copied_or_sent_away(stream: SharedStream) -> None:
    view = stream.view(name="mine")
    with pytest.raises(SharingError, match=r"mine .* cannot be copied or sent"):
        copy.copy(view)
    with pytest.raises(SharingError, match="a shared stream cannot be copied or sent"):
        copy.deepcopy(stream)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_view_in_a_forked_process_says_where_it_belongs(stream: SharedStream) -> None:
    view = stream.view(name="mine")
    iterator = iter(view)
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            words = f"mine belongs to process {os.getppid()}"
            for use in (lambda: next(iterator), lambda: iter(view)):
                with pytest.raises(SharingError, match=words):
                    use()
            with pytest.raises(SharingError, match="a shared stream belongs to process"):
                stream.view()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with lone() as expected:
        assert served(view) == passes(expected, 2)[BATCHES:]


@pytest.mark.parametrize("how", ["stream", "loader"])
def test_the_end_of_a_stream_is_told_and_nothing_is_lost(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = lone()
    stream = SharedStream(loader)
    views = [stream.view(), stream.view(batch_size=2)]
    open_ = [iter(view) for view in views]
    for number, iterator in enumerate(open_, 1):
        for _ in range(number):
            next(iterator)
    {"stream": stream, "loader": loader}[how].close()
    words = {"stream": "stream was closed: nothing is lost", "loader": "loader .* was closed"}[how]
    for iterator in open_:
        with pytest.raises(PassEnded, match=words):
            for _ in iterator:
                pass
    with SharedStream(loader) as again, lone() as expected:
        whole = served(expected)
        resumed = [again.view(), again.view(batch_size=2)]
        for view, before in zip(resumed, views, strict=True):
            state = before.state_dict()
            view.load_state_dict(state)
        assert served(resumed[0]) == whole[state["served_batches"] // 2 :][-len(resumed[0]) :]
        ids = [i for ids, _ in served(resumed[1]) for i in ids]
        assert ids == [i for ids, _ in whole for i in ids][state["served_batches"] * 2 :]
        assert "alone" not in caplog.text, "the stream began where the slower one stood"
        for view in resumed:
            view.close()
    loader.close()


def test_one_iterator_of_a_view_ends_the_other(stream: SharedStream) -> None:
    view = stream.view(name="mine")
    first = iter(view)
    next(first)
    second = iter(view)
    next(second)
    with pytest.raises(PassEnded, match=r"mine began another one.*use one iterator at a time"):
        next(first)
    assert view.state_dict()["pass"] == 1, "as with a lone loader, the pass that was left is over"
    next(second)
    view.close()


def test_a_state_of_a_view_with_other_pieces_is_refused(stream: SharedStream) -> None:
    whole, cut = stream.view(), stream.view(batch_size=2)
    next(iter(cut))
    with pytest.raises(StateError, match=r"cut into 2 pieces, this view cuts them into 1"):
        whole.load_state_dict(cut.state_dict())
    with pytest.raises(StateError, match=r"cut into 1 pieces, this view cuts them into 2"):
        cut.load_state_dict(whole.state_dict())
    with lone() as loader, pytest.raises(StateError, match=r"cuts batches into 2 pieces"):
        loader.load_state_dict(cut.state_dict())
    state = lone(seed=5).state_dict()
    with SharedStream(lone(seed=1)) as given, pytest.raises(StateError, match="seed"):
        given.view().load_state_dict(state)
    cut.close()
    whole.close()


class Pair(NamedTuple):
    picture: Any
    name: Any


def info(rows: int) -> BatchInfo:
    numbers = np.arange(rows)
    return BatchInfo(3, 5, numbers, numbers * 10, numbers * 0, numbers * 0 + 1)


def test_every_part_of_a_batch_is_cut_at_the_same_rows() -> None:
    pixels = torch.arange(10).view(5, 2)
    batch = {"a": [pixels, ["p", "q", "r", "s", "t"]], "b": Pair(pixels + 1, ("v",) * 5)}
    first, second, third = cut_batch(batch, info(5), pieces=4, size=2)
    assert torch.equal(first[0]["a"][0], pixels[:2])
    assert second[0]["a"][1] == ["r", "s"]
    assert isinstance(third[0]["b"], Pair)
    assert torch.equal(third[0]["b"].picture, pixels[4:] + 1)
    assert third[0]["b"].name == ("v",)
    assert [piece.batch_index for _, piece in (first, second, third)] == [20, 21, 22]
    assert [piece.ids.tolist() for _, piece in (first, second, third)] == [[0, 10], [20, 30], [40]]


@pytest.mark.parametrize("part", [torch.zeros(3), ["p", "q", "r"], "word", 7])
def test_a_part_without_a_row_for_each_sample_is_refused(part: Any) -> None:
    with pytest.raises(SharingError, match=r"no row for each of them.*leave batch_size out"):
        cut_batch([torch.zeros(4, 1), part], info(4), pieces=2, size=2)
