"""What plans say a job takes of the host's memory, against what real runners take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import stage_jobs as jobs

import offload
from offload.graph.taskgraph import HOST
from offload.memory.homes import resident_bytes
from offload.memory.host_needs import needs, swap_seconds

pytestmark = pytest.mark.cold

HERE = Path(__file__).parent
SLACK = 6 << 20
"""Python's objects, and pages that begin before the bytes that count."""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_runner_takes_more_than_its_plan_said_nor_much_less() -> None:
    root = HERE.parents[1]
    # Freed memory goes back to the system at once, so that it does not count.
    more = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "support" / "memory_of_runners.py")],
        capture_output=True, text=True, check=False, cwd=root, env=os.environ | more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    for name, row in found.items():
        said = row["held"] + row["device"] + row["other"]
        assert 0.9 * said <= row["lives"] <= said + SLACK, name
        assert row["peak"] <= said + row["passing"] + SLACK, name
        assert row["ends"] <= said + row["passing"] + SLACK, name
    whole = found["all resident"]
    assert whole["ends"] > whole["held"] + whole["device"] + whole["other"] + SLACK


def test_of_several_plans_the_largest_part_counts() -> None:
    streamed, resident = jobs.Job.chain(4, 4096, 24_000), jobs.Job.chain(4, 4096)
    both = needs(streamed.plan, resident.plan)
    host = streamed.plan.memgraph.arenas[HOST]
    assert host > resident.plan.memgraph.arenas.get(HOST, 0)
    assert resident_bytes(resident.plan.memgraph) == 8 * 4096
    assert both.held == host + 8 * 4096 + 64  # the step returns 64 bytes
    assert both.passing == needs(resident.plan).passing == 8 * 4096
    assert needs(streamed.plan).held < both.held


def test_the_seconds_of_a_hand_over_are_those_of_the_residents_copies() -> None:
    costs = offload.Costs(h2d=1e6, d2h=2e6, copy=0.001)
    job = jobs.Job(jobs.Job.chain(2, 4096).graph, costs=costs)
    assert swap_seconds(job.plan) == pytest.approx(4 * (0.002 + 4096 / 1e6 + 4096 / 2e6))
    streamed = jobs.Job.chain(4, 4096, 24_000)
    moved = resident_bytes(streamed.plan.memgraph)
    assert 0 < moved < 8 * 4096
    assert swap_seconds(streamed.plan) > moved / streamed.plan.costs.h2d
