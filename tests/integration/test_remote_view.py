"""A view for another process is a lone loader: states, wishes, ends. Here both ends are in this
process, because what goes over the link is the same."""

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

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
    sent,
    story_of_a_bad_sample,
)

from loaders import SharedStream
from loaders.errors import PassEnded, SharingError
from loaders.sharing import view_server
from loaders.sharing.remote_view import RemoteView
from loaders.sharing.view_link import ViewLink

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="remote views need Linux"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


# ---- what is served -----------------------------------------------------------------------------


def test_batches_that_are_kept_stay_as_they_were(stream: SharedStream) -> None:
    view = stream.remote_view()
    kept = [batch for _ in range(3) for batch in view]
    with lone() as expected:
        assert [(tuple(ids.tolist()), x.numpy().tobytes()) for x, ids in kept] == passes(
            expected, 3
        )
    assert view.stats.batch_bytes < 20 * kept[0][0].nbytes
    view.close()
    assert kept[-1][1].tolist()


# ---- where it is --------------------------------------------------------------------------------


def test_it_counts_what_was_served_and_not_what_was_sent_ahead(stream: SharedStream) -> None:
    """Within a pass, after one that was left, and after its end."""
    view = stream.remote_view()
    with lone() as alone:
        for batches in (2, 5, None, 1):
            assert served(view, batches) == served(alone, batches)
            mine, theirs = view.state_dict(), alone.state_dict()
            for name in ("decoded", "reused", "served", "serves", "mean_age"):
                assert mine["stats"][name] == theirs["stats"][name], name
            assert mine | {"stats": 0} == theirs | {"stats": 0}
            assert view.last_batch is not None and alone.last_batch is not None
            assert view.last_batch.ids.tolist() == alone.last_batch.ids.tolist()
            assert len(view) == len(alone)
    view.close()


def test_an_iterator_is_told_that_its_view_has_another_place(stream: SharedStream) -> None:
    view = stream.remote_view(name="mine")
    state = view.state_dict()
    for change in (lambda: next(iter(view)), lambda: view.load_state_dict(state), view.close):
        first = iter(view)
        next(first)
        change()
        with pytest.raises(PassEnded, match="mine began another one, loaded a state or was closed"):
            next(first)
    view.close()


def test_wishes_hold_from_the_next_pass_on_though_batches_were_sent_ahead() -> None:
    options = {"reuse": 2, "reaugment": False}
    with SharedStream(lone(**options), window=99) as stream, lone(**options) as alone:
        there = stream.remote_view()
        assert (there.reuse, there.reaugment, there.batch_size) == (2, False, BATCH)

        def told(loader: Any) -> list[Any]:
            taken: list[Any] = []
            for number, (pictures, ids) in enumerate(loader):
                taken.append((ids.tolist(), pictures.numpy().tobytes()))
                if number == 2:
                    loader.set_reuse(3, reaugment=True)
                if number == 2 * BATCHES - 2:
                    loader.limit_pass(5)
                taken.append((len(loader), loader.state_dict()["next"]))
            info = loader.last_batch
            return [*taken, info.serves.tolist(), info.draws.tolist()]

        for _ in range(3):
            assert told(there) == told(alone)
        assert (there.reuse, there.reaugment, len(there)) == (3, True, 5)
        there.set_reuse(1, batch_size=BATCH // 2)
        alone.set_reuse(1, batch_size=BATCH // 2)
        assert there.batch_size == BATCH // 2
        there.limit_pass(None)
        alone.limit_pass(None)
        assert passes(there, 2) == passes(alone, 2)
        there.close()


def test_it_goes_on_where_it_was_closed(stream: SharedStream) -> None:
    view = stream.remote_view()
    with lone() as alone:
        assert served(view, 2) == served(alone, 2)
        state = view.state_dict()
        view.close()
        view.close()
        assert view.state_dict() == state
        assert passes(sent(view), 1) == passes(alone, 1), "in another process, the next pass"
        gc.collect()


# ---- who leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "dropped", "never opened"])
def test_who_leaves_frees_the_others(how: str) -> None:
    with SharedStream(lone(), window=2) as stream:
        one, other = stream.view(), stream.remote_view()
        if how != "never opened":
            served(other, 1)
        if how == "dropped":
            del other
            gc.collect()
        else:
            other.close()
        with lone() as expected:
            assert passes(one, 3) == passes(expected, 3)
        one.close()


def test_who_closes_a_view_frees_the_others_though_a_forked_process_has_it_open() -> None:
    with SharedStream(lone(), window=2) as stream:
        one, other = stream.view(), stream.remote_view()
        served(other, 1)
        child = os.fork()
        if child == 0:
            time.sleep(600)
        try:
            other.close()
            with lone() as expected:
                assert passes(one, 2) == passes(expected, 2)
            one.close()
            # The child has the socket of the stream open, too.
            stream.close()
            with pytest.raises(PassEnded, match="has closed it or has ended"):
                served(sent(other))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_others_wait_for_a_view_that_is_not_opened_yet() -> None:
    with SharedStream(lone(), window=2) as stream:
        one, late = stream.view(), stream.remote_view()
        taken: list[Any] = []
        worker = threading.Thread(target=lambda: taken.extend(passes(one, 1)), daemon=True)
        worker.start()
        worker.join(0.3)
        assert worker.is_alive()
        assert passes(late, 1)[-1] == passes(lone(), 1)[-1]
        late.close()
        worker.join(60)
        assert len(taken) == BATCHES
        assert stream.stats.extra_decodes == 0
        one.close()


def test_the_end_of_a_stream_is_told_and_nothing_is_lost() -> None:
    loader = lone()
    stream = SharedStream(loader)
    idle, waits, late = (stream.remote_view(name=name) for name in ("idle", "waits", "late"))
    first = iter(idle)
    next(first)
    taken: list[Any] = []
    raised: list[BaseException] = []

    def take() -> None:
        try:
            taken.extend(batch for _ in range(99) for batch in served(waits))
        except PassEnded as error:
            raised.append(error)

    stream.kept.window = 1  # so it must wait for the one that is late
    worker = threading.Thread(target=take, daemon=True)
    worker.start()
    worker.join(0.2)
    stream.close()
    worker.join(60)
    assert [type(error) for error in raised] == [PassEnded]
    with pytest.raises(PassEnded, match="shared stream"):
        for _ in first:
            pass
    state = idle.state_dict()
    assert state["served_batches"] >= 1
    for use in (lambda: served(idle), lambda: len(late), lambda: served(late)):
        with pytest.raises(PassEnded, match="has closed it or has ended"):
            use()
    with SharedStream(loader) as again, lone() as expected:
        view = again.remote_view()
        view.load_state_dict(state)
        assert served(view) == served(expected)[state["served_batches"] :]
    loader.close()


# ---- what it refuses, and errors ----------------------------------------------------------------


def test_the_error_of_a_sample_comes_at_its_batch_with_its_type_and_text() -> None:
    options = {"shuffle": False, "dataset": Counted(SIZE, bad=(9,))}

    with SharedStream(lone(**options), window=99) as stream, lone(**options) as expected:
        view = stream.remote_view()
        story = story_of_a_bad_sample(view)
        assert story == story_of_a_bad_sample(expected) == [[0, 1, 2, 3], [4, 5, 6, 7], 2] * 2
        view.close()


def test_what_cannot_be_sent_is_an_error_at_its_batch_and_the_pass_is_not_lost() -> None:
    locks = [threading.Lock()]

    def collate(samples: list[Any]) -> Any:
        ids = torch.tensor([number for _, number in samples])
        return ids, torch.zeros(1), *(locks if 9 in ids else [])

    with SharedStream(lone(collate=collate, shuffle=False), window=99) as stream:
        view = stream.remote_view()
        got: list[int] = []
        with pytest.raises(SharingError, match=r"cannot be sent to another process: .*lock"):
            for ids, _ in view:
                got += ids.tolist()
        state = view.state_dict()
        assert state["served_batches"] == 2
        locks.clear()
        view.load_state_dict(state)
        for ids, _ in view:
            got += ids.tolist()
        assert got == [*range(SIZE)]
        view.close()


def test_an_open_view_is_not_sent_or_copied(stream: SharedStream) -> None:
    view = stream.remote_view(name="mine")
    assert len(view) == BATCHES
    for away in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SharingError, match=f"mine is open in process {os.getpid()}"):
            away(view)
    view.close()
    assert len(sent(view)) == BATCHES
    gc.collect()


def test_a_view_has_one_consumer(stream: SharedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_server, "BUSY_SECONDS", 0.05)
    one = stream.remote_view(name="mine")
    other = sent(one)
    assert len(one) == BATCHES
    with pytest.raises(SharingError, match=f"mine is open in process {os.getpid()} already"):
        len(other)
    other.close()  # it leaves the consumer alone
    with lone() as expected:
        assert served(one) == served(expected)
    one.close()


def test_who_has_not_the_key_is_not_let_in(stream: SharedStream) -> None:
    view = stream.remote_view(name="mine")
    module = type(view._address)
    wrong = module(view._address.socket, b"guessed", view._address.pid, "mine")
    with pytest.raises(PassEnded, match="has closed it or has ended"):
        len(RemoteView(wrong, view.facts))
    assert len(view) == BATCHES
    view.close()


def test_an_open_view_in_a_forked_process_says_whose_it_is(stream: SharedStream) -> None:
    view = stream.remote_view(name="mine")
    iterator = iter(view)
    next(iterator)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (lambda: next(iterator), lambda: iter(view), lambda: view.set_reuse(2)):
                with pytest.raises(
                    SharingError, match=f"mine was opened by process {os.getppid()}"
                ):
                    use()
            del iterator
            view.close()
            stream.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with lone() as expected:
        next(iter(expected))
        assert len([*iterator]) == BATCHES - 1
        assert served(view) == served(expected)
    view.close()


def test_a_ctrl_c_while_it_waits_ends_the_pass_and_nothing_else(
    stream: SharedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = ViewLink.receive

    def interrupted(link: ViewLink) -> Any:
        if threading.current_thread() is threading.main_thread():  # the consumer, not the server
            raise KeyboardInterrupt
        return receive(link)

    view = stream.remote_view()
    with lone() as alone:
        for loader in (view, alone):
            served(loader, 2)
        state = view.state_dict()
        iterator = iter(view)
        assert served([next(iterator)])[0] == served(alone, 1)[0]
        with monkeypatch.context() as struck, pytest.raises(KeyboardInterrupt):
            struck.setattr(ViewLink, "receive", interrupted)
            for _ in range(BATCHES):  # those that were sent ahead are served before
                next(iterator)
        assert view.state_dict()["served_batches"] >= 1
        assert served(view) == served(alone), "the pass after the one that was left"
        for loader in (view, alone):
            loader.load_state_dict(state)
        assert served(view) == served(alone)
    view.close()
