"""benchmarks/gpu/half_hour.sh on the CPU, and what it asks the GPU suite for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as run.sh has it

from gpu.part import load  # noqa: E402
from gpu.phases import phases  # noqa: E402


def run_phase(phase: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "benchmarks/gpu/half_hour.sh", phase, "--smoke"],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={
            "PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
            "STATE": str(folder / "state"), "OUT": str(folder / "out"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pieces(folder: Path) -> list[str]:
    lines = (folder / "out" / "pieces.jsonl").read_text().splitlines()
    return [json.loads(line)["piece"] for line in lines]


@pytest.mark.full
def test_the_first_phase_compiles_the_nets_keeps_its_logs_and_is_not_run_twice(
    tmp_path: Path,
) -> None:
    run_phase("arrive", tmp_path)
    assert pieces(tmp_path) == ["compiles", "never run"]
    out = tmp_path / "out"
    found = json.loads((out / "gpu_compiles.json").read_text())
    assert [row["steps"] for row in found["rows"]] == [8, 8]
    assert found["machine"]["commit"]
    assert (out / "pytest never run.xml").exists()
    assert (out / "arrive never run.log").read_text()
    line = json.loads((out / "pieces.jsonl").read_text().splitlines()[0])
    assert line["status"] == 0
    assert line["commit"]
    assert line["machine"]["torch"]
    assert run_phase("arrive", tmp_path) == "arrive: done\n"
    assert len(pieces(tmp_path)) == 2


@pytest.mark.full
@pytest.mark.parametrize("phase", ["accuracy_1", "accuracy_2", "speed", "peers", "rest"])
def test_every_later_phase_runs_to_its_end(phase: str, tmp_path: Path) -> None:
    said = run_phase(phase, tmp_path)
    assert said.endswith(f"{phase}: done\n")
    expected = {piece.name for piece in phases(True)[phase] if piece.smoke}
    assert set(pieces(tmp_path)) == expected


def test_every_word_that_chooses_cells_is_in_a_cell_s_name() -> None:
    chosen = 0
    for part in phases(False).values():
        for piece in part:
            if "--only" not in piece.command:
                continue
            letter = piece.command[2]
            cells = [cell for step in load(letter).steps(False) for cell in step.cells]
            for word in piece.command[piece.command.index("--only") + 1 :]:
                assert any(word in cell for cell in cells), (letter, word)
                chosen += 1
    assert chosen >= 20


def test_a_phase_s_pieces_fit_into_its_ten_minutes_and_beside_only_what_shares() -> None:
    for name, found in phases(False).items():
        alone = [piece.minutes for piece in found if not piece.beside]
        assert sum(alone) <= 11.5, name
        # Times are measured alone: in these phases nothing runs beside another piece.
        if name in ("speed", "peers", "rest"):
            assert not any(piece.beside for piece in found)
