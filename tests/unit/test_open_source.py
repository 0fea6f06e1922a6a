"""What `open_source` refuses, and what a folder of pictures is found to hold."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from loaders.backends import open_source
from loaders.errors import BackendMissing, LoaderError, SourceError
from loaders.sources.datasets import FolderWalk, PictureArrays, cifar10, picture_folder

ARRAYS = PictureArrays(np.zeros((4, 2, 2, 3), dtype=np.uint8), np.arange(4), ("a", "b"))


def test_a_beton_asks_for_its_backend(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match='backend="ffcv"'):
        open_source(tmp_path / "pictures.beton")


@pytest.mark.parametrize("backend", ["native", "dali"])
def test_a_size_for_a_data_set_that_has_one_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="size=8 has no effect"):
        open_source(ARRAYS, backend, size=8)


def test_a_size_for_a_beton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size=8 has no effect"):
        open_source(tmp_path / "pictures.beton", "ffcv", size=8)


@pytest.mark.parametrize("source", [ARRAYS, Path("pictures"), "pictures.tar"], ids=type)
def test_ffcv_reads_betons_alone_and_says_how_to_write_one(source: Any) -> None:
    with pytest.raises(SourceError, match=r"reads \.beton files.*python -m loaders\.convert"):
        open_source(source, "ffcv")


def test_dali_decodes_files_alone() -> None:
    with pytest.raises(SourceError, match=r"dali backend decodes pictures in files.*PictureArrays"):
        open_source(ARRAYS, "dali")


@pytest.mark.parametrize(("backend", "package"), [("dali", "nvidia.dali"), ("ffcv", "ffcv")])
def test_a_missing_package_names_the_extra_that_brings_it(
    backend: Any,
    package: str,
    tmp_path: Path,
    make_pictures: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    folder = picture_folder(make_pictures(tmp_path, {"cat": 1, "dog": 1}), 8)
    (tmp_path / "pictures.beton").touch()
    source = tmp_path / "pictures.beton" if backend == "ffcv" else folder
    with pytest.raises(BackendMissing, match=rf"\.\[{backend}\]") as error:
        open_source(source, backend)
    assert isinstance(error.value, LoaderError)
    assert isinstance(error.value.__cause__, ImportError)


TREE = (
    "cat/b.jpg", "cat/a.JPEG", "cat/a/z.png", "cat/a.b/x.jpg", "cat/a-b.jpg", "cat/deep/er/c.jpg",
    "dog/10.jpg", "dog/9.jpg", "dog/9/1.jpg", "dog/note.txt", "emu/é.webp", "emu/E.jpg",
)  # fmt: skip


def grown(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def test_a_folder_has_the_pictures_and_labels_that_torchvision_finds(tmp_path: Path) -> None:
    ours, theirs = picture_folder(grown(tmp_path, *TREE)), ImageFolder(str(tmp_path))
    found = {str(path): label for path, label in zip(ours.paths, ours.labels, strict=True)}
    assert found == dict(theirs.samples)
    assert len(ours) == len(theirs) == 11
    assert list(ours.classes) == theirs.classes


def test_pictures_come_in_the_order_of_their_folders_and_names(tmp_path: Path) -> None:
    found = [*map(Path, picture_folder(grown(tmp_path, *TREE)).paths)]
    assert found == sorted(found), "as paths are sorted: part by part"


def test_a_link_to_a_folder_above_or_to_itself_ends_no_walk(tmp_path: Path) -> None:
    grown(tmp_path, "cat/a.jpg", "cat/deep/b.jpg")
    (tmp_path / "cat" / "deep" / "up").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "self").symlink_to(tmp_path / "cat" / "self")
    (tmp_path / "cat" / "gone").symlink_to(tmp_path / "nowhere")
    found = [Path(name).name for name in FolderWalk(tmp_path).files_under(str(tmp_path / "cat"))]
    assert found == ["a.jpg", "b.jpg", "gone", "self"]


def test_a_folder_that_changed_is_read_as_it_is_now(tmp_path: Path) -> None:
    """No list of files is kept from one opening to the next."""
    grown(tmp_path, "cat/a.jpg", "dog/b.jpg")
    assert len(picture_folder(tmp_path)) == 2
    grown(tmp_path, "cat/c.jpg")
    assert len(picture_folder(tmp_path)) == 3
    (tmp_path / "cat" / "a.jpg").unlink()
    assert [Path(path).name for path in picture_folder(tmp_path).paths] == ["c.jpg", "b.jpg"]


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


def test_a_damaged_cifar10_says_where_it_should_lie(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(SourceError, match=r"is damaged.*cifar-10-batches-py"):
        cifar10(tmp_path, train=True)
