"""The GPU suite's parts run on the CPU, write what they measured, and go on where they stopped."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_part(letter: str, out: Path, *more: str, python: str = sys.executable) -> str:
    done = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", letter, "--smoke", "--out", str(out), *more],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(out: Path, name: str) -> dict[str, Any]:
    [report] = out.glob(f"*_gpu_{name}_smoke.json")
    return json.loads(report.read_text())


def rows(out: Path, name: str) -> dict[str, dict[str, Any]]:
    return {row["cell"]: row for row in results(out, name)["rows"]}


def table(out: Path, name: str) -> str:
    [report] = out.glob(f"*_gpu_{name}_smoke.md")
    return report.read_text()


@pytest.mark.full
def test_what_is_measured_is_written_down_and_not_measured_again(tmp_path: Path) -> None:
    said = run_part("a", tmp_path)
    found = rows(tmp_path, "ceilings")
    for cell in ("h2d", "d2h while h2d", "gemm bfloat16", "memory", "launch", "event query"):
        assert found[cell]["median"] > 0
        assert f"| {cell} | " in table(tmp_path, "ceilings")
    assert "not finished" not in said
    assert list(tmp_path.glob("*_gpu_ceilings_smoke.png"))

    lines = tmp_path / "gpu_ceilings_smoke.jsonl"
    whole = lines.read_text().splitlines(keepends=True)
    kept, last = whole[:-1], json.loads(whole[-1])
    lines.write_text("".join(kept) + whole[-1][:20])  # as a crash leaves it
    said = run_part("a", tmp_path)
    assert f"everything: {last['cell']}\n" in said
    assert lines.read_text().startswith("".join(kept))
    assert json.loads(lines.read_text().splitlines()[-1])["cell"] == last["cell"]
    assert "gpu.ceilings" not in run_part("a", tmp_path)


@pytest.mark.full
def test_a_planned_step_of_the_suite_is_eagers_to_the_bit(tmp_path: Path) -> None:
    run_part("b", tmp_path)
    found = rows(tmp_path, "equality")
    assert {cell.split("; ")[0] for cell in found} == {
        "resnet18", "vit-b-16", "gpt2 with dropout", "llama bf16", "odd convnet",
    }  # fmt: skip
    assert [cell.split("; ")[1] for cell in found].count("deterministic") == 2
    assert len(found) == 10
    assert all(row["losses"] == row["tensors"] == 0 < row["of"] for row in found.values())
    asked = results(tmp_path, "equality")["asked"]
    assert len(asked) == 6  # and that cudagraph replayed
    assert all(one["met"] and one["most"] == 0 for one in asked)


@pytest.mark.full
def test_the_peak_of_a_planned_step_is_watched(tmp_path: Path) -> None:
    run_part("c", tmp_path)
    found = rows(tmp_path, "peaks")
    assert {cell.split("; ")[0] for cell in found} == {"gpt2-small", "vit-b-16"}
    assert len(found) == 3
    for cell, row in found.items():
        assert row["planned_mib"] <= row["budget_mib"] < row["peak_mib"]
        assert row["looks"] > 10
        assert row["of_budget"] > 0
        assert f"{cell}: real peak, of the budget" in table(tmp_path, "peaks")


@pytest.mark.full
def test_planned_steps_are_timed_beside_eager_and_their_bounds(tmp_path: Path) -> None:
    run_part("d", tmp_path)
    found = rows(tmp_path, "speed")
    assert {cell.split("; ")[0] for cell in found} == {
        "llama lora", "llama prefill", "gpt2 full", "vit",
    }  # fmt: skip
    for cell, row in found.items():
        assert len(row["eager"]) == len(row["ours"]) == 2
        keys = ("over_eager", "bound_s", "believed_s", "predicted_s")
        assert min(row[key] for key in keys) > 0
        assert row["formula_s"] is None if cell.startswith("vit") else row["formula_s"] > 0
        assert row["decision"].startswith("kept") or "x what was expected" in row["decision"]
    assert [row["replayed"] for row in found.values()] == [None, True] * 5
    of_a_size = found["gpt2 full; 600KiB; cuda"]
    assert of_a_size["device_mib"] <= 600 / 1024 < of_a_size["peak_mib"]
    whole, least = (found[f"llama lora; {budget}; cuda"] for budget in ("none", "minimum"))
    assert whole["resident_share"] == 1.0 > least["resident_share"]
    asked = {one["what"]: one["most"] for one in results(tmp_path, "speed")["asked"]}
    assert asked["llama lora; none; cuda: over eager"] == 1.02
    assert asked["llama lora; minimum; cuda: over the bound"] in (1.05, 1.10)
    assert asked["llama prefill; minimum; cuda: off the prediction"] == 0.10


@pytest.mark.full
def test_each_idea_is_taken_away_in_turn(tmp_path: Path) -> None:
    run_part("f", tmp_path)
    found = rows(tmp_path, "ablations")
    assert [cell.rpartition("; ")[2] for cell in found] == [
        "as it is", "in order", "depth 2", "ahead 0", "no recompute", "cudagraph", "fused",
    ]  # fmt: skip
    base, queue, *_, fused = found.values()
    assert fused["tasks"] < base["tasks"]
    assert queue["bound_s"] >= base["bound_s"]  # the same work, and more edges
    assert base["clean_mib"] > 0
    assert all(row["ours_s"] > 0 for row in found.values())
    assert "| in order | " in table(tmp_path, "ablations")


@pytest.mark.full
def test_a_fleet_is_timed_beside_one_job_after_the_other(tmp_path: Path) -> None:
    run_part("i", tmp_path)
    found = rows(tmp_path, "fleet")
    assert list(found) == ["turns; 3 jobs", "host updates; 2 jobs", "host updates; 4 jobs"]
    assert [list(row["seconds"]) for row in found.values()] == [
        ["serial", "fleet", "alternate"], ["serial", "fleet"], ["serial", "fleet"],
    ]  # fmt: skip
    for cell, row in found.items():
        assert row["wrong"] == 0
        assert all(one > 0 for seconds in row["seconds"].values() for one in seconds)
        assert f"| {cell} | fleet | " in table(tmp_path, "fleet")


@pytest.mark.full
def test_requests_beside_a_training_are_timed_in_every_way(tmp_path: Path) -> None:
    run_part("j", tmp_path)
    found = rows(tmp_path, "sharing")
    ways = ["at rest", "ours, cuda", "ours, cudagraph", "threads", "process"]
    assert list(found) == [f"llama lora; {way}" for way in ways]
    for cell, row in found.items():
        assert row["wrong"] == 0
        assert bool(row["answers"]) == (not cell.endswith("at rest"))
        assert ("starts" in row) == ("ours" in cell)
        assert f"| {cell} | " in table(tmp_path, "sharing")


BROKEN = """
import os, signal
from gpu.part import Outcome, Step
from offloading.report import Report

NAME, CLAIM = "broken", "Claim: the others go on"
CELLS = ("good", "raises", "after", "killed", "last")

def steps(smoke):
    return [Step("broken:measure", CELLS), Step("broken:nothing", ("one", "two"))]

def measure(job):
    for cell in job.cells:
        if cell == "raises":
            raise ValueError("no such kernel")
        if cell == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        yield cell, {"value": 1.0}

def nothing(job):
    raise RuntimeError("CUDA error: out of memory")
    yield

def report(found):
    return Outcome(Report(NAME, CLAIM))
"""
DRIVER = """
import gpu.part
gpu.part.MODULES["a"] = "broken"
from gpu.__main__ import main
main()
"""


@pytest.mark.full
def test_a_cell_that_fails_or_is_killed_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)

    def run(*more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, "a", "--smoke", "--out", str(tmp_path), *more],
            capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
                 "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'benchmarks'}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run()
    found = rows(tmp_path, "broken")
    assert [cell for cell, row in found.items() if row.get("value") == 1.0] == [
        "good", "after", "last",
    ]  # fmt: skip
    assert "ValueError: no such kernel" in found["raises"]["problem"]
    assert "memory" in found["killed"]["problem"]
    assert all("CUDA error: out of memory" in found[cell]["problem"] for cell in ("one", "two"))
    assert "| raises | ValueError: no such kernel" in table(tmp_path, "broken")
    assert "broken:" not in run()
    again = run("--retry")
    assert "broken:measure: raises, killed\n" in again


@pytest.mark.full
def test_the_kernels_of_a_step_are_told_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu.kernels"],
        capture_output=True, text=True, cwd=ROOT / "benchmarks", check=False,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
             "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| eager | " in done.stdout and "| cudagraph | " in done.stdout
    assert "| aten::mm | " in done.stdout


@pytest.mark.full
def test_plans_by_the_rates_of_a_gpu_are_told_on_paper(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "gpu.simulated", "--smoke", "--out", str(tmp_path)],
        check=True, capture_output=True, text=True, cwd=ROOT / "benchmarks",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks"},
    )  # fmt: skip
    [report] = tmp_path.glob("*_gpu_simulated.json")
    found = json.loads(report.read_text())
    assert found["setting"] == {"rates": "NVIDIA H200"}
    assert {row["link"] for row in found["rows"]} == {"PCIe 5", "PCIe 4"}
    moves = [row for row in found["rows"] if row["resident"] != "100%"]
    assert moves and all(float(row["over no offload"]) > 1 for row in moves)
    assert all(float(row["over the bound"]) >= 1 for row in found["rows"])
