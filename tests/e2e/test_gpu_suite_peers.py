"""Parts e, g and h of the GPU suite on the CPU: peers, the loader, accuracy."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as run.sh has it

from accuracy.report import Row as Accuracy  # noqa: E402
from gpu.accuracy import asked, best  # noqa: E402
from gpu.part import Found, Job  # noqa: E402
from gpu.peers import measure, roster  # noqa: E402
from gpu.peers.part import report, steps  # noqa: E402
from gpu.peers.roundpiped import stages  # noqa: E402
from gpu.peers.task import Running, Setup, Whole, batch, tasks, whole  # noqa: E402

SMOKE = Job("", (), {}, "cpu", True)


def run_part(letter: str, out: Path) -> dict[str, dict[str, Any]]:
    """Its rows, by cell."""
    done = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", letter, "--smoke", "--out", str(out)],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not finished" not in done.stdout
    [written] = out.glob("*_smoke.json")
    return {row["cell"]: row for row in json.loads(written.read_text())["rows"]}


@pytest.mark.full
def test_peers_that_run_without_a_gpu_train_as_eager_does(tmp_path: Path) -> None:
    found = run_part("e", tmp_path)
    for task in ("lora", "full"):
        eager = found[f"{task}; none; no offload"]
        for peer in ("ours, cuda", "ours, cudagraph", "FSDP2", "FSDP2, patched", "save_on_cpu"):
            row = found[f"{task}; 1 GiB; {peer}"]
            assert row["median"] > 0
            assert (row["first"], row["last"]) == (eager["first"], eager["last"]), peer
        assert eager["last"] < eager["first"]
    for engine in roster.OURS:
        row, eager = found[f"prefill; 1 GiB; {engine}"], found["prefill; none; no offload"]
        assert row["first"] == eager["first"]
    trained = [found[f"full tiny; 1 GiB; {peer}"] for peer in ("ours, cuda", "FSDP2")]
    assert trained[0]["last"] == trained[1]["last"] < trained[0]["first"]
    for cell, row in found.items():
        peer = roster.PEERS[cell.split("; ")[2]]
        if any(importlib.util.find_spec(name) is None for name in peer.needs):
            assert "not installed" in row["problem"]
        elif not peer.on_cpu:
            assert row["problem"] == "needs a CUDA device"
        else:
            assert row["median"] > 0, row.get("problem")


@pytest.mark.full
def test_the_loader_beside_a_step_serves_what_is_asked_in_every_setting(tmp_path: Path) -> None:
    found = run_part("g", tmp_path)
    served = [row for row in found.values() if "problem" not in row]
    assert len(served) >= 17
    assert all(row["with_step"] > 0 and row["cpu_ms"] >= 0 for row in served)
    missing = {cell for cell, row in found.items() if "problem" in row}
    assert missing <= {cell for cell in found if "DALI" in cell}


@pytest.mark.full
def test_the_accuracy_part_trains_with_and_without_reuse(tmp_path: Path) -> None:
    found = run_part("h", tmp_path)
    trained = [cell.split("; ")[2] for cell in found]
    assert trained == ["no reuse 60, wsd, late decay", "best: wsd 17x3+9 roll12 re"]
    base, reused = (row["decodes"] for row in found.values())
    assert reused < base


ENDLESS = """
import threading
from gpu.part import Outcome, Step
from offloading.report import Report

NAME, CLAIM = "endless", "Claim: what was measured stays"

def steps(smoke):
    return [Step("endless:measure", ("quick", "endless")), Step("endless:measure", ("other",))]

def measure(job):
    for cell in job.cells:
        if cell == "endless":
            threading.Event().wait()
        yield cell, {"value": 1.0}

def report(found):
    return Outcome(Report(NAME, CLAIM))
"""
DRIVER = """
import gpu.part
gpu.part.MODULES["a"] = "endless"
from gpu.__main__ import main
main()
"""


@pytest.mark.full
def test_a_cell_that_the_end_of_the_time_cut_short_after_others_is_not_a_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "a", "--smoke", "--out", str(tmp_path), "--minutes", "0.6"],
        capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'benchmarks'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not finished" in done.stdout
    [line] = (tmp_path / "gpu_endless_smoke.jsonl").read_text().splitlines()
    assert json.loads(line)["cell"] == "quick"


# ---- a table of stub peers ----------------------------------------------------------------------


def stub(**changes: Any) -> roster.Peer:
    return replace(roster.Peer(f"{__name__}:unused", "a stub"), **changes)


@contextmanager
def counting(setup: Setup) -> Iterator[Running]:
    losses = iter(range(10, 0, -1))
    yield Running(lambda: torch.tensor(float(next(losses))), {"bound_s": 0.5, "binds": "compute"})


@contextmanager
def out_of_memory(setup: Setup) -> Iterator[Running]:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    yield


def attempt(monkeypatch: pytest.MonkeyPatch, made: Any, **changes: Any) -> dict[str, Any]:
    monkeypatch.setattr(measure, "function_of", lambda peer: made)
    return measure.attempt(stub(**changes), tasks(True)["lora"], "1 GiB", SMOKE, 3, 5)


def test_a_peer_is_stepped_three_times_before_the_five_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = attempt(monkeypatch, counting)
    assert (row["first"], row["last"]) == (10.0, 3.0)
    assert len(row["values"]) == 5
    assert row["bound_s"] == 0.5


def test_a_peer_that_is_not_installed_or_does_not_fit_is_a_line_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "not installed: no_such_peer" in attempt(
        monkeypatch, counting, needs=("no_such_peer",)
    )["problem"]  # fmt: skip
    assert attempt(monkeypatch, counting, on_cpu=False)["problem"] == "needs a CUDA device"
    said = attempt(monkeypatch, out_of_memory)["problem"]
    assert said == "does not run within 1 GiB: OutOfMemoryError: CUDA out of memory."


def test_a_task_that_the_host_has_no_memory_for_is_not_tried() -> None:
    large = replace(tasks(True)["full"], host_gib=1e6)
    assert "1000000 GiB of host memory are needed" in measure.refused(stub(), large, "cpu")


def found_with(medians: dict[str, float], problems: dict[str, str]) -> Found:
    """Of 7B LoRA at 8 GiB; every other cell is missing."""
    filling = {
        "device_mib": 1.0, "rss_mib": 1.0, "group_mib": 1.0, "pinned_mib": 1.0, "first": 2.0,
        "last": 1.0, "version": "stub 1",
    }  # fmt: skip
    rows = {
        cell: {"median": s, "values": [s], **filling}
        for cell, s in ((_cell(peer), s) for peer, s in medians.items())
    }
    return Found(rows, {_cell(p): why for p, why in problems.items()}, [], "stub", False)


def _cell(peer: str) -> str:
    return f"7B LoRA 8x1K; {'none' if peer == 'no offload' else '8 GiB'}; {peer}"


def test_ours_is_the_quicker_engine_and_is_asked_to_be_twice_as_fast_as_fsdp2() -> None:
    found = found_with(
        {"no offload": 0.8, "ours, cuda": 1.2, "ours, cudagraph": 1.0, "FSDP2": 2.5,
         "RoundPipe, exact": 1.2, "RoundPipe": 1.1},
        {"torchao": "does not run within 8 GiB"},
    )  # fmt: skip
    said = report(found).report
    asked = {one.what.rpartition("ours over ")[2]: one for one in said.asked}
    assert asked["FSDP2"].met and asked["FSDP2"].measured == pytest.approx(0.4)
    assert not asked["RoundPipe, exact"].met  # 1.2 times as fast, 1.3 were asked
    assert asked["RoundPipe"].met
    assert set(asked) == {"FSDP2", "RoundPipe, exact", "RoundPipe"}
    lines = said.tables["7B LoRA 8x1K, 8 GiB"]
    assert "| torchao | does not run within 8 GiB |" in lines
    assert "| ours, cudagraph | 1 | 80% |" in lines
    assert "| save_on_cpu | not yet measured |" in lines


def test_every_cell_of_the_real_run_is_a_process_of_its_own() -> None:
    made = steps(False)
    assert all(len(step.cells) == 1 for step in made)
    assert len({step.cells for step in made}) == len(made)
    assert all(step.environment["WORLD_SIZE"] == "1" for step in made)


# ---- pieces that need no peer -------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lora", "full"])
def test_the_stages_that_roundpipe_gets_are_the_model(task: str) -> None:
    setup = Setup(tasks(True)[task], None, "cpu")
    module = whole(setup, "cpu")
    assert isinstance(module, Whole)
    inputs = batch(setup, "cpu")
    expected = module(*inputs)
    expected.backward()
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    other = whole(setup, "cpu", checkpointed=False)
    assert isinstance(other, Whole)
    first, *middle, last = stages(other.inner, setup.kind, parts=2)
    flow = first(*inputs)
    for stage in middle:
        flow = stage(flow)
    loss = 2 * last(flow)
    assert torch.equal(loss, expected)
    loss.backward()
    mine = [p.grad for p in other.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(gradients, mine, strict=True))  # pyright: ignore


def test_the_last_stage_has_no_other_head_than_the_child_that_is_put_in_its_place() -> None:
    setup = Setup(tasks(True)["lora"], None, "cpu")
    module = whole(setup, "cpu")
    assert isinstance(module, Whole)
    _, words = batch(setup, "cpu")
    last = stages(module.inner, setup.kind, parts=1)[-1]
    size = setup.kind.size
    last.head = torch.nn.Linear(size.width, size.words, bias=False, dtype=torch.bfloat16)
    torch.nn.init.zeros_(last.head.weight)
    hidden = torch.randn(*words.shape, size.width, dtype=torch.bfloat16)
    assert last((hidden, words)).item() == pytest.approx(math.log(size.words))


@pytest.mark.parametrize("peer", ["torchao", "RoundPipe", "accelerate, dispatched"])
def test_a_peer_that_is_installed_is_built_where_there_is_a_gpu(peer: str) -> None:
    if not torch.cuda.is_available():  # RoundPipe cannot even be imported
        pytest.skip("no CUDA device here: benchmarks/gpu/run.sh e runs it")
    for name in roster.PEERS[peer].needs:
        pytest.importorskip(name, exc_type=ImportError)
    setup = Setup(tasks(True)["lora"], 1 << 30, "cuda")
    with measure.function_of(roster.PEERS[peer])(setup) as running:
        assert running.step().isfinite().all()


def accuracy(
    name: str, against: str | None, decodes: float, selection: float, test: float
) -> Accuracy:
    """A row whose last weights are two points worse than the averaged ones that it reports."""
    return Accuracy(
        1, name, against, decodes, decodes, 60, (test - 2,), (test,), "ema", selection, 1.0
    )  # fmt: skip


ROWS = [
    accuracy("no reuse, late", None, 60, 95.9, 95.6),
    accuracy("no reuse, early", "no reuse, late", 60, 96.0, 95.9),
    accuracy("r3 good", "no reuse, late", 27, 95.7, 95.1),
    accuracy("r3 lucky on the test", "no reuse, early", 27, 95.2, 96.0),
    accuracy("saves too little", "no reuse, late", 36, 95.9, 95.9),
    accuracy("r3 whose control is not there yet", "no reuse, cosine", 27, 96.1, 96.1),
    accuracy("no reuse 27", "no reuse, late", 27, 95.8, 95.0),
]


def test_the_row_that_is_judged_saves_enough_and_was_best_on_the_hold_out_not_on_the_test() -> None:
    found = best(ROWS)
    assert found is not None
    assert (found[0].name, found[1].name) == ("no reuse, late", "r3 good")


def test_error_and_points_lost_are_judged_on_the_same_weights() -> None:
    mixed = [replace(row, reported="last") if "no reuse" in row.name else row for row in ROWS]
    for rows in (ROWS, mixed):
        error, share, lost, _ = asked(rows)
        assert error.measured == pytest.approx(100 - 95.1)
        assert share.measured == 45.0
        assert lost.measured == pytest.approx(95.6 - 95.1)
        assert "averaged weights" in error.what
        assert "averaged weights" in lost.what
