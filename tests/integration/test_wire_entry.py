"""Who is let in to a channel over localhost, and who is refused.

Threads of this process play both sides. `no_leaks` finds every thread that is left.
"""

import socket
import ssl
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.wire_ends import LOOPBACK, OTHER, SECRET, Pair, few_descriptors, plain

from trainers.elastic.wire import listener
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.listener import Listener, connect
from trainers.elastic.wire.message import VERSION
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.stream import client_context, make_certificate, server_context
from trainers.elastic.wire.wire_errors import (
    AddressError,
    ChannelClosed,
    InsecureNetwork,
    SecretError,
    Unreachable,
    WireError,
    WireTimeout,
    WrongSecret,
)


def refusal(anchor: Listener) -> WireError:
    """The one that there is, or comes within seconds."""
    deadline = time.monotonic() + 60
    while not (found := anchor.refusals()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    [one] = found
    return one


def encrypted(anchor: Listener) -> ssl.SSLSocket:
    return client_context().wrap_socket(plain(anchor))


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
    old = client_context()
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with plain(anchor) as raw, pytest.raises(OSError):
        old.wrap_socket(raw)


def test_a_wrong_secret_is_an_error_at_both_sides_that_tells_no_secret(anchor: Listener) -> None:
    with pytest.raises(WrongSecret, match=f"{anchor.address} .* use the same secret file") as mine:
        connect([anchor.address], OTHER, 20)
    theirs = refusal(anchor)
    assert isinstance(theirs, WrongSecret)
    assert "127.0.0.1:" in str(theirs)
    assert not [e for e in (mine.value, theirs) if "somebody" in str(e) or "this test" in str(e)]
    with pytest.raises(WireTimeout):
        anchor.accept(0)


def test_a_server_without_the_secret_is_refused_though_it_says_welcome() -> None:
    made = make_certificate()
    context = server_context(made)
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
        done.result(60)


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
                back.result(60)

        done = pool.submit(proxy)
        try:
            connect([Address(LOOPBACK, listening.getsockname()[1])], SECRET, 20).close()
            return None
        except (WrongSecret, Unreachable) as error:
            return error
        finally:
            done.result(60)


def test_a_man_in_the_middle_with_a_certificate_of_his_own_is_refused(anchor: Listener) -> None:
    his = server_context(make_certificate())
    assert isinstance(proxied(anchor, his), WrongSecret)
    assert isinstance(refusal(anchor), WrongSecret)


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


def test_a_listener_without_descriptors_waits_and_lets_peers_in_when_there_are_some(
    anchor: Listener,
) -> None:
    with ExitStack() as clients:
        flood = [clients.enter_context(socket.socket()) for _ in range(10)]
        with few_descriptors():
            for client in flood:
                client.connect((anchor.address.host, anchor.address.port))
            assert "Too many open files" in str(refusal(anchor))
            threading.Event().wait(0.3)
            assert len(anchor.refusals()) < listener.MOST_REFUSALS  # It did not spin.
        with connect([anchor.address], SECRET, 60), anchor.accept(60):
            pass


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(bytes(100), id="zeros"),
        pytest.param(b"\x16\x03\x01\xff\xff", id="a cut record"),
    ],
)
def test_who_does_not_speak_tls_is_refused(anchor: Listener, garbage: bytes) -> None:
    with plain(anchor) as client:
        client.sendall(garbage)
        with suppress(OSError):  # the anchor may have hung up before each of these
            client.shutdown(socket.SHUT_WR)
            while client.recv(100):
                pass
        assert "127.0.0.1" in str(refusal(anchor))
    with connect([anchor.address], SECRET, 20), anchor.accept(20):
        pass


def test_a_listener_of_another_version_is_named_with_both_numbers() -> None:
    context = server_context(make_certificate())
    with socket.create_server((LOOPBACK, 0)) as listening, ThreadPoolExecutor(1) as pool:

        def later_version() -> None:
            raw, _ = listening.accept()
            with context.wrap_socket(raw, server_side=True) as stream:
                stream.recv(38)
                stream.sendall(b"PFEG\0\7" + bytes(32))
                stream.recv(1)

        done = pool.submit(later_version)
        with pytest.raises(Unreachable, match=r"version 2 of the protocol, .* version 7: install"):
            connect([Address(LOOPBACK, listening.getsockname()[1])], SECRET, 20)
        done.result(60)


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0", "0:0:0:0:0:0:0:0"])
def test_listening_on_all_interfaces_is_refused_unless_it_is_asked_for(host: str) -> None:
    with pytest.raises(InsecureNetwork, match=r"encrypted: .* give insecure_network=True"):
        Listener(host, 0, SECRET)
    if ":" not in host:
        with (
            Listener(host, 0, SECRET, insecure_network=True) as opened,
            connect([Address(LOOPBACK, opened.address.port)], SECRET, 20),
        ):
            opened.accept(20).close()


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
    assert read_secret(file) == SECRET
    for mode in (0o640, 0o604, 0o644, 0o660):
        file.chmod(mode)
        with pytest.raises(SecretError, match=f"mode {mode:o}.: run `chmod 600 {file}`, or allow"):
            read_secret(file)
        assert read_secret(file, loose=True) == SECRET
