"""The anchor: messages of peers go through one queue to the roster, which decides.

    Listener -> thread "anchor-in": hello -> thread "anchor-peer" for each channel --+
    thread "anchor-asks": hosts of awaited members ----------------------------------+
                                                                                    v
    run():  queue -> Roster (deciding/roster.py) -> orders -> channels of the peers they are for

Members also leave here the addresses by which their gloo groups find each other (`put`, `get`). So
no other port is open for that, and only peers with the secret can write them.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from loaders.closing import ClosedAtEnd
from trainers.elastic.anchor.kinds import TO_ANCHOR, MeetingPlace, difference
from trainers.elastic.deciding.roster import Roster, Settings
from trainers.elastic.deciding.view import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Expel,
    Form,
    FoundRun,
    Member,
    Order,
    Refuse,
    View,
)
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import Listener
from trainers.elastic.wire.message import Message, as_line
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.wire_errors import BadFrame, ChannelClosed, WireError, WireTimeout

log = logging.getLogger(__name__)

SEND_SECONDS = 2.0
"""A peer that takes nothing for so long is taken for dead."""
HELLO_SECONDS = 5.0
"""A client that has connected and sends nothing for so long is cut off."""
LAST_SECONDS = 0.2
JOIN_SECONDS = 5.0
PROBE_SECONDS = 0.5
ASK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class ChannelEvent:
    """A message that came through a channel; None: the channel is closed."""

    channel: Channel
    member: Member | None
    """Who has greeted through it."""
    message: Message | None
    why: str = ""
    certain: bool = True


class Reception:
    """Takes channels from a listener, and puts what comes through them into a queue."""

    def __init__(
        self,
        listener: Listener,
        put: Callable[[ChannelEvent], None],
        log: Callable[[str], None],
        *,
        only_anchor: bool,
    ) -> None:
        """`put` takes events, on any thread, and `log` lines. `only_anchor`: the peers know no
        other one."""
        self._listener = listener
        self._put = put
        self._log = log
        self._only_anchor = only_anchor
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def open(self) -> None:
        """Accept channels from now on."""
        self.start_thread(self._accept, "anchor-in")

    def start_thread(self, work: Callable[[], None], name: str) -> None:
        """Start a thread that `close` waits for. Raise `RuntimeError` if the system has none."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """End all threads and channels."""
        self._closed = True
        self._listener.close()
        for channel in list(self._channels):
            channel.close()
        for thread in list(self._threads):
            thread.join(JOIN_SECONDS)

    def _accept(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                with contextlib.suppress(WireTimeout):
                    self._serve(self._listener.accept(1.0))
                for refusal in self._listener.refusals():
                    self._log(f"refused: {refusal}")

    def _serve(self, channel: Channel) -> None:
        self._channels.append(channel)
        try:
            self.start_thread(partial(self._receive, channel), "anchor-peer")
        except RuntimeError as error:  # The system has no thread left.
            self._log(f"{channel.peer} is cut off: {error}")
            self._channels.remove(channel)
            channel.close()

    def _receive(self, channel: Channel) -> None:
        why, member = "its connection was closed", None
        try:
            while True:
                message = channel.receive(HELLO_SECONDS if member is None else None)
                message = replace(message, fields=message.typed(TO_ANCHOR))
                if (message.kind == "hello") is not (member is None):
                    raise BadFrame("a peer sends 'hello' first, and once")
                member = member or message.fields["member"]
                self._put(ChannelEvent(channel, member, message))
        except WireError as error:
            why = str(error)
            if isinstance(error, BadFrame | WireTimeout):
                self._log(f"{channel.peer} is cut off: {why}")
                _cut_off(channel, why)
        finally:
            channel.close()
            self._channels.remove(channel)
            self._put(ChannelEvent(channel, member, None, why, self._is_death(member)))

    def _is_death(self, member: Member | None) -> bool:
        """Return whether a closed connection is the death of the peer. If there are other anchors,
        it may train with one of them, so its host is asked."""
        if self._only_anchor or member is None or self._closed:
            return True
        return is_dead(member.host, member.port)


def _cut_off(channel: Channel, why: str) -> None:
    """Send the reason, and read what has come meanwhile: the system drops what was sent to a peer
    whose own messages are unread."""
    with contextlib.suppress(WireError):
        channel.send("refuse", why=f"the anchor cuts this peer off: {why}")
        for _ in range(10):
            channel.receive(LAST_SECONDS)


class Anchor(ClosedAtEnd):
    """A context manager. `run` serves until `stop`, or until all peers have ended the run."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        settings: Settings,
        *,
        insecure_network: bool = False,
        log_line: Callable[[str], None] = log.info,
    ) -> None:
        """`log_line` is called with a line whenever something happens to the membership."""
        self.roster = Roster(settings, time.monotonic())
        self._log = lambda line: log_line(as_line(line))
        listener = Listener(
            host, port, secret, insecure_network=insecure_network, send_seconds=SEND_SECONDS
        )
        self.address = listener.address
        self._queue: queue.SimpleQueue[ChannelEvent | Member | None] = queue.SimpleQueue()
        """A member here is an awaited one whose host reports that it is dead."""
        self._channels: dict[str, Channel] = {}
        self._meeting = MeetingPlace()
        self._manifest: Mapping[str, str] | None = None
        """What peers must have in common, as the first one sent it."""
        self._stopped = threading.Event()
        self._reported = ""
        self._stalled = 0.0
        self._reception = Reception(
            listener, self._queue.put, self._log, only_anchor=settings.only_anchor
        )

    def run(self) -> None:
        """Serve. Returns after `stop`, or when the last peer has ended the run."""
        self._reception.open()
        pause = self.roster.settings.heartbeat / 8
        latest = time.monotonic()
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                event = self._queue.get(timeout=pause)
                while True:  # handle all that has come before a peer counts as silent
                    if event is not None:
                        self._handle(event)
                    event = self._queue.get_nowait()
            before, latest = latest, time.monotonic()
            if (late := latest - before - pause) > pause:
                self._stalled += late
            self._carry_out(self.roster.tick(self._now()))
            waits = self.roster.waits_for()
            if waits and waits != self._reported:
                for peer in list(self.roster.peers):
                    self._send_to(peer, "waits", why=waits)
            self._reported = waits
            if self.roster.finished is not None and not self.roster.peers:
                self._log(f"all peers have ended the run, at step {self.roster.finished[0]}")
                return

    def _now(self) -> float:
        """Return the roster's time, which stands still while this process does not run."""
        return time.monotonic() - self._stalled

    def stop(self) -> None:
        """Let `run` return. Any thread may call this, a signal's handler too."""
        self._stopped.set()
        self._queue.put(None)

    def close(self) -> None:
        """Close everything. It is safe to call again."""
        self.stop()
        self._reception.close()

    # ---- messages of peers ----------------------------------------------------------------------

    def _handle(self, event: ChannelEvent | Member) -> None:
        if isinstance(event, Member):
            if event.name not in self._channels:  # else its channel says when it dies
                why = f"{event.name} has died while no anchor was there"
                self._log(why)
                orders = self.roster.remove_lost(event.name, self._now(), certain=True, why=why)
                self._carry_out(orders)
            return
        name = "" if event.member is None else event.member.name
        if event.message is not None and event.message.kind == "hello":
            self._admit(event.channel, event.message)
        elif self._channels.get(name) is event.channel:
            if event.message is None:
                self._handle_closed_channel(name, event)
            else:
                self._handle_member_message(name, event.message)

    def _handle_closed_channel(self, name: str, event: ChannelEvent) -> None:
        del self._channels[name]
        why = f"{name} is gone: {event.why}"
        if name in self.roster.peers:
            self._log(why)
        self._carry_out(self.roster.remove_lost(name, self._now(), certain=event.certain, why=why))

    def _admit(self, channel: Channel, message: Message) -> None:
        fields, now = message.fields, self._now()
        member, view = fields["member"], fields["view"]
        if why := self._reason_to_refuse(member.name, view, fields["manifest"]):
            self._log(f"{member.name} is refused: {why}")
            self._send(channel, "refuse", why=why)
            return
        self._channels[member.name] = channel
        settings = self.roster.settings
        about = {"heartbeat": settings.heartbeat, "min_peers": settings.min_peers}
        self._send(channel, "welcome", **about)
        if view is None:
            self._log(f"{member.name} has come")
            self._carry_out(self.roster.add_newcomer(member, fields["has_step"], now))
        else:
            self._log(f"{member.name} has come back")
            self._carry_out(self.roster.restore_member(member, view, fields["step"], now))

    def _reason_to_refuse(self, name: str, view: View | None, theirs: Mapping[str, str]) -> str:
        if view is not None and name not in view.names:
            return f"{name} is not among the members that it names"
        if self._manifest is None or not self.roster.peers:
            self._manifest = theirs
        if differs := difference(theirs, self._manifest):
            return f"this peer does not train the same: {differs} (there: the swarm)"
        if view is None and name in self.roster.peers:
            return f"a peer named {name} is there already: give every peer a name of its own"
        return ""

    def _handle_member_message(self, name: str, message: Message) -> None:
        fields, roster, now = message.fields, self.roster, self._now()
        match message.kind:
            case "beat":
                self._carry_out(roster.note_beat(name, fields["step"], now))
            case "ready":
                self._carry_out(roster.mark_ready(name, fields["donor"], now))
            case "gate":
                where = fields["generation"], fields["step"]
                self._carry_out(roster.enter_gate(name, *where, now, planned=fields["planned"]))
            case "leave":
                self._log(f"{name} leaves")
                why = f"{name} has left"
                self._carry_out(roster.remove_lost(name, now, certain=True, why=why))
            case "ended":
                self._carry_out(roster.end_run(name, fields["step"], fields["digest"], now))
            case "put":
                self._meeting.put(fields["generation"], fields["key"], fields["payload"])
            case "get":
                self._meeting.ask(name, fields["generation"], fields["key"], fields["ticket"])
            case kind:
                raise AssertionError(kind)
        for waiting, ticket, value in self._meeting.answers():
            if waiting in self._channels:
                self._send(self._channels[waiting], "value", payloads=[value], ticket=ticket)

    def _ask_host(self, member: Member) -> None:
        """Ask until the member connects, is found dead, or the heartbeat is over."""
        end = time.monotonic() + self.roster.settings.heartbeat
        while member.name not in self._channels and time.monotonic() < end:
            if is_dead(member.host, member.port):
                self._queue.put(member)
                return
            if self._stopped.wait(ASK_SECONDS):
                return

    # ---- messages to peers ----------------------------------------------------------------------

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case FoundRun(peer):
                    self._log(f"{peer} begins with its own state")
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
                        self._reception.start_thread(partial(self._ask_host, member), "anchor-asks")
                case Form(view, step, finished):
                    self._log(f"generation {view.generation}: {', '.join(view.names)}")
                    self._meeting.begin(view.generation)
                    for peer in view.names:
                        self._send_to(peer, "form", view=asdict(view), step=step, finished=finished)
                case Expel(peer, why) | Refuse(peer, why):
                    self._log(why)
                    kind = "expel" if isinstance(order, Expel) else "refuse"
                    self._send_to(peer, kind, why=why)

    def _send_to(self, peer: str, kind: str, **fields: Any) -> None:
        if channel := self._channels.get(peer):
            self._send(channel, kind, **fields)

    def _send(self, channel: Channel, kind: str, payloads: Any = (), **fields: Any) -> None:
        # A channel that fails here ends its own thread, which reports it to the roster.
        with contextlib.suppress(WireError):
            channel.send(kind, payloads, **fields)


def is_dead(host: str, port: int, seconds: float = PROBE_SECONDS) -> bool:
    """Return whether nobody listens at the port where the peer gives its state away. A living peer
    listens there, even if a router has reset its connection to this anchor."""
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
            continue  # It is dying: ask once more.
        except (OSError, ValueError):  # Nobody answers, it listens and waits, or it is no address.
            return False
    return False
