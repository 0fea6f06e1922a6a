"""Tars behind a URL: the same batches as from here, and every fault of a server is named."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.faulty_server import Faults, served
from support.stream_shards import AUGMENT, decoded, take, watch, write_shards

from loaders import ReuseLoader
from loaders.errors import DecodeError, SourceError
from loaders.streams import TarShards

fsspec = pytest.importorskip("fsspec", reason="fsspec opens URLs, and is not installed")
pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed")

LENGTHS = (6, 3, 8, 5)
SHORT, LONG = 2.0, 30.0
"""Time limits of a request: one that a test waits for, and one that a busy machine keeps."""


class Waits:
    """Instead of sleeping."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def remote(
    address: str, timeout: float = 5.0, waits: Waits | None = None, **more: Any
) -> TarShards:
    pattern = f"{address}/shard-{{000..003}}.tar"
    return TarShards(pattern, decoded, timeout=timeout, wait=waits or Waits(), **more)


def loader(source: TarShards, **options: Any) -> ReuseLoader:
    usual = {"batch_size": 4, "reuse": 2, "buffer_batches": 2, "workers": 2, "augment": AUGMENT}
    return ReuseLoader(source, **{**usual, **options})


def here(folder: Path) -> list[Any]:
    with loader(TarShards(str(folder / "*.tar"), decoded)) as local:
        return [*watch(local), *watch(local)]


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "whole files only"])
def test_a_server_serves_what_a_disk_does_and_a_pass_is_resumed_there(
    ranges: bool, tmp_path: Path
) -> None:
    write_shards(tmp_path, LENGTHS)
    expected = here(tmp_path)
    with served(tmp_path, Faults(ranges=ranges)) as address:
        with loader(remote(address)) as whole:
            assert [*watch(whole), *watch(whole)] == expected
        with loader(remote(address)) as interrupted:
            assert take(interrupted, 7) == expected[:7]
            state = json.loads(json.dumps(interrupted.state_dict()))
        with loader(remote(address)) as resumed:
            resumed.load_state_dict(state)
            assert take(resumed, 10) == expected[7:17]


@pytest.mark.parametrize("fault", ["500", "cut", "stall"])
def test_a_fault_that_passes_by_is_waited_for_and_changes_nothing(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path, LENGTHS)
    waits, bad = Waits(), {1, 2, 5}
    faults = Faults(lambda number, _: fault if number in bad else "")
    with (
        served(tmp_path, faults) as address,
        caplog.at_level(logging.WARNING),
        loader(remote(address, timeout=SHORT if fault == "stall" else LONG, waits=waits)) as one,
    ):
        assert [*watch(one), *watch(one)] == here(tmp_path)
    assert waits.seconds == [0.5, 1.0, 0.5]
    assert "is tried again in 0.5 s (1 of 4)" in caplog.text


@pytest.mark.parametrize("fault", ["500", "cut", "stall"])
def test_a_fault_that_stays_is_the_error_of_its_sample(fault: str, tmp_path: Path) -> None:
    write_shards(tmp_path, LENGTHS)
    waits, limit = Waits(), SHORT if fault == "stall" else LONG
    faults = Faults(lambda _, path: fault if path == "/shard-002.tar" else "")
    with (
        served(tmp_path, faults) as address,
        loader(remote(address, timeout=limit, waits=waits, retries=3), shuffle=False) as one,
    ):
        batches = 0
        with pytest.raises(DecodeError, match=r"read http://.*shard-002.tar from byte \d+ on in 4"):
            for _ in watch(one):
                batches += 1
    assert waits.seconds == [0.5, 1.0, 2.0]
    assert batches >= 1, "what lies before it is served"


def test_a_file_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    write_shards(tmp_path, LENGTHS)
    (tmp_path / "shard-003.tar").unlink()
    waits = Waits()
    with (
        served(tmp_path, Faults()) as address,
        loader(remote(address, waits=waits)) as one,
        pytest.raises(SourceError, match=r"cannot open http://.*shard-003.tar"),
    ):
        list(watch(one))
    assert waits.seconds == []


def test_a_resume_asks_the_server_for_no_shard_that_is_done(tmp_path: Path) -> None:
    write_shards(tmp_path, LENGTHS)
    faults = Faults()
    with served(tmp_path, faults) as address:
        with loader(remote(address), shuffle=False) as one:
            take(one, 10)
            state = one.state_dict()
        faults.asked.clear()
        with loader(remote(address), shuffle=False) as one:
            one.load_state_dict(state)
            take(one, 1)
    assert {path for path, _ in faults.asked} <= {"/shard-002.tar", "/shard-003.tar"}
