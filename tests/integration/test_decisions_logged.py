"""The log says at INFO what was decided, and at DEBUG what a plan is."""

import logging

import pytest
import torch
from torch import nn

import offload


def train(net: nn.Module, optimizer: torch.optim.Optimizer, length: int = 8) -> None:
    net(torch.randn(length, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))


def test_info_names_each_capture_and_its_plan(
    net: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with caplog.at_level(logging.INFO, "offload"), offload.within("80%", net, optimizer):
        for _ in range(3):
            train(net, optimizer)
    lines = messages(caplog, logging.INFO)
    captured = [each for each in lines if each.startswith("a part of a step was captured: ")]
    plans = [each for each in lines if each.startswith("<Plan: ") and ", bound by " in each]
    assert len(captured) == len(plans) == 1
    assert not messages(caplog, logging.DEBUG)


def test_debug_has_the_explanation_of_a_plan(
    net: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with caplog.at_level(logging.DEBUG, "offload"), offload.within("80%", net, optimizer) as run:
        train(net, optimizer)
        train(net, optimizer)
        assert run.plan is not None
        assert run.plan.explain().splitlines()[0] in "\n".join(messages(caplog, logging.DEBUG))


def test_info_says_why_a_step_has_no_plan(
    net: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.live.plan_policy.MOST_NEW", 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    refused = pytest.warns(RuntimeWarning, match="each of 2 steps in a row was another one")
    logged = caplog.at_level(logging.INFO, "offload")
    with logged, refused, offload.within("100%", net, optimizer):
        for length in range(1, 5):
            train(net, optimizer, length)
    lines = messages(caplog, logging.INFO)
    assert any(each.startswith("step step has no plan: each of 2 steps in a row") for each in lines)
