"""The orders of a pass in the accuracy benchmarks, beside the loader's own."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from accuracy.orders import Order, counted_as, plan  # noqa: E402

from loaders.order.reuse import batches_per_pass  # noqa: E402
from loaders.order.serve import Serve  # noqa: E402


def served(order: Order, reuse: int = 3, buffer: int = 2, seed: int = 0) -> list[Serve]:
    return list(plan(order, 40, 8, reuse, buffer, (seed,)))


@pytest.mark.parametrize("order", ["in-batch", "echoed", "immediate", "rolling"])
def test_every_sample_is_served_as_often_as_asked_and_its_serves_are_numbered(order: Order) -> None:
    batches = served(order)
    assert len(batches) == batches_per_pass(40, 8, 3, counted_as(order), drop_last=True)
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch.positions.tolist(), batch.serves.tolist(), strict=True)
    ]
    assert Counter(pairs) == Counter((p, s) for p in range(40) for s in range(3))
    for position in range(40):
        assert [serve for at, serve in pairs if at == position] == [0, 1, 2]


def test_serves_stand_side_by_side_within_a_batch_or_apart_after_a_shuffle_buffer() -> None:
    assert served("in-batch")[0].positions.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    echoed = np.concatenate([batch.positions for batch in served("echoed", buffer=3)])
    neighbours = int((echoed[1:] == echoed[:-1]).sum())
    assert neighbours < 40  # 80 where nothing is shuffled
    # 24 slots of serves begin with the first 8 samples, and none is read before its time.
    assert set(served("echoed", buffer=3)[0].positions.tolist()) <= set(range(8 + 3))


def test_a_shuffle_buffer_is_seeded() -> None:
    def order(seed: int) -> list[list[int]]:
        return [batch.positions.tolist() for batch in served("echoed", seed=seed)]

    assert order(1) == order(1) != order(2)


def test_without_reuse_every_order_is_the_source_s_own() -> None:
    for order in ("in-batch", "echoed", "rolling"):
        batches = served(order, reuse=1)
        assert np.concatenate([batch.positions for batch in batches]).tolist() == list(range(40))
