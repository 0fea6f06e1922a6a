"""What a view for another process refuses, and the errors of its stream, as they arrive there."""

import copy
import gc
import os
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from support.loader_datasets import served
from support.shared_streams import BATCHES, SIZE, Counted, lone, sent, story_of_a_bad_sample

from loaders import SharedStream
from loaders.errors import PassEnded, SharingError, StateError
from loaders.sharing import view_server
from loaders.sharing.remote_view import RemoteView
from loaders.sharing.view_link import ViewLink

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="remote views need Linux"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


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


def test_what_is_refused_is_refused_here_too_and_the_pass_goes_on(stream: SharedStream) -> None:
    whole, cut = stream.remote_view(), stream.remote_view(2)
    first = iter(whole)
    got = [next(first)[1].tolist()]
    with pytest.raises(StateError, match=r"cut into 2 pieces, this view cuts them into 1"):
        whole.load_state_dict(cut.state_dict())
    with pytest.raises(ValueError, match="reuse must be at least 1, not 0"):
        whole.set_reuse(0)
    with pytest.raises(SharingError, match="batch_size 3 does not divide 4"):
        stream.remote_view(3)
    got += [ids.tolist() for _, ids in first]
    with lone() as expected:
        assert got == [ids.tolist() for _, ids in expected]
    cut.close()
    whole.close()


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
        assert served_batch(next(iterator)) == served(alone, 1)[0]
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


def served_batch(batch: Any) -> tuple[tuple[int, ...], bytes]:
    pictures, ids = batch
    return tuple(ids.tolist()), pictures.numpy().tobytes()
