"""Models in processes of their own share a loader of this one; some of them die, and so does it."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any, cast

import pytest
from support.loader_datasets import served
from support.remote_consumers import consume, share, take_and_stay
from support.shared_streams import BATCHES, SIZE, Counted, lone, passes

from loaders import SharedStream
from loaders.errors import PassEnded

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
        got = [served_batch(next(iterator))]
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
                    got.append(served_batch(batch))
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


def served_batch(batch: Any) -> tuple[tuple[int, ...], bytes]:
    pictures, ids = batch
    return tuple(ids.tolist()), pictures.numpy().tobytes()
