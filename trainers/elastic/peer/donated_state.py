"""What a newcomer receives: a member's state, then every commit until it is a member itself."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.elastic.deciding.header import LaneLogs
from trainers.elastic.deciding.view import Added, Form, Member
from trainers.elastic.errors import CannotBeElastic, Expelled, SwarmRefused
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import connect
from trainers.elastic.wire.message import Kinds, Message, Payload, PayloadForm, as_line
from trainers.elastic.wire.secret import Secret
from trainers.elastic.wire.wire_errors import BadFrame, WireError, WireTimeout
from trainers.elastic.work.digests import Commit


def payloads_of(tensors: Iterable[Tensor]) -> list[Payload]:
    """Return the tensors' bytes. A tensor whose elements lie one after the other is not copied."""
    return [_payload(number, tensor) for number, tensor in enumerate(tensors)]


def tensors_of(message: Message) -> list[Tensor]:
    """Return the payloads of a message as tensors, which share their memory."""
    return [_tensor(message.kind, n, payload) for n, payload in enumerate(message.payloads)]


def _payload(number: int, tensor: Tensor) -> Payload:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise BadFrame(
            f"tensor {number} is on {tensor.device} with layout {tensor.layout}: only dense tensors"
            " of the host are sent"
        )
    data = _bytes(tensor.detach().contiguous().resolve_conj().resolve_neg())
    return Payload(
        data, PayloadForm(len(data), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    )


def _bytes(tensor: Tensor) -> memoryview:
    if sys.byteorder != "little":
        raise BadFrame("tensors are sent in little-endian order, and this machine has the other")
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensor(kind: str, number: int, payload: Payload) -> Tensor:
    form = payload.form
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadFrame(f"payload {number} of {kind!r} is no tensor: its type is {form.dtype!r}")
    if math.prod(form.shape) * dtype.itemsize != form.size:
        raise BadFrame(
            f"tensor {number} of {kind!r} has {form.size} bytes, which is not {form.dtype}"
            f" {list(form.shape)}"
        )
    try:
        if not form.size:
            return torch.empty(form.shape, dtype=dtype)
        return torch.frombuffer(payload.data, dtype=dtype).reshape(form.shape)
    except RuntimeError as error:  # A type without dense tensors, or an empty one that overflows.
        raise BadFrame(f"torch makes no tensor of {form.dtype} {list(form.shape)}") from error


CONNECT_SECONDS = 10.0
STATE_SECONDS = 600.0
POLL_SECONDS = 0.5
FORM_SECONDS = 0.02
"""How long a newcomer waits for a commit before it looks for its generation again."""
LAST_COMMITS_SECONDS = 30.0
MOST_BYTES = 1 << 41
"""The limit is high, because models may be large and the sender knows the secret."""
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


class Newcomer:
    """A peer that follows the commits of its donor until it is a member."""

    def __init__(self, link: AnchorLink, donated: DonatedState) -> None:
        self._link = link
        self._donated = donated
        self._form: Form | None = None
        self._is_ready = False

    def next(self) -> Commit | Form:
        """Return the donor's next commit, or the generation in which this peer is a member."""
        donor, step = self._donated.donor, self._link.step
        since = time.monotonic()
        while True:
            if self._form is not None and step >= self._form.step:
                self._donated.close()
                return self._form
            wait = FORM_SECONDS if self._form is None else LAST_COMMITS_SECONDS
            try:
                commit = self._donated.next(wait)
            except WireError as error:
                raise Expelled(
                    f"{donor.name}, from whom this peer has its state, is gone before this peer"
                    f" became a member: start it again ({error})"
                ) from error
            if commit is not None:
                return commit
            if self._form is not None:
                raise Expelled(f"commit {step} of the donor did not come in {wait:g} s")
            silent = time.monotonic() - since > LAST_COMMITS_SECONDS
            if silent and self._link.orders.names_another(donor):
                raise Expelled(
                    f"{donor.name}, whom this peer follows, is silent, and the anchor names another"
                    " one: start this peer again"
                )
            if not self._is_ready:
                self._link.ready(donor.name)
                self._is_ready = True
            self._form = self._link.enter_formed()

    def close(self) -> None:
        self._donated.close()


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """Return JSON for `value`, and copies of its tensors in host memory."""
    tensors: list[Tensor] = []
    return _plain(value, tensors, ""), tensors


def put_together(plain: Any, tensors: Sequence[Tensor]) -> Any:
    """Return what `take_apart` was given."""
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    match kind:
        case "dict":
            return {put_together(k, tensors): put_together(v, tensors) for k, v in inner}
        case "list":
            return [put_together(item, tensors) for item in inner]
        case "tuple":
            return tuple(put_together(item, tensors) for item in inner)
        case "set":
            return {put_together(item, tensors) for item in inner}
        case "tensor":
            return tensors[inner]
        case "array":
            return tensors[inner].numpy()
        case "float":
            return float(inner)
        case "path":
            return Path(inner)
        case "dtype" if isinstance(dtype := getattr(torch, inner, None), torch.dtype):
            return dtype
        case "size":
            return torch.Size(inner)
        case _:
            raise CannotBeElastic(f"a state has a part of the unknown kind {kind!r}")


def _plain(value: Any, tensors: list[Tensor], where: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return _plain(value.item(), tensors, where)
        case int():
            return int(value)
        case float():
            return float(value) if np.isfinite(value) else {"float": repr(float(value))}
        case torch.Size():
            return {"size": list(value)}
        case dict():
            return {
                "dict": [
                    [_plain(k, tensors, where), _plain(v, tensors, f"{where}.{k}")]
                    for k, v in value.items()
                ]
            }
        case list():
            return {"list": [_plain(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
        case tuple():
            return {"tuple": [_plain(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
        case set() | frozenset():
            return {"set": [_plain(v, tensors, where) for v in value]}
        case Tensor():
            tensors.append(value.detach().to("cpu", copy=True).contiguous())
            return {"tensor": len(tensors) - 1}
        case np.ndarray():
            tensors.append(torch.from_numpy(value.copy()))
            return {"array": len(tensors) - 1}
        case Path():
            return {"path": str(value)}
        case torch.dtype():
            return {"dtype": str(value).removeprefix("torch.")}
        case _:
            raise CannotBeElastic(
                f"a newcomer needs the state at {where or 'its root'}, and it is a"
                f" {type(value).__name__}, which cannot be sent as plain values and tensors: keep"
                " numbers, texts, lists, dicts and tensors in state_dict()"
            )
