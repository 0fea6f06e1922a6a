"""Loaders of 10 ** 12 samples: whatever made one entry for each of them would not come back.

An array of so many numbers takes 8 TB, so these tests need no clock and no count of bytes. A pass
is begun, left, and entered again in its middle and near its end.
"""

from typing import Any

import pytest
import torch
from support.computed_ids import count_computed_ids

from loaders import Cache, LaneLoader, ReuseLoader

MANY = 10**12


class Endless:
    """Samples that say who they are."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 2, 2), index % 251, dtype=torch.uint8), index


def loader(**changes: Any) -> ReuseLoader:
    return ReuseLoader(Endless(), **{"batch_size": 8, "workers": 0, **changes})


def at(state: dict[str, Any], batch: int) -> dict[str, Any]:
    """The state of a loader that has served so many batches of a pass."""
    return {**state, "served_batches": batch, "running": state["next"]}


def ids_of(loader: ReuseLoader, batches: int) -> list[list[int]]:
    found = []
    for _, ids in loader:
        found.append(ids.tolist())
        if len(found) == batches:
            return found
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"reuse": 1},
        {"reuse": 3},
        {"reuse": 3, "mode": "block"},
        {"reuse": 2, "mode": "immediate"},
        {"reuse": 3, "shuffle": False},
        {"reuse": 3, "rank": (500, 1000)},
        {"reuse": 3, "buffer_bytes": 1 << 20},
        {"reuse": 3, "cache": Cache("ram", 1 << 20)},
        {"reuse": 3, "on_error": "skip"},
        {"reuse": "auto"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_pass_of_any_length_is_begun_and_entered_anywhere(options: dict[str, Any]) -> None:
    with loader(**options) as first:
        assert all(0 <= i < MANY for ids in ids_of(first, 3) for i in ids)
        state = first.state_dict()
        for batch in (len(first) // 2, len(first) - 4):
            with loader(**options) as one, loader(**options) as other:
                one.load_state_dict(at(state, batch))
                served = ids_of(one, 3)
                other.load_state_dict(at(state, batch + 1))
                assert ids_of(other, 2) == served[1:]
                assert all(0 <= i < MANY for ids in served for i in ids)


def test_a_pass_of_any_length_ends_and_the_next_one_begins() -> None:
    with loader(reuse=3) as ours:
        state = at(ours.state_dict(), len(ours) - 2)
        ours.load_state_dict(state)
        assert len(ids_of(ours, 5)) == 2
        assert ours.state_dict()["pass"] == 1
        assert len(ids_of(ours, 5)) == 5


def test_a_lane_of_any_length_is_entered_anywhere() -> None:
    with LaneLoader(loader(reuse=3), 64) as there, LaneLoader(loader(reuse=3), 64) as here:
        there.hold([5, 63])
        assert len(there.take(63).info.ids) == 8
        for step in (len(there) // 2, len(there) - 2):
            there.load_state_dict(there.state_dict() | {"step": step})
            there.take(5)
            there.advance()
            here.load_state_dict(there.state_dict())
            assert here.take(5).info.ids.tolist() == there.take(5).info.ids.tolist()


def test_the_first_batch_computes_the_ids_of_the_buffer_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = count_computed_ids(monkeypatch)
    for batch in (0, 10**11):
        computed[0] = 0
        with loader(reuse=3, rank=(500, 1000)) as ours:
            ours.load_state_dict(at(ours.state_dict(), batch))
            ids_of(ours, 1)
            slots = ours.batch_size * ours.buffer_batches
        # Those that are read, of which a few stand for how large a slot is, and those of the
        # batches that are made ahead.
        assert computed[0] <= 2 * slots + 4 * ours.batch_size
