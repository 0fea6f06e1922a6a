"""A job as a trial of Ray Tune: its metrics, its checkpoints, what it refuses."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support import ray_nodes
from support.ray_nodes import STORE_BYTES, job, need_ray

from trainers.fleet import Fleet, FleetError
from trainers.fleet.ray_cluster import tune_trainable

need_ray()
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


def make(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**job(config["lr"]), "offload": config["offload"], "seed": 0}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`tuned(trainable, space)` returns the results of a search on one CPU."""
    import ray
    from ray import cloudpickle, tune

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for module in (ray_nodes, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES
    )

    def run(trainable: Any, space: dict[str, Any]) -> Any:
        return tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space=space,
            run_config=tune.RunConfig(storage_path=str(tmp_path), name="search", verbose=0),
        ).fit()

    yield run
    ray.shutdown()


def test_a_trial_has_the_bits_of_a_fleets_job_and_reports_after_each_validation(
    tuned: Any, tmp_path: Path
) -> None:
    from ray import tune

    offload = {"budget": "64KiB"}
    space = {"lr": tune.grid_search([0.01, 0.04]), "offload": offload}
    results = tuned(tune_trainable(make), space)
    assert not results.errors
    fleet = Fleet("64KiB", "cpu", folder=tmp_path / "alone", metric="val_loss")
    for lr in (0.01, 0.04):
        fleet.add(str(lr), seed=0, **job(lr))
    expected = fleet.fit()
    for result in results:
        assert result.metrics["val_loss"] == expected.jobs[str(result.config["lr"])].metric
        assert result.metrics["step"] == 12
        assert result.metrics["training_iteration"] == 3, "one report after each validation"
        with result.checkpoint.as_directory() as folder:
            assert [path.name for path in Path(folder).iterdir()] == ["trial.ckpt"]
    assert results.get_best_result("val_loss", "min").config["lr"] == float(expected.best)


class FailsOnce(L.Callback):
    """Fails in the third pass, the first time, and writes down where a fit begins."""

    def __init__(self, folder: Path) -> None:
        self.failed, self.begins = folder / "failed", folder / "begins"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self.begins.open("a") as file:
            file.write(f"{trainer.global_step} ")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 9 and not self.failed.exists():
            self.failed.touch()
            raise ZeroDivisionError("the first time")


def test_a_trial_that_fails_fails_alone_and_is_restored_from_its_checkpoint(
    tuned: Any, tmp_path: Path
) -> None:
    from ray import tune

    def make_failing(config: Mapping[str, Any]) -> dict[str, Any]:
        callbacks = (FailsOnce(tmp_path),) if config["lr"] == 0.04 else ()
        return {**job(config["lr"], callbacks=callbacks), "offload": False, "seed": 0}

    results = tuned(tune_trainable(make_failing), {"lr": tune.grid_search([0.01, 0.04])})
    assert len(results.errors) == 1 and "ZeroDivisionError" in str(results.errors[0])
    again = tune.Tuner.restore(
        str(tmp_path / "search"), tune_trainable(make_failing), resume_errored=True
    ).fit()
    assert not again.errors
    assert {result.metrics["step"] for result in again} == {12}
    assert (tmp_path / "begins").read_text().split() == ["0", "8"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({}, "a dict with nothing: module and train are needed"),
        ({"module": 1, "train": 2, "vall": 3}, "a dict with module, train, vall"),
    ],
    ids=str,
)
def test_what_make_returns_is_checked(made: dict[str, Any], says: str) -> None:
    with pytest.raises(FleetError, match=says):
        tune_trainable(lambda config: made)({})
