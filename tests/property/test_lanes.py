"""Laws of lanes: whoever serves them, in whatever deal, the bits are those of one peer."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.numbered_samples import Served, loader, settings_of_a_loader, take
from support.products import examples

from loaders.lanes.lane_loader import LaneLoader
from loaders.lanes.lane_order import LanePass, LaneWalk
from loaders.order.reuse import MODES, ORDER_STREAM, ReuseBuffer

Batches = dict[tuple[int, int, int], Served]
"""What was served, by (pass, step, lane)."""


@st.composite
def passes(draw: st.DrawFn) -> LanePass:
    batch, lanes = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    whole = ReuseBuffer(
        samples=draw(st.integers(batch * lanes, batch * lanes + 60)),
        batch_size=batch,
        reuse=draw(st.integers(1, 4)),
        buffer_batches=draw(st.integers(1, 4)),
        mode=draw(st.sampled_from(MODES)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 99)), ORDER_STREAM, draw(st.integers(0, 3)), 0),
    )
    return LanePass(whole, lanes, True, draw(st.none() | st.integers(0, 20)))


# ---- the order, which is pure -------------------------------------------------------------------


@given(passes())
@settings(max_examples=examples(200))
def test_all_lanes_together_serve_every_sample_as_often_as_asked_and_nothing_twice(
    of: LanePass,
) -> None:
    order = np.random.default_rng(of.whole.seed).permutation(of.whole.samples)
    walks = [LaneWalk(of.plan(lane)) for lane in range(of.lanes)]
    served: Counter[tuple[int, int]] = Counter()
    for step in range(len(of)):
        for lane, walk in enumerate(walks):
            serve = walk.serve(step)
            assert len(serve.positions) == of.sizes(step)[lane]
            ids = order[lane :: of.lanes][serve.positions]
            served.update(zip(ids.tolist(), serve.serves.tolist(), strict=True))
    assert set(served.values()) <= {1}
    if of.steps_limit is None and not of.whole.drop_last:
        assert len(served) == of.whole.samples * of.whole.reuse
        assert all(not len(walk.serve(len(of)).positions) for walk in walks)
    if of.steps_limit is None and of.whole.drop_last:
        assert all(
            size == of.whole.batch_size for step in range(len(of)) for size in of.sizes(step)
        )
    assert sum(of.share(lane) for lane in range(of.lanes)) == of.whole.samples


def test_every_lane_and_pass_has_a_reuse_order_of_its_own() -> None:
    whole = ReuseBuffer(80, 4, 2, 3, "rolling", True, False, (0, ORDER_STREAM, 0, 0))
    seeds = [(0, ORDER_STREAM, 0, 0), (0, ORDER_STREAM, 1, 0), (1, ORDER_STREAM, 0, 0)]
    passes = [LanePass(replace(whole, seed=seed), 2, True, None) for seed in seeds]
    orders = [
        [LaneWalk(each.plan(lane)).serve(3).positions.tolist() for lane in range(2)]
        for each in passes
    ]
    assert len({tuple(order) for pair in orders for order in pair}) == 6


# ---- peers --------------------------------------------------------------------------------------


@st.composite
def lane_settings(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(settings_of_a_loader())
    lanes = draw(st.integers(1, 4))
    least = options["batch_size"] * lanes
    return {**options, "size": draw(st.integers(least, least + 15)), "lanes": lanes}


@dataclass
class Peers:
    """So many peers of one run."""

    options: dict[str, Any]
    stack: ExitStack

    def join(self) -> LaneLoader:
        made = {**self.options}
        lanes = made.pop("lanes")
        return self.stack.enter_context(LaneLoader(loader(**made), lanes))


@contextmanager
def peers_of(options: dict[str, Any]) -> Iterator[Peers]:
    with ExitStack() as stack:
        yield Peers(options, stack)


def taken(peer: LaneLoader, lane: int) -> Served:
    found = peer.take(lane)
    pixels, ids = found.batch
    told = peer.ids(lane)
    assert found.info.ids.tolist() == told.ids.tolist() == ids.tolist()
    assert found.info.serves.tolist() == told.serves.tolist()
    serves = tuple(found.info.serves.tolist())
    return Served(tuple(ids.tolist()), serves, pixels.numpy().tobytes())


def served_alone(options: dict[str, Any], steps: int) -> Batches:
    """What one peer serves that holds all lanes."""
    served: Batches = {}
    with peers_of(options) as peers:
        peer = peers.join()
        for _ in range(steps):
            peer.hold(range(peer.lanes))
            for lane, size in enumerate(peer.sizes(peer.position[1])):
                if size:
                    served[(*peer.position, lane)] = taken(peer, lane)
            peer.advance()
    return served


def dealt(draw: Callable[[Any], Any], lanes: int, peers: int) -> list[list[int]]:
    owners = draw(st.lists(st.integers(0, peers - 1), min_size=lanes, max_size=lanes))
    order = draw(st.permutations(range(lanes)))
    return [[lane for lane in order if owners[lane] == peer] for peer in range(peers)]


@given(lane_settings(), st.data())
@settings(max_examples=examples(60))
def test_any_deal_with_moves_redos_and_joins_serves_what_one_peer_serves(
    options: dict[str, Any], data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, 14))
    alone = served_alone(options, steps)
    with peers_of(options) as run:
        peers = [run.join() for _ in range(data.draw(st.integers(1, 3)))]
        for _ in range(steps):
            if data.draw(st.integers(0, 4)) == 0:
                joiner = run.join()
                joiner.load_state_dict(peers[0].state_dict())
                peers[data.draw(st.integers(0, len(peers) - 1))] = joiner
            deal = dealt(data.draw, options["lanes"], len(peers))
            place = peers[0].position
            sizes = peers[0].sizes(place[1])
            for peer, lanes in zip(peers, deal, strict=True):
                assert peer.position == place and peer.sizes(place[1]) == sizes
                if data.draw(st.booleans()):
                    peer.hold(lanes)
                for lane in lanes:
                    for _ in range(data.draw(st.integers(1, 2)) if sizes[lane] else 0):
                        assert taken(peer, lane) == alone[(*place, lane)]
            redone = data.draw(st.integers(0, options["lanes"] - 1))
            if sizes[redone]:
                survivor = peers[data.draw(st.integers(0, len(peers) - 1))]
                assert taken(survivor, redone) == alone[(*place, redone)]
            for peer in peers:
                peer.advance()


@given(settings_of_a_loader())
@settings(max_examples=examples(60))
def test_one_lane_is_the_loader_itself(options: dict[str, Any]) -> None:
    with loader(**options) as plain:
        wanted = take(plain, 2 * len(plain))
        stats = plain.stats
    served = served_alone({**options, "lanes": 1}, len(wanted))
    assert [*served.values()] == wanted
    assert stats.decoded > 0


@given(lane_settings(), st.data())
@settings(max_examples=examples(40))
def test_a_run_resumes_at_every_step_on_another_number_of_peers(
    options: dict[str, Any], data: st.DataObject
) -> None:
    with peers_of(options) as run:
        first = run.join()
        steps = len(first) + data.draw(st.integers(1, 3))
        alone = served_alone(options, steps + 3)
        states = []
        for _ in range(steps):
            states.append(first.state_dict())
            first.advance()
        at = data.draw(st.integers(0, steps - 1))
        peers = [run.join() for _ in range(data.draw(st.integers(1, 3)))]
        for peer in peers:
            peer.load_state_dict(states[at])
            assert peer.state_dict() == states[at]
        for _ in range(3):
            place = peers[0].position
            for lane, size in enumerate(peers[0].sizes(place[1])):
                peer = peers[data.draw(st.integers(0, len(peers) - 1))]
                if size:
                    assert taken(peer, lane) == alone[(*place, lane)]
            for peer in peers:
                peer.advance()


@example(
    {
        "size": 1, "batch_size": 1, "reuse": 1, "buffer_batches": 4, "mode": "rolling",
        "shuffle": False, "drop_last": False, "reaugment": False, "seed": 0, "lanes": 1,
    },
    [1, 1, 2],
)  # fmt: skip
@given(lane_settings(), st.lists(st.integers(1, 4), min_size=3, max_size=3))
@settings(max_examples=examples(40))
def test_reuse_changes_between_passes_on_all_peers_alike(
    options: dict[str, Any], reuses: list[int]
) -> None:
    options["drop_last"] = False
    with peers_of(options) as run:
        peers = [run.join(), run.join()]
        for pass_index, reuse in enumerate(reuses):
            served: Counter[tuple[int, int]] = Counter()
            for peer in peers:
                peer.hold(range(pass_index % 2, peer.lanes))  # a hold does not begin the pass ...
                peer.loader.set_reuse(reuse)
            if pass_index == 0:
                reuse = options["reuse"]  # ... but for the very first one
            for step in range(len(peers[0])):
                assert [peer.position for peer in peers] == [(pass_index, step)] * 2
                for lane, size in enumerate(peers[0].sizes(step)):
                    if size:
                        found = taken(peers[(lane + step) % 2], lane)
                        served.update(zip(found.ids, found.serves, strict=True))
                for peer in peers:
                    peer.advance()
            assert len(served) == options["size"] * reuse and set(served.values()) == {1}


@given(lane_settings(), st.data())
@settings(max_examples=examples(40))
def test_lanes_that_stay_are_decoded_once_a_pass_and_a_moved_one_what_was_alive(
    options: dict[str, Any], data: st.DataObject
) -> None:
    options["drop_last"] = False
    with peers_of(options) as run:
        stays, comes = run.join(), run.join()
        lanes = range(options["lanes"])
        moved, at = data.draw(st.sampled_from(lanes)), data.draw(st.integers(0, len(stays) - 1))
        for peer in (stays, comes):
            peer.loader.limit_pass(len(peer))  # so that nothing of the next pass is decoded ahead
        served: list[Counter[int]] = [Counter(), Counter()]  # of the lane that moves
        for step in range(len(stays)):
            mine = [lane for lane in lanes if lane != moved or step < at]
            stays.hold(mine)
            comes.hold([lane for lane in lanes if lane not in mine])
            for lane, size in enumerate(stays.sizes(step)):
                if size:
                    found = taken(stays if lane in mine else comes, lane)
                    served[lane != moved or step >= at].update(found.ids if lane == moved else ())
            for peer in (stays, comes):
                peer.advance()
        for peer in (stays, comes):
            peer.close()
        fresh = stays.stats.decoded + comes.stats.decoded
        assert fresh == options["size"]
        ended = [sample for sample in served[0] if served[0][sample] == options["reuse"]]
        alive = len({*served[0], *served[1]}) - len(ended)
        assert comes.stats.decoded + comes.stats.extra_decodes == alive
