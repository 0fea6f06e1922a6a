"""What goes wrong between two peers.

WireError
  AddressError     a text that is no HOST:PORT, or that names an address twice
  SecretError      a secret file that is missing, empty or too short
  InsecureNetwork  a listener was asked to listen on all interfaces
  BadFrame         bytes that are no message, or a message that is too large
  WireTimeout      the other side did not do its part in time
  ChannelClosed    one of the two sides has closed the channel, or has died
  WrongSecret      the other side does not know our secret
  Unreachable      no address led to a channel; the text says why for each of them
"""

from trainers.elastic.errors import ElasticError


class WireError(ElasticError):
    """Base of what goes wrong between two peers."""


class AddressError(WireError, ValueError):
    """A text is no address."""


class SecretError(WireError):
    """A secret cannot be used."""


class InsecureNetwork(WireError):
    """Listening there would offer unprotected traffic to everybody."""

    def __init__(self, fact: str, allow: str = "insecure_network=True") -> None:
        """`allow`: what the user gives who wants that, in the words of the place where he does."""
        super().__init__(f"{fact}, or give {allow}")
        self.fact = fact


class BadFrame(WireError):
    """What came, or what shall be sent, is no message within the limits."""


class WireTimeout(WireError):
    """The other side did not do its part in time."""


class ChannelClosed(WireError):
    """Nothing can come or go any more."""


class WrongSecret(WireError):
    """The other side does not know our secret."""


class Unreachable(WireError):
    """No address led to a channel."""
