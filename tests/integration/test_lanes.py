"""`LaneLoader` with threads, processes, caches and faults."""

import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.lane_peers import CROP, Bits, a_pass, bits, loader, reference
from support.loader_datasets import Pictures, pixels

from loaders import Cache, Workers
from loaders.lanes.held_lanes import LaneRoom
from loaders.lanes.lane_loader import LaneLoader
from loaders.lanes.lane_table import LaneRooms

# ---- who decodes, and where it is kept ----------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 5])
def test_any_number_of_threads_serves_the_same(workers: int) -> None:
    with LaneLoader(loader(workers=workers), 3) as peer:
        served = [a_pass(peer), a_pass(peer)]
        assert peer.stats.decoded == 200
        assert peer.stats.extra_decodes == 0
    assert served == reference(2)


def test_worker_processes_serve_the_same() -> None:
    with LaneLoader(loader(workers=Workers(2, "process", start_method="fork")), 3) as peer:
        assert [a_pass(peer)] == reference()


def test_a_cache_keeps_samples_for_all_lanes_and_peers(tmp_path: Path) -> None:
    for kind in ("ram", "disk"):
        # One worker: another one may decode a sample of the next pass that this pass still reads.
        kept = loader(workers=1, cache=Cache(kind, 1 << 20, tmp_path if kind == "disk" else None))
        with LaneLoader(kept, 3) as peer:
            assert [a_pass(peer), a_pass(peer)] == reference(2)
            assert (peer.stats.decoded, peer.stats.cached) == (100, 100)
            assert peer.stats.extra_decodes == 0
    with LaneLoader(loader(cache=Cache("disk", 1 << 20, folder=tmp_path)), 3) as later:
        assert [a_pass(later)] == reference()
        assert (later.stats.decoded, later.stats.cached) == (0, 100)


def test_data_in_memory_take_no_slots() -> None:
    pictures = torch.stack([pixels(i) for i in range(100)])
    data = torch.utils.data.TensorDataset(pictures, torch.arange(100))
    with LaneLoader(loader(data), 3) as peer:
        assert [a_pass(peer), a_pass(peer)] == reference(2)
        assert peer.stats.buffer_bytes == 0


def test_user_code_and_crops_once_a_pass_are_seeded_by_the_serve() -> None:
    def noisy(picture: torch.Tensor) -> torch.Tensor:
        return picture + torch.randint(0, 9, ()).to(torch.uint8)

    def collated(samples: list[Any]) -> Any:
        pictures, labels = torch.utils.data.default_collate(samples)
        return pictures.float() + torch.rand(()), labels

    given: list[dict[str, Any]] = [
        {"augment": noisy},
        {"once": CROP, "augment": None},
        {"collate": collated},
    ]
    for changes in given:
        whole = reference(**changes)[0]
        with LaneLoader(loader(**changes), 3) as one, LaneLoader(loader(**changes), 3) as other:
            parts = a_pass(one, [2]) | a_pass(other, [1, 0])
        assert parts == whole


def test_a_sampler_draws_for_all_lanes_and_what_it_draws_twice_is_augmented_twice() -> None:
    sampler = [*range(40), *range(20)]
    served: Counter[tuple[int, int]] = Counter()
    with LaneLoader(loader(sampler=sampler), 3) as peer:
        draws = []
        while peer.position[0] == 0:
            for lane in range(3):
                if peer.sizes(peer.position[1])[lane]:
                    info = peer.take(lane).info
                    draws += zip(info.ids.tolist(), info.draws.tolist(), strict=True)
                    served.update(zip(info.ids.tolist(), info.serves.tolist(), strict=True))
            peer.advance()
    assert len({*draws}) == len(draws) == 120
    assert sorted(served.values()) == [1] * 40 + [2] * 40


# ---- what is kept in memory ---------------------------------------------------------------------


def test_a_lane_that_comes_takes_the_memory_of_one_that_goes() -> None:
    with LaneLoader(loader(), 8) as peer:
        peer.hold([0, 1])
        assert bits(peer, 0) != bits(peer, 1)
        taken = peer.stats.buffer_bytes
        for lanes in ([1, 2], [2, 3], [7, 4]):
            peer.hold(lanes)
            for lane in lanes:
                bits(peer, lane)
            # A lane that goes while a thread still reads for it gives its memory back after that.
            eventually(lambda: peer.stats.buffer_bytes == taken)
        peer.hold([4])
        eventually(lambda: peer.stats.buffer_bytes == taken // 2)


def test_a_room_that_is_left_while_another_is_made_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lane 0 goes in mid-read. A room is made for lane 2, and lane 0 ends before it is there."""
    reading, going = threading.Event(), threading.Event()
    with LaneLoader(loader(), 8) as peer:
        *_, (last, _) = a_pass(peer, [0]).values()

    class Slow(Pictures):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == last[-1] and threading.current_thread() is not threading.main_thread():
                reading.set()
                assert going.wait(60)
            return super().__getitem__(index)

    with LaneLoader(loader(Slow(100), workers=3), 8) as peer:
        peer.hold([0])
        bits(peer, 0)
        one = peer.stats.buffer_bytes
        peer.advance()
        assert reading.wait(60)
        made = LaneRooms.make

        def slowly(*given: Any) -> LaneRoom:
            going.set()
            eventually(lambda: peer.stats.buffer_bytes == one)
            return made(*given)

        monkeypatch.setattr(LaneRooms, "make", slowly)
        peer.hold([2])
        bits(peer, 2)
        assert peer.stats.buffer_bytes == one


def test_a_batch_that_is_kept_does_not_change() -> None:
    with LaneLoader(loader(), 3) as peer:
        kept, copies = [], []
        while peer.position[0] == 0:
            for lane, size in enumerate(peer.sizes(peer.position[1])):
                if size:
                    pictures, labels = peer.take(lane).batch
                    kept.append((pictures, labels))
                    copies.append((pictures.clone(), labels.clone()))
            peer.advance()
        for (pictures, labels), (one, other) in zip(kept, copies, strict=True):
            assert torch.equal(pictures, one) and torch.equal(labels, other)


def test_a_consumer_that_writes_into_its_batch_changes_no_other() -> None:
    with LaneLoader(loader(augment=None), 3) as peer:
        first = bits(peer, 1)
        peer.take(1).batch[0].zero_()
        assert bits(peer, 1) == first


# ---- faults -------------------------------------------------------------------------------------


def test_a_sample_that_cannot_be_read_is_an_error_of_its_lane_alone() -> None:
    whole = reference()[0]
    with LaneLoader(loader(Pictures(100, bad=(17,))), 3) as peer:
        broken = [*peer.loader.order.of_pass(0).drawn_ids].index(17) % 3
        served = {}
        failed_at = None
        while peer.position[0] == 0:
            step = peer.position[1]
            for lane, size in enumerate(peer.sizes(step)):
                if not size:
                    continue
                if lane != broken or (failed_at is None and 17 not in peer.ids(lane).ids):
                    served[step, lane] = bits(peer, lane)
                elif failed_at is None:
                    with pytest.raises(OSError, match="sector 17") as raised:
                        peer.take(lane)
                    assert raised.value.__notes__ == ["while decoding sample 17 of pass 0"]
                    failed_at = step
            peer.advance()
        assert failed_at is not None
        assert served.items() <= whole.items()
        assert {key for key in whole if key not in served} == {
            (step, lane) for step, lane in whole if lane == broken and step >= failed_at
        }


def test_a_lane_that_failed_is_read_anew_when_it_was_let_go() -> None:
    data = Pictures(100, bad=(17,))
    with LaneLoader(loader(data), 3) as peer:
        broken = [*peer.loader.order.of_pass(0).drawn_ids].index(17) % 3
        while 17 not in peer.ids(broken).ids:
            peer.advance()
        with pytest.raises(OSError, match="sector 17"):
            peer.take(broken)
        data.bad = frozenset()
        peer.hold([])
        assert 17 in bits(peer, broken)[0]


def test_samples_that_stand_in_are_the_same_on_every_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    broken: dict[str, Any] = {"dataset": Pictures(100, bad=(17, 40)), "on_error": "skip"}
    broken["buffer_batches"] = 3  # so that nothing of the next pass is read within this one
    whole = reference(**broken)[0]
    with LaneLoader(loader(**broken), 3) as one, LaneLoader(loader(**broken), 3) as other:
        assert a_pass(one, [1]) | a_pass(other, [0, 2]) == whole
        assert one.stats.skipped + other.stats.skipped == 2


def test_an_augmentation_that_fails_fails_its_batch_and_may_be_tried_again() -> None:
    fails = [True]

    def augment(images: torch.Tensor, draws: Any) -> torch.Tensor:
        if fails[0]:
            raise RuntimeError("no memory")
        return images

    with LaneLoader(loader(augment=augment), 3) as peer:
        peer.hold([0, 1])
        with pytest.raises(RuntimeError, match="no memory"):
            peer.take(0)
        fails[0] = False
        bits(peer, 0)


def test_threads_end_with_the_loader_or_when_nobody_holds_it() -> None:
    def ours() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("perfect-lanes")]

    peer = LaneLoader(loader(workers=3), 3)
    assert ours() == []
    peer.hold([0])
    assert len(ours()) == 3
    peer.close()
    peer.close()
    assert ours() == []
    peer = LaneLoader(loader(), 3)
    peer.take(0)
    del peer
    assert ours() == []


def test_a_forked_process_goes_on_where_its_parent_was() -> None:
    with LaneLoader(loader(), 3) as peer:
        peer.hold([0])
        bits(peer, 0)
        peer.advance()
        wanted = bits(peer, 0)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            ok = b"x"
            try:
                ok = b"y" if bits(peer, 0) == wanted else b"n"
            finally:
                os.write(writing, ok)
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"y"
        os.waitpid(child, 0)


# ---- passes -------------------------------------------------------------------------------------


def test_a_batch_size_that_changes_between_passes_and_a_limit_hold_on_all_peers() -> None:
    def served(deal: list[list[int]]) -> dict[Any, Bits]:
        found: dict[Any, Bits] = {}
        for mine in deal:
            with LaneLoader(loader(), 4) as peer:
                found |= {(0, *key): what for key, what in a_pass(peer, mine).items()}
                peer.loader.set_reuse(3, batch_size=6)
                peer.loader.limit_pass(5)
                assert len(peer) == 5
                found |= {(1, *key): what for key, what in a_pass(peer, mine).items()}
                peer.loader.limit_pass(None)
                found |= {(2, *key): what for key, what in a_pass(peer, mine).items()}
                assert peer.position == (3, 0)
        return found

    assert served([[0, 1, 2, 3]]) == served([[3], [1, 0], [2]])


def test_a_pass_of_which_nothing_is_taken_leaves_the_next_ones_their_own_order() -> None:
    with LaneLoader(loader(), 3) as peer:
        a_pass(peer)
        for _ in range(len(peer)):
            peer.advance()
        assert peer.position == (2, 0)
        assert a_pass(peer) == reference(3)[2]


def test_a_state_carries_how_passes_are_served_to_a_joiner() -> None:
    with LaneLoader(loader(), 3) as peer, LaneLoader(loader(), 3) as joiner:
        peer.hold([0, 1, 2])
        peer.take(0)
        peer.advance()
        peer.loader.set_reuse(5)
        joiner.load_state_dict(peer.state_dict())
        assert joiner.state_dict() == peer.state_dict()
        assert len(joiner) == len(peer) == 17
        assert a_pass(joiner) == a_pass(peer)
        assert len(joiner) == len(peer) == 43
        assert bits(joiner, 1) == bits(peer, 1)
        assert joiner.loader.reuse == 5


def test_inference_mode_makes_no_batches_that_cannot_be_trained_on() -> None:
    with LaneLoader(loader(augment=None), 3) as peer:
        with torch.inference_mode():
            pictures, _ = peer.take(0).batch
        assert not pictures.is_inference()
