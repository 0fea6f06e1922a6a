"""A machine is measured, and its file is a card."""

from pathlib import Path

import pytest
import torch

from offload.estimating.card import read_card
from offload.estimating.card_measuring import _curve, _update
from offload.estimating.operator_class import Work, work_of
from offload.graph.taskgraph import Task
from offload.live.function_capture import capture_kernels
from perfect.card import main


def taking(seconds: float, flops: float) -> tuple[Work, Task]:
    return Work("product", flops, 8, "float32"), Task("t", (), (), seconds=seconds)


def test_calls_of_about_one_size_are_one_point_without_their_gaps() -> None:
    near = [taking(1.1, 100.0), taking(2.1, 110.0), taking(4.1, 120.0)]
    far = [taking(10.1, 5000.0)]
    assert _curve([*far, *near], 1000.0, 0.1, True) == (
        (110.0, pytest.approx(0.055)),
        (5000.0, pytest.approx(0.5)),
    )


def test_a_call_is_never_all_gap() -> None:
    assert _curve([taking(1.0, 100.0)], 1000.0, 5.0, True) == ((100.0, pytest.approx(0.5)),)


def test_what_does_not_compute_has_no_curve_of_operations() -> None:
    assert _curve([taking(1.0, 0.0)], 1000.0, 0.0, True) == ()


def test_the_sample_of_an_update_is_one() -> None:
    graph = capture_kernels(_update, torch.zeros(64))
    kinds = [work_of(task.kernel.calls[0]) for task in graph.tasks]
    [update] = [work for work in kinds if work.kind == "optimizer"]
    assert update.nbytes == 64 * 4 * 7 + 4  # and its counter


@pytest.mark.full
def test_the_file_of_this_machine_is_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    assert main(["measure", "--device", "cpu", "--out", str(out)]) == 0
    card = read_card(out)
    assert (card.name, card.device, card.remarks(torch.__version__)) != ("", "cuda", [])
    assert {"product", "convolution_backward", "attention_forward", "recurrent"} <= {
        *card.flops_shares
    }
    assert len(card.checks) == 3
    assert f"wrote {out}" in capsys.readouterr().out


def test_a_device_that_is_not_here_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    assert main(["measure", "--device", "meta", "--out", str(out)]) == 2
    assert "cannot be measured" in capsys.readouterr().err
    assert not out.exists()
