"""Gives this member's state to newcomers, on threads of its own.

    trainer's thread   ... step 7 | copy for a newcomer | step 8 | step 9 ...
    thread "give"                   state after 7 ........ commit 8, commit 9, ...

A newcomer applies commits faster than the swarm makes steps, so it catches up. The threads pause
while a reduce needs the network, but no longer than they send: steps hardly wait for a newcomer,
which also gets the state where the network is never idle. For a slower newcomer up to
`MOST_WAITING` commits wait, and then the trainer does, for a while. A newcomer that can never keep
pace is refused with the numbers (`why_too_slow`).
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.donated_state import payloads_of, take_apart
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.wire_errors import ChannelClosed, WireError, WireTimeout
from trainers.elastic.work.digests import Commit

log = logging.getLogger(__name__)

HELD_SECONDS = 3.0
"""How long the swarm may wait at once, because a newcomer on a busy machine may stumble."""
SETUP_SECONDS = 5.0
"""The same for a newcomer that has the state and prepares its first step. It takes no totals
meanwhile, which does not show its pace."""
HELD_SHARE = 0.2
"""While a newcomer comes in, the swarm's steps may take longer by this share."""
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Following:
    """What a donor has measured of one newcomer."""

    seconds: float
    """Since it began to take the state, to prepare itself, or to follow."""
    held: float
    """How many of them the swarm has waited for this newcomer."""
    taken: int
    commits: int
    commit_bytes: int
    lanes: int
    lane_rate: float
    """The lanes a second that the donor computes; 0 where it has computed none."""
    prepares: bool = False


def seconds_left(following: Following) -> float:
    """Return how long the swarm may still wait for this newcomer; 0 or less if it may not."""
    at_once = SETUP_SECONDS if following.prepares else HELD_SECONDS
    return at_once + HELD_SHARE * following.seconds - following.held


def why_too_slow(following: Following) -> str:
    """Return why a newcomer is too slow: what it takes, what it could compute, what is needed."""
    takes = max(following.taken, 1) / following.seconds
    step = (following.seconds - following.held) / max(following.commits, 1)
    total = following.commit_bytes / takes
    lanes = min(int(max(0.0, step - total) * following.lane_rate), following.lanes)
    return (
        f"this newcomer is too slow for the swarm, which has waited {following.held:.1f} s for it:"
        f" it takes {_rate(takes)}, so the total of a step in {total:.3g} s, and the swarm makes a"
        f" step in {step:.3g} s. That leaves it time for {lanes} of {following.lanes} lanes. It"
        f" needs {_rate(following.commit_bytes / step)} or more: give it a faster link or machine,"
        " or a larger global batch, whose steps take longer"
    )


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / MEGABYTE:.3g} MB/s"


MOST_WAITING = 4
SEND_SECONDS = 5.0
POLL_SECONDS = 0.5
JOIN_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Recipient:
    """A newcomer that has asked for the state."""

    channel: Channel
    waiting: "queue.Queue[Commit | None]" = field(default_factory=lambda: queue.Queue(MOST_WAITING))
    """None: there will be no more commits for it."""
    prepares: bool = False
    since: float = field(default_factory=time.monotonic)
    """When its present phase began: to take the state, to prepare itself, or to follow."""
    held: float = 0.0
    taken: int = 0
    commits: int = 0
    refused: str = ""

    def begin(self, *, prepares: bool) -> None:
        """Begin the next phase, and measure it from now on."""
        self.prepares, self.since = prepares, time.monotonic()
        self.held, self.taken, self.commits = 0.0, 0, 0

    def measure(self, commit: Commit, lane_rate: float) -> Following:
        return Following(
            seconds=time.monotonic() - self.since,
            held=self.held,
            taken=self.taken,
            commits=self.commits,
            commit_bytes=_bytes_of(commit),
            lanes=sum(len(lanes) for _, lanes in commit.added),
            lane_rate=lane_rate,
            prepares=self.prepares,
        )


class Donor:
    """`close` ends it, and is safe to call again."""

    def __init__(self, host: str, secret: Secret, *, insecure_network: bool = False) -> None:
        self._listener = Listener(
            host, 0, secret, insecure_network=insecure_network, send_seconds=SEND_SECONDS
        )
        self.port = self._listener.address.port
        self._lock = threading.Lock()
        self._asking: list[Channel] = []
        self._followers: list[Recipient] = []
        self._threads: list[threading.Thread] = []
        self._network_free = threading.Event()
        self._network_free.set()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="elastic-donor", daemon=True)
        self._accepting.start()

    # ---- for the trainer's thread ----------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether a newcomer waits for the state."""
        return bool(self._asking)

    def give(self, state: Callable[[], dict[str, Any]], step: int) -> None:
        """Give the state after `step` steps to all that wait for it. Call it between two steps."""
        with self._lock:
            asking, self._asking = self._asking, []
        if not asking:
            return
        try:
            plain, tensors = take_apart(state())
        except CannotBeElastic as error:
            # Only newcomers are refused: the members train on.
            log.error("newcomers are refused: %s", error)
            for channel in asking:
                with contextlib.suppress(WireError):
                    channel.send("refuse", why=str(error))
                channel.close()
            return
        for channel in asking:
            follower = Recipient(channel)
            thread = threading.Thread(
                target=self._serve,
                args=(follower, (plain, tensors, step)),
                name="elastic-give",
                daemon=True,
            )
            with self._lock:
                self._followers.append(follower)
                self._threads = [known for known in self._threads if known.is_alive()]
                self._threads.append(thread)
            thread.start()

    def record(self, commit: Commit, lane_rate: float = 0.0) -> None:
        """Give a commit to all newcomers that follow. It is kept until they have it, so it must not
        change. `lane_rate`: the lanes a second that this member computes."""
        with self._lock:
            followers = list(self._followers)
        for follower in followers:
            follower.commits += 1
            while follower in self._followers:
                measured = follower.measure(commit, lane_rate)
                if (left := seconds_left(measured)) <= 0:
                    self._refuse(follower, why_too_slow(measured))
                    break
                began = time.monotonic()
                try:
                    follower.waiting.put(commit, timeout=min(left, POLL_SECONDS))
                    break
                except queue.Full:
                    continue
                finally:
                    follower.held += time.monotonic() - began

    def _refuse(self, follower: Recipient, why: str) -> None:
        log.warning("a newcomer at %s is refused: %s", follower.channel.peer, why)
        follower.refused = why
        self._remove(follower)
        with contextlib.suppress(queue.Empty):  # Its thread sends the reason instead of commits.
            while True:
                follower.waiting.get_nowait()
        with contextlib.suppress(queue.Full):
            follower.waiting.put_nowait(None)

    @contextlib.contextmanager
    def standing_back(self) -> Iterator[None]:
        """Leave the network to a reduce within this block."""
        self._network_free.clear()
        try:
            yield
        finally:
            self._network_free.set()

    @property
    def followed(self) -> bool:
        """Whether a newcomer follows, so that commits must be recorded."""
        return bool(self._followers)

    def finish(self) -> None:
        """Send every commit to the newcomers that follow, because the run ends."""
        with self._lock:
            followers, threads = list(self._followers), list(self._threads)
        for follower in followers:
            with contextlib.suppress(queue.Full):
                follower.waiting.put(None, timeout=SEND_SECONDS)
        for thread in threads:
            thread.join(SEND_SECONDS)

    def close(self) -> None:
        """End all threads. Newcomers that follow must find another donor."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        with self._lock:
            followers, self._followers = self._followers, []
            asking, self._asking = self._asking, []
            threads = [self._accepting, *self._threads]
        for channel in (*asking, *(follower.channel for follower in followers)):
            channel.close()
        for follower in followers:
            with contextlib.suppress(queue.Full):
                follower.waiting.put_nowait(None)
        for thread in threads:
            thread.join(JOIN_SECONDS)

    # ---- threads --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept(None)
            except ChannelClosed:
                return
            with self._lock:
                if self._closed:
                    channel.close()
                    return
                self._asking.append(channel)

    def _serve(self, follower: Recipient, state: tuple[Any, Any, int]) -> None:
        plain, tensors, step = state
        channel, rest = follower.channel, self._make_rest()
        try:
            channel.send("state", step=step, tree=plain, tensors=len(tensors))
            for tensor in tensors:
                if follower.refused:
                    break
                channel.send_in_parts("tensor", payloads_of([tensor]), {}, rest)
                follower.taken += tensor.nbytes
            follower.begin(prepares=True)
            while (commit := follower.waiting.get()) is not None and not follower.refused:
                payloads = payloads_of([commit.total, *commit.buffers])
                channel.send_in_parts("commit", payloads, commit_fields(commit), rest)
                follower.taken += _bytes_of(commit)
                if follower.prepares and _follows_now(channel):
                    follower.begin(prepares=False)
            if follower.refused:
                channel.send("refuse", why=follower.refused)
        except WireError as error:
            log.info("a newcomer does not follow any more: %s", error)
        finally:
            self._remove(follower)
            channel.close()

    def _make_rest(self, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
        """Return what a thread calls between two parts of what it sends."""
        begun, rested = clock(), 0.0

        def rest() -> None:
            nonlocal rested
            now = clock()
            may = now - begun - 2 * rested  # the time of sending minus the time of resting
            if may > 0 and not self._network_free.is_set():
                self._network_free.wait(may)
                rested += clock() - now

        return rest

    def _remove(self, follower: Recipient) -> None:
        with self._lock:
            self._followers = [other for other in self._followers if other is not follower]


def _follows_now(channel: Channel) -> bool:
    """Return whether the newcomer has reported that it follows."""
    try:
        channel.receive(0).typed({"follows": {}})
    except WireTimeout:
        return False
    return True


def _bytes_of(commit: Commit) -> int:
    return sum(tensor.nbytes for tensor in (commit.total, *commit.buffers))


def commit_fields(commit: Commit) -> dict[str, Any]:
    """Return the fields of a commit's message; its tensors are payloads."""
    return {
        "step": commit.step,
        "added": [[name, list(lanes)] for name, lanes in commit.added],
        "logs": asdict(commit.logs),
        "digest": commit.digest,
    }
