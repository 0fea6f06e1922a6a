"""The compiled kernels against torch, bit for bit, and both against float arithmetic.

The oracle knows nothing of fixed point: `np.interp` between the centres of the (boxed) pixels.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.products import examples

from loaders.pixels import kernels
from loaders.pixels.kernels import Pictures, resized_crop, window

Pixels = NDArray[np.uint8]
MADE = pytest.mark.skipif(not kernels.compiled(), reason="the kernels were not compiled")


@dataclass(frozen=True)
class Job:
    """One batch: what is read, from where, and the shape of what is written."""

    images: list[Pixels]
    boxes: NDArray[np.int32]
    corners: NDArray[np.int32]
    flips: NDArray[np.bool_]
    holes: NDArray[np.int32] | None
    size: tuple[int, int]

    def pictures(self) -> Pictures:
        images = self.images
        return Pictures(
            np.array([image.ctypes.data for image in images], dtype=np.uintp),
            np.array([image.shape[0] for image in images], dtype=np.int32),
            np.array([image.shape[1] for image in images], dtype=np.int32),
            images[0].shape[2],
            images,
        )

    def out(self) -> Pixels:
        """In the middle of memory whose other bytes must not change."""
        shape = (len(self.images) + 2, *self.size, self.images[0].shape[2])
        return np.full(shape, 77, dtype=np.uint8)[1:-1]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    channels = draw(st.sampled_from([1, 2, 3, 3, 3, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    small, large = st.integers(1, 9), st.integers(1, 130)
    side = st.one_of(small, large)
    images, boxes, corners = [], [], []
    size = draw(side), draw(side)
    for _ in range(draw(st.integers(1, 4))):
        height, width = draw(side), draw(side)
        tall, wide = draw(st.integers(1, height)), draw(st.integers(1, width))
        # At an edge as often as not: a kernel that reads too far does so there.
        top = draw(st.sampled_from([0, height - tall, (height - tall) // 2]))
        left = draw(st.sampled_from([0, width - wide, (width - wide) // 2]))
        images.append(rng.integers(0, 256, (height, width, channels), dtype=np.uint8))
        boxes.append((top, left, tall, wide))
        corners.append((draw(st.integers(-140, 140)), draw(st.integers(-140, 140))))
    flips = rng.random(len(images)) < 0.5
    holes = rng.integers(-20, 60, (len(images), 4), dtype=np.int32) if draw(st.booleans()) else None
    return Job(
        images,
        np.array(boxes, dtype=np.int32),
        np.array(corners, dtype=np.int32),
        flips,
        holes,
        size,
    )


@MADE
@given(jobs(), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_the_compiled_crop_and_torch_give_the_same_bits(job: Job, portable: bool) -> None:
    pictures, compiled, twin = job.pictures(), job.out(), job.out()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_portable", lambda: portable)
        resized_crop(pictures, job.boxes, job.flips, job.holes, compiled)
    kernels._by_torch(pictures, job.boxes, job.flips, job.holes, twin, resized=True)
    np.testing.assert_array_equal(compiled, twin)
    np.testing.assert_array_equal(around(compiled), 77)


@MADE
@given(jobs(), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_the_compiled_window_and_torch_give_the_same_bits(job: Job, portable: bool) -> None:
    pictures, compiled, twin = job.pictures(), job.out(), job.out()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_portable", lambda: portable)
        window(pictures, job.corners, job.flips, job.holes, compiled)
    kernels._by_torch(pictures, job.corners, job.flips, job.holes, twin, resized=False)
    np.testing.assert_array_equal(compiled, twin)
    np.testing.assert_array_equal(around(compiled), 77)


def around(out: Pixels) -> Pixels:
    assert isinstance(out.base, np.ndarray)
    return out.base[[0, -1]]


@MADE
@given(jobs())
@settings(max_examples=examples(200), deadline=None)
def test_a_crop_is_the_float_bilinear_one_within_its_roundings(job: Job) -> None:
    out = job.out()
    resized_crop(job.pictures(), job.boxes, job.flips, None, out)
    for n, (top, left, tall, wide) in enumerate(job.boxes.tolist()):
        exact = job.images[n][top : top + tall, left : left + wide].astype(np.float64)
        for axis in (0, 1):
            exact = np.apply_along_axis(bilinear, axis, exact, job.size[axis])
        got = out[n, :, ::-1] if job.flips[n] else out[n]
        # An axis: a weight is off by up to 1/254 of a difference of up to 255, then two roundings.
        assert np.abs(got - exact).max() <= 4
        assert np.abs(got - exact).mean() <= 1


def bilinear(line: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    scale = len(line) / size
    box = max(1, int(scale))
    means = [line[k : k + box].mean() for k in range(0, len(line) - box + 1, box)]
    centres = (np.arange(len(means)) + 0.5) * box
    return np.interp((np.arange(size) + 0.5) * scale, centres, means)


@given(jobs())
@settings(max_examples=examples(100), deadline=None)
def test_nothing_outside_the_box_has_a_say(job: Job) -> None:
    out, alone = job.out(), job.out()
    kernels._by_torch(job.pictures(), job.boxes, job.flips, job.holes, out, resized=True)
    cut = [
        np.ascontiguousarray(image[top : top + tall, left : left + wide])
        for image, (top, left, tall, wide) in zip(job.images, job.boxes.tolist(), strict=True)
    ]
    whole = job.boxes * np.array([0, 0, 1, 1], dtype=np.int32)
    other = Job(cut, whole, job.corners, job.flips, job.holes, job.size)
    kernels._by_torch(other.pictures(), whole, job.flips, job.holes, alone, resized=True)
    np.testing.assert_array_equal(out, alone)
