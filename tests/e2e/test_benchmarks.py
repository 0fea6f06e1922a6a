"""The benchmark drivers run; the slice of the accuracy study keeps the study's margins."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from products import only_first

ROOT = Path(__file__).resolve().parents[2]
CIFAR10 = ROOT.parent / "shared" / "data"


def run_script(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("preset", only_first("smoke", "S1-tiny", "S2-tiny", "S3-tiny"))
def test_every_path_of_the_accuracy_driver_runs(tmp_path: Path, preset: str) -> None:
    run_script("benchmarks/perfect_accuracy.py", "--preset", preset, "--out", str(tmp_path))
    assert (tmp_path / f"perfect_accuracy_{preset}.jsonl").stat().st_size > 0
    assert list(tmp_path.glob(f"*_perfect_accuracy_{preset}.png"))


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_slice_of_the_study_keeps_its_margins(tmp_path: Path) -> None:
    if not (CIFAR10 / "unpack_cifar10.py").exists():
        pytest.skip("CIFAR-10 is not beside the checkout (../shared/data)")
    unpack = subprocess.run(
        [sys.executable, str(CIFAR10 / "unpack_cifar10.py"), str(tmp_path / "data")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert unpack.returncode == 0, unpack.stderr
    said = run_script(
        "benchmarks/perfect_accuracy.py", "--preset", "slice",
        "--data", str(tmp_path / "data"), "--out", str(tmp_path),
    )  # fmt: skip
    line = next(line for line in said.splitlines() if line.startswith("reuse k3 re is"))
    over_no_reuse, over_plain_reuse = (float(word) for word in line.split() if word[0] in "+-")
    assert over_no_reuse >= 6.0
    assert over_plain_reuse >= 2.5


@pytest.mark.full
def test_the_loader_benchmark_runs(tmp_path: Path, pictures: Path) -> None:
    said = run_script(
        "benchmarks/loader_reuse.py", str(pictures), "--out", str(tmp_path), "--repeats", "1"
    )
    assert "| reuse=3, shift+flip |" in said


@pytest.mark.full
def test_the_benchmark_of_large_data_sets_runs(tmp_path: Path) -> None:
    said = run_script("benchmarks/loader_scale.py", "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob("*_loader_scale.json")
    asked = {one["what"]: one for one in json.loads(report.read_text())["asked"]}
    assert asked["memory of the first batch"]["met"]
    assert "| 1,000,000 | 100 | 3 |" in said


@pytest.mark.full
def test_the_comparison_with_peers_measures_what_is_there_and_names_what_is_not(
    tmp_path: Path, pictures: Path
) -> None:
    photos = run_script(
        "benchmarks/loader_vs_peers.py", "photos", str(pictures), "--smoke", "--stored", "32",
        "--crop", "32", "--out", str(tmp_path),
    )  # fmt: skip
    cifar10 = run_script(
        "benchmarks/loader_vs_peers.py", "cifar10", "--smoke", "--out", str(tmp_path)
    )
    assert "| ours, reuse 3, cropped anew | uint8" in photos
    assert "| ours, reuse 3 | uint8" in cifar10
    assert "| failed" not in photos + cifar10
    lines = (photos + cifar10).splitlines()
    missing = [line for line in lines if "not installed" in line]
    assert all("pip install" in line for line in missing)
    for suite in ("photos", "cifar10"):
        [report] = tmp_path.glob(f"*_loader_vs_peers_{suite}.json")
        rows = json.loads(report.read_text())["rows"]
        measured = [row for row in rows if not row["problem"]]
        assert {row["row"]["group"] for row in measured} == {"peer", "ours", "ceiling"}
        assert all(p["cpu"] > 0 for row in measured for p in row["passes"])
        assert report.with_suffix(".png").exists()


@pytest.mark.full
@pytest.mark.parametrize("part", ["planner", "overhead", "orders", "hand_overs"])
def test_every_part_of_the_offload_benchmark_runs(tmp_path: Path, part: str) -> None:
    said = run_script("benchmarks/offload_cpu.py", part, "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob(f"*_offload_cpu_{part}.json")
    assert json.loads(report.read_text())["rows"]
    assert report.with_suffix(".md").read_text().strip() in said


@pytest.mark.full
def test_the_study_of_jobs_that_share_a_device_runs(tmp_path: Path) -> None:
    said = run_script("benchmarks/fleet_tails.py", "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob("*_fleet_tails.json")
    pairs = [row for row in json.loads(report.read_text())["rows"] if "pair" in row]
    [hosted] = [row for row in pairs if "host optimizer" in row["pair"]]
    assert 1.0 < hosted["alone"] / hosted["tails=True"]["seconds"] < 2.0
    assert all(row["tails"]["seconds"] <= row["turns"]["seconds"] * 1.001 for row in pairs)
    assert "beside the other's passes" in said


@pytest.mark.full
def test_the_study_of_swapped_sub_models_runs_and_micro_batches_hide_the_copies(
    tmp_path: Path,
) -> None:
    said = run_script("benchmarks/elastic_simulated.py", "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob("*_elastic_simulated.json")
    one, four = json.loads(report.read_text())["rows"]
    assert one["binds"] == "in, then out"
    assert one["utilisation"] < 0.5
    assert four["binds"] == "compute"
    assert four["utilisation"] > 0.8
    assert all(0.5 < row["of_the_bound"] <= 1.0 for row in (one, four))
    assert "from the thesis (not ours)" in said


@pytest.mark.full
def test_the_offload_benchmark_trains_as_eager_does_to_the_bit(tmp_path: Path) -> None:
    run_script(
        "benchmarks/offload_cpu.py", "models", "--smoke", "--only", "gpt2-small", "resnet18",
        "--out", str(tmp_path),
    )  # fmt: skip
    [report] = tmp_path.glob("*_offload_cpu_models_*.json")
    found = json.loads(report.read_text())["rows"]
    assert {(one["case"], one["placement"]) for one in found} == {
        (case, placement) for case in ("gpt2-small", "resnet18") for placement in ("shim", "copy")
    }
    for eager, *plans in (one["rows"] for one in found):
        assert eager["name"] == "eager"
        assert eager["cpu"][0] > 0
        assert [plan["name"] for plan in plans] == ["resident", "60 %", "40 %", "smallest"]
        assert all(plan["wrong_losses"] + plan["wrong_tensors"] == 0 for plan in plans)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["overhead", "gpt2", "plan", "matrix", "lengths", "restarts"])
def test_every_part_of_the_strategys_benchmark_runs_and_finds_no_difference(
    tmp_path: Path, part: str
) -> None:
    said = run_script("benchmarks/strategy_cpu.py", part, "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob(f"*_strategy_cpu_{part}.json")
    found = json.loads(report.read_text())
    assert found["rows"]
    assert report.with_suffix(".md").read_text().strip() in said
    differing = [asked for asked in found["asked"] if "differ" in asked["what"]]
    assert all(asked["measured"] == 0 for asked in differing)
    assert differing or part == "plan"


@pytest.mark.full
def test_the_strategys_real_peak_is_the_planned_one(tmp_path: Path) -> None:
    run_script("benchmarks/strategy_cpu.py", "plan", "--smoke", "--out", str(tmp_path))
    [report] = tmp_path.glob("*_strategy_cpu_plan.json")
    [row] = json.loads(report.read_text())["rows"]
    assert row["real"] <= row["predicted"] <= row["budget"]
    assert row["real"] >= 0.99 * row["predicted"]


@pytest.mark.parametrize(
    "part", only_first("hand_over", "turns", "devices", "stopping", "schedules", "kills")
)
def test_the_fleet_benchmark_runs(tmp_path: Path, part: str) -> None:
    said = run_script("benchmarks/fleet_cpu.py", part, "--smoke", "--out", str(tmp_path))
    assert "| " in said
    (kept,) = tmp_path.glob("*.json")
    assert json.loads(kept.read_text())["rows"]


@pytest.mark.parametrize(
    "part",
    only_first("preemptions", "capture", "cost", "latency", "parked_loaders", "shared_input"),
)
def test_the_sharing_benchmark_runs_and_finds_no_wrong_bit(tmp_path: Path, part: str) -> None:
    run_script("benchmarks/sharing_cpu.py", part, "--smoke", "--out", str(tmp_path))
    (kept,) = tmp_path.glob("*.json")
    found = json.loads(kept.read_text())
    assert found["rows"]
    differing = [asked["measured"] for asked in found["asked"] if "other bits" in asked["what"]]
    assert differing == [0]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_accuracy_against_seconds_is_run_once_a_row(tmp_path: Path) -> None:
    once = ["benchmarks/wall_clock.py", "run", "--smoke", "--out", str(tmp_path)]
    run_script(*once, "--work", str(tmp_path / "work"))
    [kept] = tmp_path.glob("*_wall_clock.jsonl")
    lines = [json.loads(text) for text in kept.read_text().splitlines()]
    decodes = {line["row"]: line["decoded_samples"] for line in lines}
    assert decodes["no reuse, no cache"] == 9 * 48
    assert decodes["reuse 3"] == 5 * 48
    assert decodes["cache of 100 %"] == 48
    assert decodes["reuse 3, cache of 50 %"] == 3 * 48
    assert all("commit" in line["provenance"] for line in lines)
    again = run_script(*once, "--work", str(tmp_path / "work"))
    assert len(kept.read_text().splitlines()) == len(lines) and "| no reuse" in again


@pytest.mark.full
def test_the_figures_that_train_no_network_are_made(tmp_path: Path) -> None:
    for part in ("loading", "operations", "regression"):
        run_script("benchmarks/thesis_figures.py", part, "--smoke", "--out", str(tmp_path))
        [kept] = tmp_path.glob(f"*_thesis_figures_{part}.json")
        assert json.loads(kept.read_text())["rows"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_survey_of_modules_plans_two_of_them_with_plain_lightnings_bits(
    tmp_path: Path,
) -> None:
    once = ["benchmarks/module_survey.py", "--smoke", "--out", str(tmp_path)]
    run_script(*once, "--before", str(ROOT))
    [report] = tmp_path.glob("*_module_survey.json")
    found = json.loads(report.read_text())
    assert [(row["code"], row["name"]) for row in found["rows"]] == [
        (code, name)
        for code in ("now", "before")
        for name in ("autoencoder example", "VisionTransformer")
    ]
    assert {row["status"] for row in found["rows"]} == {"planned, bit-equal"}
    runs = [run for row in found["rows"] for run in row["runs"]]
    assert {run["budget"] for run in runs} == {"80%"}
    assert all(run["tasks"] > 10 and run["compared"] > 10 for run in runs)
    assert all(asked["met"] for asked in found["asked"])


@pytest.mark.full
def test_the_survey_of_modules_says_what_to_install_for_a_module(tmp_path: Path) -> None:
    if importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed, so none of its models lacks a package")
    run_script(
        "benchmarks/module_survey.py", "--only", "resnet10t", "GAN example", "--out", str(tmp_path)
    )
    [report] = tmp_path.glob("*_module_survey.json")
    planned, missing = json.loads(report.read_text())["rows"]
    assert planned["status"] == "planned, bit-equal"
    assert (missing["status"], missing["why"]) == ("not installed", "pip install timm")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_survey_of_pipelines_checks_what_is_served_of_two_of_them(tmp_path: Path) -> None:
    once = ["benchmarks/pipeline_survey.py", "--smoke", "--out", str(tmp_path)]
    run_script(*once, "--before", str(ROOT))
    [report] = tmp_path.glob("*_pipeline_survey.json")
    found = json.loads(report.read_text())
    assert [(row["code"], row["name"], row["status"]) for row in found["rows"]] == [
        (code, name, status)
        for code in ("before", "now")
        for name, status in (
            ("CIFAR-10 v1", "plugs in"),
            ("SimCLR, two views", "plugs in after the documented change"),
        )
    ]
    served = [row["attempts"][-1] for row in found["rows"]]
    facts = "error", "structure", "served", "draws", "content", "resumed"
    assert not [each for each in served if any(each[fact] for fact in facts)]
    assert all("redone at every serve" in each["summary"] for each in served)
    assert all(asked["met"] for asked in found["asked"])


@pytest.mark.full
def test_the_survey_of_pipelines_says_what_to_install_for_a_pipeline(tmp_path: Path) -> None:
    if importlib.util.find_spec("webdataset") is not None:
        pytest.skip("webdataset is installed, so its pipelines lack no package")
    name = "WebDataset, samples"
    run_script("benchmarks/pipeline_survey.py", "--only", name, "--out", str(tmp_path))
    [report] = tmp_path.glob("*_pipeline_survey.json")
    [missing] = json.loads(report.read_text())["rows"]
    assert missing["status"] == "not installed: pip install webdataset"
