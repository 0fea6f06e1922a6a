"""What torch, Lightning and matplotlib load at their first use counts for no test's half second."""

import pytest
import torch
from matplotlib import pyplot

import loaders.convert
import offload
import perfect.compare
import perfect.train
from offload.live.core import why_no_core


@pytest.fixture(autouse=True, scope="session")
def loaded() -> None:
    assert perfect.ReuseLoader is loaders.ReuseLoader
    layer = torch.nn.Linear(2, 2)
    if not why_no_core():
        offload.plan(offload.capture(layer, torch.ones(1, 2)))
    figure, axes = pyplot.subplots()
    axes.set_title("a")
    figure.canvas.draw()
    pyplot.close(figure)
