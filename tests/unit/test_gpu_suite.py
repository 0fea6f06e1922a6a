"""The GPU suite without a GPU: what a process measures with, peaks, how peers are compared."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from benchmarks.gpu import child
from benchmarks.gpu.memory_watch import MemoryWatch
from benchmarks.gpu.part import Found, Job
from benchmarks.gpu.peers import measure, roster
from benchmarks.gpu.peers.part import report, steps
from benchmarks.gpu.peers.roundpiped import stages
from benchmarks.gpu.peers.task import Running, Setup, batch, tasks, whole
from benchmarks.gpu.store import Store
from offload.measuring import calibration

SMOKE = Job("", (), {}, "cpu", True)


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
    given = json.dumps({"job": job, "store": [str(tmp_path), "gpu_any"]})
    monkeypatch.setattr(calibration, "ON_GPU", calibration.ON_GPU)  # what it was is put back
    monkeypatch.setattr(child, "function_of", lambda run: products)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    monkeypatch.setattr(sys, "argv", ["child", "a GPU"])
    child.main()
    row = Store(tmp_path, "gpu_any", "a GPU").lines()["a"].row
    assert row
    assert (row == real) != smoke
    assert not smoke or max(row.values()) < 1024


def test_a_rise_that_is_over_before_the_caller_looks_is_seen() -> None:
    seen, taken = Event(), [5]

    def used() -> int:
        if taken[0] == 70:
            seen.set()
        return taken[0]

    with MemoryWatch(used, period=0.0001) as watch:
        taken[0] = 70
        assert seen.wait(60)
        taken[0] = 6
        assert watch.most() == 70
        assert watch.begin() == watch.most() == 6


@contextmanager
def counting(setup: Setup) -> Iterator[Running]:
    losses = iter(range(10, 0, -1))
    yield Running(lambda: torch.tensor(float(next(losses))), {"bound_s": 0.5, "binds": "compute"})


def test_a_peer_is_stepped_three_times_before_the_five_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "function_of", lambda peer: counting)
    stub = roster.Peer(f"{__name__}:unused", "a stub")
    row = measure.attempt(stub, tasks(True)["lora"], "1 GiB", SMOKE, 3, 5)
    assert (row["first"], row["last"]) == (10.0, 3.0)
    assert len(row["values"]) == 5
    assert row["bound_s"] == 0.5


def found_with(medians: dict[str, float], **problems: str) -> Found:
    """Of 7B LoRA at 8 GiB; every other cell is missing."""
    filling = {
        "device_mib": 1.0, "rss_mib": 1.0, "group_mib": 1.0, "pinned_mib": 1.0, "first": 2.0,
        "last": 1.0, "version": "stub 1",
    }  # fmt: skip
    rows = {_cell(peer): {"median": s, "values": [s], **filling} for peer, s in medians.items()}
    return Found(rows, {_cell(p): why for p, why in problems.items()}, [], "stub", False)


def _cell(peer: str) -> str:
    return f"7B LoRA 8x1K; {'none' if peer == 'no offload' else '8 GiB'}; {peer}"


def test_ours_is_the_quicker_engine_and_is_asked_to_be_twice_as_fast_as_fsdp2() -> None:
    found = found_with(
        {"no offload": 0.8, "ours, cuda": 1.2, "ours, cudagraph": 1.0, "FSDP2": 2.5,
         "RoundPipe, exact": 1.2}
    )  # fmt: skip
    made = report(found)
    asked = {target.what.rpartition("ours over ")[2]: target for target in made.asked}
    assert asked["FSDP2"].met and asked["FSDP2"].measured == pytest.approx(0.4)
    assert not asked["RoundPipe, exact"].met  # 1.2 times as fast, 1.3 were asked
    lines = made.tables["7B LoRA 8x1K, 8 GiB"]
    assert "| ours, cudagraph | 1 | 80% |" in lines
    few = found_with({"no offload": 0.8}, FSDP2="does not run within 8 GiB")
    lines = report(few).tables["7B LoRA 8x1K, 8 GiB"]
    assert "| FSDP2 | does not run within 8 GiB |" in lines
    assert "| ours, cudagraph | not yet measured |" in lines


def test_every_cell_of_the_real_run_is_a_process_of_its_own() -> None:
    made = steps(False)
    assert all(len(step.cells) == 1 for step in made)
    assert len({step.cells for step in made}) == len(made)


@pytest.mark.parametrize("task", ["lora", "full"])
def test_the_stages_that_roundpipe_gets_are_the_model(task: str) -> None:
    setup = Setup(tasks(True)[task], None, "cpu")
    module = whole(setup, "cpu")
    inputs = batch(setup, "cpu")
    expected = module(*inputs)
    expected.backward()
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    other = whole(setup, "cpu", checkpointed=False)
    first, *middle, last = stages(other.inner, setup.kind, parts=2)
    flow = first(*inputs)
    for stage in middle:
        flow = stage(flow)
    loss = 2 * last(flow)
    assert torch.equal(loss, expected)
    loss.backward()
    mine = [p.grad for p in other.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(gradients, mine, strict=True))  # pyright: ignore
