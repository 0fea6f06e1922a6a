"""What a folder of pictures is found to hold, against torchvision's walk, and what a walk says."""

import itertools
import logging
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from loaders.sources import folder_walk
from loaders.sources.datasets import picture_folder
from loaders.sources.folder_walk import FolderWalk

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
    found = list(picture_folder(grown(tmp_path, *TREE)).paths)
    assert found == sorted(found), "as paths are sorted: part by part"


def test_a_link_to_a_folder_above_or_to_itself_ends_no_walk(tmp_path: Path) -> None:
    grown(tmp_path, "cat/a.jpg", "cat/deep/b.jpg")
    (tmp_path / "cat" / "deep" / "up").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "self").symlink_to(tmp_path / "cat" / "self")
    (tmp_path / "cat" / "gone").symlink_to(tmp_path / "nowhere")
    found = [Path(name).name for name in FolderWalk(tmp_path).files_under(str(tmp_path / "cat"))]
    assert found == ["a.jpg", "b.jpg", "gone", "self"]


def test_a_long_walk_says_how_far_it_has_come_and_a_short_one_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(tmp_path, *(f"cat/{n:02}/{k}.jpg" for n in range(12) for k in range(3)))
    caplog.set_level(logging.INFO, logger="loaders")
    seconds = itertools.count()
    monkeypatch.setattr(folder_walk.time, "monotonic", lambda: next(seconds))
    assert len(list(FolderWalk(tmp_path).files_under(str(tmp_path)))) == 36
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{tmp_path}: looked through {folders} folders with {entries} entries so far"
        for folders, entries in ((6, 25), (11, 40))
    ]
    caplog.clear()
    monkeypatch.setattr(folder_walk.time, "monotonic", lambda: 0.0)
    assert len(list(FolderWalk(tmp_path).files_under(str(tmp_path)))) == 36
    assert caplog.records == []


def test_a_folder_that_changed_is_read_as_it_is_now(tmp_path: Path) -> None:
    """No list of files is kept from one opening to the next."""
    grown(tmp_path, "cat/a.jpg", "dog/b.jpg")
    assert len(picture_folder(tmp_path)) == 2
    grown(tmp_path, "cat/c.jpg")
    assert len(picture_folder(tmp_path)) == 3
    (tmp_path / "cat" / "a.jpg").unlink()
    assert [path.name for path in picture_folder(tmp_path).paths] == ["c.jpg", "b.jpg"]
