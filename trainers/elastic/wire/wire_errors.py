"""What goes wrong between two peers.

WireError
  AddressError     a text that is no HOST:PORT, or that names an address twice
  SecretError      a secret file that is missing, empty, too short, or open to others
  InsecureNetwork  a listener was asked to listen on all interfaces
  BadFrame         bytes that are no message, or a message that is too large
  WireTimeout      the other side did not do its part in time
  ChannelClosed    one of the two sides has closed the channel, or has died
  WrongSecret      the other side does not know our secret
  Unreachable      no address led to a channel; the text says why for each of them
"""

from trainers.elastic.errors import ElasticError


class WireError(ElasticError):
    """Base of what goes wrong between two peers.

    The swarm goes on without the other side; start that side again.
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
        """`allow`: what the user gives who wants that, in the words of the place where he does."""
        super().__init__(f"{fact}, or give {allow}")
        self.fact = fact


class BadFrame(WireError):
    """What came, or what shall be sent, is no message within the limits."""


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
