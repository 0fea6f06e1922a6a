"""The newcomer's side: the state of a member, then every commit, until the newcomer is a member."""

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from torch import Tensor

from trainers.elastic.commits.commit import Commit
from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Added, Member
from trainers.elastic.errors import SwarmRefused
from trainers.elastic.giving.plain_tree import put_together
from trainers.elastic.wire import (
    Address,
    BadFrame,
    Channel,
    Message,
    Secret,
    WireTimeout,
    as_line,
    connect,
)
from trainers.elastic.wire.message import Kinds
from trainers.elastic.wire.tensors import tensors_of

CONNECT_SECONDS = 10.0
STATE_SECONDS = 600.0
POLL_SECONDS = 0.5
MOST_BYTES = 1 << 41
"""A model may be large, and the sender knows the secret."""
OF_DONOR: Kinds = MappingProxyType(
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
        fields = self._heard(self._awaited(replaced), "state")
        tensors: list[Tensor] = []
        for _ in range(fields["tensors"]):
            part = self._awaited(replaced)
            self._heard(part, "tensor")
            tensors += tensors_of(part)
        try:
            return dict(put_together(fields["tree"], tensors)), fields["step"]
        except Exception as error:  # Whatever a tree leads to that nobody has taken apart.
            raise BadFrame(f"{self.donor.name} gives a state that is none: {error!r}") from error

    def next(self, timeout: float) -> Commit | None:
        """Return the next commit; None if none has come in `timeout` seconds."""
        if not self._follows:
            self._follows = True
            self._channel.send("follows")  # From now on the donor measures the pace.
        try:
            message = self._channel.receive(timeout, limit=MOST_BYTES)
        except WireTimeout:
            return None
        fields = self._heard(message, "commit")
        if not (tensors := tensors_of(message)):
            raise BadFrame(f"{self.donor.name} gives a commit without a total")
        return Commit(**fields, total=tensors[0], buffers=tuple(tensors[1:]))

    def _awaited(self, replaced: Callable[[], bool]) -> Message:
        end = time.monotonic() + STATE_SECONDS
        while True:
            try:
                return self._channel.receive(POLL_SECONDS, limit=MOST_BYTES)
            except WireTimeout as error:
                if replaced():
                    raise WireTimeout("the anchor names another one meanwhile") from error
                if time.monotonic() > end:
                    raise

    def _heard(self, message: Message, kind: str) -> dict[str, Any]:
        fields = message.typed({name: OF_DONOR[name] for name in (kind, "refuse")})
        if message.kind == "refuse":
            raise SwarmRefused(as_line(fields["why"]))
        return fields

    def close(self) -> None:
        self._channel.close()
