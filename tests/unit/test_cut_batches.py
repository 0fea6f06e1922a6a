"""Batches cut into smaller ones."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from loaders.arguments import Serving
from loaders.errors import SharingError
from loaders.order.reuse import batches_per_pass
from loaders.sharing.view_batches import BatchCopies, batch_of_piece, cut_batch, pieces_per_pass
from loaders.stats import BatchInfo


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


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", ["rolling", "immediate"])
def test_uncut_passes_are_as_long_as_a_loaders(mode: Any, drop_last: bool) -> None:
    for share in range(4, 20):
        serving = Serving(reuse=3, reaugment=True, batch_size=4)
        whole = batches_per_pass(share, 4, 3, mode, drop_last)
        assert pieces_per_pass(share, serving, 1, mode, drop_last) == whole
        assert pieces_per_pass(share, Serving(3, True, 4, 2), 1, mode, drop_last) == min(2, whole)


@pytest.mark.parametrize("mode", ["rolling", "block", "immediate"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_pieces_are_counted_batch_by_batch(mode: Any, pieces: int) -> None:
    for share, reuse in ((12, 1), (13, 3), (17, 2), (20, 4)):
        items = [share] * reuse if mode == "immediate" else [share * reuse]
        sizes = [min(6, items[0] - at) for at in range(0, items[0], 6) for _ in items]
        told = [
            (number, piece)
            for number, size in enumerate(sizes)
            for piece in range(-(-size * pieces // 6))
        ]
        serving = Serving(reuse, True, 6)
        assert pieces_per_pass(share, serving, pieces, mode, False) == len(told)
        found = [batch_of_piece(n, share, serving, pieces, mode) for n in range(len(told))]
        assert found == told


def test_a_copy_has_the_strides_of_the_batch_and_memory_of_its_own() -> None:
    copies = BatchCopies(pin_memory=False)
    pixels = torch.randint(0, 256, (8, 100, 101, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    batch = {"x": [pixels, torch.arange(8)], "names": ["a"] * 8, "n": np.arange(3)}
    made = copies.copy(batch)
    x = made["x"][0]
    assert torch.equal(x, pixels)
    assert x.stride() == pixels.stride()
    assert made["names"] == batch["names"]
    x.zero_()
    made["x"][1].zero_()
    made["n"][:] = 9
    assert pixels.any()
    assert batch["x"][1].tolist() == list(range(8))
    assert batch["n"].tolist() == [0, 1, 2]


def test_memory_of_a_copy_is_used_again_when_nobody_holds_it() -> None:
    copies, pixels = BatchCopies(pin_memory=False), torch.ones(1 << 17)
    held = [copies.copy(pixels) for _ in range(3)]
    assert copies.nbytes == 3 * pixels.nbytes
    first = held[0].data_ptr()
    del held[0]
    assert copies.copy(pixels).data_ptr() == first


def test_parts_that_share_memory_share_it_in_a_copy_too() -> None:
    pixels = torch.ones(4, 3)
    made = BatchCopies(pin_memory=False).copy([pixels, pixels[0]])
    made[0].zero_()
    assert not made[1].any()
    assert pixels.all()


def test_a_tensor_of_another_class_stays_one() -> None:
    class Marked(torch.Tensor): ...

    made = BatchCopies(pin_memory=False).copy([torch.ones(2).as_subclass(Marked)])
    assert type(made[0]) is Marked
