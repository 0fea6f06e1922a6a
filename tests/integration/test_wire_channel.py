"""What a channel over localhost carries, and how it ends.

Threads of this process play both sides, but for a peer that is killed or frozen: that is a process
of its own (wire_peer.py). `no_leaks` finds every thread that is left.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from support import wire_peer
from support.wire_ends import LOOPBACK, SECRET, Pair

from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener, connect
from trainers.elastic.wire.wire_errors import BadFrame, ChannelClosed, WireTimeout


@pytest.fixture
def crew() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# ---- what is carried ----------------------------------------------------------------------------


def test_both_sides_send_much_at_once(anchor: Listener, crew: ThreadPoolExecutor) -> None:
    """More than what the system keeps: a side that sends before it receives needs the other's
    receiver, on another thread of one TLS connection."""
    data = os.urandom(1 << 20) * 24
    with connect([anchor.address], SECRET, 20) as client, anchor.accept(20) as server:
        sent = [crew.submit(side.send, "much", [data]) for side in (client, server)]
        got = [crew.submit(side.receive, 60, limit=len(data)) for side in (client, server)]
        assert all(one.result(60).payloads[0].data == data for one in got)
        assert [one.result(60) for one in sent] == [None, None]


def test_messages_of_many_threads_stay_whole(pair: Pair, crew: ThreadPoolExecutor) -> None:
    client, server = pair

    def send(thread: int) -> None:
        for number in range(50):
            client.send("m", [bytes([thread]) * (1 + 777 * number)], thread=thread, number=number)

    done = [crew.submit(send, thread) for thread in range(3)]
    numbers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(150):
        message = server.receive(20)
        thread, number = message.fields["thread"], message.fields["number"]
        assert message.payloads[0].data == bytes([thread]) * (1 + 777 * number)
        numbers[thread].append(number)
    assert [*numbers.values()] == [[*range(50)]] * 3
    assert [one.result(60) for one in done] == [None] * 3


def test_a_payload_above_the_limit_closes_the_channel(pair: Pair) -> None:
    client, server = pair
    client.send("state", [bytes(101)])
    with pytest.raises(BadFrame, match="'state' brings 101 bytes of payloads, and at most 100"):
        server.receive(20, limit=100)
    assert server.closed


# ---- how it ends --------------------------------------------------------------------------------


def test_what_was_sent_before_a_close_still_arrives(pair: Pair) -> None:
    client, server = pair
    client.send("leave", [bytes(100_000)])
    client.close()
    client.close()
    assert server.receive(20).kind == "leave"
    with pytest.raises(ChannelClosed, match="no message has come: the other side has closed"):
        server.receive(20)
    with pytest.raises(ChannelClosed, match="'late' was not sent"):
        client.send("late")


def test_close_frees_a_thread_that_receives_and_one_that_sends(
    anchor: Listener, crew: ThreadPoolExecutor
) -> None:
    patient = connect([anchor.address], SECRET, 20, send_seconds=1000)
    with patient as client, anchor.accept(20):
        data = bytes(64 << 20)
        waiting = [crew.submit(client.receive, None), crew.submit(client.send, "state", [data])]
        with pytest.raises(TimeoutError):
            waiting[1].result(0.3)
        client.close()
        for one in waiting:
            with pytest.raises(ChannelClosed, match="this side has closed"):
                one.result(60)


def test_a_receiver_that_takes_nothing_does_not_hold_a_sender_for_ever(anchor: Listener) -> None:
    impatient = connect([anchor.address], SECRET, 20, send_seconds=0.3)
    with impatient as client, anchor.accept(20) as server:
        with pytest.raises(WireTimeout, match=f"{client.peer} has taken nothing for 0.3 s"):
            client.send("state", [bytes(64 << 20)])
        assert client.closed
        with pytest.raises(ChannelClosed, match="this side has closed"):
            client.send("more")
        with pytest.raises(ChannelClosed, match="in the middle of a message"):
            server.receive(20, limit=64 << 20)


def test_a_listener_closes_what_nobody_accepted_and_leaves_what_was(crew: Any) -> None:
    with ExitStack() as channels:
        with Listener(LOOPBACK, 0, SECRET) as opened:
            first = channels.enter_context(connect([opened.address], SECRET, 20))
            accepted = channels.enter_context(opened.accept(20))
            second = channels.enter_context(connect([opened.address], SECRET, 20))
        with pytest.raises(ChannelClosed):
            second.receive(20)
        accepted.send("still here")
        assert first.receive(20).kind == "still here"


def test_a_closed_listener_frees_who_waits_in_accept(crew: ThreadPoolExecutor) -> None:
    with Listener(LOOPBACK, 0, SECRET) as opened:
        waiting = crew.submit(opened.accept, None)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
    with pytest.raises(ChannelClosed, match="is closed"):
        waiting.result(20)


# ---- processes that are killed or frozen --------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[bytes], Channel]]:
    """A process that has said hello, and its channel."""
    with (
        Listener(LOOPBACK, 0, SECRET, send_seconds=0.3) as anchor,
        subprocess.Popen(
            [sys.executable, "-S", wire_peer.__file__, str(anchor.address.port)],
            stdin=subprocess.PIPE,
        ) as process,
    ):
        try:
            with anchor.accept(60) as channel:
                assert channel.receive(20).kind == "hello"
                yield process, channel
        finally:
            process.kill()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with bytes on their way"])
def test_a_killed_process_is_noticed_at_once(
    peer: tuple[subprocess.Popen[bytes], Channel], crew: ThreadPoolExecutor, busy: bool
) -> None:
    process, channel = peer
    if busy:
        channel.send("unread", [bytes(100_000)])

    def notice() -> None:
        with pytest.raises(ChannelClosed):  # and no `WireTimeout`
            channel.receive(1000)

    noticed = crew.submit(notice)
    with pytest.raises(TimeoutError):
        noticed.result(0.2)  # It waits by now.
    process.kill()
    noticed.result(60)


def test_a_frozen_process_costs_its_channel_and_nothing_else(
    peer: tuple[subprocess.Popen[bytes], Channel],
) -> None:
    process, channel = peer
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WireTimeout, match=r"has taken nothing for 0\.3 s"):
        channel.send("state", [bytes(64 << 20)])
    assert channel.closed
