"""The gate: guests come between two nodes, one at a time, the highest priority first."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.eventually import eventually

from offload import StepError
from offload.gate import Gate, only_python, stand_aside

PATIENCE = 60.0


@contextmanager
def in_thread(run: Callable[[], Any]) -> Iterator[threading.Thread]:
    errors: list[BaseException] = []

    def kept() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_guest_comes_between_two_nodes_and_the_step_goes_on_after_it() -> None:
    gate, ran = Gate(), list[str]()

    def ask() -> None:
        with gate.granted():
            ran.append("guest")

    with gate.hold():
        ran.append("F1")
        with in_thread(ask):
            eventually(lambda: gate.wanted)
            assert ran == ["F1"]
            stand_aside()
            ran.append("F2")
    assert ran == ["F1", "guest", "F2"]
    assert gate.stood_aside > 0


def test_the_highest_priority_comes_first_and_among_equals_who_asked_first() -> None:
    gate, ran = Gate(), list[str]()

    def ask(name: str, priority: int) -> None:
        with gate.granted(priority):
            ran.append(name)

    with ExitStack() as threads, gate.hold():
        for name, priority in [("a", 0), ("b", 1), ("c", 1), ("d", 2)]:
            gate.wanted = False
            threads.enter_context(in_thread(partial(ask, name, priority)))
            eventually(lambda: gate.wanted)
        stand_aside()
        ran.append("step")
    assert ran == ["d", "b", "c", "a", "step"]


def test_a_guest_inside_comes_only_while_a_step_stands_aside() -> None:
    gate, ran = Gate(), list[str]()

    def ask() -> None:
        with gate.granted(inside=True):
            ran.append("guest")

    with gate.hold():
        pass
    with in_thread(ask):
        eventually(lambda: gate.wanted)
        ran.append("between two steps")
        with gate.hold():  # it comes before the first node
            ran.append("F1")
    assert ran == ["between two steps", "guest", "F1"]


def test_guests_with_memory_of_their_own_come_while_the_step_only_computes_in_python() -> None:
    gate, ran, over = Gate(), list[str](), threading.Event()

    def ask() -> None:
        with gate.granted():
            ran.append("guest")
            over.set()

    def borrow() -> None:
        with gate.granted(inside=True):
            ran.append("borrower")

    with only_python():  # no gate is held: nothing happens
        pass
    with gate.hold(), ExitStack() as threads:
        with only_python():
            threads.enter_context(in_thread(borrow))
            eventually(lambda: gate.wanted)
            threads.enter_context(in_thread(ask))
            assert over.wait(PATIENCE)
            ran.append("python")
        ran.append("node")
    assert ran == ["guest", "python", "borrower", "node"]


def test_a_guest_that_raises_gives_back() -> None:
    gate, ran = Gate(), list[str]()

    def ask() -> None:
        with pytest.raises(ValueError, match="own"), gate.granted():
            raise ValueError("own")

    with gate.hold():
        with in_thread(ask):
            eventually(lambda: gate.wanted)
            stand_aside()
        ran.append("step")
    with gate.granted():
        ran.append("another")
    assert ran == ["step", "another"]


def refused(gate: Gate, words: str, inside: bool = False) -> None:
    with pytest.raises(StepError, match=words), gate.granted(inside=inside):
        raise AssertionError("it was granted")


def test_who_would_wait_for_himself_is_told() -> None:
    gate = Gate()
    with gate.hold():
        refused(gate, "comes from the thread that trains")
    with gate.granted():
        refused(gate, "has the gate already")
    refused(gate, "comes from the thread that trains", inside=True)
    with gate.granted():  # no step runs: nobody waits for himself
        pass


def test_a_forked_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StepError, match="was forked from it"), gate.granted():
        pass


def test_a_ctrl_c_waits_until_the_guest_has_given_back() -> None:
    ran, times = list[str](), [0.0]
    gate = Gate(lambda: times.append(0.0) or 0.0)
    entered, over = threading.Event(), threading.Event()

    def ask() -> None:
        with gate.granted():
            entered.set()
            assert over.wait(PATIENCE)
            ran.append("guest")

    with in_thread(ask):
        assert entered.wait(PATIENCE)

        def interrupt() -> None:
            eventually(lambda: len(times) > 3)  # two for the guest, and one for the step
            signal.raise_signal(signal.SIGINT)
            over.set()

        with in_thread(interrupt), pytest.raises(KeyboardInterrupt), gate.hold():
            ran.append("never")
    assert ran == ["guest"]
    with gate.granted():
        pass


def test_a_guest_that_a_ctrl_c_hits_as_it_asks_is_not_waited_for() -> None:
    class Struck(int):
        def __neg__(self) -> int:
            raise KeyboardInterrupt

    gate = Gate()
    with pytest.raises(KeyboardInterrupt), gate.granted(Struck(1)):
        raise AssertionError("it was granted")
    assert not gate.wanted
    with gate.hold():
        stand_aside()
    with gate.granted():
        pass


@given(
    nodes=st.integers(1, 30),
    guests=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12),
)
def test_nodes_and_guests_never_run_at_once_and_all_run(
    nodes: int, guests: list[tuple[int, bool]]
) -> None:
    gate, inside, ran = Gate(), threading.Lock(), list[str]()

    def alone(name: str) -> None:
        assert inside.acquire(blocking=False), "two at once"
        ran.append(name)
        inside.release()

    def ask(priority: int, within: bool) -> None:
        with gate.granted(priority, inside=within):
            alone("guest")

    def step() -> None:
        for _ in range(3):
            with gate.hold():
                for _ in range(nodes):
                    stand_aside()
                    alone("node")
        gate.close()

    with ExitStack() as threads:
        for one in guests:
            threads.enter_context(in_thread(partial(ask, *one)))
        threads.enter_context(in_thread(step))
    assert ran.count("guest") == len(guests)
    assert ran.count("node") == 3 * nodes
