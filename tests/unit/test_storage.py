"""The slab: what is written into a slot comes out of it, and its size is known to the byte."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.products import examples

from loaders.blocks import Blocks
from loaders.errors import BufferTooSmall, SampleShapeError
from loaders.slots.slab import Slab

law = settings(max_examples=examples(50), deadline=None)


class Pair(NamedTuple):
    picture: torch.Tensor
    label: int


def gathered(slab: Slab, *slots: int) -> Any:
    blocks = Blocks(spare=1)
    return slab.nest.batch([column.gather(np.array(slots), blocks) for column in slab.columns])


@pytest.mark.parametrize(
    ("sample", "bytes_a_slot"),
    [
        (torch.zeros(3, 4, 5, dtype=torch.uint8), 60),
        (torch.zeros(3, 4, 5), 240),
        (torch.zeros(3, 4, 5, dtype=torch.float16), 120),
        (np.zeros((2, 3), np.int16), 12),
        ((torch.zeros(7, dtype=torch.uint8), 3), 7 + 8),
        ({"a": 1, "b": [2.5, True]}, 8 + 8 + 1),
        (Image.new("RGB", (5, 4)), 60),
        (Image.new("L", (5, 4)), 20),
        (np.float32(1), 4),
        ("a word takes no slab memory", 0),
        ((torch.zeros(4, dtype=torch.uint8), "word"), 4),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_a_slab_takes_exactly_the_bytes_of_its_slots(sample: Any, bytes_a_slot: int) -> None:
    assert Slab(sample, 10).nbytes == 10 * bytes_a_slot
    assert Slab(sample, 1).nbytes == bytes_a_slot


@law
@given(
    slots=st.integers(1, 12),
    shape=st.lists(st.integers(1, 4), max_size=4),
    dtype=st.sampled_from([torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool]),
    data=st.data(),
)
def test_what_is_written_into_a_slot_comes_out_of_it(
    slots: int, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    rng = np.random.default_rng(1)
    count = slots + 3
    samples = torch.from_numpy(rng.integers(0, 256, (count, *shape))).to(dtype)
    if data.draw(st.booleans()):
        samples = samples.permute(0, *range(len(shape), 0, -1))  # some other layout in memory
    slab = Slab(samples[0], slots)
    held: dict[int, int] = {}
    for sample in range(count):
        slot = data.draw(st.integers(0, slots - 1))
        slab.write(slot, samples[sample], sample)
        held[slot] = sample
    asked = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, max_size=8))
    batch = gathered(slab, *asked)
    assert batch.dtype == dtype
    assert torch.equal(batch, samples[[held[slot] for slot in asked]])


def test_a_batch_is_nested_as_its_samples_are() -> None:
    def sample(i: int) -> dict[str, Any]:
        picture = torch.full((2, 2), i, dtype=torch.uint8)
        return {"pair": Pair(picture, i), "more": (i / 2, [f"word {i}"]), "flag": i > 1}

    slab = Slab(sample(0), 3)
    for i in range(3):
        slab.write(i, sample(i), i)
    batch = gathered(slab, 2, 0)
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].picture[:, 0, 0].tolist() == [2, 0]
    assert batch["pair"].label.tolist() == [2, 0]
    assert batch["more"][0].tolist() == [1.0, 0.0]
    assert batch["more"][0].dtype == torch.float64
    assert batch["more"][1] == [["word 2", "word 0"]]
    assert batch["flag"].tolist() == [True, False]


@pytest.mark.parametrize(
    "layout",
    [(0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)],
    ids=lambda order: "".join(map(str, order)),
)
def test_a_batch_lies_in_memory_as_its_samples_do(layout: tuple[int, int, int]) -> None:
    """`layout`: dimensions of the sample from the outermost in memory to the innermost."""
    sizes = [3, 4, 5]
    memory = torch.arange(60, dtype=torch.uint8).reshape([sizes[d] for d in layout])
    sample = memory.permute([layout.index(d) for d in range(3)])
    assert sample.shape == (3, 4, 5)
    slab = Slab(sample, 4)
    for slot in range(4):
        slab.write(slot, sample, slot)
    batch = gathered(slab, 3, 1)
    assert torch.equal(batch[0], sample)
    assert batch.stride()[1:] == sample.stride()
    assert batch.stride(0) == 60


def test_a_sample_of_another_layout_but_the_same_shape_fits() -> None:
    slab = Slab(torch.zeros(4, 5, 3).permute(2, 0, 1), 1)
    other = torch.arange(60.0).reshape(3, 4, 5)
    slab.write(0, other, 0)
    assert torch.equal(gathered(slab, 0)[0], other)


def test_a_batch_is_a_copy_and_a_slot_keeps_nothing_of_the_sample_it_was_given() -> None:
    sample = torch.ones(3)
    slab = Slab(sample, 1)
    slab.write(0, sample, 0)
    sample.zero_()
    batch = gathered(slab, 0)
    assert batch.tolist() == [[1, 1, 1]]
    slab.write(0, torch.full((3,), 7.0), 1)
    assert batch.tolist() == [[1, 1, 1]]


def test_a_sample_that_learns_is_refused() -> None:
    slab = Slab(torch.zeros(2), 1)
    with pytest.raises(SampleShapeError, match="requires_grad=True, whose graph would end"):
        slab.write(0, torch.ones(2, requires_grad=True) * 2, 0)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (torch.zeros(4), r"sample 9 is \(4,\)"),
        (torch.zeros(3, 4, dtype=torch.float64), r"sample 9 is torch.float64.*torch.float32"),
        (None, r"sample 9 is NoneType"),
        ("word", r"sample 9 is str"),
        ([torch.zeros(3, 4)] * 2, r"sample 9"),
        ({"picture": torch.zeros(3, 4)}, r"sample 9"),
    ],
    ids=["dimensions", "type", "none", "word", "more parts", "a dict"],
)
def test_a_sample_that_does_not_fit_is_refused_and_its_slot_left_alone(
    sample: Any, complaint: str
) -> None:
    slab = Slab(torch.ones(3, 4), 1)
    slab.write(0, torch.ones(3, 4), 0)
    with pytest.raises(SampleShapeError, match=complaint):
        slab.write(0, sample, 9)
    assert torch.equal(gathered(slab, 0), torch.ones(1, 3, 4))


# ---- samples of several sizes --------------------------------------------------------------------


def test_a_smaller_sample_lies_in_the_slots_row_and_a_larger_one_in_memory_of_its_own() -> None:
    slab = Slab(torch.zeros(3, 4, dtype=torch.uint8), 3)
    samples = [torch.full((2, 5), 7), torch.full((5, 6), 8), torch.full((3, 4), 9)]
    for slot, sample in enumerate(samples):
        slab.write(slot, sample.to(torch.uint8), slot)
    assert [slab.sample(slot).tolist() for slot in range(3)] == [s.tolist() for s in samples]
    assert slab.nbytes == 3 * 12 + 30
    slab.write(1, torch.full((4, 4), 5, dtype=torch.uint8), 3)  # fits into what the slot has got
    assert slab.nbytes == 3 * 12 + 30
    slab.write(1, torch.full((3, 4), 6, dtype=torch.uint8), 4)
    assert gathered(slab, 1, 2)[:, 0, 0].tolist() == [6, 9]


def test_growing_beyond_the_limit_is_refused_with_both_sizes() -> None:
    slab = Slab(torch.zeros(10, dtype=torch.uint8), 2, limit_bytes=40)
    slab.write(0, torch.zeros(20, dtype=torch.uint8), 0)
    with pytest.raises(BufferTooSmall, match=r"21 bytes does not fit.*40 of at most 40"):
        slab.write(1, torch.zeros(21, dtype=torch.uint8), 1)
    assert slab.nbytes == 40


def test_samples_of_several_sizes_make_no_batch_and_the_error_names_two_of_them() -> None:
    slab = Slab((torch.zeros(3, 4), 1), 2)
    slab.write(0, (torch.zeros(3, 4), 1), 0)
    slab.write(1, (torch.zeros(3, 5), 1), 1)
    with pytest.raises(SampleShapeError, match=r"part 0 is \(3, 4\) in one.*\(3, 5\) in another"):
        gathered(slab, 0, 1)
    assert gathered(slab, 1)[0].shape == (1, 3, 5)


def test_a_lent_slot_points_there_until_it_is_written_again() -> None:
    slab = Slab((torch.zeros(2, 3, dtype=torch.uint8), 0), 2)
    there = torch.full((2, 3), 5, dtype=torch.uint8)
    slab.lend(0, [there, 4], 0)
    slab.write(1, (torch.full((2, 3), 1, dtype=torch.uint8), 2), 1)
    pixels, labels = gathered(slab, 0, 1)
    assert pixels[:, 0, 0].tolist() == [5, 1]
    assert labels.tolist() == [4, 2]
    assert slab.leaves(0)[0].data_ptr() == there.data_ptr()
    slab.write(0, (torch.full((2, 3), 8, dtype=torch.uint8), 2), 2)
    assert there.unique().tolist() == [5], "what was lent is never written to"
    assert gathered(slab, 0, 1)[0][:, 0, 0].tolist() == [8, 1]


@pytest.mark.parametrize(
    "sample",
    [
        Image.new("RGB", (5, 4), (1, 2, 3)),
        Image.new("L", (5, 4), 7),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float32(1.5),
        torch.arange(6).reshape(2, 3),
        {"a": (1, 2.5, True), "b": ["word", None]},
        Pair(torch.ones(2, 2), 4),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_a_sample_comes_back_as_what_the_data_set_gave(sample: Any) -> None:
    slab = Slab(sample, 1)
    slab.write(0, sample, 0)
    back = slab.sample(0)
    assert type(back) is type(sample) or isinstance(back, Image.Image)
    assert str(back) == str(sample) or back.tobytes() == sample.tobytes()
    assert type(back) is not Image.Image or (back.mode, back.size) == (sample.mode, sample.size)


def test_bfloat16_is_stored_bit_by_bit() -> None:
    sample = torch.randn(3, 4).to(torch.bfloat16)
    slab = Slab(sample, 2)
    slab.write(1, sample, 0)
    assert torch.equal(gathered(slab, 1)[0], sample)
