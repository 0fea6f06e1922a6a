"""A peer whose generation ends in mid-step, and one whose module is unusual, in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.planned_peer import Classifier, alone

from trainers.elastic.errors import GenerationEnded, SwarmStopped
from trainers.elastic.peer.anchor_link import AnchorOrders
from trainers.elastic.work.plain_work import PlainWork

LANES = 8


class NoGradient(Classifier):
    """Its losses are finite, and its gradients are not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] + (self.unused * 0).sqrt().sum()}


@pytest.mark.parametrize(
    ("sum", "why"),
    [("fast", "gradients are not finite at step 0, of parameters"), ("exact", "cannot be made of")],
)
def test_gradients_that_are_no_numbers_stop_a_step_whose_generation_ends_after_its_last_lane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sum: str, why: str
) -> None:
    compute, check = PlainWork.compute, AnchorOrders.check_generation
    left = LANES

    def count_lanes(work: PlainWork, lanes: Any) -> int:
        nonlocal left
        count = compute(work, lanes)
        left -= count
        return count

    def end_once(orders: AnchorOrders) -> None:
        nonlocal left
        if left == 0:
            left = LANES
            raise GenerationEnded("a member has died")
        check(orders)

    monkeypatch.setattr(PlainWork, "compute", count_lanes)
    monkeypatch.setattr(AnchorOrders, "check_generation", end_once)
    with pytest.raises(SwarmStopped, match=f"one: .*{why}"):
        alone(tmp_path, None, steps=1, sum=sum, module=NoGradient())
    assert left == LANES


def test_a_buffer_without_numbers_is_committed(tmp_path: Path) -> None:
    module = Classifier()
    module.layers = torch.nn.Linear(8, 4)
    module.seen = torch.ones(0)  # Its buffers have no bytes at all.
    module.training_step = lambda batch, batch_idx: module.layers(batch[0]).square().mean()
    assert len(alone(tmp_path, None, steps=2, module=module).digests) == 2
