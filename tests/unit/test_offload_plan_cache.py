"""The folder of plans: what is read is what was written, or nothing, and never too much is kept."""

import json
import logging
import os
from pathlib import Path

import pytest

from offload.caching.plan_cache import PlanCache

KEY = ("a graph", 7, 0.5)
DATA = {"numbers": [1, 2.5, None], "text": "ü"}


def the_file(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def test_what_was_written_is_read_by_another_object(tmp_path: Path) -> None:
    PlanCache(tmp_path / "new" / "folder").write("plan", KEY, DATA)
    other = PlanCache(tmp_path / "new" / "folder")
    assert other.read("plan", KEY) == DATA
    assert other.read("plan", ("a graph", 7, 0.25)) is None
    assert other.read("costs", KEY) is None


def test_nothing_is_made_before_something_is_kept(tmp_path: Path) -> None:
    assert PlanCache(tmp_path / "plans").read("plan", KEY) is None
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"data": 1}', "\x00\xff", "[" * 100_000],
    ids=["empty", "half", "list", "null", "no digest", "bytes", "deep"],
)
def test_a_damaged_file_is_not_used_and_one_line_names_it(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PlanCache(tmp_path)
    cache.write("plan", KEY, DATA)
    the_file(tmp_path).write_bytes(damage.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        assert cache.read("plan", KEY) is None
    [line] = caplog.messages
    assert str(the_file(tmp_path)) in line
    cache.write("plan", KEY, DATA)
    assert cache.read("plan", KEY) == DATA


def test_a_changed_number_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PlanCache(tmp_path)
    cache.write("plan", KEY, DATA)
    path = the_file(tmp_path)
    held = json.loads(path.read_text(encoding="utf-8"))
    held["data"]["numbers"][0] = 3
    path.write_text(json.dumps(held), encoding="utf-8")
    assert cache.read("plan", KEY) is None and "digest" in caplog.text


def test_a_file_under_the_name_of_another_is_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.write("plan", KEY, DATA)
    first = the_file(tmp_path)
    cache.write("plan", ("another",), {"other": 1})
    [second] = {*tmp_path.iterdir()} - {first}
    os.replace(first, second)
    assert cache.read("plan", ("another",)) is None


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine " * 1000, encoding="utf-8")
    cache = PlanCache(tmp_path, limit=3000)
    for number in range(3):
        cache.write("plan", (number,), "x" * 800)
        for path in tmp_path.glob("plan-*"):  # a file system's clock may stand still
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
    assert cache.read("plan", (0,)) is not None  # it is used now
    cache.write("plan", (3,), "x" * 800)
    assert [cache.read("plan", (n,)) is not None for n in range(4)] == [True, False, True, True]
    cache.write("plan", ("large",), "x" * 5000)
    assert cache.read("plan", ("large",)) is not None
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"notes", "plan-"}
    assert len([*tmp_path.iterdir()]) == 2


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = PlanCache(tmp_path / "file")
    for number in range(2):
        cache.write("plan", (number,), DATA)
    assert len(caplog.messages) == 1 and "not kept" in caplog.text
