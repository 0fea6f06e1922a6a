"""Augmentations of a user's own, parts and views: in workers, resumed, shared, cached, in lanes."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import serve_functions as functions
from support.serve_functions import told

from loaders import Cache, Device, LaneLoader, LoaderError, ReuseLoader, SharedStream, Workers
from loaders.augment import Chain, Flip, PadCrop, RandomResizedCrop, WholeSample


def loader(data: Any, augment: Any, **changes: Any) -> ReuseLoader:
    usual: dict[str, Any] = {"reuse": 2, "workers": 1, "seed": 3}
    return ReuseLoader(data, 5, augment=augment, **{**usual, **changes})


def served(data: Any, augment: Any, **changes: Any) -> list[Any]:
    with loader(data, augment, **changes) as made:
        return [told(batch) for batch in made]


@pytest.mark.parametrize(
    ("data", "augment", "views"),
    [("Detections", "moved", 2), ("Pictures", "noisy", 1), ("Pictures", "crop", 2)],
)
def test_processes_give_what_the_consumers_thread_gives(
    data: str, augment: str, views: int
) -> None:
    function, samples = getattr(functions, augment), getattr(functions, data)()
    whole = WholeSample(function) if data == "Detections" else function
    each = whole if views == 1 else [whole] * views
    assert served(samples, each) == served(samples, each, workers=Workers(2, "process"))


def test_parts_move_together_and_draw_anew_at_every_serve() -> None:
    seen: dict[int, set[str]] = {}
    with loader(
        functions.Detections(), WholeSample(functions.moved), workers=Workers(2, "process")
    ) as made:
        for pictures, target in made:
            assert torch.equal(pictures[:, 0], target["mask"])
            for picture, number in zip(pictures, target["id"].tolist(), strict=True):
                seen.setdefault(number, set()).add(str(picture.tolist()))
    assert len(seen) == 20
    assert sum(len(each) for each in seen.values()) > 30  # of 40 serves, few are alike


def test_several_processes_change_one_batch(tmp_path: Path) -> None:
    meeting = WholeSample(functions.Meeting(str(tmp_path)))
    options: dict[str, Any] = {"workers": Workers(2, "process"), "reuse": 1}
    with ReuseLoader(functions.Pictures(), 20, augment=meeting, **options) as made:
        (batch,) = made
    assert sorted(batch.tolist()) == list(range(20))


def test_a_users_function_does_not_run_in_this_process() -> None:
    for worker_kind, here in (("thread", True), ("process", False)):
        with loader(
            functions.Pictures(), WholeSample(functions.who), workers=Workers(kind=worker_kind)
        ) as made:
            for _, pids in made:
                assert all((pid == os.getpid()) == here for pid in pids.tolist())


def test_an_error_of_the_function_comes_at_the_same_batch() -> None:
    data, augment = functions.Pictures(), WholeSample(functions.failing)
    counts = []
    for options in ({}, {"workers": Workers(kind="process")}, {"workers": Workers(3, "process")}):
        taken = 0
        said = pytest.raises(ValueError, match="no augmentation for seven")
        with loader(data, augment, **options) as made, said:
            for _ in made:
                taken += 1
        counts.append(taken)
    assert len(set(counts)) == 1


def test_a_process_that_dies_is_replaced_and_nothing_changes(tmp_path: Path) -> None:
    whole = WholeSample(functions.Deadly(str(tmp_path / "unharmed")))
    (tmp_path / "unharmed").touch()
    expected = served(functions.Pictures(), whole)
    deadly = WholeSample(functions.Deadly(str(tmp_path / "mark")))
    assert served(functions.Pictures(), deadly, workers=Workers(kind="process")) == expected
    assert (tmp_path / "mark").exists()


def test_what_cannot_be_sent_runs_here_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pid = os.getpid()
    augment = WholeSample(lambda sample: (sample[1], os.getpid(), float(torch.rand(()))))
    with caplog.at_level(logging.WARNING):
        there = served(functions.Pictures(), augment, workers=Workers(kind="process"))
    assert "cannot be sent to the worker processes" in caplog.text
    assert there == served(functions.Pictures(), augment)
    assert all(found == pid for batch in there for found in batch[1][2])


def test_wrong_uses_are_refused() -> None:
    whole = WholeSample(functions.moved)
    with pytest.raises(ValueError, match="lists a WholeSample beside others"):
        loader(functions.Detections(), [whole, Flip()])
    with pytest.raises(ValueError, match="parts has no effect on a WholeSample"):
        loader(functions.Detections(), whole, parts={1: "mask"})
    with pytest.raises(LoaderError, match=r"a WholeSample\(transform\)"):
        list(loader(functions.Detections(), functions.moved))


# ---- other libraries' transforms ----------------------------------------------------------------


@pytest.mark.parametrize("worker_kind", ["thread", "process"])
def test_albumentations_moves_all_parts(worker_kind: Any) -> None:
    pytest.importorskip("albumentations")
    from support import albumentations_functions as theirs

    runs = [
        served(theirs.Boxed(), WholeSample(theirs.moved), workers=Workers(n, worker_kind))
        for n in (1, 2)
    ]
    assert runs[0] == runs[1]
    with loader(
        theirs.Boxed(), WholeSample(theirs.moved), workers=Workers(kind=worker_kind)
    ) as made:
        for batch in made:
            assert torch.equal(batch["image"][..., 0], batch["mask"])
            for picture, boxes in zip(batch["image"].numpy(), batch["boxes"].tolist(), strict=True):
                rows, columns = np.nonzero(picture[..., 1] == 255)
                surrounds = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert np.allclose(boxes[0], surrounds, atol=1e-3)


def test_kornia_moves_all_parts() -> None:
    pytest.importorskip("kornia")
    from support import kornia_functions as theirs

    here = served(functions.Detections(), WholeSample(theirs.moved))
    assert here == served(
        functions.Detections(), WholeSample(theirs.moved), workers=Workers(2, "process")
    )
    for images, masks in loader(functions.Detections(), WholeSample(theirs.moved)):
        assert torch.equal(images[:, 0], masks[:, 0])


# ---- parts and views through all that a loader does ---------------------------------------------

MOVE = Chain([PadCrop(3), Flip()])
CROPS = [Chain([RandomResizedCrop(8), Flip()])] * 2 + [RandomResizedCrop(4)] * 3
NAMED = {"mask": "mask", "boxes": "boxes_xyxy", "points": "points"}


class Plain:
    """The parts as plain tensors in a dict. It is a function of the index."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(index)
        picture = torch.randint(0, 256, (3, 9, 11), generator=drawn, dtype=torch.uint8)
        left, top = index % 4, index % 5
        return {
            "picture": picture,
            "mask": picture[0].long(),
            "boxes": torch.tensor([[left, top, left + 3.0, top + 2.0]]),
            "points": torch.tensor([[left, top, 2]]),
            "id": index,
        }


def painted(data: Any = None, **changes: Any) -> ReuseLoader:
    usual: dict[str, Any] = {
        "batch_size": 4, "reuse": 3, "buffer_batches": 2, "augment": [MOVE, MOVE],
        "workers": Workers(1, "thread"), "parts": NAMED,
    }  # fmt: skip
    return ReuseLoader(Plain() if data is None else data, **{**usual, **changes})


def all_of(made: ReuseLoader, passes: int = 1) -> list[Any]:
    with made:
        return [told(batch) for _ in range(passes) for batch in made]


def views_agree(batch: dict[str, Any]) -> bool:
    both = zip(batch["picture"], batch["mask"], strict=True)
    return all(torch.equal(picture[:, 0].long(), mask) for picture, mask in both)


@pytest.mark.parametrize("taken", [1, 5, 16])
@pytest.mark.parametrize("reaugment", [True, False])
def test_a_run_that_goes_on_after_any_batch_sees_the_same(taken: int, reaugment: bool) -> None:
    whole = all_of(painted(reaugment=reaugment))
    with painted(reaugment=reaugment, workers=2) as first:
        batches = iter(first)
        for _ in range(taken):
            next(batches)
        state = first.state_dict()
    with painted(reaugment=reaugment) as second:
        second.load_state_dict(state)
        assert [told(batch) for batch in second] == whole[taken:]


def test_a_view_more_needs_no_decode_and_changes_no_other() -> None:
    stats, runs = [], list[list[Any]]()
    for views in (1, 2, 3):
        with painted(augment=MOVE if views == 1 else [MOVE] * views) as made:
            runs.append(list(made))
            stats.append((made.stats.decoded, made.stats.served, made.stats.reused))
    assert len(set(stats)) == 1
    for batch, more in zip(runs[1], runs[2], strict=True):
        assert views_agree(batch) and views_agree(more)
        for name in ("picture", *NAMED):
            assert told(batch[name]) == told(more[name][:2])


def drawn(images: torch.Tensor, draws: Any) -> torch.Tensor:
    return torch.from_numpy(draws.uniform())[:, None, None].expand(-1, 1, 1).clone()


def pictures() -> list[Any]:
    return [(sample["picture"], sample["id"]) for sample in map(Plain().__getitem__, range(22))]


def test_reuse_and_views_multiply_into_different_draws() -> None:
    seen: dict[int, set[float]] = {}
    for views, ids in painted(pictures(), augment=[drawn, drawn], parts=None):
        for view in views:
            for number, value in zip(ids.tolist(), view.flatten().tolist(), strict=True):
                seen.setdefault(number, set()).add(value)
    assert len(seen) == 22 and all(len(each) == 3 * 2 for each in seen.values())


def test_crops_of_several_sizes_have_their_own_parts() -> None:
    for batch in painted(augment=CROPS):
        assert [view.shape[-1] for view in batch["picture"]] == [8, 8, 4, 4, 4]
        assert [mask.shape[-1] for mask in batch["mask"]] == [8, 8, 4, 4, 4]
        for boxes, side in zip(batch["boxes"], (8, 8, 4, 4, 4), strict=True):
            assert boxes.min() >= 0 and boxes.max() <= side


def test_processes_that_read_serve_what_threads_serve() -> None:
    assert all_of(painted()) == all_of(painted(workers=Workers(2, "process")))


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_keeps_parts_and_not_their_draws(cache: Any, tmp_path: Path) -> None:
    folder = tmp_path if cache == "disk" else None
    kept = painted(cache=Cache(cache, 1 << 22, folder))
    assert all_of(kept, 2) == all_of(painted(), 2)


def test_a_shared_stream_serves_and_cuts_views() -> None:
    whole = all_of(painted(batch_size=4, drop_last=True))
    with SharedStream(painted(batch_size=4, drop_last=True)) as stream:
        views = [stream.view(), stream.view(batch_size=2)]
        one, half = iter(views[0]), iter(views[1])
        for expected in whole:
            assert told(next(one)) == expected
            pieces = [next(half) for _ in range(2)]
            for name in ("picture", *NAMED):
                for view in range(2):
                    both = torch.cat([piece[name][view] for piece in pieces])
                    assert told(both) == expected[name][view]


def test_lanes_serve_views() -> None:
    lanes = LaneLoader(painted(batch_size=2), lanes=3)
    with lanes:
        lanes.hold([0, 2])
        for lane in (0, 1, 2):
            assert views_agree(lanes.take(lane).batch)


def test_views_are_made_on_a_device() -> None:
    # A CPU stands for it: the code is the same, but for the streams.
    there = painted(pictures(), parts=None, device=Device("cpu", augments=True))
    assert all_of(there) == all_of(painted(pictures(), parts=None))
