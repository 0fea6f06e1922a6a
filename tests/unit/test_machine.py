"""What the machine allows, read from files that a test wrote."""

from pathlib import Path

import pytest

from loaders.errors import LoaderError
from loaders.workers.machine import cpu_quota, free_memory, usable_cpus


@pytest.fixture
def machine(tmp_path: Path):
    """`machine("0::/job", {"job/cpu.max": "200000 100000"})`: the quota found there."""

    def quota(membership: str, files: dict[str, str]) -> tuple[int, int] | None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return cpu_quota(tmp_path / "cgroup", tmp_path / "membership")

    return quota


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, (200_000, 100_000)),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, (50_000, 100_000)),
        (
            "0::/a/b",
            {"a/b/cpu.max": "150000 50000", "a/cpu.max": "400000 100000"},
            (150_000, 50_000),
        ),
        # The path is the host's, which this container does not see.
        ("0::/kubepods/pod7", {"cpu.max": "100000 100000"}, (100_000, 100_000)),
        (
            "4:memory:/\n3:cpu,cpuacct:/j",
            {"cpu,cpuacct/j/cpu.cfs_quota_us": "300000", "cpu,cpuacct/j/cpu.cfs_period_us": "9"},
            (300_000, 9),
        ),
        (
            "2:cpu:/docker/7\n0::/",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("5:cpuset:/", {"cpuset/cpu.max": "1 100000"}, None),
        ("", {"cpu.max": "1 1"}, None),
    ],
    ids=[
        "v2", "v2 without limit", "no file", "parent", "child", "path of the host", "v1",
        "v1 without limit", "another controller", "no membership",
    ],
)  # fmt: skip
def test_the_quota_is_the_tightest_of_this_process_and_the_groups_around_it(
    machine, membership: str, files: dict[str, str], quota: tuple[int, int] | None
) -> None:
    assert machine(membership, files) == quota


def test_the_cpus_are_shared_by_the_ranks_that_the_launcher_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loaders.workers.machine.MEMBERSHIP", Path("/nonexistent"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_cpus() == 12
    assert usable_cpus(local_ranks=3) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cpus() == 3
    assert usable_cpus(local_ranks=2) == 6


@pytest.mark.parametrize("said", ["", "0", "two", "-1"])
def test_a_launcher_that_says_nonsense_is_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    with pytest.raises(LoaderError, match=f"LOCAL_WORLD_SIZE is '{said}'"):
        usable_cpus()


# ---- memory -------------------------------------------------------------------------------------


def test_free_memory_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    def left(membership: str, **files: dict[str, str]) -> int:
        (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
        (tmp_path / "membership").write_text(membership)
        for group, lines in files.items():
            folder = tmp_path / "cgroup" / group.replace("_", "/")
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in lines.items():
                (folder / name).write_text(text + "\n")
        places = tmp_path / "cgroup", tmp_path / "membership", tmp_path / "meminfo"
        return free_memory(*places)

    assert left("0::/") == 8 << 10
    stat = "anon 1000\ninactive_file 500\nactive_file 300\nslab_reclaimable 100"
    limited = {"memory.max": "5000", "memory.current": "2000", "memory.stat": stat}
    assert left("0::/job/step", job_step=limited, job={"memory.max": "max"}) == 5000 - 1100
    older = {"memory.limit_in_bytes": "4000", "memory.usage_in_bytes": "4500"}
    assert left("0::/job/step\n4:memory:/job", memory_job=older) == 0
