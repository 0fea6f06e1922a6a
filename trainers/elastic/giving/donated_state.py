"""The newcomer's side: the state of a member, then every commit, until the newcomer is a member."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainers.elastic.commits.commit import Commit
from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Member
from trainers.elastic.errors import SwarmRefused
from trainers.elastic.giving.plain_tree import put_together
from trainers.elastic.wire import Address, Channel, Secret, WireTimeout, connect
from trainers.elastic.wire.tensors import tensors_of

CONNECT_SECONDS = 10.0
STATE_SECONDS = 600.0
MOST_BYTES = 1 << 41
"""A model may be large, and the sender knows the secret."""


class DonatedState:
    """A channel to a donor. `close` it when the newcomer is a member."""

    def __init__(self, donor: Member, secret: Secret) -> None:
        self.donor = donor
        self._follows = False
        self._channel: Channel = connect([Address(donor.host, donor.port)], secret, CONNECT_SECONDS)

    def receive(self) -> tuple[dict[str, Any], int]:
        """Return the checkpoint of the donor, and the step after which it was made."""
        message = self._channel.receive(STATE_SECONDS)
        if message.kind == "refuse":
            raise SwarmRefused(message.fields["why"])
        tensors: list[Tensor] = []
        for _ in range(message.fields["tensors"]):
            part = self._channel.receive(STATE_SECONDS, limit=MOST_BYTES)
            if part.kind == "refuse":
                raise SwarmRefused(part.fields["why"])
            tensors += tensors_of(part)
        return put_together(message.fields["tree"], tensors), message.fields["step"]

    def next(self, timeout: float) -> Commit | None:
        """Return the next commit; None if none has come in `timeout` seconds."""
        if not self._follows:
            self._follows = True
            self._channel.send("follows")  # From now on the donor measures the pace.
        try:
            message = self._channel.receive(timeout, limit=MOST_BYTES)
        except WireTimeout:
            return None
        if message.kind == "refuse":
            raise SwarmRefused(message.fields["why"])
        total, *buffers = tensors_of(message)
        return commit_of(message.fields, total, tuple(buffers))

    def close(self) -> None:
        self._channel.close()


def commit_of(fields: Mapping[str, Any], total: Tensor, buffers: tuple[Tensor, ...]) -> Commit:
    """Return the commit that `told` has told."""
    return Commit(
        step=fields["step"],
        added=tuple((name, tuple(lanes)) for name, lanes in fields["added"]),
        total=total,
        logs=LaneLogs.of_plain(fields["logs"]),
        buffers=buffers,
        digest=fields["digest"],
    )
