"""The anchor's threads: what peers say goes through one queue to the roster, which decides.

    Listener -> thread "anchor-in": hello -> thread "anchor-peer" for each channel --+
    thread "anchor-asks": hosts of awaited members ----------------------------------+
                                                                                    v
    run():  queue -> Roster (deciding/roster.py) -> words -> channels of the peers they are for

It is also where members leave the addresses by which their gloo groups find each other (`put`,
`get`), so no other port is opened for that, and those who do not know the secret cannot write them.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from trainers.elastic.anchor.kinds import TO_ANCHOR
from trainers.elastic.anchor.meeting_place import MeetingPlace
from trainers.elastic.deciding.roster import Roster, Settings
from trainers.elastic.deciding.roster_words import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Expel,
    Form,
    Found,
    Refuse,
    Word,
)
from trainers.elastic.deciding.view import Member, View
from trainers.elastic.wire import (
    BadFrame,
    Channel,
    ChannelClosed,
    Listener,
    Manifest,
    Message,
    Secret,
    WireError,
    WireTimeout,
    as_line,
    difference,
)

log = logging.getLogger(__name__)

SEND_SECONDS = 2.0
"""A peer that takes nothing for so long is as good as gone."""
HELLO_SECONDS = 5.0
"""Who has been let in and says nothing for so long is cut off."""
LAST_SECONDS = 0.2
JOIN_SECONDS = 5.0
PROBE_SECONDS = 0.5
ASK_SECONDS = 0.1
"""So often the host of an awaited member is asked whether that member is dead."""


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """Something that came through a channel; None: the channel is closed."""

    channel: Channel
    message: Message | None
    why: str = ""
    certain: bool = True
    """Whether a closed channel is the peer's death."""


@dataclass(frozen=True, slots=True)
class Died:
    """The host of an awaited member says that it is dead."""

    member: Member


class Anchor:
    """A context manager. `run` serves until `stop`, or until all peers have ended the run."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        settings: Settings,
        *,
        insecure_network: bool = False,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        """`tell` is called with a line whenever something happens to the membership."""
        self.roster = Roster(settings, time.monotonic())
        self._tell = lambda line: tell(as_line(line))
        self._listener = Listener(
            host, port, secret, insecure_network=insecure_network, send_seconds=SEND_SECONDS
        )
        self.address = self._listener.address
        self._queue: queue.SimpleQueue[Heard | Died | None] = queue.SimpleQueue()
        self._channels: dict[str, Channel] = {}
        self._names: dict[Channel, str] = {}
        self._members: dict[Channel, Member] = {}
        self._meeting = MeetingPlace()
        self._manifest: Manifest | None = None
        """What peers must have in common. The first one brings it."""
        self._open: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._beginning = threading.Lock()
        """Two threads begin others."""
        self._stopped = threading.Event()
        self._waited_for = ""
        self._stalled = 0.0
        self._accepting = threading.Thread(target=self._accept, name="anchor-in", daemon=True)

    def run(self) -> None:
        """Serve. Returns after `stop`, or when the last peer has ended the run."""
        self._accepting.start()
        pause = self.roster.settings.heartbeat / 8
        latest = time.monotonic()
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                heard = self._queue.get(timeout=pause)
                while True:  # all that has come counts before anybody is taken for silent
                    if heard is not None:
                        self._handle(heard)
                    heard = self._queue.get_nowait()
            before, latest = latest, time.monotonic()
            if (late := latest - before - pause) > pause:
                self._stalled += late
            self._say(self.roster.tick(self._now()))
            self._tell_waiting()
            if self.roster.finished is not None and not self.roster.peers:
                self._tell(f"all peers have ended the run, at step {self.roster.finished[0]}")
                return

    def _now(self) -> float:
        """The roster's time. It stands still while this process has no time of its machine: peers
        were not silent then, it was the anchor that did not listen."""
        return time.monotonic() - self._stalled

    def stop(self) -> None:
        """Let `run` return. Any thread may call this, a signal's handler too."""
        self._stopped.set()
        self._queue.put(None)

    def close(self) -> None:
        """Close everything. It is safe to call again."""
        self.stop()
        self._listener.close()
        for channel in list(self._open):
            channel.close()
        for thread in (self._accepting, *self._threads):
            if thread.ident is not None:
                thread.join(JOIN_SECONDS)

    def __enter__(self) -> "Anchor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._beginning:
            self._threads = [known for known in self._threads if known.is_alive()]
            thread.start()
            self._threads.append(thread)

    # ---- threads that listen --------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                channel = self._listener.accept(1.0)
            except WireTimeout:
                self._tell_refusals()
                continue
            except ChannelClosed:
                return
            self._tell_refusals()
            self._open.append(channel)
            try:
                self._begin(partial(self._listen, channel), "anchor-peer")
            except RuntimeError as error:  # The system has no thread left.
                self._tell(f"{channel.peer} is cut off: {error}")
                self._open.remove(channel)
                channel.close()

    def _tell_refusals(self) -> None:
        for refusal in self._listener.refusals():
            self._tell(f"not let in: {refusal}")

    def _listen(self, channel: Channel) -> None:
        why, has_greeted = "its connection was closed", False
        try:
            while True:
                message = channel.receive(None if has_greeted else HELLO_SECONDS)
                message = replace(message, fields=message.typed(TO_ANCHOR))
                if (message.kind == "hello") is has_greeted:
                    raise BadFrame("a peer says 'hello' first, and once")
                has_greeted = True
                self._queue.put(Heard(channel, message))
        except WireError as error:
            why = str(error)
            if isinstance(error, BadFrame | WireTimeout):
                self._tell(f"{channel.peer} is cut off: {why}")
                self._cut_off(channel, why)
        finally:
            channel.close()
            self._queue.put(Heard(channel, None, why, self._is_death(channel)))

    def _cut_off(self, channel: Channel, why: str) -> None:
        """Say why. What has come meanwhile is read, since the system drops what was said to a peer
        whose messages lie unread."""
        self._send(channel, "refuse", why=f"the anchor cuts this peer off: {why}")
        with contextlib.suppress(WireError):
            for _ in range(10):
                channel.receive(LAST_SECONDS)

    def _is_death(self, channel: Channel) -> bool:
        """Whether a closed connection is the end of the peer. Where it knows other anchors, it may
        live and train with one of those, so its host is asked."""
        member = self._members.pop(channel, None)
        if self.roster.settings.only_anchor or member is None or self._stopped.is_set():
            return True
        return is_dead(member.host, member.port)

    def _ask_host(self, member: Member) -> None:
        """Ask until the member comes here, is found dead, or is given up by the roster."""
        end = time.monotonic() + self.roster.settings.heartbeat
        while member.name not in self._channels and time.monotonic() < end:
            if is_dead(member.host, member.port):
                self._queue.put(Died(member))
                return
            if self._stopped.wait(ASK_SECONDS):
                return

    # ---- what peers say -------------------------------------------------------------------------

    def _handle(self, heard: Heard | Died) -> None:
        if isinstance(heard, Died):
            self._died(heard.member.name)
            return
        channel, message = heard.channel, heard.message
        name = self._names.get(channel)
        if message is None:
            self._gone(channel, name, heard.why, certain=heard.certain)
        elif message.kind == "hello":
            self._hello(channel, message)
        elif name is not None and self._channels.get(name) is channel:
            self._said(name, message)

    def _gone(self, channel: Channel, name: str | None, why: str, *, certain: bool) -> None:
        with contextlib.suppress(ValueError):
            self._open.remove(channel)
        self._names.pop(channel, None)
        if name is None or self._channels.get(name) is not channel:
            return
        del self._channels[name]
        if name in self.roster.peers:
            self._tell(f"{name} is gone: {why}")
        now, why = self._now(), f"{name} is gone: {why}"
        self._say(self.roster.lost(name, now, certain=certain, why=why))

    def _died(self, name: str) -> None:
        if name in self._channels:
            return  # It has come here meanwhile. If it dies, its channel is closed.
        why = f"{name} has died while no anchor was there"
        self._tell(why)
        self._say(self.roster.lost(name, self._now(), certain=True, why=why))

    def _hello(self, channel: Channel, message: Message) -> None:
        fields, now = message.fields, self._now()
        member, view = fields["member"], fields["view"]
        if why := self._refusal(member.name, view, Manifest.of(fields["manifest"])):
            self._tell(f"{member.name} is refused: {why}")
            self._send(channel, "refuse", why=why)
            return
        self._channels[member.name], self._names[channel] = channel, member.name
        self._members[channel] = member
        settings = self.roster.settings
        about = {"heartbeat": settings.heartbeat, "min_peers": settings.min_peers}
        self._send(channel, "welcome", **about)
        if view is None:
            self._tell(f"{member.name} has come")
            self._say(self.roster.came(member, fields["has_step"], now))
        else:
            self._tell(f"{member.name} has come back")
            self._say(self.roster.came_back(member, view, fields["step"], now))

    def _refusal(self, name: str, view: View | None, theirs: Manifest) -> str:
        if view is not None and name not in view.names:
            return f"{name} is not among the members that it names"
        if self._manifest is None or not self.roster.peers:
            self._manifest = theirs
        if found := difference(theirs, self._manifest):
            return f"this peer does not train the same: {found} (there: the swarm)"
        if view is None and name in self.roster.peers:
            return f"a peer named {name} is there already: give every peer a name of its own"
        return ""

    def _said(self, name: str, message: Message) -> None:
        fields, roster, now = message.fields, self.roster, self._now()
        match message.kind:
            case "beat":
                self._say(roster.beat(name, fields["step"], now))
            case "ready":
                self._say(roster.ready(name, fields["donor"], now))
            case "gate":
                where = fields["generation"], fields["step"]
                self._say(roster.at_gate(name, *where, now, planned=fields["planned"]))
            case "leave":
                self._tell(f"{name} leaves")
                self._say(roster.left(name, now))
            case "ended":
                self._say(roster.ended(name, fields["step"], fields["digest"], now))
            case "put":
                self._meeting.put(fields["generation"], fields["key"], fields["payload"])
                self._answer()
            case "get":
                self._meeting.ask(name, fields["generation"], fields["key"], fields["ticket"])
                self._answer()
            case kind:
                raise AssertionError(kind)

    # ---- what the anchor says -------------------------------------------------------------------

    def _answer(self) -> None:
        for name, ticket, value in self._meeting.answers():
            if name in self._channels:
                self._send(self._channels[name], "value", payloads=[value], ticket=ticket)

    def _say(self, words: list[Word]) -> None:
        for word in words:
            match word:
                case Found(peer):
                    self._tell(f"{peer} begins with its own state")
                    self._send_to(peer, "found")
                case CopyFrom(peer, donor):
                    self._send_to(peer, "copy", donor=asdict(donor))
                case Announce(peers, generation):
                    for peer in peers:
                        self._send_to(peer, "announce", generation=generation)
                case Break(peers, generation, why):
                    for peer in peers:
                        self._send_to(peer, "break", generation=generation, why=why)
                case AskHost(member):
                    with contextlib.suppress(RuntimeError):  # Without a thread left, time decides.
                        self._begin(partial(self._ask_host, member), "anchor-asks")
                case Form(view, step, finished):
                    self._tell(f"generation {view.generation}: {', '.join(view.names)}")
                    self._meeting.begin(view.generation)
                    for peer in view.names:
                        self._send_to(peer, "form", view=asdict(view), step=step, finished=finished)
                case Expel(peer, why) | Refuse(peer, why):
                    self._tell(why)
                    kind = "expel" if isinstance(word, Expel) else "refuse"
                    self._send_to(peer, kind, why=why)

    def _send_to(self, peer: str, kind: str, **fields: Any) -> None:
        if channel := self._channels.get(peer):
            self._send(channel, kind, **fields)

    def _send(self, channel: Channel, kind: str, payloads: Any = (), **fields: Any) -> None:
        # A channel that fails here ends its own thread, which tells the roster.
        with contextlib.suppress(WireError):
            channel.send(kind, payloads, **fields)

    def _tell_waiting(self) -> None:
        waits = self.roster.waits_for()
        if waits and waits != self._waited_for:
            for peer in list(self.roster.peers):
                self._send_to(peer, "waits", why=waits)
        self._waited_for = waits


def is_dead(host: str, port: int, seconds: float = PROBE_SECONDS) -> bool:
    """Whether the peer's host says that nobody listens where the peer gives its state away. A peer
    that lives listens there, also where a router has reset its connection to this anchor and it has
    found another one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as probe:
                probe.settimeout(max(end - time.monotonic(), 0.001))
                if probe.recv(1):
                    return False
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:
            continue  # It is dying: it is asked once more.
        except (OSError, ValueError):  # Nobody answers, who listens waits, or it is no address.
            return False
    return False
