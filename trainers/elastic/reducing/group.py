"""A group of members for one generation, formed over callbacks."""

import contextlib
import ctypes
import errno
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import Store, Work  # pyright: ignore[reportPrivateImportUsage]

import trainers.torch_seams as torch_seams  # `from trainers` would import the public names
from trainers.elastic.errors import GroupBroken, ReducingError
from trainers.elastic.reducing.graveyard import Forming, Graveyard, Remains

FIRST_POLL = 20e-6
LONGEST_POLL = 1e-3
GROWTH = 1.3


def wait(work: Work, alive: Callable[[], None], what: str) -> None:
    """Wait until a work is complete, and meanwhile call `alive`, which raises when the generation
    has ended. Raise `GroupBroken` if the work has failed. `what` names it in the error."""
    pause = FIRST_POLL
    while not work.is_completed():
        alive()
        time.sleep(pause)
        pause = min(pause * GROWTH, LONGEST_POLL)
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupBroken(
            f"{what} failed, because a member has died or its connection was cut"
        ) from error


_T = TypeVar("_T")

OPERATION_SECONDS = 600.0
"""An operation's own timeout is long, because heartbeats show which members live."""

TRANSFER_SECONDS = 30.0
"""How long a piece of a reduce may take. All members are there, so 10 Mbps are enough for it. If a
connection closes in the middle of a message, gloo does not wake the operation, so a group that is
abandoned then ends only after this time."""


class Rendezvous(Protocol):
    """A store in which the members of a generation find each other's addresses."""

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for the value of a key. Raise if it does not come within `timeout` seconds."""
        ...


class _CallbackStore(Store):
    """A store of torch that asks a `Rendezvous`. Gloo calls its `set`, `wait` and `get`."""

    def __init__(self, rendezvous: Rendezvous, prefix: str, timeout: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._seconds = timeout
        self.error: BaseException | None = None
        self.addresses = b""

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
    """One generation's group. After the first failure it is broken: abandon it then."""

    def __init__(self, process_group: Any, place: "GroupPlace", transfer: float) -> None:
        """`transfer`: how many seconds a part of a tensor may take."""
        self._process_group: Any = process_group  # torch types none of its methods
        self._works: list[Work] = []
        self._transfer = timedelta(seconds=transfer)
        self.generation = place.generation
        self.rank = place.rank
        self.size = place.size
        self.sent = 0
        """Bytes of sums that gloo got for other members, also in reduces that failed later.
        Headers, votes and buffers are not counted, nor what gloo and TCP add."""

    def __str__(self) -> str:
        return f"generation {self.generation}, rank {self.rank} of {self.size}"

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out_of: list[int]
    ) -> Work:
        """Begin to send slices of `sent`, a slice for each rank, and to receive as many."""
        options = torch_seams.AllToAllOptions()
        options.timeout = self._transfer
        work = self._note(self._present().alltoall_base(received, sent, into, out_of, options))
        self.sent += sum(out_of) - out_of[self.rank]
        return work

    def all_gather(
        self, received: torch.Tensor, sent: torch.Tensor, *, all_are_there: bool = False
    ) -> Work:
        """Begin to gather `sent` of all members, each of the same size. Other members may begin
        much later, unless `all_are_there`, as for a part of a tensor."""
        rows = list(received.view(self.size, -1).unbind())
        options = torch_seams.AllgatherOptions()
        if all_are_there:
            options.timeout = self._transfer
        work = self._note(self._present().allgather([rows], [sent], options))
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

    def _present(self) -> Any:
        if self._process_group is None:
            raise ReducingError(f"{self} was abandoned: use the group of the next generation")
        return self._process_group

    def _note(self, work: Work) -> Work:
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


def form_group(
    store: Rendezvous,
    place: GroupPlace,
    timeout: float,
    alive: Callable[[], None],
    graveyard: Graveyard,
    transfer: float = TRANSFER_SECONDS,
) -> Group:
    """Connect every member of a generation with every other one.

    Members must call this at about the same time; the anchor's gate ensures that. An error of the
    rendezvous or of `alive` is raised as it is. After `timeout` seconds `GroupBroken` is raised.
    `transfer`: how many seconds a piece of a reduce may take.
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
    refuse_connections(made, inner.addresses)
    return Group(formed, place, transfer)


PROBES = 3
SO_ATTACH_FILTER = 26
DROPS_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""The filter of one instruction: return 0 bytes of a packet."""


def open_sockets() -> frozenset[int]:
    """Return the file descriptors of this process that are sockets; none without /dev/fd."""
    sockets: set[int] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError, ValueError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    sockets.add(int(name))
    return frozenset(sockets)


def end_when_unreachable(sockets: Collection[int], seconds: float) -> None:
    """Let each connection end if its other side does not answer for `seconds`."""
    for number in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
            if link.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if link.type != socket.SOCK_STREAM:
                continue
            link.getpeername()  # raises OSError for one that listens
            each = max(1, round(seconds / (PROBES + 1)))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", each),
                ("TCP_KEEPINTVL", each),
                ("TCP_KEEPCNT", PROBES),
                ("TCP_USER_TIMEOUT", round(seconds * 1000)),
            ):
                if hasattr(socket, option):  # not every system has each of them
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def refuse_connections(sockets: Collection[int], addresses: bytes) -> None:
    """Let the sockets that listen at one of `addresses` get no packet any more. Gloo ends the
    process if no descriptor is left for a connection, so a stranger who connects often enough could
    end it. Once a group is formed, no other connection is needed."""
    code = ctypes.create_string_buffer(DROPS_ALL)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for number in sockets if sys.platform == "linux" else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as door:
            if not door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if struct.pack("=H", door.family) + door.getsockname()[1].to_bytes(2) in addresses:
                door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
