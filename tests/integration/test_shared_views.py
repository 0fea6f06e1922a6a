"""What views of a shared stream and lone loaders have in common, also in a Trainer."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.lightning_runs import Module, make_loader, make_trainer
from support.loader_datasets import served
from support.shared_streams import BATCH, BATCHES, SIZE, Counted, lone, passes

from loaders import SharedStream
from perfect import LoaderCallback, Phase, PhaseSwitch
from perfect.method.phases import PhaseError


@pytest.fixture
def stream() -> Iterator[SharedStream]:
    with SharedStream(lone(), window=2 * BATCHES) as made:
        yield made


@pytest.mark.parametrize("how", ["resumed", "left"])
def test_a_stream_goes_on_where_its_loader_was(how: str) -> None:
    with lone() as loader, lone() as expected:
        for each in (loader, expected):
            served(each, 2)
            if how == "resumed":
                each.load_state_dict(each.state_dict())
        with SharedStream(loader, window=99) as stream:
            views = stream.view(), stream.view()
            whole = passes(expected, 2)
            for view in views:
                assert passes(view, 2) == whole
                assert view.stats.served == expected.stats.served
                view.close()


def test_views_that_resume_apart_share_what_is_left_of_the_pass() -> None:
    data = Counted(SIZE)
    with lone() as expected:
        whole = served(expected)
    with SharedStream(lone(dataset=data)) as stream:
        ahead, behind = stream.view(), stream.view()
        states = []
        for view, batches in ((ahead, 4), (behind, 1)):
            served(view, batches)
            states.append(view.state_dict())
    data.reads.clear()
    with SharedStream(lone(dataset=data)) as stream:
        ahead, behind = stream.view(), stream.view()
        ahead.load_state_dict(states[0])
        behind.load_state_dict(states[1])
        assert served(ahead) == whole[4:]
        assert served(behind) == whole[1:]
        assert stream.stats.decoded == SIZE - BATCH
        assert stream.stats.extra_decodes == 0
        ahead.close()
        behind.close()


def test_views_with_other_wishes_read_their_pass_alone_and_meet_again(
    stream: SharedStream, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = stream.view(), stream.view(name="other")
    other.set_reuse(3)
    with lone() as first, lone(reuse=3) as second:
        assert served(one) == served(first)
        with caplog.at_level(logging.WARNING):
            assert served(other) == served(second)
        assert "other reads pass 0 alone from batch 0 on" in caplog.text
        assert len(other) == 3 * BATCHES
        assert stream.stats.extra_decodes >= SIZE
        for each in (other, second):
            each.set_reuse(1)
        before = stream.stats.extra_decodes
        assert passes(one, 2) == passes(first, 2)
        assert passes(other, 2) == passes(second, 2)
        assert stream.stats.extra_decodes == before
    one.close()
    other.close()


def test_a_views_own_sampler_and_collate_function_run_once_for_all() -> None:
    calls: list[int] = []

    def collate(samples: list[Any]) -> Any:
        calls.append(len(samples))
        noise = torch.rand(())
        return {"x": torch.stack([x for x, _ in samples]) * noise, "ids": [i for _, i in samples]}

    class Sampler(torch.utils.data.Sampler[int]):
        def __len__(self) -> int:
            return SIZE

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(SIZE).tolist())

    options = {"collate": collate, "sampler": Sampler()}

    def batches(loader: Any) -> list[Any]:
        return [(b["x"].numpy().tobytes(), b["ids"]) for _ in range(2) for b in loader]

    with SharedStream(lone(**options), window=99) as stream, lone(**options) as expected:
        views = stream.view(), stream.view()
        first, second = map(batches, views)
        assert len(calls) == 2 * BATCHES
        assert first == second == batches(expected)
        assert views[0].state_dict()["identity"] == expected.state_dict()["identity"]
        for view in views:
            view.close()


def test_memory_is_shared_out_among_the_views(stream: SharedStream) -> None:
    one, other = stream.view(), stream.view()
    served(one)
    assert one.stats.buffer_bytes == other.stats.buffer_bytes == stream.stats.buffer_bytes // 2 > 0
    kept = SIZE * 3 * 8 * 8
    assert stream.stats.batch_bytes >= kept, "the other has taken none"
    served(other)
    assert one.stats.served == other.stats.served == stream.stats.served == SIZE
    one.close()
    other.close()


# ---- in a Trainer -------------------------------------------------------------------------------


def test_trainers_share_a_loader_and_resume_from_their_checkpoints(tmp_path: Path) -> None:
    alone = Module()
    make_trainer(LoaderCallback()).fit(alone, make_loader())
    with SharedStream(make_loader(), window=999) as stream:
        modules = [Module(), Module()]
        views = [stream.view(), stream.view()]
        saver = SaveAt(20, tmp_path / "20.ckpt")
        for module, view in zip(modules, views, strict=True):
            make_trainer(LoaderCallback(), saver).fit(module, view)
        assert stream.stats.decoded == 3 * len(view.dataset)
        resumed, view = Module(), stream.view(batch_size=None)
        make_trainer(LoaderCallback()).fit(
            resumed, view, ckpt_path=tmp_path / "20.ckpt", weights_only=True
        )
        for each in (*views, view):
            each.close()
    for module in modules:
        assert module.ids == alone.ids
        assert torch.equal(torch.cat(module.pixels), torch.cat(alone.pixels))
        assert torch.equal(module.net.weight, alone.net.weight)
    assert resumed.ids == alone.ids[20:]
    assert torch.equal(resumed.net.weight, alone.net.weight)


class SaveAt(L.Callback):
    """Writes a checkpoint in the middle of a pass."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


PHASES = [Phase("reuse", passes=2, reuse=3), Phase("fresh", passes=2, reuse=1)]


def test_phases_of_two_trainers_share_their_passes() -> None:
    alone = Module()
    make_trainer(PhaseSwitch(PHASES), max_epochs=-1).fit(alone, make_loader())
    with SharedStream(make_loader(), window=999) as stream:
        views = [stream.view(), stream.view()]
        for view in views:
            module = Module()
            make_trainer(PhaseSwitch(PHASES), max_epochs=-1).fit(module, view)
            assert module.ids == alone.ids
            assert torch.equal(torch.cat(module.pixels), torch.cat(alone.pixels))
        assert stream.stats.decoded == 4 * len(views[0].dataset)
        for view in views:
            view.close()
        cut = stream.view(batch_size=2, name="cut")
        with pytest.raises(PhaseError, match=r"whole batches, but cut cuts those of its stream"):
            make_trainer(PhaseSwitch(PHASES), max_epochs=-1).fit(Module(), cut)
