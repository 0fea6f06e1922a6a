"""Damaged files of the decoded cache cost the samples that they hit. Never wrong pixels."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cache_contents import MIB, NAME, SAMPLES, fill, holds, offer

from loaders.cache.cache_records import encoded_line
from loaders.cache.disk_cache import DiskCache
from loaders.errors import CacheError


def data_of(folder: Path, writer: int = 0) -> Path:
    return folder / NAME / f"writer-{writer}.data"


def index_of(folder: Path, writer: int = 0) -> Path:
    return folder / NAME / f"writer-{writer}.index"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def record_start(sample_id: int) -> int:
    return sample_id * 4800  # 40 * 40 * 3 bytes, a multiple of 64


def blank_sample_3(folder: Path) -> None:
    """As after a power cut: the line was kept, the bytes were lost."""
    with data_of(folder).open("r+b") as file:
        file.seek(record_start(3))
        file.write(bytes(4800))


def flip_line_of_sample_3(folder: Path, end: bool) -> None:
    """Flip its last byte, or the first one of the offset that it tells."""
    text, told = index_of(folder).read_bytes(), b"record\t3\t"
    start = text.index(told)
    flip(index_of(folder), text.index(b"\n", start) if end else start + len(told))


DAMAGES: dict[str, tuple[Callable[[Path], object], set[int]]] = {
    "data cut within 5": (lambda to: os.truncate(data_of(to), record_start(5) + 100), {5, 6, 7}),
    "no data": (lambda to: data_of(to).unlink(), {*range(SAMPLES)}),
    "a pixel of 3": (lambda to: flip(data_of(to), record_start(3) + 1234), {3}),
    "3 is blank": (blank_sample_3, {3}),
    "the offset of 3": (lambda to: flip_line_of_sample_3(to, end=False), {3}),
    "the end of the line of 3": (lambda to: flip_line_of_sample_3(to, end=True), {3, 4}),
    "the last line is torn": (
        lambda to: os.truncate(index_of(to), index_of(to).stat().st_size - 1),
        {7},
    ),
    "the header is torn": (lambda to: os.truncate(index_of(to), 10), {*range(SAMPLES)}),
    "rubbish at the end": (
        lambda to: data_of(to).write_bytes(data_of(to).read_bytes() + b"half a record" * 100),
        set(),
    ),
}


@pytest.mark.parametrize("reader", [0, 1], ids=["own files", "files of another rank"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_costs_the_samples_it_hit_and_they_are_kept_anew(
    damage: str, reader: int, tmp_path: Path
) -> None:
    fill(tmp_path)
    do, lost = DAMAGES[damage]
    do(tmp_path)
    for run in range(3):
        with DiskCache(tmp_path, 64 * MIB, NAME, reader) as cache:
            missing = {i for i in range(SAMPLES) if not holds(cache, i)}
            assert missing == (lost if run == 0 else set())
            assert cache.entries == SAMPLES - len(missing)
            assert all(offer(cache, i) for i in missing)
            assert all(holds(cache, i) for i in range(SAMPLES))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("a pixel of 3", ["writer-0.data", "sample 3", "checksum", "decoded again"]),
        ("data cut within 5", ["writer-0.index", "3 records", "decoded again"]),
        ("the end of the line of 3", ["writer-0.index", "1 damaged line"]),
    ],
)
def test_damage_is_said_once_in_the_log(
    damage: str,
    words: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(tmp_path)
    DAMAGES[damage][0](tmp_path)
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        for _ in range(2):
            for i in range(SAMPLES):
                cache.read(i)
    [warning] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert all(word in warning.message for word in words), warning.message


def test_a_bad_record_is_found_once_for_all_later_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    DAMAGES["a pixel of 3"][0](tmp_path)
    with DiskCache(tmp_path, 64 * MIB, NAME, 1) as cache:
        assert not holds(cache, 3)
    caplog.clear()
    with DiskCache(tmp_path, 64 * MIB, NAME, 2) as cache:
        assert not holds(cache, 3)
        assert cache.entries == SAMPLES - 1
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]


def another_version(folder: Path) -> None:
    _, _, rest = index_of(folder).read_bytes().partition(b"\n")
    index_of(folder).write_bytes(encoded_line(f"header\t99\t{NAME}") + rest)


def another_fingerprint(folder: Path) -> None:
    _, _, rest = index_of(folder).read_bytes().partition(b"\n")
    index_of(folder).write_bytes(encoded_line("header\t1\tdata-of-yesterday") + rest)


def a_flipped_header(folder: Path) -> None:
    flip(index_of(folder), 12)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (another_version, ["format 99", "delete the folder"]),
        (another_fingerprint, ["data-of-yesterday", NAME, "delete the folder"]),
        (a_flipped_header, ["damaged at its beginning", "delete the folder"]),
    ],
)
def test_an_index_of_something_else_is_refused_and_left_as_it_is(
    damage: Callable[[Path], None],
    words: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fill(tmp_path)
    damage(tmp_path)
    before = index_of(tmp_path).read_bytes(), data_of(tmp_path).read_bytes()
    with pytest.raises(CacheError) as error:
        DiskCache(tmp_path, 64 * MIB, NAME, 0)
    assert all(word in str(error.value) for word in [*words, str(index_of(tmp_path))])
    # Another rank goes on without it, and says so.
    with DiskCache(tmp_path, 64 * MIB, NAME, 1) as cache:
        assert cache.entries == 0
        assert offer(cache, 0)
        cache.refresh()
    assert [r for r in caplog.records if words[0] in r.message]
    assert (index_of(tmp_path).read_bytes(), data_of(tmp_path).read_bytes()) == before
