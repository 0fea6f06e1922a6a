"""Augmentations of a user's own, in worker processes: in parallel, with the draws of a thread."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import serve_functions as functions

from loaders import LoaderError, ReuseLoader, Workers
from loaders.augment import Flip, WholeSample


def loader(data: Any, augment: Any, **changes: Any) -> ReuseLoader:
    usual: dict[str, Any] = {"reuse": 2, "workers": 1, "seed": 3}
    return ReuseLoader(data, 5, augment=augment, **{**usual, **changes})


def told(batch: Any) -> Any:
    """A batch as plain values, to be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape), batch.tolist()
    if isinstance(batch, dict):
        return {key: told(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [told(part) for part in batch]
    return batch


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


def test_a_run_that_goes_on_in_the_middle_sees_the_same() -> None:
    data, augment = functions.Detections(), [WholeSample(functions.moved)] * 2
    whole = served(data, augment, workers=Workers(1, "process"))
    with loader(data, augment, workers=Workers(2, "process")) as first:
        batches = iter(first)
        begun = [told(next(batches)) for _ in range(3)]
        state = first.state_dict()
    with loader(data, augment, workers=Workers(3, "process")) as second:
        second.load_state_dict(state)
        assert begun + [told(batch) for batch in second] == whole


def test_views_of_whole_samples_are_batches_of_their_own() -> None:
    for batch in loader(functions.Detections(), [WholeSample(functions.moved)] * 2):
        (one, target), (other, same) = batch
        assert torch.equal(one[:, 0], target["mask"]) and torch.equal(other[:, 0], same["mask"])
        assert torch.equal(target["id"], same["id"])


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


def test_data_that_lie_in_memory_are_augmented_in_processes_too() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20).reshape(20, 1, 1), torch.arange(20))
    with loader(data, WholeSample(functions.who), workers=Workers(2, "process")) as made:
        for numbers, pids in made:
            assert os.getpid() not in pids.tolist() and len(numbers) == 5


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


def test_numpys_arrays_reach_the_function_as_arrays() -> None:
    for worker_kind in ("thread", "process"):
        with loader(
            functions.Arrays(), WholeSample(functions.flipped), workers=Workers(kind=worker_kind)
        ) as made:
            for batch in made:
                assert torch.equal(batch["image"][..., 0], batch["mask"])


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
