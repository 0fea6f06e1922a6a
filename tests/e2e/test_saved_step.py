"""`perfect-step` saves a step of a run, replays it, and searches it for faults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.replaying.issuing import StepMemory, issue, result_name
from offload.replaying.step_file import read_step
from perfect.step import main


@pytest.mark.parametrize("more", [{}, {"offload": {"budget": "70%"}}], ids=["plain", "offload"])
def test_a_step_of_a_run_is_saved_and_has_the_bits_of_eager(
    recipe: dict[str, Any],
    train: Callable[..., Any],
    tmp_path: Path,
    more: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out = train(recipe | more)
    assert code == 0
    before = (out / "last.ckpt").read_bytes()
    assert main(["save", str(out), "--step", "12", "--out", str(tmp_path / "step.pt")]) == 0
    assert (out / "last.ckpt").read_bytes() == before
    for command in ("replay", "bisect"):
        assert main([command, str(tmp_path / "step.pt"), "--engine", "serial"]) == 0
    said = capsys.readouterr().out
    assert "saved step 12" in said
    assert said.count("every bit is equal to eager's") == 2


def test_the_saved_step_makes_the_weights_of_the_run(
    recipe: dict[str, Any], train: Callable[..., Any], tmp_path: Path
) -> None:
    code, out = train(recipe)
    assert code == 0
    for step in (1, 2):
        assert (
            main(["save", str(out), "--step", str(step), "--out", str(tmp_path / str(step))]) == 0
        )
    first, second = (read_step(tmp_path / str(step)) for step in (1, 2))
    memory = StepMemory(first.parts[-1])
    issue(first.parts[-1], memory)
    made = memory.results()
    names = {name.name: name.value.buffer for name in second.parts[0].named}
    compared = 0
    for slot, result in made.items():
        name, _ = result_name(first.parts[-1], slot)
        if name in names:
            compared += 1
            assert torch.equal(result, second.parts[0].data[names[name]]), name
    assert compared >= 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["save", "nowhere", "--step", "3"], "no run folder"),
        (["save", "nowhere", "--step", "0"], "the first one is 1"),
        (["replay", "nowhere.pt"], "cannot be read"),
        (["bisect", __file__], "no file of a step"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err
