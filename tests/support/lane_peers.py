"""A loader that is dealt in lanes, and what a peer serves of it."""

from typing import Any

from support.loader_datasets import Pictures

from loaders import ReuseLoader, Workers
from loaders.augment import Chain, Flip, RandomResizedCrop
from loaders.lanes.lane_loader import LaneLoader

CROP = Chain([RandomResizedCrop(6), Flip()])
Bits = tuple[tuple[int, ...], bytes]


def loader(dataset: Any = None, **changes: Any) -> ReuseLoader:
    changes["workers"] = Workers(2, "thread").changed_by(changes.get("workers", Workers()))
    usual = {"batch_size": 4, "reuse": 2, "augment": CROP}
    return ReuseLoader(dataset or Pictures(100), **{**usual, **changes})


def bits(peer: LaneLoader, lane: int) -> Bits:
    pictures, labels = peer.take(lane).batch
    return tuple(labels.tolist()), pictures.numpy().tobytes()


def a_pass(peer: LaneLoader, lanes: list[int] | None = None) -> dict[tuple[int, int], Bits]:
    """What the lanes serve until the next pass."""
    mine, begun = lanes or [*range(peer.lanes)], peer.position[0]
    served: dict[tuple[int, int], Bits] = {}
    peer.hold(mine)
    while peer.position[0] == begun:
        step = peer.position[1]
        sizes = peer.sizes(step)
        for lane in mine:
            if sizes[lane]:
                served[step, lane] = bits(peer, lane)
        peer.advance()
    return served


def reference(passes: int = 1, lanes: int = 3, **changes: Any) -> list[dict[tuple[int, int], Bits]]:
    with LaneLoader(loader(**changes), lanes) as peer:
        return [a_pass(peer) for _ in range(passes)]
