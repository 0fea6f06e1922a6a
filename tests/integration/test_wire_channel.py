"""What a channel over localhost carries, and how it ends.

Threads of this process play both sides, but for a peer that is killed or frozen: that is a process
of its own (wire_peer.py). `no_leaks` finds every thread that is left.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support import wire_peer
from support.wire_ends import LOOPBACK, SECRET, Pair, plain

from trainers.elastic.wire import listener
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.connection import connect
from trainers.elastic.wire.listener import Listener
from trainers.elastic.wire.message import MAGIC, MOST_HEADER_BYTES, PREFIX, VERSION
from trainers.elastic.wire.stream import TlsStream
from trainers.elastic.wire.tensors import payloads_of, tensors_of
from trainers.elastic.wire.wire_errors import BadFrame, ChannelClosed, Unreachable, WireTimeout


@pytest.fixture
def crew() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# ---- what is carried ----------------------------------------------------------------------------


def test_200_mb_of_tensors_arrive(
    anchor: Listener, crew: ThreadPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    sent = [torch.arange(25_000_000, dtype=torch.int32), torch.full((100_000_000,), 3).char()]
    size = sum(tensor.nbytes for tensor in sent)
    with connect([anchor.address], SECRET, 20) as client, anchor.accept(20) as server:
        began, cpu = time.monotonic(), time.process_time()
        done = crew.submit(client.send, "state", payloads_of(sent), step=7)
        message = server.receive(100, limit=size)
        done.result(60)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    print(f"{size / seconds / 1e6:.0f} MB/s, {size / cpu / 1e6:.0f} MB a CPU second of both sides")
    assert message.fields["step"] == 7
    assert all(torch.equal(*both) for both in zip(tensors_of(message), sent, strict=True))


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


def written(channel: Channel, data: bytes) -> None:
    """Bytes that need not be a message."""
    channel._stream.write(memoryview(data), 20)


def test_who_gives_up_in_the_middle_of_a_message_goes_on_with_it_later(pair: Pair) -> None:
    client, server = pair
    with pytest.raises(WireTimeout, match=f"a message from {server.peer} has not come in 0"):
        server.receive(0)
    header = b'{"kind": "k", "fields": {}, "payloads": [[6, "", []]]}'
    data = PREFIX.pack(MAGIC, VERSION, len(header)) + header + b"abcdef"
    for begin in range(0, len(data) - 5, 5):
        written(client, data[begin : begin + 5])
        with pytest.raises(WireTimeout, match="the rest of a message"):
            server.receive(0.02)
    written(client, data[(len(data) - 1) // 5 * 5 :])
    client.send("next")
    assert server.receive(20).payloads[0].data == b"abcdef"
    assert server.receive(20).kind == "next"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin with"),
        (PREFIX.pack(MAGIC, VERSION, MOST_HEADER_BYTES + 1), f"{MOST_HEADER_BYTES + 1} bytes"),
        (PREFIX.pack(MAGIC, VERSION, 2) + b"[]", "a header is none"),
    ],
)
def test_garbage_from_who_knows_the_secret_closes_the_channel(
    pair: Pair, data: bytes, said: str
) -> None:
    client, server = pair
    written(client, data)
    with pytest.raises(BadFrame, match=said) as caught:
        server.receive(20)
    assert caught.value.__notes__ == [f"in a message from {server.peer}; the channel is closed"]
    assert server.closed
    with pytest.raises(ChannelClosed):
        client.receive(20)
    with pytest.raises(ChannelClosed, match="this side has closed"):
        server.receive(20)


def test_a_payload_above_the_limit_closes_the_channel(pair: Pair) -> None:
    client, server = pair
    client.send("state", [bytes(101)])
    with pytest.raises(BadFrame, match="'state' brings 101 bytes of payloads, and at most 100"):
        server.receive(20, limit=100)
    assert server.closed


# ---- how it ends --------------------------------------------------------------------------------


def test_a_message_that_is_cut_off_is_a_closed_channel(pair: Pair) -> None:
    client, server = pair
    written(client, PREFIX.pack(MAGIC, VERSION, 100) + b"{")
    client.close()
    with pytest.raises(ChannelClosed, match=f"{server.peer}, in the middle of a message"):
        server.receive(20)


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


def test_a_closed_listener_frees_who_accepts_and_who_is_greeted(
    crew: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 1000.0)
    opened = Listener(LOOPBACK, 0, SECRET)
    accepting = crew.submit(opened.accept, None)
    with plain(opened):
        while not opened._pending:
            threading.Event().wait(0.01)
        greeting = [*opened._threads]
        opened.close()
        opened.close()
        assert greeting and not any(thread.is_alive() for thread in greeting)
        with pytest.raises(ChannelClosed, match="is closed"):
            accepting.result(60)
    with pytest.raises(Unreachable, match="Connection refused"):
        connect([opened.address], SECRET, 20)


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


def test_a_stream_reports_the_same_end_however_often_it_is_asked(pair: Pair) -> None:
    client, server = pair
    stream: TlsStream = server._stream
    client.close()
    for _ in range(3):
        with pytest.raises(ChannelClosed, match="the other side has closed"):
            stream.read(memoryview(bytearray(1)), None)
