"""benchmarks/gpu/child.py: what a process of the GPU suite is told, and what it measures with."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # as run.sh has it

from gpu import child
from gpu.part import Job
from gpu.store import Store

from offload.measuring import calibration


def products(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of the products that would measure a GPU now."""
    for cell in job.cells:
        yield cell, dict(calibration.sizes_on(torch.device("cuda")).gemm or {})


@pytest.mark.parametrize("smoke", (False, True))
def test_a_smoke_run_and_no_other_measures_a_gpu_by_small_products(
    smoke: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dict(calibration.ON_GPU.gemm or {})
    job = {"run": "any", "cells": ["a"], "arguments": {}, "device": "cuda", "smoke": smoke}
    told = json.dumps({"job": job, "store": [str(tmp_path), "gpu_any"]})
    monkeypatch.setattr(calibration, "ON_GPU", calibration.ON_GPU)  # what it was is put back
    monkeypatch.setattr(child, "function_of", lambda run: products)
    monkeypatch.setattr(sys, "stdin", io.StringIO(told))
    monkeypatch.setattr(sys, "argv", ["child", "a GPU"])
    child.main()
    row = Store(tmp_path, "gpu_any", "a GPU").lines()["a"].row
    assert row
    assert (row == real) != smoke
    assert not smoke or max(row.values()) < 1024
