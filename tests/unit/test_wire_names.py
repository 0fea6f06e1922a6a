"""Addresses, manifests, secrets and errors: what is read, what is told, what is never told."""

import sys
from pathlib import Path

import pytest

from trainers.elastic.anchor.kinds import difference
from trainers.elastic.errors import ElasticError
from trainers.elastic.wire import wire_errors
from trainers.elastic.wire.address import parse_addresses
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.stream import make_certificate
from trainers.elastic.wire.wire_errors import AddressError, SecretError, WireError


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("10.0.0.1:29400", [("10.0.0.1", 29400)]),
        (" node-1:1 , node-2:65535", [("node-1", 1), ("node-2", 65535)]),
        ("[::1]:80,[fe80::1%eth0]:81", [("::1", 80), ("fe80::1%eth0", 81)]),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, addresses: list[tuple[str, int]]) -> None:
    read = parse_addresses(text)
    assert [(a.host, a.port) for a in read] == addresses
    assert parse_addresses(",".join(map(str, read))) == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no address is given"),
        ("a:1,", "has an empty address"),
        ("node", "'node' has no port: write HOST:PORT"),
        ("node:", "has no port"),
        ("[::1]", "has no port"),
        ("[::1]80", "has no port"),
        (":80", "has no host"),
        ("a b:80", "has no host"),
        ("node:http", "the port 'http' is no number"),
        ("node:-1", "the port '-1' is no number"),
        ("node:²", "is no number"),
        ("node:0", "the port 0 is not between 1 and 65535"),
        ("node:65536", "the port 65536 is not between"),
        ("node:99999999999", "is not between"),
        ("::1:80", "write .* for IPv6"),
        ("[::1:80", "no closing bracket"),
        ("[node]:80", "only an IPv6 address stands in brackets"),
        ("a:1,b:1,A:1", "names A:1 twice"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(AddressError, match=said):
        parse_addresses(text)


# ---- manifests ----------------------------------------------------------------------------------


def test_equal_manifests_differ_in_nothing_whatever_their_order() -> None:
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert difference(one, other) is None


def test_the_first_keys_that_differ_are_named_with_both_short_values() -> None:
    mine = {"same": "x", "config": "a" * 64, "torch": "2.15.0", "old": "1"}
    theirs = {"same": "x", "config": "b" * 64, "torch": "2.11.0", "new": "2"}
    assert difference(mine, theirs) == (
        "config is aaaaaaaaaaaa... here and bbbbbbbbbbbb... there; torch is 2.15.0 here and 2.11.0"
        " there; old is 1 here and missing there; 1 more differ: new"
    )


def test_values_that_look_equal_when_shortened_are_told_whole() -> None:
    mine, theirs = ({"data": "0" * 20 + end} for end in "ab")
    assert difference(mine, theirs) == f"data is {mine['data']} here and {theirs['data']} there"


# ---- secrets and errors -------------------------------------------------------------------------


def test_a_short_secret_is_refused_and_none_is_shown() -> None:
    with pytest.raises(SecretError, match="has 15 bytes, and at least 16") as caught:
        Secret(b"fifteen letters")
    assert "fifteen" not in str(caught.value)
    assert "sixteen" not in repr(Secret(b"sixteen letters!"))


def test_a_proof_depends_on_everything_that_it_proves() -> None:
    secret, nonces = Secret(b"s" * 16), (b"c" * 32, b"s" * 32)
    proofs = {
        secret.proof(b"client", nonces, b"der"),
        secret.proof(b"server", nonces, b"der"),
        secret.proof(b"client", (nonces[1], nonces[0]), b"der"),
        secret.proof(b"client", (nonces[0], b"t" * 32), b"der"),
        secret.proof(b"client", nonces, b"another"),
        Secret(b"t" * 16).proof(b"client", nonces, b"der"),
    }
    assert len(proofs) == 6
    assert secret.proof(b"client", nonces, b"der") in proofs


def test_every_error_is_an_elastic_error_and_stands_in_the_list() -> None:
    kinds = [kind for kind in vars(wire_errors).values() if isinstance(kind, type)]
    ours = [kind for kind in kinds if kind.__module__ == wire_errors.__name__]
    assert all(issubclass(kind, WireError) and issubclass(kind, ElasticError) for kind in ours)
    listed = wire_errors.__doc__ or ""
    assert [kind.__name__ for kind in ours if f"  {kind.__name__} " not in listed] == ["WireError"]


def test_without_cryptography_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(WireError, match=r"pip install '\.\[elastic\]'"):
        make_certificate()


def test_importing_the_wire_does_not_import_cryptography() -> None:
    text = (Path(wire_errors.__file__).parent / "stream.py").read_text()
    assert "\nfrom cryptography" not in text
    assert "\nimport cryptography" not in text
