"""What torch, Lightning and matplotlib load at their first use counts for no test's half second."""

import pytest
import torch
from matplotlib import pyplot

import loaders.convert
import offload
import perfect.compare
import perfect.train


@pytest.fixture(autouse=True, scope="session")
def loaded() -> None:
    assert perfect.ReuseLoader is loaders.ReuseLoader
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    inputs = torch.ones(1, 2), torch.ones(1, 2)
    offload.plan(offload.capture_training_step(layer, torch.nn.MSELoss(), optimizer, *inputs))
    figure, axes = pyplot.subplots()
    axes.set_title("a")
    figure.canvas.draw()
    pyplot.close(figure)
