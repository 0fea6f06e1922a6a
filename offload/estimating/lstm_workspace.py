"""The bytes that an LSTM on a CPU keeps for its backward pass. Only oneDNN knows them.

A step of a row keeps its input or state three times over, its gates and its states, in padded rows.
The numbers below were found on 150 layers of many sizes: they are never too small, and 1.0 to 1.4
times as much.
"""

from collections.abc import Iterator

from offload.live.tape_calls import TapeCall
from offload.program.kernels import Value

LAYER = "aten::mkldnn_rnn_layer.default"
WORKSPACE = 3
"""Which of its results it is. Torch's function for shapes says that it is empty."""
OF_WIDER, OF_STATE, PADDING, FIXED = 24, 38, 320, 7 * 4096


def list_lstm_workspaces(calls: list[TapeCall]) -> Iterator[tuple[int, int]]:
    """The slot of each workspace, and its bytes at the most."""
    for call in calls:
        if call.op == LAYER and (kept := call.call.outputs[WORKSPACE]) is not None:
            given, state = call.call.args[0], call.call.args[2]
            assert isinstance(given, Value) and isinstance(state, Value)
            steps, rows, width = given.size
            yield kept.buffer, bound_workspace(steps, rows, width, state.size[1])


def bound_workspace(steps: int, rows: int, width: int, state: int) -> int:
    """At least the bytes of a layer whose rows have `width` numbers and a state of `state`."""
    each = OF_WIDER * max(width, state) + OF_STATE * state + PADDING
    return (steps + 1) * rows * each + FIXED
