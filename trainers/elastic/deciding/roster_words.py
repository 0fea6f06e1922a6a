"""What the anchor says to peers when the roster has decided."""

from dataclasses import dataclass

from trainers.elastic.deciding.view import Member, View


@dataclass(frozen=True, slots=True)
class Found:
    """Nobody has the state: this peer begins with its own, and gives it to the others."""

    peer: str


@dataclass(frozen=True, slots=True)
class CopyFrom:
    """Take the state from this member."""

    peer: str
    donor: Member


@dataclass(frozen=True, slots=True)
class Announce:
    """A change is due: go to the gate between two steps."""

    peers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Break:
    """The generation has ended: leave whatever you wait for, and go to the gate."""

    peers: tuple[str, ...]
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class AskHost:
    """Ask the host of this awaited member whether it is dead, and tell the roster if it is."""

    member: Member


@dataclass(frozen=True, slots=True)
class Form:
    """The next generation begins."""

    view: View
    step: int
    """The steps that the one of its members has applied who has applied the most."""
    finished: tuple[int, str] | None
    """The step and the digest with which somebody has ended the whole run, if somebody has."""


@dataclass(frozen=True, slots=True)
class Expel:
    """This peer is no member any more. It has to join again."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """This peer cannot join."""

    peer: str
    why: str


Word = Found | CopyFrom | Announce | Break | AskHost | Form | Expel | Refuse
