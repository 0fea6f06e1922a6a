"""Processes that share a loader of this one: some die, so does it; what is sent arrives whole."""

import gc
import mmap
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.loader_datasets import served
from support.remote_consumers import consume, share, take_and_stay
from support.shared_streams import BATCH, BATCHES, SIZE, Counted, lone, passes

from loaders import SharedStream
from loaders.errors import PassEnded, SharingError
from loaders.sharing.lent_blocks import HELD, BorrowedBlocks, LentBlocks, Shipment, pack, unpack
from loaders.sharing.remote_view import RemoteSource
from loaders.sharing.view_link import AHEAD

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="remote views need Linux"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


@contextmanager
def process(run: Any, *arguments: Any, method: str = "fork") -> Iterator[tuple[Any, Connection]]:
    """Run a consumer in a process of its own, which is killed in the end."""
    context = cast(SpawnContext, multiprocessing.get_context(method))
    ours, theirs = context.Pipe()
    child = context.Process(target=run, args=(*arguments, theirs))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    return {*os.listdir("/dev/shm")}


def test_processes_at_different_speeds_get_what_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A spawned process gets the path of this one.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    data = Counted(SIZE)
    with lone(reuse=2) as expected:
        whole = passes(expected, 2)
        state = expected.state_dict()
    with SharedStream(lone(dataset=data, reuse=2), window=3) as stream:
        data.reads.clear()  # the loader has looked whether reading repeats itself
        views = [stream.remote_view() for _ in range(3)]
        with (
            process(consume, views[0], 2, 0.0, method="spawn") as (_, spawned),
            process(consume, views[1], 2, 0.0) as (_, fast),
            process(consume, views[2], 2, 0.01) as (_, slow),
        ):
            for pipe in (fast, slow, spawned):
                taken, reached = pipe.recv()
                assert taken == whole
                assert reached | {"stats": 0} == state | {"stats": 0}
                assert reached["stats"]["served"] == 2 * 2 * SIZE
        assert stream.stats.decoded == 2 * SIZE
        assert len(data.reads) < 3 * SIZE, "twice, and what was decoded ahead for a third pass"


def test_a_killed_consumer_frees_the_others_and_leaves_nothing_behind() -> None:
    files, memory = open_files(), shared_memory()
    with SharedStream(lone(), window=2) as stream:
        stays, dies = stream.view(), stream.remote_view()
        taken: list[Any] = []
        worker = threading.Thread(target=lambda: taken.extend(passes(stays, 3)), daemon=True)
        with process(take_and_stay, dies, 3) as (child, pipe):
            worker.start()
            assert pipe.recv() == "taken"
            worker.join(0.3)
            assert worker.is_alive(), "it waits for the one that takes no more"
            child.kill()
            worker.join(60)
        with lone() as expected:
            assert taken == passes(expected, 3)
        # The view is where the dead one was: after its third batch, hence at the next pass.
        assert dies.state_dict()["served_batches"] == 3
        with lone() as expected:
            assert passes(dies, 1) == passes(expected, 2)[BATCHES:]
        dies.close()
        stays.close()
    deadline = time.monotonic() + 60  # what other tests have there now goes in the end, too
    while open_files() > files or shared_memory() - memory:
        assert time.monotonic() < deadline, (open_files(), files, shared_memory() - memory)
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["idle", "waiting"])
def test_the_death_of_the_streams_process_is_an_error_and_no_hang(when: str) -> None:
    """Though a consumer that was forked from it holds its sockets open."""
    with process(share) as (owner, pipe):
        view = pipe.recv()
        with lone() as expected:
            whole = served(expected)
        iterator = iter(view)
        got = [served([next(iterator)])[0]]
        pipe.send("fork now")
        told = [pipe.recv(), pipe.recv()]  # its process id, and that it has a batch
        assert "taken" in told
        [other] = [word for word in told if word != "taken"]
        killer = threading.Timer(0.0 if when == "idle" else 0.3, owner.kill)
        killer.start()
        if when == "idle":
            killer.join()
            owner.join()
        with pytest.raises(PassEnded, match=f"process {owner.pid}.* has closed it or has ended"):
            while True:
                for batch in iterator:
                    got.append(served([batch])[0])
                iterator = iter(view)
        killer.join()
        os.kill(other, 0)  # that one is there still
        os.kill(other, 9)
    assert got[:BATCHES] == whole[: len(got)]
    state = view.state_dict()
    with lone() as expected:
        expected.load_state_dict(state)
        assert state["pass"] * BATCHES + state["served_batches"] == len(got)
        assert len(served(expected)) == BATCHES - state["served_batches"]
    with pytest.raises(PassEnded, match="has closed it or has ended"):
        served(view)


def taken(batch: Any) -> Any:
    return served([batch])[0]


def over(far: SharedStream, data: Counted) -> tuple[SharedStream, RemoteSource]:
    """Return a stream that reads a view of `far`, and whose own data set is `data`."""
    loader = lone(dataset=data)
    view = pickle.loads(pickle.dumps(far.remote_view()))
    source = RemoteSource(loader, lambda: view)
    return SharedStream(loader, window=2 * BATCHES, source=source), source


@pytest.mark.parametrize("ends_after", [0, 1, BATCHES - 1, BATCHES, BATCHES + 2])
def test_a_stream_whose_other_process_ends_goes_on_with_the_next_batch(
    ends_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = Counted(SIZE)
    far = SharedStream(lone(), window=2 * BATCHES)
    near, source = over(far, data)
    data.reads.clear()
    with near, lone() as expected:
        first, second = near.view(), near.view()
        found: list[Any] = []
        for number in range(2 * BATCHES):
            if number == ends_after:
                far.close()
            if number % BATCHES == 0:
                iterator = iter(first)
            found.append(next(iterator))
        reference = served(expected) + served(expected)
        assert [taken(batch) for batch in found] == reference
        assert served(second) + served(second) == reference
        assert first.state_dict() | {"stats": None} == expected.state_dict() | {"stats": None}
    assert source.is_remote == (ends_after > 2 * BATCHES)
    said = re.findall(r"pass (\d+) is read in this process from batch (\d+) on", caplog.text)
    ((in_pass, in_batch),) = said
    sent = int(in_pass) * BATCHES + int(in_batch)
    assert ends_after <= sent <= ends_after + AHEAD, "what was sent before the end is served"
    own = 2 * SIZE - sent * BATCH
    assert own <= len(data.reads) <= own + 2 * SIZE, "nothing is decoded twice, some may be ahead"
    far.close()


def test_while_the_other_process_reads_nothing_is_decoded_here() -> None:
    data = Counted(SIZE)
    with SharedStream(lone(), window=BATCHES) as far:
        near, source = over(far, data)
        data.reads.clear()
        with near, lone() as expected:
            view = near.view()
            assert served(view) + served(view) == served(expected) + served(expected)
            assert source.is_remote and not data.reads
            assert view.stats.decoded == expected.stats.decoded


def test_an_error_of_the_data_set_is_raised_as_it_is_here_and_the_pass_can_be_tried_again() -> None:
    broken = Counted(SIZE, bad=(7,))
    with SharedStream(lone(dataset=Counted(SIZE, bad=(7,))), window=BATCHES) as far:
        near, source = over(far, broken)
        with near:
            view = near.view()
            with pytest.raises(OSError, match="sector 7"):
                served(view)
            assert not source.is_remote
            broken.bad = frozenset()
            with lone() as expected:
                assert len(served(view)) == len(served(expected))


Pair = namedtuple("Pair", "left right")


def sent(batch: Any) -> Any:
    packed = pack(batch)
    area = mmap.mmap(-1, max(1, packed.parcel.nbytes))
    packed.write(area)
    return unpack(packed.parcel, area)


def check_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert type(mine) is type(theirs)
    assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    bits = [tensor.flatten().contiguous().view(torch.uint8) for tensor in (mine, theirs)]
    assert torch.equal(*bits)


numbers = torch.arange(1, 49, dtype=torch.float32)
TENSORS = {
    "plain": numbers,
    "channels last": numbers.view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last),
    "part": numbers.view(6, 8)[2:4, 1:7:2],
    "reversed dims": numbers.view(2, 4, 6).permute(2, 0, 1),
    "expanded": numbers[:3].view(3, 1).expand(3, 4),
    "no rows": numbers.view(6, 8)[3:3],
    "nothing": torch.empty(0),
    "one number": torch.tensor(7),
    "bfloat16": numbers.bfloat16()[5:],
    "flags": numbers > 20,
    "complex": torch.complex(numbers, -numbers)[3:].view(5, 9),
    "nan": torch.tensor([float("nan"), -0.0]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_bits_and_strides(name: str) -> None:
    check_same(sent(TENSORS[name]), TENSORS[name])


def test_a_nest_arrives_as_it_was() -> None:
    left, right = numbers.clone(), torch.arange(5)
    batch = {"pair": Pair(left, [right, "word", None]), 3: (1.5, b"x", {left.dtype})}
    got = sent(batch)
    assert list(got) == ["pair", 3]
    assert type(got["pair"]) is Pair
    check_same(got["pair"].left, left)
    check_same(got["pair"].right[0], right)
    assert got["pair"].right[1:] == ["word", None]
    assert got[3] == batch[3]


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(SharingError, match=r"cannot be sent to another process: .*lock"):
        pack([numbers, threading.Lock()])
    parcel = pack([Pair(1, 2)]).parcel
    kept = globals().pop("Pair")
    try:
        with pytest.raises(SharingError, match=r"cannot be rebuilt in this process: .*Pair"):
            unpack(parcel, bytearray())
    finally:
        globals()["Pair"] = kept


# ---- blocks -------------------------------------------------------------------------------------


class BothEnds:
    """Blocks at both ends, without the link between them."""

    def __init__(self) -> None:
        self.lent, self.borrowed = LentBlocks(), BorrowedBlocks()

    def send(self, batch: Any) -> Shipment:
        shipment, file = self.lent.ship(pack(batch))
        self.borrowed.receive(shipment, file)
        return shipment

    def serve(self, batch: Any) -> Any:
        got = self.borrowed.open(self.send(batch))
        self.lent.take_back(self.borrowed.returned())
        return got


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="blocks are Linux's")


@needs_linux
def test_blocks_are_used_again_when_nobody_holds_what_was_in_them() -> None:
    ends = BothEnds()
    kept: Any = None
    for number in range(9):
        batch = ends.serve([torch.full((64,), number), torch.tensor([number])])
        kept = kept if kept is not None else batch[0][10:20].numpy()
        assert batch[0][0] == number
    assert kept.tolist() == [0] * 10
    size = pack([torch.full((64,), 0), torch.tensor([0])]).parcel.nbytes
    # One is kept, one is the loop's, one was when the next came, and that one came in the fourth.
    assert ends.lent.nbytes == 4 * size


@needs_linux
def test_who_keeps_all_batches_keeps_few_blocks_and_files() -> None:
    gc.collect()
    ends, before = BothEnds(), open_files()
    kept = [ends.serve(torch.full((64,), number)) for number in range(40)]
    assert [batch[3].item() for batch in kept] == list(range(40))
    assert ends.lent.nbytes <= (HELD + 1) * kept[0].nbytes
    assert open_files() - before <= 2 * (HELD + 1)
    del kept, ends
    gc.collect()
    assert open_files() == before
