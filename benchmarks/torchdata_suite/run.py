"""Runs torchdata's tests of a DataLoader on torch's and on ours, and prints what differs.

    python -m benchmarks.torchdata_suite.run CHECKOUT [--files test_dataloader.py] [--out FILE]

CHECKOUT is a checkout of torchdata's repository. Its tests need the packages expecttest, psutil and
parameterized. (On torch's DataLoader, which has no state_dict, no test of test_state_dict.py says
anything, so those are counted against torchdata's own loader: all pass.)
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.harness.foreign_tests import Outcomes, end_with, run_tests, tell_differences

FILES = ("test_dataloader.py", "test_state_dict.py")
LIMIT = "300"
"""The seconds that a test may take."""

REASONS = {
    "KeyError: '_snapshot": "the test reads torchdata's own layout of the state",
    "KeyError: 'dataset_state": "the test reads torchdata's own layout of the state",
    "::test_random_state": "a map-style data set's state_dict is no part of ours: what is drawn is"
    " a function of (seed, pass, sample)",
    "::test_map_iterrupted_shuffle": "a map-style data set's state_dict is no part of ours: what is"
    " drawn is a function of (seed, pass, sample)",
    "EndOfEpochBehavior": "a state from the end of a pass goes on with the next pass, and not with"
    " an empty one",
    "SnapshotEnd_shard2::test_map": "a state from the end of a pass goes on with the next pass, and"
    " not with an empty one",
    "MultiEpochState": "a stream's state is taken in the middle of a pass, and between passes the"
    " stream counts them itself (set_epoch)",
    "num_workers_mismatch": "a state may be resumed with another number of workers",
    "test_init_error": "worker_init_fn runs when the first batch is asked for, not at iter()",
    "FastStateDictRequestRoundRobin": "the test bounds the seconds that a resume may take: a stream"
    " in several workers is iterated from its beginning, and skips",
    "Iterable2_shard0": "the stream is its own iterator, which has ended: an empty pass is refused",
    "StateInitializationDataset": "the stream gives other samples after a resume, which is refused",
    "OutOfOrder": "in_order=False is not followed: the order never depends on which worker was"
    " faster",
    "test_partial_workers": "the test reads private attributes of torch's iterator",
    "test_segfault": "a worker may die once; the second death is a WorkerDied with torch's words",
    "test_timeout": "a sample that hangs is a SampleTimeout, which names it",
    "test_ind_worker_queue": "with timeout= samples go to whichever worker is free, so that one"
    " that hangs is named",
    "test_shuffler_iterdatapipe": "a pipe's shuffle is seeded by the loader, not by its generator",
    "test_dataset_not_reset": "a stream's workers start anew in each pass, as it is then",
    "test_iterable_style_dataset": "torch's warning of more workers than cores comes with the first"
    " batch, and not at iter()",
}
"""By a part of the name of a test and its failure: why it fails."""


def run_file(tests: Path, file: str, ours: bool) -> Outcomes:
    """Run a file of tests, which import torchdata's loader, on another one."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder, "torchdata", "stateful_dataloader")
        shim.mkdir(parents=True)
        (shim.parent / "__init__.py").touch()
        (shim / "__init__.py").write_text(
            "from benchmarks.torchdata_suite.adopting import Stateful, StatefulDataLoader\n"
        )
        return run_tests(tests, ["--timeout", LIMIT, file], folder, OURS=str(int(ours)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    tests = given.checkout.resolve() / "test" / "stateful_dataloader"
    if not (tests / FILES[0]).exists():
        parser.error(f"{given.checkout} has no test/stateful_dataloader/{FILES[0]}")
    results = {}
    for file in given.files:
        print(file)
        plain = run_file(tests, file, False) if file == FILES[0] else {}
        results[file] = tell_differences(run_file(tests, file, True), plain, REASONS)
    end_with(results, given.out)


if __name__ == "__main__":
    main()
