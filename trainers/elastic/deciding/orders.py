"""What the anchor orders peers to do, as the roster has decided."""

from dataclasses import dataclass

from trainers.elastic.deciding.view import Member, View


@dataclass(frozen=True, slots=True)
class FoundRun:
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
    """The generation has ended: stop waiting, and go to the gate."""

    peers: tuple[str, ...]
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class AskHost:
    """Ask the host of this awaited member whether it is dead, and report it to the roster."""

    member: Member


@dataclass(frozen=True, slots=True)
class Form:
    """The next generation begins."""

    view: View
    step: int
    """The largest number of steps that one of its members has applied."""
    finished: tuple[int, str] | None
    """The last step and digest of the whole run, if a member has ended it."""


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


Order = FoundRun | CopyFrom | Announce | Break | AskHost | Form | Expel | Refuse
