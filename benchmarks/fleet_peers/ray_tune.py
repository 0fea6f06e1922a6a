"""Ray Tune trains the jobs: one trial after the other, in a process that it starts once.

    python -m benchmarks.fleet_peers.ray_tune --jobs 12 --budget 70%      prints one line of JSON

`seconds` is from `ray.init` to the last result. `trial_seconds` is what each trial took by itself,
as Tune says.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.fleet_peers.gpt_jobs import GptSize, configurations, make

ROOT = Path(__file__).resolve().parents[2]


def run(jobs: int, size: GptSize, budget: str) -> dict[str, Any]:
    """`budget`: of the OffloadStrategy of every trial."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import tune  # pyright: ignore[reportMissingImports]

    from trainers.fleet.ray_cluster import tune_trainable

    offload = {"budget": budget}
    trial = tune_trainable(lambda config: {**make(config["job"]), "offload": offload})
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 * 2**20,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )  # fmt: skip
        try:
            started = perf_counter()
            results = tune.Tuner(
                tune.with_resources(trial, {"cpu": 1}),
                param_space={"job": tune.grid_search(configurations(jobs, size))},
                tune_config=tune.TuneConfig(reuse_actors=True),
                run_config=tune.RunConfig(storage_path=folder, verbose=0),
            ).fit()
            ended = perf_counter()
        finally:
            ray.shutdown()
    if results.errors:
        raise results.errors[0]
    found: list[Any] = [results[number] for number in range(len(results))]
    found.sort(key=lambda result: result.config["job"]["seed"])
    return {
        "version": ray.__version__, "jobs": jobs, "budget": budget,
        "seconds": round(ended - begun, 2), "of them to start Ray": round(started - begun, 2),
        "trial_seconds": [round(result.metrics["time_total_s"], 2) for result in found],
        "losses": [result.metrics["loss"] for result in found],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--size", type=json.loads, default={}, help="fields of GptSize, as JSON")
    parser.add_argument("--budget", default="70%", help="an OffloadStrategy's")
    given = parser.parse_args()
    print(json.dumps(run(given.jobs, GptSize(**given.size), given.budget)))


if __name__ == "__main__":
    main()
