"""Lanes of a peer that run in groups have the bits of lanes one by one, and of a plain peer.

    deals of 1 to 9 lanes, in any order    k = 1 ... 4    plain Lightning, lane after lane
"""

import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import dealt_peer
from dealt_peer import LANES, Bare, Deal, DealtRun, Wide, always, assert_same, came_in, dealt

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield from dealt_peer.one_thread()


def deals() -> list[Deal]:
    """One peer with all lanes; then two, of which one has 1, 2, ... 8 lanes in any order, and
    gets what it has in one or in two parts. A pass has five steps, the last one a small one."""
    dice, found = random.Random(5), [[[range(LANES)]]]
    for count in range(1, LANES):
        lanes = dice.sample(range(LANES), LANES)
        mine, others = lanes[:count], sorted(lanes[count:])
        at = dice.randrange(count + 1)
        found.append([[mine[:at], mine[at:]], [others]])
    return found


DEALS = deals()


@cache
def plain(kind: Any, clip: str) -> DealtRun:
    return dealt(DEALS, module=kind(), clip=clip)


@pytest.mark.parametrize(
    ("size", "kind", "clip"),
    [(1, Wide, "norm"), (2, Wide, "norm"), (3, Wide, "value"), (4, Wide, "norm"), (3, Bare, "none")],
)
def test_groups_have_the_bits_of_single_lanes_and_of_a_plain_peer(
    size: int, kind: Any, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch, size)
    grouped = dealt(DEALS, "60%", module=kind(), clip=clip)
    assert_same(grouped, plain(kind, clip))
    assert {n for _, n in grouped.notes.runs} == {1, size}
