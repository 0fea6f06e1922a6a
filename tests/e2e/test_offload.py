"""`offload:` in a YAML: what comes of a run is the same to the bit, wherever its bytes were."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from support.run_folders import logged, stop_after
from torch.utils import _pytree as pytree

import offload.measuring.profiling
from offload import Plan, Runner
from perfect.assembly.berth import berth_alone
from perfect.assembly.data import build_data
from perfect.assembly.phase_plan import build_phase_switch
from perfect.assembly.run import build_module, build_trainer
from perfect.commands.check import plan_phases
from perfect.config.yaml_reader import read_config
from perfect.runs.record import RunLog
from trainers.steps.step_planner import StepPlanner

Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]


@pytest.fixture
def phased(recipe: Recipe) -> Recipe:
    """Reuse, then fresh samples in other batches with another decay; averaged weights."""
    recipe["phases"] = [
        {"name": "pretrain", "passes": 1, "reuse": 3, "ema": True,
         "lr": {"kind": "constant", "lr": 0.05, "warmup": 0.2}},
        {"name": "finetune", "passes": 2, "ema": True, "batch_size": 12, "weight_decay": 0.01,
         "reset_optimizer": True, "lr": {"kind": "linear", "lr": 0.05}},
    ]  # fmt: skip
    return recipe


def within(budget: Any, recipe: Recipe, **more: Any) -> Recipe:
    return recipe | {"offload": {"budget": budget, **more}}


def saved(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor and count of a checkpoint, by its place; what offloading cost is apart."""
    content = torch.load(path, weights_only=False)
    content.get("callbacks", {}).pop("StallLog", None)
    parts = ("state_dict", "optimizer_states", "callbacks", "global_step", "epoch")
    tree = {part: content[part] for part in parts if part in content}
    found, _ = pytree.tree_flatten_with_path(tree)
    return {
        pytree.keystr(at): torch.as_tensor(leaf)
        for at, leaf in found
        if isinstance(leaf, int | torch.Tensor)
    }


def same(one: Path, two: Path) -> None:
    left, right = saved(one), saved(two)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# ---- the same run -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget, devices", [(None, 1), ("70%", 1), ("100%", 2)])
def test_phases_within_a_budget_learn_what_they_learn_without_to_the_bit(
    budget: str | None,
    devices: int,
    train: Train,
    phased: Recipe,
    read_run: Callable[[Path], Recipe],
) -> None:
    assert train(phased, out="plain")[0] == 0
    code, folder = train(within(budget, phased, devices=devices), out="offloaded")
    plain = folder.with_name("plain")
    assert code == 0
    assert len(logged(folder)) > 4
    assert logged(folder) == logged(plain)
    same(folder / "final.ckpt", plain / "final.ckpt")
    same(folder / "last.ckpt", plain / "last.ckpt")
    assert read_run(folder)["accuracy"] == read_run(plain)["accuracy"]


def test_a_plateau_is_told_at_the_same_step(
    train: Train, recipe: Recipe, read_run: Callable[[Path], Recipe]
) -> None:
    recipe["phases"][0] |= {"passes": 6, "lr": {"kind": "constant", "lr": 0.05}}
    recipe["switch"] = {
        "rule": "plateau", "window": 4, "earliest": 0.1, "accuracy_slope": 100.0,
        "loss_slope": 100.0,
    }  # fmt: skip
    assert train(recipe, out="plain")[0] == 0
    code, folder = train(within("80%", recipe), out="offloaded")
    plain = folder.with_name("plain")
    assert code == 0
    assert read_run(folder)["switches"][0]["reason"].startswith("plateau")
    assert read_run(folder)["switches"] == read_run(plain)["switches"]
    assert read_run(folder)["trace"] == read_run(plain)["trace"]
    same(folder / "final.ckpt", plain / "final.ckpt")


def test_accumulated_and_clipped_in_bfloat16_it_is_the_same_too(
    train: Train, phased: Recipe
) -> None:
    phased["trainer"] |= {"accumulate": 3, "gradient_clip": 0.5, "precision": "bf16-mixed"}
    assert train(phased, out="plain")[0] == 0
    code, folder = train(within("80%", phased), out="offloaded")
    assert code == 0
    assert logged(folder) == logged(folder.with_name("plain"))
    same(folder / "final.ckpt", folder.with_name("plain") / "final.ckpt")


@pytest.mark.parametrize(
    ("step", "then"),  # phases of 23 and 10 steps
    [
        (10, {"budget": "90%"}),
        pytest.param(27, {"budget": "70%"}, marks=pytest.mark.full),
        pytest.param(27, None, marks=pytest.mark.full),
    ],
)
def test_a_stopped_run_goes_on_under_any_budget_to_the_same_end(
    step: int, then: Recipe | None, train: Train, phased: Recipe,
    monkeypatch: pytest.MonkeyPatch, read_run: Callable[[Path], Recipe],
) -> None:  # fmt: skip
    phased["checkpoint"] = {"every_steps": 4}
    _, whole = train(phased, out="whole")
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        assert train(within("70%", phased), out="parted")[0] == 130
    code, folder = train(phased | {"offload": then}, out="parted")
    assert code == 0
    [resumed] = read_run(folder)["resumed_at"]
    assert 0 < resumed <= step
    assert logged(folder) == logged(whole)
    same(folder / "final.ckpt", whole / "final.ckpt")
    kept = yaml.safe_load((folder / "config.yaml").read_text())["offload"]
    assert then is None or kept["budget"] == then["budget"], "config.yaml says how it went on"


def test_the_complete_configuration_of_a_run_runs_again_the_same(
    train: Train, phased: Recipe
) -> None:
    _, folder = train(within("70%", phased))
    complete = yaml.safe_load((folder / "config.yaml").read_text())
    assert complete["offload"] == {
        "budget": "70%", "host_budget": None, "recompute": "auto", "optimizer": "auto",
        "engine": "auto", "verify": True,
        "plan_cache": None, "host_dir": None, "devices": 1, "micro_batches": 1,
    }  # fmt: skip
    assert train(complete, out="again")[0] == 0
    same(folder / "final.ckpt", folder.with_name("again") / "final.ckpt")


def test_the_weights_of_a_run_load_into_the_bare_model(train: Train, recipe: Recipe) -> None:
    _, folder = train(within("70%", recipe))
    content = torch.load(folder / "final.ckpt", weights_only=True)
    config = read_config(folder / "config.yaml")[0]
    module = build_module(config, 3)
    assert list(content["state_dict"]) == list(module.state_dict())
    module.load_state_dict(content["state_dict"])
    nbytes = [t.untyped_storage().nbytes() - t.nbytes for t in content["state_dict"].values()]
    assert not any(nbytes), "a tensor was saved with the arena around it"


# ---- --check ------------------------------------------------------------------------------------


def test_check_explains_a_plan_for_every_batch_size_and_trains_nothing(
    train: Train, phased: Recipe, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run(*_: Any) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(Runner, "run", run)
    phased["loggers"] = ["csv", "tensorboard"]
    code, folder = train(within("70%", phased), "--check")
    said = capfd.readouterr().out
    assert code == 0
    assert "a step of phase pretrain, batches of 8\nplan  " in said
    assert "a step of phase finetune, batches of 12\nplan  " in said
    assert "at least" in said and "together" in said
    assert not folder.exists()


@pytest.mark.parametrize("averaged", [True, False])  # where nobody averages, updates may wait
def test_the_plans_of_check_are_those_that_training_makes(
    averaged: bool, train: Train, phased: Recipe, write_yaml: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Kernels are measured anew each time, and plans are chosen by the seconds: a clock that stands.
    monkeypatch.setattr(offload.measuring.profiling, "perf_counter", lambda: 0.0)
    phased["phases"][0]["batch_size"] = 10
    del phased["phases"][1]["batch_size"]
    for phase in phased["phases"]:
        phase["ema"] = averaged
    if not averaged:
        del phased["ema"]
    recipe = within("70%", phased, optimizer="host")
    config = read_config(write_yaml(recipe))[0]
    data, switch, alone = build_data(config), build_phase_switch(config), berth_alone(Console())
    module = build_module(config, data.num_classes)
    trainer = build_trainer(config, tmp_path / "none", switch, RunLog(tmp_path), alone, data)
    first, second = plan_phases(trainer, module, data, switch)
    assert (first.phases, first.batch_size) == (("pretrain",), 10)
    assert (second.phases, second.batch_size) == (("finetune",), 8)

    made = []
    added = StepPlanner.note_plan

    def add(self: StepPlanner, key: Any, plan: Plan) -> None:
        made.append(plan)
        added(self, key, plan)

    monkeypatch.setattr(StepPlanner, "note_plan", add)
    assert train(recipe)[0] == 0
    assert first.plan is not None and second.plan is not None
    assert made[0].explain() == first.plan.explain()
    assert made[0].memgraph.arenas == first.plan.memgraph.arenas
    assert second.plan.budget == first.plan.budget, "a share is one of the largest step"


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--check"], []])
def test_a_budget_under_the_minimum_is_refused_with_its_line_and_what_to_change(
    options: list[str], train: Train, phased: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(within("20KiB", phased), *options)
    said = capfd.readouterr().err
    assert code == 2
    assert "recipe.yaml:" in said and "offload.budget: " in said
    assert "are needed at task " in said and "the budget is 20.0 KiB" in said
    assert "raise the budget to " in said and "or lower the batch size" in said
    assert "Traceback" not in said
    assert folder.exists() == (not options)
    # The folder is not lost: the budget is no part of what it belongs to.
    assert train(within("70%", phased))[0] == 0


@pytest.mark.parametrize(
    "accelerator, why",
    [
        ("cpu", "cuda runs on a GPU, but trainer.accelerator is cpu"),
        ("auto", "engine='cuda' needs"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_an_engine_that_is_not_here_is_refused_with_its_line(
    accelerator: str,
    why: str,
    train: Train,
    phased: Recipe,
    capfd: pytest.CaptureFixture[str],
) -> None:
    phased["trainer"]["accelerator"] = accelerator
    for options in ((), ("--check",)):
        code, folder = train(within("70%", phased, engine="cuda"), *options)
        assert code == 2
        assert not folder.exists()
        said = capfd.readouterr().err
        assert re.search(rf"recipe.yaml:\d+: offload.engine: {why}", said)
        assert "Traceback" not in said


def test_several_devices_within_a_budget_are_refused_with_their_line(
    train: Train, phased: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    phased["trainer"]["devices"] = 2
    for options in ((), ("--check",)):
        code, folder = train(within("70%", phased), *options)
        assert code == 2
        assert not folder.exists()
        said = capfd.readouterr().err
        assert re.search(r"recipe.yaml:\d+: trainer.devices: is 2.*give offload.devices", said)
        assert "Traceback" not in said
