"""The compiled kernels against torch, bit for bit, and both against float arithmetic.

The oracle knows nothing of fixed point: `np.interp` between the centres of the (boxed) pixels.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.products import examples

from loaders.pixels import kernels
from loaders.pixels.kernels import Pictures, compiled, resized_crop, window

Pixels = NDArray[np.uint8]
Kernel = Callable[..., None]
pytestmark = pytest.mark.filterwarnings("ignore:pictures are cropped by torch")
MADE = pytest.mark.skipif(not kernels.compiled(), reason="the kernels were not compiled")


def pictures_of(*images: Pixels) -> Pictures:
    return Pictures(
        np.array([image.ctypes.data for image in images], dtype=np.uintp),
        np.array([image.shape[0] for image in images], dtype=np.int32),
        np.array([image.shape[1] for image in images], dtype=np.int32),
        images[0].shape[2],
        images,
    )


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
        return pictures_of(*self.images)

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


def by_torch(kernel: Kernel, job: Job, places: NDArray[np.int32], out: Pixels) -> None:
    """What is done where nobody has compiled the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kernel_library", lambda: "a test has taken them away")
        kernel(job.pictures(), places, job.flips, job.holes, out)


@MADE
@pytest.mark.parametrize("kernel", [resized_crop, window])
@given(jobs(), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_a_compiled_kernel_and_torch_give_the_same_bits(
    kernel: Kernel, job: Job, portable: bool
) -> None:
    places = job.boxes if kernel is resized_crop else job.corners
    compiled, twin = job.out(), job.out()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_portable", lambda: portable)
        kernel(job.pictures(), places, job.flips, job.holes, compiled)
    by_torch(kernel, job, places, twin)
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
    by_torch(resized_crop, job, job.boxes, out)
    cut = [
        np.ascontiguousarray(image[top : top + tall, left : left + wide])
        for image, (top, left, tall, wide) in zip(job.images, job.boxes.tolist(), strict=True)
    ]
    whole = job.boxes * np.array([0, 0, 1, 1], dtype=np.int32)
    other = Job(cut, whole, job.corners, job.flips, job.holes, job.size)
    by_torch(resized_crop, other, whole, alone)
    np.testing.assert_array_equal(out, alone)


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways of doing it, for every test that asks."""
    if request.param == "compiled" and not compiled():
        pytest.skip("the kernels were not compiled")
    if request.param == "torch":
        monkeypatch.setattr(kernels, "kernel_library", lambda: "it was taken away by a test")
    yield


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def cropped(
    image: Pixels,
    box: tuple[int, int, int, int],
    size: tuple[int, int],
    flip: bool = False,
    hole: tuple[int, int, int, int] | None = None,
) -> Pixels:
    return run(resized_crop, image, box, size, flip, hole)


def windowed(
    image: Pixels,
    corner: tuple[int, int],
    size: tuple[int, int],
    flip: bool = False,
    hole: tuple[int, int, int, int] | None = None,
) -> Pixels:
    return run(window, image, corner, size, flip, hole)


def run(
    kernel: Callable[..., None],
    image: Pixels,
    place: tuple[int, ...],
    size: tuple[int, int],
    flip: bool,
    hole: tuple[int, int, int, int] | None,
) -> Pixels:
    out = np.full((1, *size, image.shape[2]), 77, dtype=np.uint8)
    holes = None if hole is None else np.array([hole], dtype=np.int32)
    kernel(pictures_of(image), np.array([place], dtype=np.int32), np.array([flip]), holes, out)
    return out[0]


# ---- resized_crop --------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_a_picture_of_one_colour_keeps_it_at_every_scale() -> None:
    for colour in range(0, 256, 5):
        image = np.full((23, 31, 3), colour, dtype=np.uint8)
        for size in ((1, 1), (7, 50), (23, 9), (64, 3)):
            assert (cropped(image, (1, 2, 21, 29), size) == colour).all()


@pytest.mark.usefixtures("way")
def test_a_hole_is_a_box_of_the_output_and_may_reach_over_its_edge() -> None:
    image = np.full((9, 9, 3), 50, dtype=np.uint8)
    for do in (
        functools.partial(cropped, image, (0, 0, 9, 9)),
        functools.partial(windowed, image, (0, 0)),
    ):
        out = do((6, 8), flip=True, hole=(-2, 5, 4, 9))
        expected = np.full((6, 8, 3), 50, dtype=np.uint8)
        expected[:2, 5:] = 0
        np.testing.assert_array_equal(out, expected)
        for nowhere in ((0, 0, 0, 5), (2, 2, -1, -1), (6, 0, 5, 5), (0, -5, 9, 5), (9, 9, 9, 9)):
            assert (do((6, 8), hole=nowhere) == 50).all()
        largest = np.iinfo(np.int32).max
        assert (do((6, 8), hole=(0, 0, largest, largest)) == 0).all()


# ---- window --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("corner", [(0, 0), (2, 3), (-4, -4), (4, 4), (-7, 20), (40, 0), (0, -40)])
def test_a_window_is_what_padding_with_zeros_and_cutting_give(
    channels: int, flip: bool, corner: tuple[int, int]
) -> None:
    image, (top, left), pad = noise(17, 29, channels), corner, 100
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    expected = padded[pad + top : pad + top + 17, pad + left : pad + left + 29]
    expected = expected[:, ::-1] if flip else expected
    np.testing.assert_array_equal(windowed(image, corner, (17, 29), flip), expected)


@pytest.mark.usefixtures("way")
def test_a_window_as_far_away_as_a_number_can_say_is_empty() -> None:
    for far in (np.iinfo(np.int32).min, np.iinfo(np.int32).max):
        assert not windowed(noise(4, 5), (far, 0), (3, 3)).any()
        assert not windowed(noise(4, 5), (0, far), (3, 3), flip=True).any()


# ---- both ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    def work(seed: int) -> bytes:
        return cropped(noise(60, 90, seed=seed), (3, 4, 50, 81), (24, 33)).tobytes()

    alone = [work(seed) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(24))) == alone


@pytest.mark.parametrize(
    "box", [(-1, 0, 2, 2), (0, -1, 2, 2), (0, 0, 0, 2), (0, 0, 2, -1), (3, 0, 3, 2), (0, 8, 2, 2)]
)
@pytest.mark.usefixtures("way")
def test_a_box_that_is_not_inside_its_picture_is_refused_by_name(
    box: tuple[int, int, int, int],
) -> None:
    boxes = np.array([(0, 0, 5, 9), box], dtype=np.int32)
    values = "top {}, left {}, height {}, width {}".format(*box)
    with pytest.raises(ValueError, match=rf"box 1 \({values}\) is not inside its picture of 5x9"):
        resized_crop(
            pictures_of(noise(5, 9), noise(5, 9)),
            boxes,
            np.zeros(2, np.bool_),
            None,
            np.zeros((2, 3, 3, 3), np.uint8),
        )


def test_a_box_whose_end_does_not_fit_a_number_is_refused() -> None:
    largest = np.iinfo(np.int32).max
    for box in ((largest, 0, largest, 2), (0, largest, 2, largest), (2, 0, largest, 2)):
        with pytest.raises(ValueError, match="not inside its picture"):
            cropped(noise(5, 9), box, (3, 3))


READ_ONLY = np.zeros((2, 3, 3, 3), np.uint8)
READ_ONLY.flags.writeable = False


# ---- without a compiler --------------------------------------------------------------------------


def test_without_compiled_kernels_a_process_is_warned_once_of_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "kernel_library", lambda: "nobody has built them")
    # The cache that makes it once a process, but an empty one.
    monkeypatch.setattr(
        kernels, "_warn_of_torch", functools.cache(kernels._warn_of_torch.__wrapped__)
    )
    assert not compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            cropped(noise(4, 4), (0, 0, 4, 4), (2, 2))
            windowed(noise(4, 4), (0, 0), (2, 2))
    [warning] = caught
    assert warning.category is RuntimeWarning
    assert str(warning.message).endswith("than by the compiled kernels: nobody has built them")
