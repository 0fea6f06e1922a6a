"""A peer on several devices has the bits of one on one device."""

from pathlib import Path

import pytest
from support.planned_peer import CLIPS, alone, assert_equal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("equal_seconds")]


@pytest.mark.parametrize(
    "devices, budget, clip, sum",
    [(2, None, "norm", "fast"), (3, "100%", "value", "fast"), (2, "100%", "norm", "exact")],
)
def test_a_peer_on_several_devices_has_the_bits_of_one_on_one(
    devices: int, budget: str | None, clip: str, sum: str, tmp_path: Path
) -> None:
    plain = alone(tmp_path / "plain", None, sum=sum, **CLIPS[clip])
    ours = alone(tmp_path / "ours", budget, devices=devices, sum=sum, **CLIPS[clip])
    assert_equal(ours, plain)
    assert ours.digests == plain.digests
    plan = ours.strategy.plan
    assert plan is not None
    assert len({task.device for task in plan.graph.tasks}) > 1
    lanes = 1 + max(task.turn for task in plan.graph.tasks)
    assert lanes == 1 if sum == "exact" else lanes > 1, plan.explain()
