"""A peer whose connection was closed is dead only if its host says that nobody listens any more."""

import socket
import threading

from trainers.elastic.anchor.anchor import is_dead


def test_a_peer_that_listens_still_is_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert not is_dead(*listening.getsockname(), seconds=0.2)


def test_a_peer_whose_port_is_closed_is_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
    assert is_dead(*address)


def test_a_peer_that_is_just_dying_is_asked_once_more() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()

    def die() -> None:
        asked, _ = listening.accept()
        listening.close()
        asked.close()

    dying = threading.Thread(target=die)
    dying.start()
    assert is_dead(*address, seconds=30.0)
    dying.join()
