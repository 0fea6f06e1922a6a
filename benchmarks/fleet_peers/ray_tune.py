"""Ray Tune trains the jobs: one trial after the other on one device.

    python -m benchmarks.fleet_peers.ray_tune --jobs 12               prints one line of JSON
    python -m benchmarks.fleet_peers.ray_tune --jobs 12 --budget 70%  with an OffloadStrategy

`seconds` is from `ray.init` to the last result. `trial_seconds` is what each trial took by itself,
as Tune says. `peak_bytes` is of all processes: Tune's, Ray's, and the one that trains.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.fleet_peers.gpt_jobs import GptSize, configurations, make
from benchmarks.fleet_peers.tree_memory import TreeMemory

ROOT = Path(__file__).resolve().parents[2]


def run(jobs: int, size: GptSize, budget: str | None, *, reuse_processes: bool) -> dict[str, Any]:
    """`reuse_processes`: whether Tune trains the next trial in the process of the one before.
    `budget`: of the OffloadStrategy of every trial; None trains with plain Lightning."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import tune  # pyright: ignore[reportMissingImports]

    from trainers.fleet.ray_cluster import tune_trainable

    offload = {"budget": budget} if budget else False
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as folder, TreeMemory() as memory:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
        try:
            started = perf_counter()
            results = tune.Tuner(
                tune.with_resources(
                    tune_trainable(lambda config: {**make(config["job"]), "offload": offload}),
                    {"cpu": 1},
                ),
                param_space={"job": tune.grid_search(configurations(jobs, size))},
                tune_config=tune.TuneConfig(reuse_actors=reuse_processes),
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
        "peer": "ray tune",
        "version": ray.__version__,
        "jobs": jobs,
        "budget": budget,
        "reuses processes": reuse_processes,
        "seconds": round(ended - begun, 2),
        "of them to start Ray": round(started - begun, 2),
        "trial_seconds": [round(result.metrics["time_total_s"], 2) for result in found],
        "peak_bytes": memory.peak,
        "losses": [result.metrics["loss"] for result in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--size", type=json.loads, default={}, help="fields of GptSize, as JSON")
    parser.add_argument("--budget", help="an OffloadStrategy's; without it, plain Lightning")
    parser.add_argument("--fresh", action="store_true", help="a new process for every trial")
    given = parser.parse_args()
    found = run(given.jobs, GptSize(**given.size), given.budget, reuse_processes=not given.fresh)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
