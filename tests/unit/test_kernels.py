"""The picture kernels on small pictures that can be checked by eye, and on wrong arguments.

That compiled kernels and torch agree to the bit is `property/test_kernels.py`.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loaders.pixels import kernels
from loaders.pixels.kernels import Pictures, compiled, resized_crop, window

Pixels = NDArray[np.uint8]


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways of doing it, for every test that asks."""
    if request.param == "compiled" and not compiled():
        pytest.skip("the kernels were not compiled")
    if request.param == "torch":
        monkeypatch.setattr(kernels, "kernel_library", lambda: "it was taken away by a test")
        monkeypatch.setattr(kernels, "_warn_of_torch", lambda reason: None)
    yield


def pictures_of(*images: Pixels) -> Pictures:
    return Pictures(
        np.array([image.ctypes.data for image in images], dtype=np.uintp),
        np.array([image.shape[0] for image in images], dtype=np.int32),
        np.array([image.shape[1] for image in images], dtype=np.int32),
        images[0].shape[2],
        images,
    )


def grey(*rows: list[int]) -> Pixels:
    return np.array(rows, dtype=np.uint8)[:, :, None]


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
def test_a_box_of_the_outputs_size_is_copied() -> None:
    image = noise(20, 30)
    np.testing.assert_array_equal(cropped(image, (3, 4, 12, 17), (12, 17)), image[3:15, 4:21])


@pytest.mark.usefixtures("way")
def test_a_picture_of_one_colour_keeps_it_at_every_scale() -> None:
    for colour in range(0, 256, 5):
        image = np.full((23, 31, 3), colour, dtype=np.uint8)
        for size in ((1, 1), (7, 50), (23, 9), (64, 3)):
            assert (cropped(image, (1, 2, 21, 29), size) == colour).all()


@pytest.mark.usefixtures("way")
def test_growing_blends_the_two_nearest_pixels_and_repeats_those_at_the_edge() -> None:
    out = cropped(grey([0, 127]), (0, 0, 1, 2), (1, 4))
    assert out[:, :, 0].tolist() == [[0, 32, 95, 127]]  # 1/4 and 3/4 in steps of 1/127


@pytest.mark.usefixtures("way")
def test_shrinking_by_two_or_more_takes_means_so_that_fine_patterns_turn_grey() -> None:
    stripes = np.tile(grey([0, 200], [0, 200]), (30, 30, 3))
    for size in (30, 15, 10, 1):
        assert (cropped(stripes, (0, 0, 60, 60), (size, size)) == 100).all()
    assert cropped(grey([10, 20, 61]), (0, 0, 1, 3), (1, 1)).item() == 30
    assert cropped(grey([10], [21]), (0, 0, 2, 1), (1, 1)).item() == 16


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
def test_an_empty_batch_is_no_work() -> None:
    nothing = Pictures(np.zeros(0, np.uintp), np.zeros(0, np.int32), np.zeros(0, np.int32), 3, None)
    assert len(nothing) == 0
    out, flips = np.zeros((0, 4, 4, 3), dtype=np.uint8), np.zeros(0, dtype=np.bool_)
    resized_crop(nothing, np.zeros((0, 4), np.int32), flips, None, out)
    window(nothing, np.zeros((0, 2), np.int32), flips, None, out)


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


GOOD: dict[str, Any] = {
    "boxes": np.zeros((2, 4), np.int32) + np.array([0, 0, 1, 1], np.int32),
    "corners": np.zeros((2, 2), np.int32),
    "flips": np.zeros(2, np.bool_),
    "holes": np.zeros((2, 4), np.int32),
    "out": np.zeros((2, 3, 3, 3), np.uint8),
}
READ_ONLY = np.zeros((2, 3, 3, 3), np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("boxes", np.zeros((2, 4), np.int64)),
        ("boxes", np.zeros((1, 4), np.int32)),
        ("boxes", np.zeros((4, 4), np.int32)[::2]),
        ("corners", np.zeros((2, 4), np.int32)),
        ("corners", np.zeros((2, 2), np.float32)),
        ("flips", np.zeros(2, np.int64)),
        ("flips", np.zeros(3, np.bool_)),
        ("holes", np.zeros((2, 4), np.int64)),
        ("holes", np.zeros((2, 2), np.int32)),
        ("out", np.zeros((2, 3, 3, 3), np.float32)),
        ("out", np.zeros((2, 3, 3, 1), np.uint8)),
        ("out", np.zeros((1, 3, 3, 3), np.uint8)),
        ("out", np.zeros((2, 3, 0, 3), np.uint8)),
        ("out", np.zeros((2, 3, 3), np.uint8)),
        ("out", np.zeros((2, 3, 6, 3), np.uint8)[:, :, ::2]),
        ("out", READ_ONLY),
    ],
)
def test_an_array_of_another_type_shape_or_layout_is_refused_by_name(
    what: str, wrong: NDArray[Any]
) -> None:
    pictures = pictures_of(noise(4, 4), noise(4, 4))
    given = {**GOOD, what: wrong}
    places = {resized_crop: "boxes", window: "corners"}
    for kernel, place in places.items():
        if what in {*places.values()} - {place}:
            continue
        with pytest.raises(ValueError, match=f"^{what} is "):
            kernel(pictures, given[place], given["flips"], given["holes"], given["out"])


def test_pictures_that_cannot_be_are_refused() -> None:
    address, two = np.array([64, 64], np.uintp), np.array([2, 2], np.int32)
    for sides in ([2, 0], [2, -3], [2, (1 << 24) + 1]):
        with pytest.raises(ValueError, match=f"picture 1 is {sides[1]}x2"):
            Pictures(address, np.array(sides, np.int32), two, 3, None)
    with pytest.raises(ValueError, match="picture 0 is 2x2 at address 0x0"):
        Pictures(np.array([0, 64], np.uintp), two, two, 3, None)
    with pytest.raises(ValueError, match="widths is int64"):
        Pictures(address, two, two.astype(np.int64), 3, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="0 channels"):
        Pictures(address, two, two, 0, None)


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


def test_why_there_are_no_kernels_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reason = functools.partial(kernels._why_not_built, tmp_path)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(kernels.shutil, "which", {"gcc": "/bin/gcc"}.get)
    assert reason().startswith("this checkout was not built; build them by: pip install -e . ")
    (tmp_path / "perfect_training.egg-info").mkdir()
    assert reason().startswith("when this package was installed, a C compiler was missing or fail")
    monkeypatch.setattr(kernels.shutil, "which", {}.get)
    assert reason().startswith("there is no C compiler: install gcc or clang, then build them by")
    (tmp_path / "loaders/pixels").mkdir(parents=True)
    (tmp_path / "loaders/pixels/_pictures.cpython-27.so").touch()
    assert reason().startswith("they were built for another Python (_pictures.cpython-27.so);")
