"""Gives this member's state to newcomers, on threads of its own.

    trainer's thread   ... step 7 | copy for a newcomer | step 8 | step 9 ...
    thread "give"                   state after 7 ........ commit 8, commit 9, ...

A newcomer applies the commits as fast as it can, which is faster than the steps are made, so it
comes up with the swarm. Where its link is slower, `MOST_WAITING` commits wait for it and then the
trainer does: a newcomer is never left behind for ever. One that takes nothing is dropped.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from trainers.elastic.commits.commit import Commit
from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.giving.plain_tree import take_apart
from trainers.elastic.wire import Channel, ChannelClosed, Listener, Secret, WireError
from trainers.elastic.wire.tensors import payloads_of

log = logging.getLogger(__name__)

MOST_WAITING = 4
SEND_SECONDS = 5.0
POLL_SECONDS = 0.5
JOIN_SECONDS = 5.0


class Donor:
    """One member's. `close` ends it, and is safe to call again."""

    def __init__(self, host: str, secret: Secret, *, insecure_network: bool = False) -> None:
        self._listener = Listener(
            host, 0, secret, insecure_network=insecure_network, send_seconds=SEND_SECONDS
        )
        self.port = self._listener.address.port
        self._lock = threading.Lock()
        self._asked: list[Channel] = []
        """Newcomers that have asked for the state and have not got it."""
        self._followers: dict[Channel, queue.Queue[Commit | None]] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="elastic-donor", daemon=True)
        self._accepting.start()

    # ---- for the trainer's thread ----------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether a newcomer waits for the state."""
        return bool(self._asked)

    def give(self, state: Callable[[], dict[str, Any]], step: int) -> None:
        """Give the state after `step` steps to all that wait for it. Call this between two
        steps."""
        with self._lock:
            asked, self._asked = self._asked, []
        if not asked:
            return
        try:
            plain, tensors = take_apart(state())
        except CannotBeElastic as error:
            # It is the newcomers that cannot come: whoever trains here goes on.
            log.error("newcomers are refused: %s", error)
            for channel in asked:
                with contextlib.suppress(WireError):
                    channel.send("refuse", why=str(error))
                channel.close()
            return
        for channel in asked:
            waiting: queue.Queue[Commit | None] = queue.Queue(MOST_WAITING)
            thread = threading.Thread(
                target=self._serve,
                args=(channel, waiting, (plain, tensors, step)),
                name="elastic-give",
                daemon=True,
            )
            with self._lock:
                self._followers[channel] = waiting
                self._threads = [known for known in self._threads if known.is_alive()]
                self._threads.append(thread)
            thread.start()

    def record(self, commit: Commit) -> None:
        """Give a commit to all that follow. It is kept until they have it, so it must not
        change."""
        with self._lock:
            followers = list(self._followers.items())
        for channel, waiting in followers:
            while channel in self._followers:
                with contextlib.suppress(queue.Full):
                    waiting.put(commit, timeout=POLL_SECONDS)
                    break

    @property
    def followed(self) -> bool:
        """Whether somebody follows, so that commits have to be kept."""
        return bool(self._followers)

    def finish(self) -> None:
        """Let all that follow have every commit, because the run has come to its end."""
        with self._lock:
            waiting, threads = list(self._followers.values()), list(self._threads)
        for one in waiting:
            with contextlib.suppress(queue.Full):
                one.put(None, timeout=SEND_SECONDS)
        for thread in threads:
            thread.join(SEND_SECONDS)

    def close(self) -> None:
        """End all threads. Newcomers that follow have to find another member."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        with self._lock:
            followers, self._followers = self._followers, {}
            asked, self._asked = self._asked, []
            threads = [self._accepting, *self._threads]
        for channel in (*asked, *followers):
            channel.close()
        for waiting in followers.values():
            with contextlib.suppress(queue.Full):
                waiting.put_nowait(None)
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
                self._asked.append(channel)

    def _serve(
        self, channel: Channel, waiting: "queue.Queue[Commit | None]", state: tuple[Any, Any, int]
    ) -> None:
        plain, tensors, step = state
        try:
            channel.send("state", step=step, tree=plain, tensors=len(tensors))
            for tensor in tensors:
                channel.send("tensor", payloads_of([tensor]))
            while (commit := waiting.get()) is not None:
                payloads = payloads_of([commit.total, *commit.buffers])
                channel.send("commit", payloads, **told(commit))
        except WireError as error:
            log.info("a newcomer does not follow any more: %s", error)
        finally:
            with self._lock:
                self._followers.pop(channel, None)
            channel.close()


def told(commit: Commit) -> dict[str, Any]:
    """Return what is told of a commit beside its tensors."""
    return {
        "step": commit.step,
        "added": [[name, list(lanes)] for name, lanes in commit.added],
        "logs": asdict(commit.logs),
        "digest": commit.digest,
    }
