"""A peer's link to the anchor: the peer's reports go out, the anchor's orders come in.

thread "elastic-link"   receives; connects again, to the next address, when the anchor is gone
thread "elastic-beat"   reports that the peer lives, its step, and its donor
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from trainers.elastic.anchor.kinds import TO_PEER
from trainers.elastic.deciding.view import Form, Member, View
from trainers.elastic.errors import ElasticError, Expelled, GenerationEnded, SwarmRefused
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
POLL_SECONDS = 0.02
RETRY_SECONDS = 0.1
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Instruction:
    """The anchor's order to a newcomer: take the state from `donor`; None: begin with its own."""

    donor: Member | None
    number: int
    """It grows with every new order, for example when a donor has died."""


class AnchorOrders:
    """What the anchor has ordered. The thread that receives writes it; the trainer's thread
    asks, and waits for `changed`. A question raises the error that has ended the membership."""

    def __init__(self, name: str) -> None:
        """`name`: of the peer."""
        self.changed = threading.Condition()
        self.heartbeat = 2.0
        self.min_peers = 1
        self.waits = ""
        """What the next generation waits for."""
        self._name = name
        self._role: Instruction | None = None
        self._view: View | None = None
        self._formed: Form | None = None
        self._ended: dict[int, str] = {}
        self._announced: set[int] = set()
        self._values: dict[int, bytes] = {}
        self._failure: Exception | None = None

    # ---- questions of the trainer's thread -------------------------------------------------------

    def role(self, after: int = 0, seconds: float = math.inf) -> Instruction:
        """Wait for an order to a newcomer with a higher number than `after`. Raise `Expelled` if
        none comes in `seconds`."""
        end = time.monotonic() + seconds
        with self.changed:
            while self._role is None or self._role.number <= after:
                self._raise_failure()
                if time.monotonic() > end:
                    raise Expelled("the anchor named nobody else who has the state: start again")
                self.changed.wait(1.0)
            return self._role

    def names_another(self, donor: Member) -> bool:
        """Whether the anchor's newest order is to take the state from somebody else."""
        with self.changed:
            self._raise_failure()
            return self._role is not None and self._role.donor != donor

    def check_generation(self) -> None:
        """Raise `GenerationEnded` if the present generation is over."""
        with self.changed:
            self._raise_failure()
            if self._formed is not None:
                raise GenerationEnded("a newer generation has begun")
            if why := self._ended.get(self.generation):
                raise GenerationEnded(why)

    @property
    def announced(self) -> bool:
        """Whether the anchor has announced a change of this generation."""
        with self.changed:
            return self.generation in self._announced

    @property
    def generation(self) -> int:
        """The number of the present generation; 0 while this peer has not been a member."""
        return 0 if self._view is None else self._view.generation

    @property
    def newest_view(self) -> View | None:
        """The generation that has formed, which the trainer's thread is about to enter, or else the
        present one."""
        with self.changed:
            return self._view if self._formed is None else self._formed.view

    def enter_formed(self) -> Form | None:
        """Make the generation that has formed, if there is one, the present one."""
        with self.changed:
            self._raise_failure()
            formed, self._formed = self._formed, None
            if formed is not None:
                self._view = formed.view
            return formed

    def value(self, ticket: int, key: str, timeout: float) -> bytes:
        """Wait for the answer to the question with this ticket, which was for `key`."""
        end = time.monotonic() + timeout
        with self.changed:
            while ticket not in self._values:
                if time.monotonic() > end:
                    raise GenerationEnded(f"{key} of another member did not come in {timeout:g} s")
                self.changed.wait(POLL_SECONDS)
                self.check_generation()
            return self._values.pop(ticket)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    # ---- on the thread that receives -------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether no order will come any more."""
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Raise `error` from now on, at whoever asks."""
        with self.changed:
            self._failure = error
            self.changed.notify_all()

    def take(self, message: Message) -> None:
        """Take a message of the anchor."""
        fields = message.typed(TO_PEER)
        if "why" in fields:
            fields["why"] = as_line(fields["why"])
        with self.changed:
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
                case "found" | "copy":
                    number = 1 if self._role is None else self._role.number + 1
                    self._role = Instruction(fields.get("donor"), number)
                case "announce":
                    self._announced.add(fields["generation"])
                case "break":
                    self._ended[fields["generation"]] = fields["why"]
                case "form":
                    if self._name not in fields["view"].names:
                        raise BadFrame(f"{self._name} is not in its new generation")
                    if fields["view"].generation > self.generation:
                        self._formed = Form(**fields)
                case "value":
                    self._values[fields["ticket"]] = bytes(fields["payload"])
                case "waits":
                    self.waits = fields["why"]
                case kind:
                    raise AssertionError(kind)
            self.changed.notify_all()


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
        self.orders = AnchorOrders(member.name)
        self.step = 0
        """The steps that are applied to the weights here. The trainer's thread sets it."""
        self._addresses = list(addresses)
        self._secret = secret
        self._identity: dict[str, Any] = {"member": asdict(member), "manifest": dict(manifest)}
        """What a greeting says of this peer, whichever step it is at."""
        self._channel: Channel | None = None
        self._report: tuple[str, dict[str, Any]] | None = None
        """The newest report that a new anchor must hear, too: "gate", or "ready" of a newcomer."""
        self._tickets = count(1)
        self._over = threading.Event()
        """Set when the run has ended here, or the link is closed: no anchor is looked for."""
        self._threads = [
            threading.Thread(target=self._listen, name="elastic-link", daemon=True),
            threading.Thread(target=self._beat, name="elastic-beat", daemon=True),
        ]

    def open(self, has_step: int) -> None:
        """Connect. `has_step`: the step of the checkpoint from which this peer could begin."""
        self._identity["has_step"] = has_step
        self._send_hello(connect(self._addresses, self._secret, CONNECT_SECONDS * 2))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hang up. Later reports are dropped."""
        self._over.set()
        self.orders.fail(ChannelClosed("the link is closed, and the anchor's answer will not come"))
        if (channel := self._channel) is not None:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(JOIN_SECONDS)

    # ---- reports of the trainer's thread ---------------------------------------------------------

    def enter_formed(self) -> Form | None:
        """Become a member of the generation that has formed, if there is one, and return it."""
        with self.orders.changed:
            formed = self.orders.enter_formed()
            if formed is not None:
                self._report = None
            return formed

    def gate(self, step: int, idle: Callable[[], None], *, planned: bool) -> Form:
        """Wait for the next generation, and call `idle` meanwhile. `planned`: between two steps."""
        if self._report is None:
            generation = self.orders.generation
            self._report = "gate", {"generation": generation, "step": step, "planned": planned}
            self._send("gate", **self._report[1])
        logged, lost_at = "", time.monotonic()
        while (formed := self.enter_formed()) is None:
            with self.orders.changed:
                self.orders.changed.wait(POLL_SECONDS)
            waits = self.orders.waits
            if self._channel is not None:
                lost_at = time.monotonic()
            elif time.monotonic() - lost_at > PATIENCE_SECONDS:
                raise Unreachable(
                    f"no anchor could be reached for {PATIENCE_SECONDS:g} s, at"
                    f" {', '.join(map(str, self._addresses))}: start one"
                )
            if waits and waits != logged:
                log.info("waiting at the gate: %s", waits)
                logged = waits
            idle()
        return formed

    def ready(self, donor: str) -> None:
        """Report that the state of `donor` is here, and that this peer follows it."""
        self._report = "ready", {"donor": donor}
        self._send("ready", donor=donor)

    def leave(self) -> None:
        """Leave the swarm, between two steps."""
        self._send("leave")

    def ended(self, step: int, digest: str) -> None:
        """Report that the whole run has ended here. The anchor may end then."""
        self._over.set()
        self._send("ended", step=step, digest=digest)

    def set(self, key: str, value: bytes) -> None:
        """Leave a value for the other members of this generation."""
        self._send("put", [value], generation=self.orders.generation, key=key)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value that a member of this generation leaves."""
        ticket = next(self._tickets)
        self._send("get", generation=self.orders.generation, key=key, ticket=ticket)
        return self.orders.value(ticket, key, timeout)

    def _send(self, kind: str, payloads: Sequence[bytes] = (), **fields: Any) -> None:
        channel = self._channel
        if channel is None:
            return  # The greeting tells the next anchor all that counts.
        try:
            channel.send(kind, payloads, **fields)
        except WireError as error:
            log.info("%r was not sent to the anchor: %s", kind, error)
            channel.close()  # The thread that receives connects again.

    # ---- threads --------------------------------------------------------------------------------

    def _send_hello(self, channel: Channel) -> None:
        view = self.orders.newest_view
        now = {"view": None if view is None else asdict(view), "step": self.step}
        try:
            channel.send("hello", **self._identity, **now)
            self._channel = channel  # The trainer's thread sends by itself from now on.
            if self._over.is_set():
                channel.close()  # `close` has not seen it.
            elif (report := self._report) is not None:
                channel.send(report[0], **report[1])
        except WireError:
            channel.close()
            self._channel = None  # Whoever waits at the gate may lose patience.
            raise

    def _listen(self) -> None:
        try:
            self._follow_anchors()
        except Exception as error:  # The trainer's thread would wait for an order for ever.
            failure = ElasticError(f"the link to the anchor has failed: {error!r}")
            failure.__cause__ = error
            self.orders.fail(failure)

    def _follow_anchors(self) -> None:
        while (channel := self._channel) is not None:
            try:
                while True:
                    self.orders.take(channel.receive(None))
            except WireError as error:
                channel.close()
                self._channel = None
                if self._over.is_set() or self.orders.failed:
                    return
                log.warning("the anchor is gone (%s): training goes on without it", error)
            self._connect_again()

    def _connect_again(self) -> None:
        """Connect to the next address, or to another one, unless the link ends first."""
        self._addresses = self._addresses[1:] + self._addresses[:1]
        while not self._over.is_set():
            try:
                channel = connect(self._addresses, self._secret, CONNECT_SECONDS)
                self._send_hello(channel)
            except WrongSecret as error:
                self.orders.fail(error)
                return
            except WireError:
                self._over.wait(RETRY_SECONDS)
                continue
            log.info("an anchor was found at %s", channel.peer)
            return

    def _beat(self) -> None:
        while not self._over.wait(self.orders.heartbeat / 4):
            self._send("beat", step=self.step)
            if (report := self._report) is not None and report[0] == "ready":
                # A new anchor does not know the donor before the donor has connected.
                self._send("ready", **report[1])
