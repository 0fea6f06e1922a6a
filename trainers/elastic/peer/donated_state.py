"""A newcomer receives the state of a member, then every commit, until it is a member."""

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Added, Member
from trainers.elastic.errors import SwarmRefused
from trainers.elastic.peer.plain_tree import put_together
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.connection import connect
from trainers.elastic.wire.message import Kinds, Message, as_line
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.tensors import tensors_of
from trainers.elastic.wire.wire_errors import BadFrame, WireTimeout
from trainers.elastic.work.commit import Commit

CONNECT_SECONDS = 10.0
STATE_SECONDS = 600.0
POLL_SECONDS = 0.5
MOST_BYTES = 1 << 41
"""Models may be large, and the sender has the secret."""
FROM_DONOR: Kinds = MappingProxyType(
    {
        "state": {"step": int, "tree": Any, "tensors": int},
        "tensor": {},
        "commit": {"step": int, "added": Added, "logs": LaneLogs, "digest": str},
        "refuse": {"why": str},
    }
)


class DonatedState:
    """A channel to a donor. `close` it when the newcomer is a member."""

    def __init__(self, donor: Member, secret: Secret) -> None:
        self.donor = donor
        self._follows = False
        self._channel: Channel = connect([Address(donor.host, donor.port)], secret, CONNECT_SECONDS)

    def receive(self, replaced: Callable[[], bool]) -> tuple[dict[str, Any], int]:
        """Return the checkpoint of the donor, and the step after which it was made. `replaced`:
        whether the anchor names another donor, as it does when this one is silent."""
        fields = self._checked_fields(self._receive_part(replaced), "state")
        tensors: list[Tensor] = []
        for _ in range(fields["tensors"]):
            part = self._receive_part(replaced)
            self._checked_fields(part, "tensor")
            tensors += tensors_of(part)
        try:
            return dict(put_together(fields["tree"], tensors)), fields["step"]
        except Exception as error:  # A malformed tree may raise anything.
            raise BadFrame(f"{self.donor.name} sends a malformed state: {error!r}") from error

    def next(self, timeout: float) -> Commit | None:
        """Return the next commit; None if none has come in `timeout` seconds."""
        if not self._follows:
            self._follows = True
            self._channel.send("follows")  # From now on the donor measures the newcomer's pace.
        try:
            message = self._channel.receive(timeout, limit=MOST_BYTES)
        except WireTimeout:
            return None
        fields = self._checked_fields(message, "commit")
        if not (tensors := tensors_of(message)):
            raise BadFrame(f"{self.donor.name} gives a commit without a total")
        return Commit(**fields, total=tensors[0], buffers=tuple(tensors[1:]))

    def _receive_part(self, replaced: Callable[[], bool]) -> Message:
        end = time.monotonic() + STATE_SECONDS
        while True:
            try:
                return self._channel.receive(POLL_SECONDS, limit=MOST_BYTES)
            except WireTimeout as error:
                if replaced():
                    raise WireTimeout("the anchor names another one meanwhile") from error
                if time.monotonic() > end:
                    raise

    def _checked_fields(self, message: Message, kind: str) -> dict[str, Any]:
        fields = message.typed({name: FROM_DONOR[name] for name in (kind, "refuse")})
        if message.kind == "refuse":
            raise SwarmRefused(as_line(fields["why"]))
        return fields

    def close(self) -> None:
        self._channel.close()
