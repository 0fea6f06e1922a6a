"""Pictures in folders, in arrays and as CIFAR-10: what they give, and which are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders import ReuseLoader
from loaders.errors import DecodeError, SourceError
from loaders.pixels.augmentation import Flip
from loaders.sources.datasets import PictureArrays, cifar10, picture_folder


def notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", []))


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:120])


def damage_emptied(path: Path) -> None:
    path.write_bytes(b"")


def damage_to_text(path: Path) -> None:
    path.write_text("I am no picture\n" * 20, encoding="utf-8")


def damage_to_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_truncated, damage_emptied, damage_to_text, damage_to_a_folder, damage_removed],
)
def test_a_damaged_picture_is_named_with_what_to_do_about_it(
    damage: Callable[[Path], None], tmp_path: Path, make_pictures: Any
) -> None:
    source = picture_folder(make_pictures(tmp_path, {"cat": 6, "dog": 6}), size=16)
    bad = Path(source.paths[8])
    damage(bad)
    with pytest.raises(DecodeError) as error:
        list(ReuseLoader(source, 4, 2, shuffle=False, workers=2))
    assert str(bad) in str(error.value)
    assert "repair the file or remove it" in str(error.value)
    assert "sample 8 of pass 0" in notes(error.value)
    assert error.value.__cause__ is not None


def test_a_picture_whose_end_is_missing_is_no_picture(tmp_path: Path, make_pictures: Any) -> None:
    # A decoder would fill the rest with grey: the model would learn from it and nobody would know.
    source = picture_folder(make_pictures(tmp_path, {"cat": 2, "dog": 2}), size=16)
    path = Path(source.paths[1])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DecodeError, match=path.name):
        source[1]


@pytest.mark.parametrize(
    ("classes", "complaint"),
    [
        (None, "no folder"),
        ({}, "no pictures under"),
        ({"cat": 0, "dog": 0}, "no pictures under"),
        ({"cat": 3}, "only one class under .*'cat'.*at least two"),
        ({"cat": 3, "dog": 0}, "only one class under .*'cat'.*at least two"),
    ],
    ids=["missing", "empty", "empty classes", "one class", "one class with pictures"],
)
def test_a_folder_that_cannot_be_learned_from_says_why(
    classes: dict[str, int] | None, complaint: str, tmp_path: Path, make_pictures: Any
) -> None:
    root = tmp_path / "pictures"
    if classes is not None:
        root.mkdir()
        make_pictures(root, classes)
    with pytest.raises(SourceError, match=complaint) as error:
        picture_folder(root, size=16)
    assert str(root) in str(error.value)


def test_a_file_in_place_of_the_folder_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("")
    with pytest.raises(SourceError, match="no folder"):
        picture_folder(tmp_path / "pictures", size=16)


def test_a_damaged_cifar10_says_where_it_should_lie(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(SourceError, match=r"is damaged.*cifar-10-batches-py"):
        cifar10(tmp_path, train=True)


def test_pictures_in_memory_are_served_as_they_are() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
    source = PictureArrays(pixels, np.arange(6), ("a", "b"))
    [(pictures, labels)] = ReuseLoader(source, 6, 1, shuffle=False, workers=1)
    assert np.array_equal(pictures.numpy(), pixels.transpose(0, 3, 1, 2))
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_pictures_in_memory_may_be_a_view_of_planes() -> None:
    """As torchvision's CIFAR10 has them: kernels read memory, not views."""
    planes = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), dtype=np.uint8)
    source = PictureArrays(planes.transpose(0, 2, 3, 1), np.arange(6), ("a", "b"))
    [(pictures, _)] = ReuseLoader(source, 6, 1, shuffle=False, workers=1, augment=Flip(p=1.0))
    assert np.array_equal(pictures.numpy(), planes[..., ::-1])
