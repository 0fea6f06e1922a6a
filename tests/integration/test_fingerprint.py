"""The name of a folder of pictures: another one whenever a decoded sample could be another."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loaders.cache.fingerprint import fingerprint
from loaders.errors import CacheError
from loaders.sources.datasets import PictureFiles, picture_folder


@pytest.fixture
def pictures(tmp_path: Path, make_pictures: Any) -> Path:
    return make_pictures(tmp_path / "pictures", {"cat": 3, "dog": 3})


def lengthen(source: PictureFiles) -> PictureFiles:
    """A longer file whose time of change is the old one."""
    path = Path(source.paths[2])
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return source


def touch(source: PictureFiles) -> PictureFiles:
    os.utime(source.paths[2], ns=(1, 1))
    return source


def rename(source: PictureFiles) -> PictureFiles:
    path = Path(source.paths[2])
    path.rename(path.with_name("009.jpg"))
    return picture_folder(path.parents[1], 16)


def resize(source: PictureFiles) -> PictureFiles:
    return picture_folder(Path(source.paths[0]).parents[1], 8)


def reorder(source: PictureFiles) -> PictureFiles:
    order = [0, 2, 1, 3, 4, 5]
    paths, labels = [source.paths[i] for i in order], [source.labels[i] for i in order]
    return PictureFiles(paths, labels, source.classes, source.decoder)


def relabel(source: PictureFiles) -> PictureFiles:
    return PictureFiles(source.paths, [0, 0, 1, 1, 1, 1], source.classes, source.decoder)


@pytest.mark.parametrize("change", [lengthen, touch, rename, resize, reorder, relabel])
def test_a_change_of_the_files_or_of_the_decoder_changes_the_name(
    change: Callable[[PictureFiles], PictureFiles], pictures: Path
) -> None:
    source = picture_folder(pictures, 16)
    before = fingerprint(source)
    assert fingerprint(picture_folder(pictures, 16)) == before
    assert fingerprint(change(source)) != before


def test_a_folder_that_was_moved_keeps_its_name(pictures: Path) -> None:
    before = fingerprint(picture_folder(pictures, 16))
    moved = pictures.rename(pictures.with_name("elsewhere"))
    assert fingerprint(picture_folder(moved, 16)) == before


def test_a_file_that_is_gone_is_named(pictures: Path) -> None:
    source = picture_folder(pictures, 16)
    Path(source.paths[3]).unlink()
    with pytest.raises(CacheError, match=str(source.paths[3])):
        fingerprint(source)


class Holds:
    """A data set that keeps its samples in a table."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        return self.table.iloc[index]


def test_a_table_keeps_its_name_when_it_is_used() -> None:
    pandas = pytest.importorskip("pandas")
    columns = [[by if number == 250 else 0 for number in range(500)] for by in (0, 1)]
    tables = [
        pandas.DataFrame({"n": column, "t": pandas.to_datetime(column)}).astype({"n": "category"})
        for column in columns
    ]
    before = [fingerprint(Holds(table)) for table in tables]
    for table in tables:
        assert len(list(table.iterrows())) == 500 and str(table) and len(table.loc[3]) == 2
    assert [fingerprint(Holds(table)) for table in tables] == before
    assert before[0] != before[1]


def test_another_process_gives_the_same_name() -> None:
    source = (
        "from unit import test_identity as t\n"
        "print([t.fingerprint(t.Holds([make(0) for make in t.CHANGES.values()]))])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
