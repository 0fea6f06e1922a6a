"""A view for another process is a lone loader: states, wishes, ends. Here both ends are in this
process, because what goes over the link is the same."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from support.lightning_runs import Module, make_loader, make_trainer
from support.loader_datasets import served
from support.shared_streams import BATCH, BATCHES, SIZE, Counted, lone, passes, sent

from loaders import SharedStream
from loaders.errors import PassEnded, SharingError
from perfect import LoaderCallback

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="remote views need Linux"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


# ---- what is served -----------------------------------------------------------------------------


def test_views_here_and_there_serve_what_a_lone_loader_does_from_one_decode_a_sample() -> None:
    data = Counted(SIZE)
    with SharedStream(lone(dataset=data, reuse=2), window=99) as stream:
        data.reads.clear()  # the loader has looked whether reading repeats itself
        here, there, cut = stream.view(), sent(stream.remote_view()), stream.remote_view(2)
        with lone(reuse=2) as expected:
            whole = passes(expected, 2)
        assert passes(there, 2) == whole
        assert passes(here, 2) == whole
        pieces = passes(cut, 2)
        assert all(len(ids) == 2 for ids, _ in pieces)
        for part in (0, 1):
            joined = [pair[part] for pair in pieces]
            both = [a + b for a, b in zip(joined[::2], joined[1::2], strict=True)]
            assert both == [batch[part] for batch in whole]
        assert stream.stats.decoded == 2 * SIZE
        assert len(data.reads) - 2 * SIZE <= 3 * BATCH, "what was decoded ahead for a third pass"
        for view in (here, there, cut):
            view.close()


class Words(NamedTuple):
    picture: torch.Tensor
    words: list[str]


def test_nests_of_a_collate_function_arrive_as_they_are() -> None:
    def collate(samples: list[Any]) -> Any:
        pictures = torch.stack([picture for picture, _ in samples])
        words = [f"word {number}" for _, number in samples]
        return {"all": Words(pictures, words), "mask": (pictures[:, 0] > 99, None)}

    with SharedStream(lone(collate=collate), window=99) as stream, lone(collate=collate) as alone:
        for mine, theirs in zip(stream.remote_view(), alone, strict=True):
            assert type(mine["all"]) is Words
            assert torch.equal(mine["all"].picture, theirs["all"].picture)
            assert mine["all"].words == theirs["all"].words
            assert torch.equal(mine["mask"][0], theirs["mask"][0])
            assert mine["mask"][1] is None


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


def test_a_state_goes_to_a_lone_loader_to_a_view_of_this_process_and_back() -> None:
    with lone(reuse=2) as expected:
        whole = passes(expected, 2)
    with SharedStream(lone(reuse=2), window=99) as stream:
        there, here = stream.remote_view(), stream.view()
        assert served(there, 3) == whole[:3]
        with lone(reuse=2) as alone:
            alone.load_state_dict(there.state_dict())
            assert served(alone, 2) == whole[3:5]
            here.load_state_dict(alone.state_dict())
        assert served(here, 4) == whole[5:9]
        there.load_state_dict(here.state_dict())
        assert len(there) == 2 * BATCHES
        assert passes(there, 2) == whole[9:]
        assert there.stats.served == 2 * 2 * SIZE
        there.close()
        here.close()


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


def test_facts_are_known_before_it_is_opened(stream: SharedStream) -> None:
    view = sent(stream.remote_view(2, name="mine"))
    assert view._link is None
    assert (view.name, view.mode, view.drop_last, view.seed) == ("mine", "rolling", False, 0)
    assert (view.pieces, view.rank, view.world_size, len(view.dataset)) == (2, 0, 1, SIZE)
    assert view.last_batch is None
    with pytest.raises(SharingError, match="sample 3 cannot be read here"):
        view.dataset[3]
    view.close()


class StopAt(L.Callback):
    """Writes a checkpoint in the middle of a pass, and ends the fit."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_a_trainer_goes_on_with_it_from_a_checkpoint_of_the_middle_of_a_pass(
    tmp_path: Path,
) -> None:
    alone, first, second = Module(), Module(), Module()
    make_trainer(LoaderCallback()).fit(alone, make_loader())
    with SharedStream(make_loader(), window=999) as stream:
        with stream.remote_view() as view:
            stop = StopAt(20, tmp_path / "20.ckpt")
            make_trainer(LoaderCallback(), stop).fit(first, view)
        with stream.remote_view() as view:
            make_trainer(LoaderCallback()).fit(
                second, view, ckpt_path=tmp_path / "20.ckpt", weights_only=True
            )
    assert first.ids[:20] + second.ids == alone.ids
    assert torch.equal(torch.cat(first.pixels[:20] + second.pixels), torch.cat(alone.pixels))
    assert torch.equal(second.net.weight, alone.net.weight)


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

    stream.window = 1  # so it must wait for the one that is late
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
