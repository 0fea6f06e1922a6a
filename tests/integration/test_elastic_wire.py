"""Channels over localhost: who is let in, what is carried, and how everything ends.

Threads of this process play both sides, but for a peer that is killed or frozen: that is a process
of its own (wire_peer.py). `no_leaks` finds every thread that is left.
"""

import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.elastic.wire import (
    Address,
    AddressError,
    BadFrame,
    Channel,
    ChannelClosed,
    InsecureNetwork,
    Listener,
    Secret,
    SecretError,
    Unreachable,
    WireError,
    WireTimeout,
    WrongSecret,
    certificate,
    connect,
    into_tensors,
    listener,
    payloads_of,
    read_secret,
)
from trainers.elastic.wire.message import MAGIC, MOST_HEADER_BYTES, PREFIX, VERSION
from trainers.elastic.wire.stream import TlsStream

HERE = Path(__file__).parent
SECRET = Secret(b"the secret of this test")
OTHER = Secret(b"the secret of somebody else")
LOOPBACK = "127.0.0.1"

Pair = tuple[Channel, Channel]


@pytest.fixture
def anchor() -> Iterator[Listener]:
    with Listener(LOOPBACK, 0, SECRET, send_seconds=60) as opened:
        yield opened


@pytest.fixture
def pair(anchor: Listener) -> Iterator[Pair]:
    """The client's and the server's channel."""
    client = connect([anchor.address], SECRET, 20, send_seconds=60)
    with client, anchor.accept(20) as server:
        yield client, server


@pytest.fixture
def crew() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def refusal(anchor: Listener) -> WireError:
    """The one that there is, or comes within seconds."""
    deadline = time.monotonic() + 20
    while not (found := anchor.refusals()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    [one] = found
    return one


def plain(anchor: Listener) -> socket.socket:
    return socket.create_connection((anchor.address.host, anchor.address.port), 20)


def encrypted(anchor: Listener) -> ssl.SSLSocket:
    return certificate.client_context().wrap_socket(plain(anchor))


# ---- who is let in ------------------------------------------------------------------------------


def test_who_knows_the_secret_is_let_in_and_both_sides_talk(pair: Pair) -> None:
    client, server = pair
    assert (client.here, client.peer) == (server.peer, server.here)
    client.send("join", [b"raw"], name="a", lanes=[1, 2])
    said = server.receive(20)
    assert (said.kind, said.fields["name"], said.fields["lanes"]) == ("join", "a", [1, 2])
    assert bytes(said.payloads[0].data) == b"raw"
    server.send("view", kind="fields may be called so", generation=3)
    assert client.receive(20).fields == {"kind": "fields may be called so", "generation": 3}


def test_the_connection_is_encrypted_with_tls_13(anchor: Listener) -> None:
    with encrypted(anchor) as client:
        assert client.version() == "TLSv1.3"
    old = certificate.client_context()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with plain(anchor) as raw, pytest.raises(OSError):
        old.wrap_socket(raw)


def test_a_wrong_secret_is_an_error_at_both_sides_that_tells_no_secret(anchor: Listener) -> None:
    with pytest.raises(WrongSecret, match=f"{anchor.address} .* use the same secret_file") as mine:
        connect([anchor.address], OTHER, 20)
    theirs = refusal(anchor)
    assert isinstance(theirs, WrongSecret)
    assert "127.0.0.1:" in str(theirs)
    assert not [e for e in (mine.value, theirs) if "somebody" in str(e) or "this test" in str(e)]
    with pytest.raises(WireTimeout):
        anchor.accept(0)


def test_a_server_without_the_secret_is_refused_though_it_says_welcome() -> None:
    made = certificate.make_certificate()
    context = certificate.server_context(made)
    with socket.create_server((LOOPBACK, 0)) as listening, ThreadPoolExecutor(1) as pool:

        def impostor() -> None:
            raw, _ = listening.accept()
            with context.wrap_socket(raw, server_side=True) as stream:
                hello = stream.recv(38)
                stream.sendall(hello)  # the client's own nonce
                proof = stream.recv(32)
                stream.sendall(b"\1" + proof)  # and its own proof
                assert not stream.recv(1)

        done = pool.submit(impostor)
        with pytest.raises(WrongSecret, match="does not know our secret"):
            connect([Address(LOOPBACK, listening.getsockname()[1])], SECRET, 20)
        done.result(20)


def pumped(source: ssl.SSLSocket, target: ssl.SSLSocket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            socket.socket.shutdown(end, socket.SHUT_RDWR)


def proxied(anchor: Listener, context: ssl.SSLContext) -> Unreachable | WrongSecret | None:
    """What a client says to a proxy that ends TLS with `context` and passes everything on."""
    with socket.create_server((LOOPBACK, 0)) as listening, ThreadPoolExecutor(2) as pool:

        def proxy() -> None:
            raw, _ = listening.accept()
            with context.wrap_socket(raw, server_side=True) as client, encrypted(anchor) as server:
                back = pool.submit(pumped, server, client)
                pumped(client, server)
                back.result(20)

        done = pool.submit(proxy)
        try:
            connect([Address(LOOPBACK, listening.getsockname()[1])], SECRET, 20).close()
            return None
        except (WrongSecret, Unreachable) as error:
            return error
        finally:
            done.result(20)


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_refused(anchor: Listener) -> None:
    his = certificate.server_context(certificate.make_certificate())
    assert isinstance(proxied(anchor, his), WrongSecret)
    assert isinstance(refusal(anchor), WrongSecret)
    # The proxy is not refused for being one: with the listener's own key it passes.
    assert proxied(anchor, anchor._context) is None
    anchor.accept(20).close()


def test_a_proof_that_was_heard_before_is_refused(anchor: Listener) -> None:
    def greeting(client: ssl.SSLSocket, hello: bytes, proof: bytes | None) -> tuple[bytes, bytes]:
        client.sendall(hello)
        answer = client.recv(38)
        nonces = hello[6:], answer[6:]
        der = client.getpeercert(binary_form=True) or b""
        proof = proof or SECRET.proof(b"client", nonces, der)
        client.sendall(proof)
        return client.recv(1), proof

    hello = b"PFEG" + VERSION.to_bytes(2, "big") + bytes(32)
    with encrypted(anchor) as first:
        said, proof = greeting(first, hello, None)
        assert said == b"\1"
    anchor.accept(20).close()
    with encrypted(anchor) as second:
        assert greeting(second, hello, proof)[0] == b"\0"
    assert isinstance(refusal(anchor), WrongSecret)


def test_who_is_silent_holds_up_nobody_and_is_cut_off(
    anchor: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 0.5)
    with plain(anchor) as silent, encrypted(anchor) as half:
        with connect([anchor.address], SECRET, 20), anchor.accept(20):
            pass
        for client in (silent, half):
            client.settimeout(20)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
    refused = [refusal(anchor)] if len(both := anchor.refusals()) < 2 else both
    assert all(isinstance(one, WireTimeout | ChannelClosed) for one in refused)


def test_many_silent_clients_never_keep_others_out_nor_take_many_threads(
    anchor: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS", 100.0)
    monkeypatch.setattr(listener, "MOST_PENDING", 3)
    with ExitStack() as clients:
        for _ in range(10):
            clients.enter_context(plain(anchor))
        with connect([anchor.address], SECRET, 20), anchor.accept(20):
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("perfect-elastic-greet") <= 3
        refused = anchor.refusals()
        assert len(refused) >= 7
        assert all("was not let in" in str(one) for one in refused)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff"]
)
def test_who_does_not_speak_tls_is_refused(anchor: Listener, garbage: bytes) -> None:
    with plain(anchor) as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while client.recv(100):
                pass
        assert "127.0.0.1" in str(refusal(anchor))
    with connect([anchor.address], SECRET, 20), anchor.accept(20):
        pass


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(30), "something else speaks there"),
        (b"PFEG\0\7" + bytes(32), "version 7 of the protocol, this one 1"),
    ],
)
def test_who_greets_differently_is_refused(anchor: Listener, hello: bytes, said: str) -> None:
    with encrypted(anchor) as client:
        client.sendall(hello)
        refused = refusal(anchor)
    assert isinstance(refused, BadFrame)
    assert said in str(refused)


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "0:0:0:0:0:0:0:0"])
def test_listening_on_all_interfaces_is_refused_unless_it_is_asked_for(host: str) -> None:
    with pytest.raises(InsecureNetwork, match="neither authenticated nor encrypted"):
        Listener(host, 0, SECRET)
    if ":" not in host:
        with (
            Listener(host, 0, SECRET, insecure_network=True) as opened,
            connect([Address(LOOPBACK, opened.address.port)], SECRET, 20),
        ):
            opened.accept(20).close()


def test_an_address_that_cannot_be_listened_at_is_named(anchor: Listener) -> None:
    with pytest.raises(AddressError, match=f"{anchor.address} cannot be listened at"):
        Listener(LOOPBACK, anchor.address.port, SECRET)
    with pytest.raises(AddressError, match="the port 70000 to listen at is not"):
        Listener(LOOPBACK, 70_000, SECRET)


def test_addresses_are_tried_in_order_and_each_failure_is_told(anchor: Listener) -> None:
    with socket.create_server((LOOPBACK, 0)) as mute, socket.socket() as closed:
        closed.bind((LOOPBACK, 0))
        nobody, silent = (Address(LOOPBACK, s.getsockname()[1]) for s in (closed, mute))
        with pytest.raises(Unreachable) as caught:
            connect([nobody, silent], SECRET, 0.5)
        assert f"{nobody}: Connection refused" in str(caught.value)
        assert f"{silent}: it takes the connection and says nothing" in str(caught.value)
        with connect([nobody, silent, anchor.address], SECRET, 2) as client:
            assert client.peer == anchor.address
            anchor.accept(20).close()
    with pytest.raises(AddressError, match="no address"):
        connect([], SECRET, 1)


def test_something_else_that_answers_is_said_to_be_no_anchor() -> None:
    with socket.create_server((LOOPBACK, 0)) as other, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            client, _ = other.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        done = pool.submit(answer)
        with pytest.raises(Unreachable, match="something answers there that is no anchor or peer"):
            connect([Address(LOOPBACK, other.getsockname()[1])], SECRET, 20)
        done.result(20)


def test_the_key_is_in_no_file_once_a_listener_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    load = ssl.SSLContext.load_cert_chain

    def watched(context: ssl.SSLContext, file: Path) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent))
        load(context, file)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    with Listener(LOOPBACK, 0, SECRET):
        assert modes == [0o600, 0o700]
        assert [*tmp_path.iterdir()] == []


# ---- secrets ------------------------------------------------------------------------------------


def test_a_secret_is_read_from_a_file_that_is_the_users_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(SecretError, match=f"{file} cannot be read .*openssl rand"):
        read_secret(file)
    for content, said in ((b" \n", "is empty"), (b"too short\n", "has 9 bytes")):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(SecretError, match=f"{file}.*{said}"):
            read_secret(file)
    file.write_bytes(SECRET.key + b"\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_secret(file) == SECRET
    file.chmod(0o640)
    with pytest.warns(UserWarning, match=f"others may use the secret file {file} .mode 640"):
        assert read_secret(file) == SECRET


# ---- what is carried ----------------------------------------------------------------------------


def test_200_mb_of_tensors_arrive_in_place(
    anchor: Listener, crew: ThreadPoolExecutor, record_property: Callable[[str, object], None]
) -> None:
    sent = [torch.arange(25_000_000, dtype=torch.int32), torch.full((100_000_000,), 3).char()]
    there = [torch.zeros_like(tensor) for tensor in sent]
    size = sum(tensor.nbytes for tensor in sent)
    with connect([anchor.address], SECRET, 20) as client, anchor.accept(20) as server:
        began, cpu = time.monotonic(), time.process_time()
        done = crew.submit(client.send, "state", payloads_of(sent), step=7)
        place = into_tensors({"state": there})
        message = server.receive(100, limit=size, place=place)
        done.result(20)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    print(f"{size / seconds / 1e6:.0f} MB/s, {size / cpu / 1e6:.0f} MB a CPU second of both sides")
    assert message.fields["step"] == 7
    assert all(torch.equal(*both) for both in zip(there, sent, strict=True))


def test_both_sides_send_much_at_once(anchor: Listener, crew: ThreadPoolExecutor) -> None:
    """More than what the system keeps: a side that sends before it receives needs the other's
    receiver, on another thread of one TLS connection."""
    data = os.urandom(1 << 20) * 24
    with connect([anchor.address], SECRET, 20) as client, anchor.accept(20) as server:
        sent = [crew.submit(side.send, "much", [data]) for side in (client, server)]
        got = [crew.submit(side.receive, 60, limit=len(data)) for side in (client, server)]
        assert all(one.result(60).payloads[0].data == data for one in got)
        assert [one.result(20) for one in sent] == [None, None]


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
    assert [one.result(20) for one in done] == [None] * 3


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
        before = server.heard_at
        with pytest.raises(WireTimeout, match="the rest of a message"):
            server.receive(0.02)
        assert server.heard_at > before
    written(client, data[(len(data) - 1) // 5 * 5 :])
    client.send("next")
    assert server.receive(20).payloads[0].data == b"abcdef"
    assert server.receive(20).kind == "next"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin with"),
        (PREFIX.pack(MAGIC, VERSION, MOST_HEADER_BYTES + 1), f"{MOST_HEADER_BYTES + 1} bytes"),
        (PREFIX.pack(MAGIC, VERSION, 2) + b"[]", "not exactly kind, fields and payloads"),
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
    with connect([anchor.address], SECRET, 20) as client, anchor.accept(20):
        data = bytes(64 << 20)
        waiting = [crew.submit(client.receive, None), crew.submit(client.send, "state", [data])]
        with pytest.raises(TimeoutError):
            waiting[1].result(0.3)
        began = time.monotonic()
        client.close()
        for one in waiting:
            with pytest.raises(ChannelClosed, match="this side has closed"):
                one.result(20)
        assert time.monotonic() - began < 1


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


def test_a_closed_listener_frees_who_accepts_and_who_is_greeted(crew: ThreadPoolExecutor) -> None:
    opened = Listener(LOOPBACK, 0, SECRET)
    accepting = crew.submit(opened.accept, None)
    with plain(opened):
        while not opened._pending:
            threading.Event().wait(0.01)
        began = time.monotonic()
        opened.close()
        opened.close()
        with pytest.raises(ChannelClosed, match="is closed"):
            accepting.result(20)
        assert time.monotonic() - began < 2
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
            [sys.executable, "-S", str(HERE / "wire_peer.py"), str(anchor.address.port)],
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

    def notice() -> float:
        with pytest.raises(ChannelClosed):
            channel.receive(20)
        return time.monotonic()

    noticed = crew.submit(notice)
    with pytest.raises(TimeoutError):
        noticed.result(0.2)  # It waits by now.
    killed = time.monotonic()
    process.kill()
    assert noticed.result(20) - killed < 0.2


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
