"""The moving average of weights, against the recurrence written out by hand."""

import pytest
import torch

from perfect.callbacks.ema import Ema


class Net(torch.nn.Module):
    """One parameter, one statistic, one counter: all that a module can hold."""

    counter: torch.Tensor

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value))
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("counter", torch.tensor(0))

    def put(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.mean.fill_(value)
            self.counter += 1


def values(module: Net) -> tuple[float, float, int]:
    return module.weight[0].item(), module.mean[0].item(), int(module.counter)


def averaged(ema: Ema, module: Net) -> tuple[float, float, int]:
    ema.swap(module)
    seen = values(module)
    ema.swap(module)
    return seen


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_it_follows_the_recurrence_with_a_quicker_start(decay: float) -> None:
    net = Net(1.0)
    ema = Ema(net, decay)
    expected = 1.0
    for step in range(1, 60):
        net.put(float(step))
        ema.update(net)
        now = min(decay, (1 + step) / (10 + step))
        expected = now * expected + (1 - now) * step
        weight, mean, counter = averaged(ema, net)
        assert weight == pytest.approx(expected, rel=1e-5)
        assert mean == pytest.approx(expected, rel=1e-5)
        assert counter == step, "whole numbers are copied, not averaged"
    assert values(net) == (59.0, 59.0, 59)


def test_swapping_twice_gives_every_bit_back() -> None:
    net = Net(0.1)
    ema = Ema(net, 0.9)
    net.put(1 / 3)
    ema.update(net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pointer = net.weight.data_ptr()
    ema.swap(net)
    assert not torch.equal(net.weight, before["weight"])
    ema.swap(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.weight.data_ptr() == pointer, "an optimizer still holds the same tensor"


def test_a_saved_average_goes_on_as_if_it_had_not_stopped() -> None:
    net = Net(0.0)
    whole = Ema(net, 0.9)
    saved = None
    for step in range(30):
        if step == 13:
            saved = {k: v for k, v in whole.state_dict().items() if k != "shadow"}
            saved["shadow"] = {k: v.clone() for k, v in whole.state_dict()["shadow"].items()}
        net.put(float(step))
        whole.update(net)
    again = Net(99.0)
    resumed = Ema(again, 0.5)
    assert saved is not None
    resumed.load_state_dict(saved)
    assert resumed.decay == 0.9
    for step in range(13, 30):
        again.put(float(step))
        resumed.update(again)
    assert averaged(resumed, again)[0] == averaged(whole, net)[0]
