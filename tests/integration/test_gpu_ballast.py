"""What holds a device's memory, so that a budget is one for all: with a file as the device."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support.fake_gpu import not_on_a_fake_gpu

from benchmarks.gpu.ballast import Ballast, BallastError, fill

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
GIB = 1 << 30

HELPER = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.gpu.ballast import main

class FileMemory:
    '''A device in a file: its free bytes, and who holds the others.'''
    path = Path({device!r})

    def free(self):
        held = json.loads(self.path.read_text())
        return held["total"] - sum(held.get("held", {{}}).values()) - held["others"]

    def take(self, nbytes):
        held = json.loads(self.path.read_text())
        there = held.setdefault("held", {{}})
        there[str(os.getpid())] = there.get(str(os.getpid()), 0) + nbytes
        self.path.write_text(json.dumps(held))
        return True

main(FileMemory())
"""


class Pieces:
    """Memory that is free in pieces: no more than `most` at once."""

    def __init__(self, free: int, most: int) -> None:
        self.left, self.most = free, most
        self.sizes: list[int] = []

    def free(self) -> int:
        return self.left

    def take(self, nbytes: int) -> bool:
        if nbytes > self.most:
            return False
        self.left -= nbytes
        self.sizes.append(nbytes)
        return True


def device(tmp_path: Path, total: int) -> tuple[Path, list[str]]:
    """A file as a device, and the command of a helper that takes its memory."""
    path = tmp_path / "device.json"
    path.write_text(json.dumps({"total": total, "others": 0}))
    helper = HELPER.format(root=str(ROOT), device=str(path))
    return path, [sys.executable, "-c", helper]


def taken(path: Path) -> int:
    return sum(json.loads(path.read_text()).get("held", {}).values())


def others(path: Path, nbytes: int) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"others": nbytes}))


def test_all_but_what_is_left_is_taken_to_the_granule() -> None:
    memory = Pieces(80 * GIB + 12345, most=1 << 62)
    held = fill(memory, 9 * GIB)
    assert held == sum(memory.sizes)
    assert 0 <= memory.left - 9 * GIB < 2 * MIB


def test_memory_that_is_free_in_pieces_is_taken_in_pieces() -> None:
    memory = Pieces(GIB, most=100 * MIB)
    fill(memory, 64 * MIB)
    assert 0 <= memory.left - 64 * MIB < 2 * MIB
    assert max(memory.sizes) <= 100 * MIB


def test_a_device_that_has_less_than_the_budget_is_refused_in_mib() -> None:
    with pytest.raises(BallastError, match=r"only 512 MiB .* 1,024 MiB are needed: another proc"):
        fill(Pieces(512 * MIB, most=GIB), GIB)


def test_the_helper_holds_until_it_is_closed_and_ends_then(tmp_path: Path) -> None:
    path, command = device(tmp_path, 16 * GIB)
    with Ballast(4 * GIB, spare=GIB, command=command) as ballast:
        assert taken(path) == ballast.held == 11 * GIB
        assert ballast.check() == 5 * GIB
        process = ballast._process
    assert process is not None and process.returncode == 0
    ballast.close()


def test_memory_that_somebody_took_meanwhile_is_noticed(tmp_path: Path) -> None:
    path, command = device(tmp_path, 16 * GIB)
    with Ballast(4 * GIB, spare=0, command=command) as ballast:
        others(path, GIB)
        with pytest.raises(BallastError, match=r"3,072 MiB are free, 4,096 MiB were left"):
            ballast.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@not_on_a_fake_gpu("the driver gives no memory, and processes do not share it")
def test_what_a_ballast_holds_torch_does_not_get_and_gets_back_after() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gpu.ballast import main; main()"
    with Ballast(2 * GIB, spare=GIB, command=[sys.executable, "-c", code]):
        there = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    assert torch.empty(3 * GIB, dtype=torch.uint8, device="cuda").numel() > there.numel()
