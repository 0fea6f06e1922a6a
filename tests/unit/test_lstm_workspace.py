"""An estimate never believes that an LSTM on a CPU keeps less than it does."""

import pytest
import torch

from offload.estimating.lstm_workspace import WORKSPACE, bound_workspace

kernel = torch.ops.aten.mkldnn_rnn_layer.default


@pytest.mark.parametrize("steps, rows", [(1, 1), (5, 3), (33, 16), (64, 8)])
@pytest.mark.parametrize("width, state", [(8, 16), (100, 100), (128, 256), (300, 250), (512, 64)])
def test_the_bound_holds_and_is_near(steps: int, rows: int, width: int, state: int) -> None:
    weights = [torch.zeros(4 * state, width), torch.zeros(4 * state, state)]
    weights += [torch.zeros(4 * state), torch.zeros(4 * state)]
    states = [torch.zeros(1, rows, state)] * 2
    flags = (2, state, 1, True, False, False, True)
    made = kernel(torch.zeros(steps, rows, width), *weights, *states, False, [], *flags)
    bytes_kept = made[WORKSPACE].nbytes
    assert bytes_kept <= bound_workspace(steps, rows, width, state) <= 1.5 * bytes_kept + 65536
