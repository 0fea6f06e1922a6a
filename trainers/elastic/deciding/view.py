"""The members of a generation, in the order in which they came: a member's rank is its place.

A generation is the time between two changes of membership. Its members have one gloo group, and
none of them joins or leaves it: who comes, goes or dies ends the generation.
"""

from dataclasses import dataclass
from reprlib import repr as shown

MOST_LETTERS = 200
Added = tuple[tuple[str, tuple[int, ...]], ...]
"""Who added which lanes, in the order of the sum: members by rank, lanes in their order."""


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a generation."""

    name: str
    """It is unique in the swarm, also among peers that have left."""
    host: str
    port: int
    """Where it gives its state to peers that join."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if not (self.host.isprintable() and 0 <= self.port < 1 << 16):
            raise ValueError(f"{self.host!r}:{self.port} is no address of a peer")


def check_name(name: str) -> None:
    """Raise `ValueError` for what cannot be a peer's name: lines of logs and a file have it."""
    if not (0 < len(name) <= MOST_LETTERS and name.isprintable() and "/" not in name):
        raise ValueError(
            f"a peer is called {shown(name)}, and a name has 1 to {MOST_LETTERS} printable"
            " characters and no slash"
        )


@dataclass(frozen=True, slots=True)
class View:
    """A generation: its number and its members."""

    generation: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if len({*self.names}) < len(self.members):
            raise ValueError(f"members of generation {self.generation} have one name")

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names by rank."""
        return tuple(member.name for member in self.members)

    def rank(self, name: str) -> int:
        """The rank of a member; raise ValueError for somebody else."""
        return self.names.index(name)


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
