"""A picture of Pillow comes back to a user's own code in its own mode, or is refused."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_tensor

from loaders import LoaderError, ReuseLoader

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
AS_THEY_ARE = ("RGB", "L", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "F")
AS_RGB = ("1", "P", "LA", "PA", "I;16")


def in_mode(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    if mode == "PA":
        return RGB.convert("P").convert("PA")
    if mode == "LAB":
        return Image.frombytes("LAB", RGB.size, RGB.tobytes())
    return RGB.convert(mode)


class Opened:
    """Sample i is a picture of the i-th mode."""

    def __init__(self, *modes: str) -> None:
        self.pictures = [in_mode(mode) for mode in modes]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Image.Image:
        return self.pictures[index].copy()


def seen(source: Any, **options: Any) -> list[Any]:
    """What a collate function is given, pass by pass."""
    with ReuseLoader(
        source, 1, 2, shuffle=False, workers=1, collate=lambda samples: samples[0], **options
    ) as loader:
        return [*loader]


@pytest.mark.parametrize("order", [AS_THEY_ARE[:3], AS_THEY_ARE[2::-1]])
def test_pictures_of_several_modes_come_back_as_they_were(order: tuple[str, ...]) -> None:
    pictures = Opened(*order)
    for mine, theirs in zip(seen(pictures), [*pictures, *pictures], strict=True):
        assert (mine.mode, mine.tobytes()) == (theirs.mode, theirs.tobytes())


@pytest.mark.parametrize("mode", AS_THEY_ARE)
def test_a_picture_of_a_mode_that_is_stored_comes_back_as_it_was(mode: str) -> None:
    assert {(each.mode, each.tobytes()) for each in seen(Opened(mode, mode))} == {
        (mode, in_mode(mode).tobytes())
    }


@pytest.mark.parametrize("mode", AS_RGB)
@pytest.mark.parametrize("before", [(), ("RGB",)])
def test_a_picture_that_cannot_come_back_as_it_was_is_refused(
    mode: str, before: tuple[str, ...]
) -> None:
    with pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"):
        seen(Opened(*before, mode))
    with (
        pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"),
        ReuseLoader(Opened(*before, mode), 1, 1, shuffle=False, workers=1, augment=as_array) as it,
    ):
        list(it)


def as_array(picture: Image.Image) -> Any:
    return np.array(picture)


@pytest.mark.parametrize("mode", AS_RGB)
def test_without_code_that_wants_single_pictures_they_are_batched_as_rgb(mode: str) -> None:
    with ReuseLoader(Opened(mode, "RGB"), 2, 1, workers=1) as loader:
        [batch] = list(loader)
    assert batch.shape == (2, 3, 8, 8)


@pytest.mark.parametrize("mode", ["1", "LA", "P"])
def test_an_adopted_folders_own_transform_sees_no_other_mode_than_torchvision_gives_it(
    mode: str, tmp_path: Any
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        in_mode(mode).save(tmp_path / name / "a.png")

    with pytest.raises(LoaderError, match=f"mode '{mode}'.*convert"):
        given = ImageFolder(str(tmp_path), transforms.Lambda(to_tensor), loader=Image.open)
        list(ReuseLoader(given, 2, 2, workers=1))
    with ReuseLoader(
        ImageFolder(str(tmp_path), transforms.Lambda(to_tensor)), 2, 1, workers=1
    ) as it:
        [(pictures, _)] = list(it)
    assert (pictures == to_tensor(in_mode(mode).convert("RGB"))).all()
