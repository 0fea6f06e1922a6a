"""A peer's link to the anchor: the anchor's latest orders, and the peer's reports.

thread "elastic-link"   receives; connects again, to the next address, when the anchor is gone
thread "elastic-beat"   reports that the peer lives, its step, and its donor
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainers.elastic.anchor.kinds import TO_PEER
from trainers.elastic.deciding.view import Form, Member, View
from trainers.elastic.errors import Expelled, GenerationEnded, SwarmRefused
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import connect
from trainers.elastic.wire.message import Message, as_line
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.wire_errors import (
    BadFrame,
    ChannelClosed,
    Unreachable,
    WireError,
    WrongSecret,
)

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
PATIENCE_SECONDS = 600.0
"""How long a peer at the gate looks for an anchor before it gives up."""
IDLE_SECONDS = 0.02
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Instruction:
    """The anchor's order to a newcomer: take the state from `donor`; None: begin with its own."""

    donor: Member | None
    number: int
    """It grows with every new order, for example when a donor has died."""


class AnchorLink:
    """`open` it, and `close` it at the end."""

    def __init__(
        self,
        addresses: Sequence[Address],
        secret: Secret,
        member: Member,
        manifest: Mapping[str, str],
    ) -> None:
        self.member = member
        self.heartbeat = 2.0
        self.min_peers = 1
        self.step = 0
        """The steps that are applied to the weights here. The trainer's thread sets it."""
        self._addresses = list(addresses)
        self._secret = secret
        self._manifest = manifest
        self._has_step = 0
        self._changed = threading.Condition()
        self._channel: Channel | None = None
        self._closing = False
        self._run_ended = False
        self._hung_up = threading.Event()
        self._view: View | None = None
        self._role: Instruction | None = None
        self._formed: Form | None = None
        self._ended: dict[int, str] = {}
        self._announced: set[int] = set()
        self._values: dict[int, bytes] = {}
        self._tickets = 0
        self._at_gate: tuple[int, int, bool] | None = None
        self._ready = ""
        """The donor of this newcomer; "" before it has the state, and when it is a member."""
        self._failure: Exception | None = None
        self._waits = ""
        self._threads = [
            threading.Thread(target=self._listen, name="elastic-link", daemon=True),
            threading.Thread(target=self._beat, name="elastic-beat", daemon=True),
        ]

    def open(self, has_step: int) -> None:
        """Connect. `has_step`: the step of the checkpoint from which this peer could begin."""
        self._has_step = has_step
        self._send_hello(connect(self._addresses, self._secret, CONNECT_SECONDS * 2))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hang up. Later reports are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            channel = self._channel
        self._hung_up.set()
        if channel is not None:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    # ---- for the trainer's thread ----------------------------------------------------------------

    def role(self, after: int = 0, seconds: float = math.inf) -> Instruction:
        """Wait for an order to a newcomer with a higher number than `after`. Raise `Expelled` if
        none comes in `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._role is None or self._role.number <= after:
                self._raise_if_expelled()
                if self._closing:
                    raise ChannelClosed("the link is closed, and the anchor's answer will not come")
                self._changed.wait(1.0)
                if time.monotonic() > end:
                    raise Expelled("the anchor named nobody else who has the state: start again")
            return self._role

    def names_another(self, donor: Member) -> bool:
        """Whether the anchor's newest order is to take the state from somebody else."""
        with self._changed:
            self._raise_if_expelled()
            return self._role is not None and self._role.donor != donor

    def alive(self) -> None:
        """Raise `GenerationEnded` if the present generation is over."""
        with self._changed:
            self._raise_if_expelled()
            if self._view is not None and (why := self._end_reason()):
                raise GenerationEnded(why)

    def formed(self) -> Form | None:
        """Return the generation of which this newcomer is a member, if there is one."""
        with self._changed:
            self._raise_if_expelled()
            formed, self._formed = self._formed, None
            if formed is not None:
                self._view, self._ready = formed.view, ""
            return formed

    @property
    def announced(self) -> bool:
        """Whether the anchor has announced a change of this generation."""
        with self._changed:
            return self._view is not None and self._view.generation in self._announced

    def gate(self, step: int, idle: Callable[[], None], *, planned: bool) -> Form:
        """Wait for the next generation, and call `idle` meanwhile. `planned`: between two steps."""
        with self._changed:
            generation = 0 if self._view is None else self._view.generation
            self._at_gate = generation, step, planned
        if not self._ready:
            self._send("gate", generation=generation, step=step, planned=planned)
        reported, lost_at = "", time.monotonic()
        while True:
            with self._changed:
                self._raise_if_expelled()
                if self._formed is not None and self._formed.view.generation > generation:
                    formed, self._formed = self._formed, None
                    self._view, self._at_gate, self._ready = formed.view, None, ""
                    return formed
                self._changed.wait(IDLE_SECONDS)
                waits = self._waits
                if self._channel is not None:
                    lost_at = time.monotonic()
                elif time.monotonic() - lost_at > PATIENCE_SECONDS:
                    raise Unreachable(
                        f"no anchor could be reached for {PATIENCE_SECONDS:g} s, at"
                        f" {', '.join(map(str, self._addresses))}: start one"
                    )
            if waits and waits != reported:
                log.info("waiting at the gate: %s", waits)
                reported = waits
            idle()

    def ready(self, donor: str) -> None:
        """Report that the state of `donor` is here, and that this peer follows it."""
        self._ready = donor
        self._send("ready", donor=donor)

    def leave(self) -> None:
        """Leave the swarm, between two steps."""
        self._send("leave")

    def ended(self, step: int, digest: str) -> None:
        """Report that the whole run has ended here. The anchor may end then."""
        self._run_ended = True
        self._send("ended", step=step, digest=digest)

    def set(self, key: str, value: bytes) -> None:
        """Leave a value for the other members of this generation."""
        self._send("put", [value], generation=self._generation(), key=key)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value that a member of this generation leaves."""
        end = time.monotonic() + timeout
        with self._changed:
            self._tickets += 1
            ticket = self._tickets
        self._send("get", generation=self._generation(), key=key, ticket=ticket)
        with self._changed:
            while ticket not in self._values:
                if time.monotonic() > end:
                    raise GenerationEnded(f"{key} of another member did not come in {timeout:g} s")
                self._changed.wait(IDLE_SECONDS)
                self._raise_if_expelled()
                if why := self._end_reason():
                    raise GenerationEnded(why)
            return self._values.pop(ticket)

    def _end_reason(self) -> str:
        """Return why the present generation is over, or "" if it is not."""
        generation = self._generation()
        if self._formed is not None and self._formed.view.generation > generation:
            return "a newer generation has begun"
        return self._ended.get(generation, "")

    def _generation(self) -> int:
        assert self._view is not None
        return self._view.generation

    def _raise_if_expelled(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    # ---- threads --------------------------------------------------------------------------------

    def _send(self, kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> None:
        with self._changed:
            channel = self._channel
        if channel is None:
            return  # The next anchor is reported all that counts in the greeting.
        try:
            channel.send(kind, payloads, **fields)
        except WireError as error:
            log.info("%r was not sent to the anchor: %s", kind, error)
            channel.close()  # The thread that receives connects again.

    def _send_hello(self, channel: Channel) -> None:
        with self._changed:
            # The trainer's thread is about to enter the generation that has formed.
            view = self._view if self._formed is None else self._formed.view
        channel.send(
            "hello",
            member=asdict(self.member),
            manifest=dict(self._manifest),
            has_step=self._has_step,
            view=None if view is None else asdict(view),
            step=self.step,
        )
        with self._changed:
            self._channel = channel  # The trainer's thread sends by itself from now on.
            if self._formed is not None:
                return
            at_gate, ready = self._at_gate, self._ready
        if ready:
            channel.send("ready", donor=ready)
        elif at_gate is not None:
            generation, step, planned = at_gate
            channel.send("gate", generation=generation, step=step, planned=planned)

    def _listen(self) -> None:
        while True:
            channel = self._channel
            try:
                while channel is not None:
                    self._handle(channel.receive(None))
            except WireError as error:
                if channel is not None:
                    channel.close()
                with self._changed:
                    self._channel = None
                    if self._closing or self._run_ended or self._failure is not None:
                        return
                log.warning("the anchor is gone (%s): training goes on without it", error)
            if not self._connect_again():
                return

    def _connect_again(self) -> bool:
        """Return whether an anchor was found, at the next address or at another one."""
        self._addresses = self._addresses[1:] + self._addresses[:1]
        while True:
            with self._changed:
                if self._closing:
                    return False
            try:
                self._send_hello(connect(self._addresses, self._secret, CONNECT_SECONDS))
            except WrongSecret as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return False
            except WireError:
                with self._changed:
                    self._changed.wait(0.1)
                continue
            log.info("an anchor was found at %s", self._channel and self._channel.peer)
            return True

    def _handle(self, message: Message) -> None:
        fields = message.typed(TO_PEER)
        if "why" in fields:
            fields["why"] = as_line(fields["why"])
        with self._changed:
            match message.kind:
                case "welcome":
                    if not 0 < fields["heartbeat"] < threading.TIMEOUT_MAX:
                        raise BadFrame(f"{fields['heartbeat']} s cannot be a heartbeat")
                    self.heartbeat = fields["heartbeat"]
                    self.min_peers = fields["min_peers"]
                case "refuse":
                    self._failure = SwarmRefused(fields["why"])
                case "expel":
                    self._failure = Expelled(fields["why"])
                case "found":
                    self._role = Instruction(None, self._next_number())
                case "copy":
                    self._role = Instruction(fields["donor"], self._next_number())
                case "announce":
                    self._announced.add(fields["generation"])
                case "break":
                    self._ended[fields["generation"]] = fields["why"]
                case "form":
                    if self.member.name not in fields["view"].names:
                        raise BadFrame(f"{self.member.name} is not in its new generation")
                    self._formed = Form(**fields)
                case "value":
                    self._values[fields["ticket"]] = bytes(fields["payload"])
                case "waits":
                    self._waits = fields["why"]
                case kind:
                    raise AssertionError(kind)
            self._changed.notify_all()

    def _next_number(self) -> int:
        return 1 if self._role is None else self._role.number + 1

    def _beat(self) -> None:
        while not self._hung_up.wait(self.heartbeat / 4):
            self._send("beat", step=self.step)
            if donor := self._ready:
                # A new anchor does not know the donor before the donor has connected.
                self._send("ready", donor=donor)
