"""Worker processes that die, are stopped or are forgotten: no sample lost, nothing left behind."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support import worker_datasets as sets

from loaders.errors import LoaderError, PassEnded, WorkerDied
from loaders.slots.leaves import Chunk
from loaders.workers import processes
from loaders.workers.processes import StartMethod, WorkerProcess

every_method = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
# A spawned process is as one of the fork server's, but for the second that it takes to start.
without_spawning = pytest.mark.parametrize("method", ["fork", "forkserver"])
pytestmark = [
    # Python 3.12 warns of fork where threads live; these tests ask for it by name.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def values(chunk: Chunk) -> list[Any]:
    return [sample.item() for sample in chunk.samples]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- deaths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGKILL", "by signal SIGKILL, often the kernel's doing when memory runs out"),
        ("SIGSEGV", "by signal SIGSEGV, a crash in native code"),
        ("SIGTERM", "by signal SIGTERM"),
        ("exit", "with exit code 3"),
    ],
)
def test_a_worker_that_dies_once_is_restarted_and_nothing_is_lost(
    how: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with WorkerProcess(sets.Deadly(how, 1, tmp_path / "count"), None, "reader") as worker:
        with caplog.at_level(logging.WARNING, "loaders.workers.processes"):
            assert values(worker.read([1, 2])) == [1, 2]
            assert values(worker.read([4, 5, 6])) == [4, 5, 6]
            assert values(worker.read([5, 7])) == [5, 7]
        assert worker.restarts == 1
    [warning] = caplog.messages
    assert f"worker process reader ended {said} while it read sample 5" in warning


@without_spawning
def test_a_worker_that_dies_again_is_given_up_with_the_sample_it_was_at(
    method: StartMethod, tmp_path: Path
) -> None:
    with WorkerProcess(sets.Deadly("SIGKILL", 2, tmp_path / "count"), method, "reader") as worker:
        with pytest.raises(WorkerDied, match=r"reader ended by signal SIGKILL.*sample 5") as error:
            worker.read([4, 5, 6])
        assert "restarted before" in str(error.value)
        assert "decode in threads" in str(error.value)
        assert worker.pid is None


@without_spawning
def test_a_worker_killed_between_two_reads_is_restarted_by_the_next(
    method: StartMethod, watch: Any
) -> None:
    with WorkerProcess(sets.Faulty(), method, "reader") as worker:
        worker.read([1])
        ended = watch(worker.pid)
        os.kill(worker.pid or 0, signal.SIGKILL)
        assert ended()
        assert values(worker.read([2, 3])) == [2, 3]
        assert worker.restarts == 1


@pytest.mark.parametrize("hangs", [1, 2])
def test_a_forked_worker_that_never_reports_is_forked_once_more(
    hangs: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock that another thread held at the fork stays shut in there."""
    lock = threading.Lock()
    lock.acquire()
    work = processes.worker.work

    def hang_then_work(*arguments: Any) -> None:
        with lock if worker.restarts < hangs else nullcontext():
            work(*arguments)

    monkeypatch.setattr(processes.worker, "work", hang_then_work)
    monkeypatch.setattr(processes, "FORK_SECONDS", 1.0)
    warn = processes.log.warning

    def wait_longer(*said: Any) -> None:
        """A fork that does not hang has as long as a slow machine takes."""
        warn(*said)
        monkeypatch.setattr(processes, "FORK_SECONDS", 60.0 if hangs == 1 else 1.0)

    monkeypatch.setattr(processes.log, "warning", wait_longer)
    with WorkerProcess(sets.Faulty(), "fork", "reader") as worker:
        if hangs == 2:
            with pytest.raises(WorkerDied, match=r"hangs since it was forked.*forkserver"):
                worker.read([1])
        else:
            assert values(worker.read([1, 2])) == [1, 2]
        assert worker.restarts == 1
    assert "It is forked once more" in caplog.text


def test_a_forked_worker_is_seen_to_die_where_its_siblings_hold_its_pipe() -> None:
    """Each of these inherits whatever ends of pipes are open at the moment of its fork."""
    workers = [WorkerProcess(sets.Faulty(), "fork", f"reader-{n}") for n in range(4)]
    threads = [threading.Thread(target=worker.read, args=([1],)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGKILL)
        assert values(worker.read([2])) == [2]
    for worker in workers:
        worker.close()


def test_a_ctrl_c_at_the_terminal_does_not_reach_the_worker() -> None:
    with WorkerProcess(sets.Faulty(), None, "reader") as worker:
        worker.read([1])
        pid = worker.pid
        os.kill(pid or 0, signal.SIGINT)
        assert values(worker.read([2])) == [2]
        assert (worker.pid, worker.restarts) == (pid, 0)


# ---- the end ------------------------------------------------------------------------------------


@every_method
def test_closing_leaves_no_process_and_no_descriptor(method: StartMethod, watch: Any) -> None:
    def whole_life() -> None:
        with WorkerProcess(sets.Sized(), method, "reader") as worker:
            worker.read([100_000, 2])
            worker.read([200_000])
            ended = watch(worker.pid)
        assert ended()
        worker.close()

    whole_life()  # starts the fork server and the resource tracker, which stay
    before = descriptors()
    whole_life()
    assert descriptors() == before
    assert not multiprocessing.active_children()


class Reading:
    """A read on a thread of its own, up to the moment at which the data set says so."""

    def __init__(self, worker: WorkerProcess, ids: list[int], fifo: Path) -> None:
        self.outcome: Any = None
        self.thread = threading.Thread(target=self._read, args=(worker, ids), daemon=True)
        self.thread.start()
        fifo.read_text()

    def _read(self, worker: WorkerProcess, ids: list[int]) -> None:
        try:
            self.outcome = worker.read(ids)
        except LoaderError as error:
            self.outcome = error

    def result(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaders.workers.child_process.END_SECONDS", (0.3, 0.3, 10.0))


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize("kind", ["Hanging", "Stubborn"])
@without_spawning
def test_a_data_set_that_hangs_is_ended_by_closing_from_another_thread(
    method: StartMethod, kind: str, watch: Any, fifo: Path, quick_ends: None
) -> None:
    worker = WorkerProcess(getattr(sets, kind)(fifo), method, "reader")
    reading = Reading(worker, [0, 1, 2], fifo)
    ended = watch(worker.pid)
    worker.close()
    assert isinstance(reading.result(), PassEnded)
    assert ended()
    assert worker.restarts == 0


@without_spawning
def test_a_stopped_worker_ends_after_the_sample_that_it_is_at(
    method: StartMethod, watch: Any, fifo: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go on")
    worker = WorkerProcess(sets.Waiting(fifo, tmp_path / "go on"), method, "reader")
    reading = Reading(worker, [0, 1, 2], fifo)
    ended = watch(worker.pid)
    worker.stop()
    (tmp_path / "go on").write_text("now")
    assert isinstance(reading.result(), PassEnded)
    assert ended()
    worker.close()


def test_a_thread_of_the_data_set_does_not_keep_its_process(watch: Any) -> None:
    worker = WorkerProcess(sets.WithAThread(), None, "reader")
    worker.read([0])
    ended = watch(worker.pid)
    worker.stop()
    assert ended()
    worker.close()


# ---- programs that end without closing ----------------------------------------------------------

# Its workers are idle: a thread that reads on while the interpreter ends is whoever started it to
# end, as a loader does with its own.
PROGRAM = """
import sys, threading
from support.worker_datasets import Faulty
from loaders.workers.processes import WorkerProcess

def main():
    global workers
    workers = [WorkerProcess(Faulty(), {method!r}, f"reader-{{n}}") for n in range(2)]
    threads = [threading.Thread(target=worker.read, args=([1],)) for worker in workers]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(*[worker.pid for worker in workers], flush=True)
    sys.stdin.readline()

if __name__ == '__main__': main()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(method: str) -> subprocess.Popen[str]:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM.format(method=method))
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, str(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


@every_method
def test_workers_end_when_their_parent_is_killed(method: str, program: Any, watch: Any) -> None:
    parent = program(method)
    ends = [watch(pid) for pid in pids(parent)]
    assert len(ends) == 2
    parent.kill()
    assert all(ended() for ended in ends)


@every_method
def test_a_program_that_forgets_to_close_ends_all_the_same(
    method: str, program: Any, watch: Any
) -> None:
    parent = program(method)
    ends = [watch(pid) for pid in pids(parent)]
    _, said = parent.communicate("\n")
    assert all(ended() for ended in ends)
    assert parent.returncode == 0
    assert said == ""


@every_method
def test_a_ctrl_c_ends_parent_and_workers_without_a_word_from_these(
    method: str, program: Any, watch: Any
) -> None:
    parent = program(method)
    workers = pids(parent)
    ends = [watch(pid) for pid in workers]
    for pid in (*workers, parent.pid):
        os.kill(pid, signal.SIGINT)
    _, said = parent.communicate()
    assert all(ended() for ended in ends)
    assert said.count("KeyboardInterrupt") == 1


UNGUARDED = """
import sys
from support.worker_datasets import Faulty
from loaders.workers.processes import WorkerProcess
WorkerProcess(Faulty(), {method!r}, "reader").read([1])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_cannot_be_imported_is_told_what_to_do(method: str, tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED.format(method=method))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "unguarded.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "WorkerDied: worker process reader ended with exit code 1 before it could read" in last
    assert "under `if __name__ == '__main__':`" in last
