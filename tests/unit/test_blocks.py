"""Floats in memory that is used again lie as torch lays them, and nobody's are overwritten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loaders.blocks import Blocks, floats_like

BYTES = torch.zeros(2, 3, 4, 5, 6, dtype=torch.uint8)
BATCHES = {
    "planes": BYTES[0],
    "pixels": BYTES[0].permute(0, 3, 1, 2),
    "grey": BYTES[0, 0],
    "turned": BYTES[0, 0].mT,
    "clips": BYTES,
    "clips of pixels": BYTES.movedim(-1, 2),
    "with gaps": BYTES[0, ..., ::2],
    "one": BYTES[:1, 0, :1],
    "none": BYTES[0, :0],
}


@pytest.mark.parametrize("name", BATCHES)
def test_floats_lie_as_torchs_do_and_their_memory_is_used_again(name: str) -> None:
    blocks, batch = Blocks(spare=1), BATCHES[name]
    places = set[int]()
    for _ in range(3):
        floats = blocks.floats_like(batch)
        expected = floats_like(batch)
        assert (floats.shape, floats.stride()) == (expected.shape, expected.stride())
        assert floats.dtype == torch.float32
        assert torch.equal(floats.copy_(batch), batch.float())
        places.add(floats.data_ptr())
    assert len(places) == (2 if batch.numel() else 1)  # one is held while the next one is made


@pytest.mark.parametrize(
    "hold", [lambda x: x[1:], lambda x: x.numpy(), lambda x: x.permute(1, 0, 2, 3).unbind()[0]]
)
def test_a_block_of_which_a_part_is_held_is_not_used_again(hold: Callable[[Any], Any]) -> None:
    blocks = Blocks(spare=1)
    held = hold(blocks.floats_like(BYTES[0]).fill_(7))
    for _ in range(3):
        blocks.floats_like(BYTES[0]).fill_(8)
    assert (held == 7).all()


def test_pictures_on_another_device_become_floats_there() -> None:
    floats = Blocks(spare=1).floats_like(BYTES.to("meta"))
    assert floats.device.type == "meta"
