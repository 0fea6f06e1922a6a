"""What several devices must be and have before a plan runs on them. Their answers are played."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload import GraphBuilder
from offload.errors import MemoryTooSmall, OffloadError
from offload.graph.taskgraph import HOST
from offload.memory import room
from offload.memory.device_memory import DeviceLeft
from offload.memory.room import check_move, check_room
from offload.program.kernels import Program
from offload.running.drivers.cuda import check_devices

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
GIB = 1 << 30
Kinds = list[tuple[str, int]]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    """The model and the memory of every device."""
    found: Kinds = [("H200", 140 * GIB), ("H200", 140 * GIB)]

    def told(device: torch.device) -> Any:
        name, nbytes = found[device.index]
        return SimpleNamespace(name=name, total_memory=nbytes)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", told)
    return found


def test_a_plan_has_the_devices_from_its_first_one_on(kinds: Kinds) -> None:
    assert check_devices(FIRST, 2) == (FIRST, SECOND)
    with pytest.raises(OffloadError, match="for 2 devices, cuda:1 to cuda:2, and this process"):
        check_devices(SECOND, 2)


@pytest.mark.parametrize(
    "other, told",
    [
        (("RTX 4090", 140 * GIB), "cuda:1 is a RTX 4090 with 140.0 GiB"),
        (("H200", 70 * GIB), "cuda:1 is a H200 with 70.0 GiB"),
    ],
)
def test_devices_of_two_kinds_are_refused_with_both(
    kinds: Kinds, other: tuple[str, int], told: str
) -> None:
    kinds[1] = other
    with pytest.raises(OffloadError, match=f"cuda:0 is a H200 with 140.0 GiB and {told}"):
        check_devices(FIRST, 2)


def test_each_device_must_have_room_for_its_own_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = GraphBuilder()
    x, y = builder.buffer("x", 4096, "input"), builder.buffer("y", 4096)
    builder.task("f", [x], [y], kernel=print, device=1)
    builder.output(y)
    program = Program((), (), {}, device=FIRST)
    made = offload.plan(replace(builder.graph(), program=program), placement="copy")
    free = {FIRST: 8 * GIB, SECOND: 2 * GIB}
    monkeypatch.setattr(room, "give_cached_back", lambda device: None)
    monkeypatch.setattr(
        room, "device_left", lambda device: DeviceLeft(device, free[device], 10 * GIB)
    )
    sizes = {0: 5 * GIB, 1: GIB, HOST: 4096}
    check_room(made, sizes)
    check_move(made, sizes)
    check_move(made, {0: 9 * GIB, 1: 4 * GIB}, freed={0: 2 * GIB, 1: 3 * GIB})
    with pytest.raises(MemoryTooSmall, match=r"of cuda:1 are needed \(3.0 GiB for the arena"):
        check_room(made, {0: 5 * GIB, 1: 3 * GIB})
    with pytest.raises(MemoryTooSmall, match="of cuda:1 are needed to move"):
        check_move(made, {0: 5 * GIB, 1: 3 * GIB}, freed={0: GIB})
