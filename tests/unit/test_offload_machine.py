"""What the machine and the cgroups leave to this process, and plans that do not fit into it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import MemoryTooSmall
from offload.memory import room
from offload.memory.host_memory import HostMemoryLeft, memory_left

GIB = 1 << 30


def written(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def left(folder: Path, membership: str, free: int = 100 * GIB) -> HostMemoryLeft:
    meminfo = f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable: {free // 1024} kB"
    files = written(folder / "proc", membership=membership, meminfo=meminfo)
    return memory_left(folder / "cgroup", files / "membership", files / "meminfo")


def test_without_cgroups_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    found = left(tmp_path, "0::/", 3 * GIB)
    assert found.nbytes == 3 * GIB
    assert "3.0 GiB of this machine's" in found.where
    assert memory_left(tmp_path, tmp_path, tmp_path).where.startswith("this machine has")


def test_the_limit_of_a_cgroup_less_what_is_in_use_and_does_not_give_way(tmp_path: Path) -> None:
    stat = (
        f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\nslab_reclaimable {GIB // 4}"
    )
    written(
        tmp_path / "cgroup/job/step",
        memory__max=4 * GIB,
        memory__current=2 * GIB,
        memory__stat=stat,
    )
    written(tmp_path / "cgroup/job", memory__max="max", memory__current=2 * GIB)
    found = left(tmp_path, "0::/job/step")
    assert found.nbytes == 3 * GIB
    assert "cgroup is 4.0 GiB" in found.where and "1.0 GiB of it are in use" in found.where


def test_the_tightest_group_on_the_way_up_binds_and_so_does_the_machine(tmp_path: Path) -> None:
    written(tmp_path / "cgroup/job/step", memory__max=8 * GIB, memory__current=0)
    written(tmp_path / "cgroup/job", memory__max=5 * GIB, memory__current=3 * GIB)
    assert left(tmp_path, "0::/job/step").nbytes == 2 * GIB
    assert left(tmp_path, "0::/job/step", GIB).nbytes == GIB
    # In a container the path is the host's, and the mount is the group.
    written(tmp_path / "cgroup", memory__max=2 * GIB, memory__current=3 * GIB)
    assert left(tmp_path, "0::/somewhere/else").nbytes == 0


def test_version_1_says_the_same_in_other_words(tmp_path: Path) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    written(
        tmp_path / "cgroup/memory/job",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=stat,
    )
    membership = "9:name=systemd:/\n4:memory:/job\n3:cpu,cpuacct:/other\n0::/"
    assert left(tmp_path, membership).nbytes == 3 * GIB
    written(tmp_path / "cgroup/memory/job", memory__limit_in_bytes=9223372036854771712)
    assert left(tmp_path, membership).nbytes == 100 * GIB


@pytest.fixture
def step() -> Any:
    module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 4))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        return loss.detach()

    batch = torch.randn(64, 512), torch.randint(0, 4, (64,))
    return module, offload.capture(added, *batch), batch


def test_a_plan_that_does_not_fit_is_refused_with_who_needs_what(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, graph, _ = step
    plan = offload.plan(graph)
    at = [p.data_ptr() for p in module.parameters()]
    monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(1 << 20, "the cgroup is small"))
    with pytest.raises(MemoryTooSmall, match=r"only 1\.0 MiB are left: the cgroup") as refused:
        offload.Runner(plan)
    said = str(refused.value)
    assert plan.explain() in said
    assert "the arena of device 0" in said and "host_budget" in said
    assert refused.value.left == 1 << 20 < refused.value.needed
    assert [p.data_ptr() for p in module.parameters()] == at


def test_tensors_that_move_into_an_arena_count_once_and_the_largest_twice(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, graph, batch = step
    plan = offload.plan(graph)
    with pytest.raises(MemoryTooSmall) as refused:
        monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(0, ""))
        offload.Runner(plan)
    needed = refused.value.needed
    weights = sum(p.nbytes for p in module.parameters())
    largest = max(p.nbytes for p in module.parameters())
    arenas = sum(plan.memgraph.arenas.values())
    assert needed == max(2 * weights, arenas - 2 * weights + largest + 4)  # 4: the loss
    for nbytes, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(room, "memory_left", lambda nbytes=nbytes: HostMemoryLeft(nbytes, ""))
        if fits:
            with offload.Runner(plan) as runner:
                runner(*batch)
        else:
            with pytest.raises(MemoryTooSmall):
                offload.Runner(plan)


def test_arenas_that_grow_are_checked_with_what_the_kernels_of_the_entering_plan_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(nbytes: int, unplaced: int) -> offload.TaskGraph:
        builder = offload.GraphBuilder()
        y = builder.buffer("y", nbytes)
        builder.task("f", writes=[y], unplaced=unplaced, kernel=lambda r, w: w[0].fill_(1))
        builder.output(y)
        return builder.graph()

    with offload.Runner(offload.plan(made(64, 0), placement="copy")) as runner:
        runner.add("large", made(4096, 64 << 20))
        monkeypatch.setattr(
            room, "memory_left", lambda: HostMemoryLeft(32 << 20, "a small machine")
        )
        with pytest.raises(MemoryTooSmall, match=r"kernels besides 64\.0 MiB"):
            runner.run("large")
        monkeypatch.setattr(room, "memory_left", lambda: HostMemoryLeft(65 << 20, "a larger one"))
        [y] = runner.run("large")
    assert int(y.sum()) == 4096


def test_what_is_given_back_at_the_end_is_nobodys(step: Any) -> None:
    """Aliases that the user holds of parameters keep the values of the end."""
    module, graph, batch = step
    runner = offload.Runner(offload.plan(graph))
    runner(*batch)
    alias = module.state_dict()
    values = {name: tensor.clone() for name, tensor in alias.items()}
    runner.close()
    assert all(torch.equal(alias[name], value) for name, value in values.items())
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.state_dict().items())
