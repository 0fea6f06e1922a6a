"""What no offload engine could beat, from the shape of a model and the rates of a machine. Pure.

    seconds >= max(C_f, weights in / B) + max(C_b, weights in / B, gradients out / B)
               or the host's memory: updates, and every copy once more

P parameters, n tokens, L layers, s words a row, h width, R FLOP/s, B bytes/s of a link, rho the
resident share of the weights. A product of a weight takes 2 n FLOP forwards; backwards as much
again for the gradient that goes on, and once more where the weight itself learns; causal attention
2 s h L n forwards, 2.5 times that backwards. Frozen weights never go out. Beside it in the tables
stand the plan's own bound, of measured kernels, and the measured step without offload.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates."""

    flops: float
    h2d: float
    """Bytes a second, alone."""
    d2h: float
    host: float
    """Bytes a second that all workers of the host read and write."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a language model and its step."""

    parameters: float
    """Of the matrices in the blocks and of the head: those that every token is multiplied with."""
    weight_bytes: float
    layers: int
    width: int
    rows: int
    length: int
    kind: str
    """full, lora, prefill"""
    checkpointed: bool = False
    host_update_bytes: float = 0.0
    """Read and written by updates that run on the host."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Limit:
    """No step is faster than `seconds`; `binds` says what is in the way."""

    seconds: float
    binds: str
    compute: float
    copies: float
    """Seconds of the busier direction."""


def limit(shape: Shape, machine: Machine, resident: float) -> Limit:
    """`resident`: the share of the weights that stays on the device."""
    forward, backward = (work / machine.flops for work in work_of(shape))
    streamed = (1.0 - resident) * shape.weight_bytes
    into = [streamed / machine.h2d, 0.0]
    out = [0.0, 0.0]
    if shape.kind != "prefill":
        # The last layer's weights are still there when the backward pass begins.
        into[1] = into[0] * (1.0 - 1.0 / shape.layers)
    if shape.kind == "full":
        # What changed goes home; on the host updates, the gradients go instead.
        out[1] = (shape.weight_bytes if shape.host_update_bytes else streamed) / machine.d2h
    copied = streamed + shape.weight_bytes * (shape.kind == "full")
    host = (shape.host_update_bytes + (copied if streamed else 0.0)) / machine.host
    phases = max(forward, into[0], out[0]) + max(backward, into[1], out[1])
    compute, copies = forward + backward, max(sum(into), sum(out))
    found = {"compute": compute, "copies": phases, "host": host}
    binds = max(found, key=lambda name: found[name])
    if phases == compute:
        binds = "host" if host > compute else "compute"
    return Limit(found[binds], binds, compute, copies)


def work_of(shape: Shape) -> tuple[float, float]:
    """FLOP forwards and backwards."""
    linear = 2.0 * shape.parameters * shape.tokens
    attention = 2.0 * shape.length * shape.width * shape.layers * shape.tokens
    forward = linear + attention
    if shape.kind == "prefill":
        return forward, 0.0
    backward = (2.0 if shape.kind == "full" else 1.0) * linear + 2.5 * attention
    return forward, backward + (forward if shape.checkpointed else 0.0)


def hiding_tokens(machine: Machine) -> float:
    """So many tokens a step hide the weights of any model behind its own work."""
    return machine.flops / machine.h2d
