"""The decoded cache on disk: kills, full disks, two at once, threads. Never wrong pixels."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cache_contents import MIB, NAME, SAMPLES, fill, holds, offer, picture

from loaders.cache.cache import DecodedCache, RamCache
from loaders.cache.disk_cache import DiskCache
from loaders.errors import CacheError

# ---- killed -------------------------------------------------------------------------------------

WRITER = """
import sys, threading, time
from pathlib import Path
import numpy as np, torch
from loaders.cache.disk_cache import DiskCache

def picture(i, size=40):
    pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1)

cache = DiskCache(Path(sys.argv[1]), 64 * 2**20, "data-of-today", 0)
cache.offer(0, [picture(0), 0, "label"])
def work(first):
    for i in range(first, 10**6, 3):
        cache.offer(i, [picture(i), i, "label"])
        if i == 200:
            print("going", flush=True)
        if i > 200:
            time.sleep(0.005)  # the cache is not full however late the kill comes
for first in range(1, 4):
    threading.Thread(target=work, args=(first,)).start()
"""


def test_who_reads_along_writes_when_the_other_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout and writer.stdout.readline() == b"going\n"
        with DiskCache(tmp_path, 64 * MIB, NAME, 0) as along:
            along.refresh()  # the other one lives
            assert not offer(along, 10**6)
            seen, kept = along.entries, along.read(0)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            along.refresh()
            assert along.entries >= seen
            assert kept is not None and torch.equal(kept[0], picture(0))  # it stays readable
            assert offer(along, 10**6) and holds(along, 10**6)
            whole = [i for i in range(10**4) if holds(along, i)]
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert cache.entries == len(whole) + 1
        assert holds(cache, 10**6) and all(holds(cache, i) for i in whole)


def test_a_writer_that_is_killed_leaves_a_cache_that_opens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"going\n"
        with DiskCache(tmp_path, 64 * MIB, NAME, 0) as along:
            assert along.entries > 50
            assert holds(along, 0)
            assert not offer(along, 10**6)
            assert along.nbytes > 0
        with DiskCache(tmp_path, 64 * MIB, NAME, 1) as beside:
            seen = beside.entries
            assert seen > 50
            assert holds(beside, 0)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
                assert cache.entries >= seen
                whole = [i for i in range(10**4) if holds(cache, i)]
                assert len(whole) == cache.entries
                assert offer(cache, 10**6)
                beside.refresh()
                assert beside.entries == cache.entries
                assert holds(beside, 10**6)
    assert "another live process writes it as number 0; this one reads" in caplog.text
    assert [r for r in caplog.records if "cut off" in r.message and "writer-0.data" in r.message]
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert cache.entries == len(whole) + 1


# ---- no room, no permission, two at once --------------------------------------------------------


def test_a_disk_that_is_full_stops_the_keeping_and_not_the_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert offer(cache, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            assert not any(offer(cache, i) for i in range(1, 5))
        assert not offer(cache, 5)
        assert holds(cache, 0)
        assert cache.entries == 1
    [warning] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "No space left" in warning.message
    assert "what is there is still served (samples: 1)" in warning.message
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert cache.entries == 1
        assert offer(cache, 1)


def test_a_line_that_did_not_fit_on_the_disk_leaves_a_whole_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert offer(cache, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
            assert not offer(cache, 1)
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert [holds(cache, i) for i in range(2)] == [True, False]
        assert offer(cache, 1)
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert all(holds(cache, i) for i in range(2))


def test_a_full_disk_at_the_beginning_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CacheError, match="No space left on device; give a folder"):
            DiskCache(tmp_path, 64 * MIB, NAME, 0)
    fill(tmp_path)  # nothing is left locked


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"no decoded cache in .*file.*give a folder"):
        DiskCache(tmp_path / "file", MIB, NAME, 0)


def test_other_data_lie_in_another_folder_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    caplog.set_level(logging.INFO)
    with DiskCache(tmp_path, 64 * MIB, "data-of-tomorrow", 0) as cache:
        assert cache.entries == 0
        assert not holds(cache, 0)
    [line] = [r.message for r in caplog.records if "other data" in r.message]
    assert NAME in line
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert cache.entries == SAMPLES


def test_a_limit_below_what_is_there_serves_it_all_and_adds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    with DiskCache(tmp_path, 10_000, NAME, 0) as cache:
        assert all(holds(cache, i) for i in range(SAMPLES))
        assert not offer(cache, SAMPLES)
    assert any("the limit is 10000: nothing is added" in r.message for r in caplog.records)


# ---- threads, growth, closing -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_four_threads_that_offer_and_read_see_whole_samples_and_keep_the_limit(
    kind: Any, tmp_path: Path
) -> None:
    limit, ids = 3 * MIB, 600
    failures: list[BaseException] = []
    accepted = [0] * 4
    start = threading.Barrier(4)

    def work(number: int, cache: DecodedCache) -> None:
        try:
            start.wait(60)
            for i in np.random.default_rng(number).permutation(ids).tolist():
                holds(cache, (i * 7) % ids)
                accepted[number] += offer(cache, i)
                assert cache.nbytes <= limit
                holds(cache, i)
        except BaseException as error:
            failures.append(error)

    with RamCache(limit) if kind == "ram" else DiskCache(tmp_path, limit, NAME, 0) as cache:
        threads = [threading.Thread(target=work, args=(n, cache)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not failures
        assert cache.entries == sum(accepted)
        # Nearly all of the limit is used.
        assert limit // 6000 < cache.entries < limit // 4800
        kept = {i for i in range(ids) if holds(cache, i)}
        assert len(kept) == cache.entries
    if kind == "disk":
        with DiskCache(tmp_path, limit, NAME, 1) as cache:
            assert {i for i in range(ids) if holds(cache, i)} == kept


def test_views_stay_valid_while_the_file_grows_and_after_it_is_closed(tmp_path: Path) -> None:
    with DiskCache(tmp_path, 256 * MIB, NAME, 0) as cache:  # room is taken 4 MiB at a time
        assert offer(cache, 0)
        first = cache.read(0)
        assert first is not None
        assert all(offer(cache, i, size=800) for i in range(1, 12))
        assert all(holds(cache, i, size=800) for i in range(1, 12))
        large = cache.read(11)
        assert large is not None
    cache.close()
    assert cache.read(0) is None
    assert not offer(cache, 99)
    assert torch.equal(first[0], picture(0))
    assert torch.equal(large[0], picture(11, 800))


def test_writing_to_a_tensor_of_the_cache_kills_rather_than_spoils(tmp_path: Path) -> None:
    fill(tmp_path)
    script = f"""
from pathlib import Path
from loaders.cache.disk_cache import DiskCache
DiskCache(Path({str(tmp_path)!r}), 2**26, "data-of-today", 0).read(0)[0].zero_()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -signal.SIGSEGV
    with DiskCache(tmp_path, 64 * MIB, NAME, 0) as cache:
        assert all(holds(cache, i) for i in range(SAMPLES))
