"""Part j of the GPU suite: a guest is answered beside the steps of a GPU."""

from typing import Any

import pytest
import torch

from benchmarks.gpu import sharing
from benchmarks.gpu.part import Job
from offload.measuring.calibration import take_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_guest_is_answered_beside_the_steps_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a CPU stand for the GPU's, which take long to measure where there is none."""

    def of_a_cpu(device: str, seconds: float) -> Any:
        return take_samples("cpu", 0.1)

    monkeypatch.setattr(sharing, "take_samples", of_a_cpu)
    cells = ("llama lora; ours, cudagraph",)
    [(_, row)] = sharing.rows(Job("gpu.sharing:rows", cells, {}, "cuda", smoke=True))
    assert row["answers"] and row["wrong"] == 0
