"""What a `LaneLoader` refuses, by name: loaders, places and states that are not those of lanes."""

from typing import Any

import pytest
import torch
from support.lane_peers import bits, loader
from support.loader_datasets import Pictures

from loaders import LoaderError
from loaders.errors import LaneError, StateError
from loaders.lanes.lane_loader import LaneLoader


@pytest.mark.parametrize(
    ("changes", "lanes", "error", "words"),
    [
        ({}, 0, ValueError, "lanes must be at least 1, not 0"),
        ({}, -1, ValueError, "lanes must be at least 1, not -1"),
        ({"batch_size": 1}, 101, ValueError, r"101 lanes are more than .* samples \(100\)"),
        ({"batch_size": 10}, 11, ValueError, r"batch_size 10 is larger than a lane's share .*\(9 "),
        ({"reuse": "auto"}, 2, LaneError, 'reuse="auto" measures'),
        ({"buffer_bytes": 1 << 20}, 2, LaneError, "buffer_bytes=1048576 decides"),
        ({"device": "cpu"}, 2, LaneError, "leave device out"),
        ({"rank": (1, 2)}, 2, LaneError, "rank 1 of 2, .* rank=\\(0, 1\\)"),
    ],
)
def test_what_cannot_be_dealt_in_lanes_is_refused_by_name(
    changes: dict[str, Any], lanes: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LaneLoader(loader(**changes), lanes)


def test_a_sampler_of_one_rank_and_what_is_no_loader_are_refused() -> None:
    data = Pictures(100)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type]
    with pytest.raises(LaneError, match="DistributedSampler draws the share of one rank"):
        LaneLoader(loader(data, sampler=sampler), 2)
    with pytest.raises(TypeError, match="not DataLoader: ReuseLoader"):
        LaneLoader(torch.utils.data.DataLoader(data), 2)  # type: ignore[arg-type]


def test_a_loader_in_the_middle_of_a_pass_is_refused() -> None:
    plain = loader()
    iterator = iter(plain)
    next(iterator)
    with pytest.raises(LaneError, match="under way in another iterator"):
        LaneLoader(plain, 2)
    state = plain.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    with LaneLoader(plain, 2) as peer:
        assert peer.position == (1, 0)
        peer.take(0)
        iterator = iter(plain)
        next(iterator)
        with pytest.raises(LaneError, match="under way in another iterator"):
            peer.take(1)
        iterator.close()  # type: ignore[attr-defined]
        peer.take(1)
    resumed = loader()
    resumed.load_state_dict(state)
    with pytest.raises(LaneError, match="after batch 1 of a pass of its own"):
        LaneLoader(resumed, 2)


def test_lanes_places_and_loaders_that_are_not_there_are_refused() -> None:
    peer = LaneLoader(loader(), 3)
    for call in (peer.take, peer.ids, lambda lane: peer.hold([lane])):
        for lane in (-1, 3):
            with pytest.raises(ValueError, match=f"there is no lane {lane}: .* 0 to 2"):
                call(lane)
    with pytest.raises(ValueError, match="step 17 is none of pass 0, which has steps 0 to 16"):
        peer.sizes(17)
    assert peer.sizes(16) == (4, 2, 2)
    peer.close()
    for call in (peer.advance, lambda: peer.take(0), lambda: peer.hold([0]), lambda: peer.ids(0)):
        with pytest.raises(LaneError, match="this LaneLoader was closed"):
            call()


def test_a_lane_without_samples_at_a_step_is_refused() -> None:
    with LaneLoader(loader(Pictures(9), batch_size=4, reuse=1), 2) as peer:
        assert len(peer) == 2 and peer.sizes(1) == (1, 0)
        peer.advance()
        assert not len(peer.ids(1).ids)
        peer.hold([0, 1])
        assert len(bits(peer, 0)[0]) == 1
        with pytest.raises(LaneError, match="lane 1 has no samples at step 1 of pass 0"):
            peer.take(1)


def test_closing_the_loader_ends_its_lanes_with_an_error() -> None:
    plain = loader()
    with LaneLoader(plain, 3) as peer:
        peer.take(0)
        plain.close()
        with pytest.raises(LaneError, match="the loader of these lanes was closed"):
            peer.take(1)


@pytest.mark.parametrize(
    ("changes", "lanes", "words"),
    [
        ({}, 4, "lanes=3, here it is 4"),
        ({"seed": 1}, 3, "seed=0, here it is 1"),
        ({"dataset": Pictures(90)}, 3, "samples=100, here it is 90"),
    ],
)
def test_a_state_of_other_lanes_is_refused(changes: dict[str, Any], lanes: int, words: str) -> None:
    with LaneLoader(loader(), 3) as peer:
        state = peer.state_dict()
        plain = peer.loader.state_dict()
    with LaneLoader(loader(**changes), lanes) as other:
        with pytest.raises(StateError, match=words):
            other.load_state_dict(state)
        with pytest.raises(StateError, match="no state of a LaneLoader"):
            other.load_state_dict(plain)


def test_a_state_of_another_order_is_refused_when_the_pass_goes_on() -> None:
    with LaneLoader(loader(sampler=torch.arange(100)), 3) as peer:
        peer.take(0)
        peer.advance()
        state = peer.state_dict()
    del state["identity"]["sampler arguments"]
    with LaneLoader(loader(sampler=torch.arange(100).flip(0)), 3) as other:
        other.load_state_dict(state)
        with pytest.raises(LoaderError, match="draws another order"):
            other.take(0)
