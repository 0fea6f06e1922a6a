"""A fault at any call that a decoding thread makes: the consumer gets it, and nobody hangs.

A first run lists the calls that the threads make. Then one of each name, also of C functions, is
struck in a run of its own.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from support.numbered_samples import Served, loader, watch

from loaders import ReuseLoader
from loaders.errors import PassEnded, WorkerDied
from loaders.options import WorkerKind, Workers
from loaders.workers import crew

SIZE = 12
pytestmark = [
    # A thread may be struck before it is within its guard, or in a generator that is thrown away.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Struck(Exception):
    """Nobody of ours raises this."""


def keeps_lock(frame: FrameType, event: str, called: Any) -> bool:
    """Whether a lock would never be left: at the end of a `with` block, and where the interpreter
    imports a module. Nothing but a profiler can raise there: the interpreter looks for signals and
    exceptions of other threads before, within the block."""
    leaves_with = event == "c_call" and called.__name__ == "__exit__"
    return leaves_with or frame.f_code.co_filename.startswith("<frozen importlib")


class Strike:
    """Watches the calls of the decoding threads, and raises at number `at` of them."""

    def __init__(self, at: int) -> None:
        self.names: dict[str, int] = {}
        """The first call of each name."""
        self.done = threading.Event()
        self.guarded = True
        """Whether what was struck lies within the guard of a thread."""
        self._at = at
        self._numbers = itertools.count()

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        ours = threading.current_thread().name.startswith("perfect-decode")
        if not ours or event not in ("call", "c_call") or keeps_lock(frame, event, called):
            return
        number, code = next(self._numbers), frame.f_code
        here = f"{code.co_filename}:{code.co_qualname}"
        self.names.setdefault(here if event == "call" else f"{here}:{called.__name__}", number)
        if number == self._at:
            self.guarded = code.co_qualname not in ("Thread.run", "ThreadCrew._work")
            self.done.set()
            raise Struck(here)


@contextmanager
def struck(at: int) -> Iterator[Strike]:
    strike = Strike(at)
    threading.setprofile(strike)
    try:
        yield strike
    finally:
        threading.setprofile(None)


def numbered(reuse: int, kind: WorkerKind) -> ReuseLoader:
    return loader(SIZE, reuse=reuse, workers=Workers(2, kind), seed=1)


def outcome_of(ours: ReuseLoader) -> list[Served] | BaseException:
    try:
        return list(watch(ours))
    except Exception as error:
        return error


def tells_of(strike: Strike, error: BaseException | None) -> bool:
    if not strike.guarded and isinstance(error, WorkerDied):
        return "before it began to work" in str(error)
    while error is not None and not isinstance(error, Struck):
        error = error.__cause__ or error.__context__
    return error is not None


def points(reuse: int, kind: WorkerKind, most: int) -> tuple[list[int], list[Served]]:
    """Calls to strike, and what is served where none is struck."""
    with struck(-1) as strike, numbered(reuse, kind) as ours:
        served = list(watch(ours))
        every = sorted(strike.names.values())
    return every[:: -(-len(every) // most)], served


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(crew, "JOIN_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("reuse", "kind", "most"), [(1, "thread", 60), (3, "thread", 60), (3, "process", 12)]
)
def test_the_consumer_gets_the_fault_or_all_that_it_wanted(
    reuse: int, kind: WorkerKind, most: int
) -> None:
    calls, served = points(reuse, kind, most)
    reached = failed = 0
    for at in calls:
        ours = numbered(reuse, kind)
        with struck(at) as strike:
            outcome = outcome_of(ours)
        if isinstance(outcome, BaseException):
            assert tells_of(strike, outcome), (at, outcome)
        else:
            assert outcome == served
        reached += strike.done.is_set()
        failed += outcome != served
        following = outcome_of(ours)
        if isinstance(following, BaseException):  # it was struck while it decoded ahead
            assert outcome == served and tells_of(strike, following)
            following = outcome_of(ours)
        assert isinstance(following, list)
        ids = Counter(i for batch in following for i in batch.ids)
        assert ids == Counter(dict.fromkeys(range(SIZE), reuse))
        ours.close()
    assert reached > len(calls) / 2 and failed > len(calls) / 3


def test_a_loader_that_is_closed_while_a_thread_is_struck_ends_its_consumer() -> None:
    calls, served = points(3, "thread", 20)
    for at in calls:
        ours, outcomes = numbered(3, "thread"), []
        with struck(at) as strike:
            consumer = threading.Thread(
                target=lambda o=ours, to=outcomes: to.append(outcome_of(o)), daemon=True
            )
            consumer.start()
            strike.done.wait(0.1)
            ours.close()
            consumer.join(60)
        assert not consumer.is_alive()
        [outcome] = outcomes
        assert outcome == served or isinstance(outcome, PassEnded) or tells_of(strike, outcome)
        ours.close()


def test_a_loader_that_is_closed_while_a_pass_begins_says_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with numbered(3, "thread") as ours:
        with monkeypatch.context() as patched:
            patched.setattr(ours.announcement, "announce", lambda *_: ours.close())
            with pytest.raises(PassEnded, match="was closed"):
                next(iter(ours))
        assert outcome_of(ours) == points(3, "thread", 1)[1]
