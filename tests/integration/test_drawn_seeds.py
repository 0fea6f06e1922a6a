"""A loader that is given no seed draws one when it is made, as a DataLoader does at each pass.

python test_drawn_seeds.py FOLDER   (two gloo processes write FOLDER/rank0.json, rank1.json)
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.gloo_ranks import WORLD, main
from torch.utils.data import DataLoader

from loaders import ReuseLoader
from loaders.lanes.lane_loader import LaneLoader

SAMPLES = 64
IDS: Any = list(range(SAMPLES))

pytestmark = pytest.mark.draws_seeds


def adopted(**changes: Any) -> ReuseLoader:
    return ReuseLoader.from_dataloader(DataLoader(IDS, 4, shuffle=True), reuse=1, **changes)


def own(**options: Any) -> ReuseLoader:
    return ReuseLoader(IDS, 4, reuse=1, workers=1, **options)


def served(loader: ReuseLoader) -> list[int]:
    """The ids of a pass, in the order in which they come."""
    return [i for batch in loader for i in batch.tolist()]


def passes(*loaders: ReuseLoader) -> list[list[int]]:
    orders = []
    for loader in loaders:
        with loader:
            orders.append(served(loader))
    return orders


def alone() -> ReuseLoader:
    """It waits for no other process."""
    return own(rank=(0, 1))


both_ways = pytest.mark.parametrize("make", [own, adopted, alone])


@both_ways
def test_two_loaders_pair_differently(make: Any) -> None:
    with make() as one, make() as other:
        pairs = [*zip(served(one), served(other), strict=True)]
    assert sorted(i for i, _ in pairs) == sorted(i for _, i in pairs) == IDS
    assert sum(i == k for i, k in pairs) < 10  # by chance it is 1 of 64


@both_ways
def test_seed_everything_repeats_a_run(make: Any) -> None:
    def run(seed: int) -> list[list[int]]:
        L.seed_everything(seed, verbose=False)
        return passes(make(), make())

    assert run(5) == run(5) != run(6)


@both_ways
def test_a_resume_takes_over_what_was_drawn(make: Any) -> None:
    with make() as first:
        batches = iter(first)
        begun = [i for _ in range(5) for i in next(batches).tolist()]
        state = first.state_dict()
        rest = [i for batch in batches for i in batch.tolist()]
        following = served(first)
    with make() as second:
        assert second.seed != first.seed
        second.load_state_dict(state)
        assert second.seed == first.seed
        assert served(second) == rest
        assert served(second) == following
    assert sorted(begun + rest) == IDS


def test_a_given_seed_draws_nothing() -> None:
    untouched = torch.get_rng_state()
    assert passes(own(seed=9)) == passes(adopted(seed=9))
    assert torch.equal(torch.get_rng_state(), untouched)


def test_peers_cannot_compare_what_they_draw_and_serve_the_same_lanes() -> None:
    with own() as one, adopted() as other:
        assert one.seed != other.seed
        ids = []
        for loader in (one, other):
            with LaneLoader(loader, 2) as lanes:
                ids.append([lanes.ids(lane).ids.tolist() for lane in range(2)])
    assert ids[0] == ids[1]


def test_ranks_with_other_global_seeds_serve_the_order_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    torch.manual_seed(3)
    for name, make in (("own", own), ("adopted", adopted)):
        with make() as lone:
            drawn = lone.seed
        seeds, shares = zip(*(told[name] for told in ranks), strict=True)
        assert seeds == (drawn, drawn)
        assert sorted(shares[0] + shares[1]) == IDS
        for rank in range(WORLD):
            assert passes(make(seed=drawn, rank=(rank, WORLD))) == [shares[rank]]


def told(rank: int, folder: Path) -> dict[str, Any]:
    """What a rank serves, whose global seed is its own."""
    torch.manual_seed(3 + rank)
    outcomes = {}
    for name, make in (("own", own), ("adopted", adopted)):
        with make() as loader:
            shares = served(loader)
            outcomes[name] = loader.seed, shares
    return outcomes


if __name__ == "__main__":
    main(told)
