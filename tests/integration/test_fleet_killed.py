"""A fleet that is killed at any moment and started again becomes what it becomes in one piece."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.killed_run import EPOCHS, NAMES, outcome


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = outcome(tmp_path_factory.mktemp("whole"))
    ends = sorted(state for state, *_ in found["jobs"].values())
    assert ends == ["finished", "stopped", "stopped"]
    assert max(step for _, step, _ in found["jobs"].values()) == 5 * EPOCHS
    assert sorted(map(len, found["metrics"].values())) == [3, 10, 11], "two rungs stop one each"
    return found


@pytest.mark.parametrize("moments", [(5,), (14,), (25, 4)], ids=lambda m: "-".join(map(str, m)))
def test_a_killed_fleet_stops_the_same_jobs_and_ends_with_the_same_weights(
    moments: Sequence[int], whole: dict[str, Any], tmp_path: Path
) -> None:
    found = outcome(tmp_path, moments)
    assert found["kills"] == list(moments)
    for what in ("jobs", "metrics", "weights"):
        assert found[what] == whole[what], what
    assert [name for name in NAMES if found["weights"][name] is not None]
