"""What goes wrong between two peers."""

from trainers.elastic.errors import ElasticError


class WireError(ElasticError):
    """Base of what goes wrong between two peers.

    The swarm trains on without the other side; start that side again.
    """


class AddressError(WireError, ValueError):
    """A text is no address.

    Write it as HOST:PORT.
    """


class SecretError(WireError):
    """A secret cannot be used.

    Make one with `openssl rand -hex 32`, readable by its owner alone.
    """


class InsecureNetwork(WireError):
    """Listening there would offer unprotected traffic to everybody.

    Give the address of a private network.
    """

    def __init__(self, fact: str, allow: str = "insecure_network=True") -> None:
        """`allow`: the option that allows it, as the user writes it in that place."""
        super().__init__(f"{fact}, or give {allow}")
        self.fact = fact


class BadFrame(WireError):
    """The bytes that came, or the fields that are to be sent, are no message within the limits."""


class WireTimeout(WireError):
    """The other side did not do its part in time.

    Look at the other machine and at the network between them.
    """


class ChannelClosed(WireError):
    """Nothing can come or go any more."""


class WrongSecret(WireError):
    """The other side does not know our secret.

    Copy the same key file to every node.
    """


class Unreachable(WireError):
    """No address led to a channel.

    Start the anchor first, and let its port through the firewall.
    """
