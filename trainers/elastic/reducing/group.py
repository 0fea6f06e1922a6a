"""A group of members for one generation, formed over callbacks."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import Store, Work  # pyright: ignore[reportPrivateImportUsage]

import trainers.torch_seams as torch_seams  # `from trainers` would import the public names
from trainers.elastic.reducing.forming import Forming
from trainers.elastic.reducing.graveyard import Graveyard, Remains
from trainers.elastic.reducing.link_watch import (
    end_when_unreachable,
    open_sockets,
    take_nobody_more,
)
from trainers.elastic.reducing.reducing_errors import GroupBroken, ReducingError

_T = TypeVar("_T")

OPERATION_SECONDS = 600.0
"""An operation's own timeout is long: that members live is known from heartbeats."""

TRANSFER_SECONDS = 30.0
"""So long a piece of a reduce may be under way, for which all members are there: at 10 Mbps it is
through by then. Gloo wakes nobody who is in the middle of a message when its connection closes, so
an abandoned group ends only after this time if a member stopped in the middle of one."""


class Rendezvous(Protocol):
    """Where the members of a generation leave their addresses for one another."""

    def set(self, key: str, value: bytes) -> None:
        """Leave a value under a key."""
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Return the value as soon as it is there; raise when it is not within `timeout` s."""
        ...


class _CallbackStore(Store):
    """A store of torch's that asks a `Rendezvous`. Gloo calls `set`, `wait` and `get` of it."""

    def __init__(self, rendezvous: Rendezvous, prefix: str, timeout: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._seconds = timeout
        self.error: BaseException | None = None
        self.addresses = b""
        """What this member has left there: the addresses at which its gloo listens."""

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        self.addresses += data
        self._keep_error(lambda: self._rendezvous.set(self._prefix + key, data))

    def get(self, key: str) -> bytes:
        return self._keep_error(lambda: self._rendezvous.get(self._prefix + key, self._seconds))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:  # The timeout is gloo's own, which is not that of forming.
            self._keep_error(lambda k=key: self._rendezvous.get(self._prefix + k, self._seconds))

    def _keep_error(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except BaseException as error:
            self.error = error
            raise


class Group:
    """One generation's group. It is broken for good by the first failure: abandon it then."""

    def __init__(self, process_group: Any, place: "GroupPlace", transfer: float) -> None:
        """`transfer`: so many seconds a part of a tensor may be under way."""
        self._process_group: Any = process_group  # torch types none of its methods
        self._works: list[Work] = []
        self._transfer = timedelta(seconds=transfer)
        self.generation = place.generation
        self.rank = place.rank
        self.size = place.size
        self.sent = 0
        """Bytes of sums that were given to gloo for other members, also in a reduce that broke off
        later. Headers, votes and buffers are not counted, nor what gloo and TCP add."""

    def __str__(self) -> str:
        return f"generation {self.generation}, rank {self.rank} of {self.size}"

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out_of: list[int]
    ) -> Work:
        """Begin to send slices of `sent`, a slice for each rank, and to receive as many."""
        options = torch_seams.AllToAllOptions()
        options.timeout = self._transfer
        work = self._begun(self._living().alltoall_base(received, sent, into, out_of, options))
        self.sent += sum(out_of) - out_of[self.rank]
        return work

    def all_gather(
        self, received: torch.Tensor, sent: torch.Tensor, *, all_are_there: bool = False
    ) -> Work:
        """Begin to gather everybody's `sent`, all of one size, one after the other. Others may
        come to it much later, unless `all_are_there`: so they are for a part of a tensor."""
        rows = list(received.view(self.size, -1).unbind())
        options = torch_seams.AllgatherOptions()
        if all_are_there:
            options.timeout = self._transfer
        work = self._begun(self._living().allgather([rows], [sent], options))
        if all_are_there:
            self.sent += (self.size - 1) * sent.numel() * sent.element_size()
        return work

    def abandon(self, graveyard: Graveyard) -> None:
        """Give the group and its unfinished works to the graveyard; a second call does nothing."""
        if self._process_group is None:
            return
        works = tuple(work for work in self._works if not work.is_completed())
        remains = Remains(self._process_group, works, self.rank, self.size)
        self._process_group = None
        self._works = []
        graveyard.bury(remains)

    def _living(self) -> Any:
        if self._process_group is None:
            raise ReducingError(f"{self} was abandoned: use the group of the next generation")
        return self._process_group

    def _begun(self, work: Work) -> Work:
        self._works = [old for old in self._works if not old.is_completed()]
        self._works.append(work)
        return work


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A member's place in a generation."""

    generation: int
    rank: int
    size: int
    host: str
    """The address of the interface that this member listens on."""


def form_group(
    store: Rendezvous,
    place: GroupPlace,
    timeout: float,
    alive: Callable[[], None],
    graveyard: Graveyard,
    transfer: float = TRANSFER_SECONDS,
) -> Group:
    """Connect every member of a generation with every other one.

    Members must call this at about the same time, which the anchor's gate sees to. What the
    rendezvous or `alive` raises (the generation has ended) is raised as it is; else `GroupBroken`
    after `timeout` seconds. `transfer`: so many seconds a piece of a reduce may be under way.
    """
    generation, rank, size, host = place.generation, place.rank, place.size, place.host
    if not 0 <= rank < size:
        raise ReducingError(f"rank {rank} is not one of {size} members: ranks are 0 to {size - 1}")
    before = open_sockets()
    inner = _CallbackStore(store, f"generation {generation}/", timeout)

    def make() -> Any:
        return torch_seams.gloo_group(
            inner,
            rank,
            size,
            host,
            forming=timedelta(seconds=timeout),
            operation=timedelta(seconds=OPERATION_SECONDS),
        )

    try:
        formed = Forming(make, rank, size).wait(alive, graveyard)
    except RuntimeError as error:
        if inner.error is not None:
            raise inner.error from None
        if os.strerror(errno.EMFILE) in str(error):
            raise ReducingError(
                f"generation {generation}: no file descriptor is left for the connections to"
                f" {size - 1} others: raise the limit (`ulimit -n`), and start this peer again"
            ) from error
        raise GroupBroken(
            f"generation {generation}: rank {rank} of {size} at {host} could not connect to the"
            f" others within {timeout:g} s"
        ) from error
    made = open_sockets() - before
    end_when_unreachable(made, timeout)
    take_nobody_more(made, inner.addresses)
    return Group(formed, place, transfer)
