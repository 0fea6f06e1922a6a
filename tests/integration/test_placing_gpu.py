"""A step on several GPUs: the bits of one, whichever stream is late.

Dead memory is NaN. On GPUs kernels add in any order, so these tests run on fake ones.
"""

from typing import Any

import pytest
import torch
from support import offload_training as training
from support.fake_gpu import only_on_a_fake_gpu
from support.live_training import LiveTraining
from support.placed_training import PlacingPlanner
from support.products import every_value

pytestmark = [
    pytest.mark.gpu,
    only_on_a_fake_gpu("kernels of a GPU add in any order"),
]


@pytest.mark.parametrize(
    "name, devices, chunks, share, order",
    every_value(
        ["gpt", "resnet18", "llama"], [2, 4], [1, 2], [1.0, 0.4, 0.0], ["priority", "random"]
    ),
)
def test_a_step_on_several_devices_has_the_bits_of_one(
    name: str, devices: int, chunks: int, share: float, order: str
) -> None:
    case = training.trained_once(name, "cuda")
    case.restart()
    how: dict[str, Any] = {"engine": "cuda", "order": order, "seed": devices, "poison": True}
    planner = PlacingPlanner(devices, chunks, share, **how)
    around = case.case.around
    with LiveTraining(
        case.model, case.case.loss, case.optimizer, around=around, planner=planner
    ) as step_of:
        for number, batch in enumerate(case.batches):
            training.rated(case.optimizer, number)
            torch.manual_seed(number)
            (loss,) = step_of(*batch)
            assert torch.equal(loss, case.losses[number]), number
        case.compare()
    case.compare()
    assert planner.last is not None
    assert 2 <= len({task.device for task in planner.last.graph.tasks}) <= devices
    assert any(node.kind == "send" for node in planner.last.memgraph.nodes)
