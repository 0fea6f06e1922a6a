"""`LaneLoader` with threads, processes, caches and faults, and what it refuses by name."""

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.lane_peers import Bits, a_pass, bits, loader, reference
from support.loader_datasets import Pictures, pixels

from loaders import Cache, LoaderError, Workers
from loaders.errors import LaneError, StateError
from loaders.lanes.lane_loader import LaneLoader
from loaders.workers.processes import WorkerProcess

# ---- who decodes, and where it is kept ----------------------------------------------------------


def test_worker_processes_serve_the_same() -> None:
    with LaneLoader(loader(workers=Workers(2, "process", start_method="fork")), 3) as peer:
        assert [a_pass(peer)] == reference()


def test_worker_processes_are_forked_before_threads_of_ours_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, living = WorkerProcess.start, list[str]()

    def note_threads(process: WorkerProcess) -> None:
        living.extend(thread.name for thread in threading.enumerate())
        start(process)
        assert process.pid is not None

    monkeypatch.setattr(WorkerProcess, "start", note_threads)
    with LaneLoader(loader(workers=Workers(2, "process", start_method="fork")), 3) as peer:
        peer.hold([0])
    assert living
    assert not [name for name in living if name.startswith("perfect-lanes")]


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


# ---- what is refused by name --------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="pass 0 has no step 17: it has steps 0 to 16"):
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
        ({}, 4, "lanes=3, this loader has lanes=4"),
        ({"seed": 1}, 3, "seed=0, this loader has seed=1"),
        ({"dataset": Pictures(90)}, 3, "samples=100, this loader has samples=90"),
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
