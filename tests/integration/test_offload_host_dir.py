"""The host's memory in files: the bits, what is left in the folder, and what is refused by name."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from support.stage_jobs import Job as jobs

from offload.errors import MemoryTooSmall, OffloadError
from offload.memory.arenas import DeviceArena, HostArena
from offload.memory.file_memory import check_folder
from offload.memory.host_memory import memory_left
from offload.program.kernels import CPU
from offload.running.runner import Runner
from offload.running.stage import Stage
from perfect.assembly.berth import build_strategy
from perfect.config.schema import RunConfig
from perfect.errors import BuildError
from trainers import OffloadStrategy
from trainers.fleet.deciding.events import FleetError
from trainers.fleet.jobs.tenancy import Tenancy
from trainers.steps.target import Target, target_of

MIB = 1 << 20


def mappings(folder: Path) -> int:
    """How many files of this folder are mapped by this process, shared."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line and line.split()[1] == "rw-s" for line in lines)


def small() -> Any:
    """A job that needs the host's arena."""
    whole = jobs.chain(6, 64)
    job = jobs(whole.graph, whole.plan.smallest_bytes)
    assert job.plan.host_bytes
    return job


@contextmanager
def limited(what: int, nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_the_bits_are_eagers_and_no_file_has_a_name(tmp_path: Path) -> None:
    job = small()
    with Runner(job.plan, host_dir=tmp_path) as runner:
        for _ in range(3):
            job.step(runner)
            assert mappings(tmp_path) == 1
            assert not list(tmp_path.iterdir())  # a process that is killed leaves nothing
    assert job.is_right()
    assert mappings(tmp_path) == 0


def test_what_is_parked_and_what_is_lent_waits_in_files_too(tmp_path: Path) -> None:
    one, other = jobs.chain(4, 64), jobs.chain(3, 64)
    with Stage(host_dir=tmp_path) as stage, Runner(one.plan, stage=stage) as of_one:
        one.step(of_one)
        with Runner(other.plan, stage=stage) as of_other:
            other.step(of_other)
            assert one.plan.host_bytes and other.plan.host_bytes
            assert mappings(tmp_path) == 4  # of each its arena, and where it is parked
            one.step(of_one)
    assert one.is_right() and other.is_right()
    arena = DeviceArena({0: 4096}, CPU, tmp_path)
    arena.regions[0].tensor.fill_(7)
    with arena.lend({0: 1024}) as lent:
        assert mappings(tmp_path) == 1
        lent.regions[0].tensor.zero_()
    assert int(arena.regions[0].tensor.sum()) == 7 * 4096


def test_a_full_disk_is_refused_before_a_byte_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        limited(resource.RLIMIT_FSIZE, MIB),
        pytest.raises(MemoryTooSmall, match=r"2\.0 MiB for the arena.*host_dir=.*are free") as no,
    ):
        HostArena(2 * MIB, host_dir=tmp_path)
    assert no.value.needed == 2 * MIB and no.value.left > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(OffloadError, match="No such file or directory"):
        HostArena(MIB, host_dir=tmp_path / "gone since")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryTooSmall, match="No space left on device"):
        HostArena(MIB, host_dir=tmp_path)


def test_a_forked_process_does_not_share_the_bytes(tmp_path: Path) -> None:
    arena = HostArena(4096, host_dir=tmp_path)
    assert mappings(tmp_path) == 1
    child = os.fork()
    if not child:
        os._exit(mappings(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.region.nbytes == 4096


def test_it_does_not_count_for_the_limit_of_data_which_is_what_is_left(tmp_path: Path) -> None:
    with limited(resource.RLIMIT_DATA, 1 << 40):
        before = memory_left()
    used = sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    with limited(resource.RLIMIT_DATA, used + 4 * MIB):
        left = memory_left()
        assert left.nbytes <= 4 * MIB < before.nbytes
        assert "ulimit -d" in left.where and "ulimit -d" not in before.where
        arena = HostArena(64 * MIB, host_dir=tmp_path)
        arena.region.tensor.fill_(1)
        with pytest.raises(OffloadError, match="refused by this machine"):
            HostArena(1024 * MIB)  # more than the process can have freed and kept


def test_a_folder_that_is_none_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"host_dir='.*' is not a folder: make it first"):
        OffloadStrategy("1GiB", host_dir=tmp_path / "none")
    phases = [{"name": "train", "passes": 1}]
    run = {"model": {"name": "resnet18"}, "data": {"name": "cifar10"}, "phases": phases}
    offload = {"budget": "1GiB", "host_dir": str(tmp_path / "none")}
    with pytest.raises(BuildError) as blamed:
        build_strategy(RunConfig.model_validate(run | {"offload": offload}))
    assert blamed.value.key == "offload.host_dir"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="may not be written to"):
        check_folder(tmp_path)


def test_a_gpu_and_another_folder_in_a_fleet_are_refused_by_name(tmp_path: Path) -> None:
    gpu = CUDAAccelerator(), torch.device("cuda", 0)
    with pytest.raises(OffloadError, match=r"host_dir=.*no effect on a GPU.*page-locked"):
        target_of("auto", *gpu, tmp_path)
    plan = jobs.chain(2, 8).plan
    tenancy = Tenancy(CPU)
    tenancy.runner(plan, 0, Target(host_dir=tmp_path)).close()
    with pytest.raises(FleetError, match="give all jobs of a fleet the same host_dir"):
        tenancy.runner(plan, 1, Target())
    tenancy.close()
