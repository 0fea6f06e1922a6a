"""Runs torchdata's tests of a DataLoader on torch's and on ours, and prints what differs.

    python -m benchmarks.torchdata_suite.run CHECKOUT [--files test_dataloader.py] [--out FILE]

CHECKOUT is a checkout of torchdata's repository; nothing is fetched. Its tests need the packages
expecttest, psutil and parameterized. A test that fails on torch's DataLoader, too, says nothing
about us and is left out. `REASONS` says why each of the others fails; a failure without a reason
ends the script with an error. (On torch's DataLoader, which has no state_dict, no test of
test_state_dict.py says anything, so those are counted against torchdata's own loader: all pass.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

FILES = ("test_dataloader.py", "test_state_dict.py")
ROOT = Path(__file__).parent.parent.parent
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


def outcomes(tests: Path, files: list[str], ours: bool) -> dict[str, str]:
    """Run the tests; return by test its failure, empty if it passed."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder, "torchdata", "stateful_dataloader")
        shim.mkdir(parents=True)
        (shim.parent / "__init__.py").touch()
        (shim / "__init__.py").write_text(
            "from benchmarks.torchdata_suite.adopting import Stateful, StatefulDataLoader\n"
        )
        report = Path(folder, "report.xml")
        paths = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OURS": str(int(ours))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--timeout", LIMIT, f"--junit-xml={report}", *files]
        subprocess.run(command, cwd=tests, env=env, check=False, stdout=subprocess.DEVNULL)
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, (found.get("message") or found.text or kind).strip()
    return name, "" if case.find("skipped") is None else "skipped"


def reason(name: str, failure: str) -> str:
    said = f"{name} {failure}"
    return next((why for part, why in REASONS.items() if part in said), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    given = parser.parse_args()
    tests = given.checkout.resolve() / "test" / "stateful_dataloader"
    if not (tests / FILES[0]).exists():
        parser.error(f"{given.checkout} has no test/stateful_dataloader/{FILES[0]}")
    unexplained = 0
    results: dict[str, Any] = {"torch": str(torch.__version__)}
    for file in given.files:
        ours = outcomes(tests, [file], True)
        plain = outcomes(tests, [file], False) if file == FILES[0] else {}
        alone = {name for name, failure in plain.items() if failure not in ("", "skipped")}
        failed = {n: f for n, f in ours.items() if f not in ("", "skipped") and n not in alone}
        passed = sum(not failure for failure in ours.values())
        print(f"{file}: {passed} pass, {len(failed)} differ, {len(alone)} fail on torch's, too")
        whys = Counter(reason(*each) for each in failed.items())
        for why, count in whys.most_common():
            print(f"  {count:3}  {why or 'NO REASON IS KNOWN'}")
        for name, failure in failed.items():
            print(f"       {name}: {failure.splitlines()[0][:120]}")
        unexplained += whys[""]
        results[file] = {"passed": passed, "alone": sorted(alone), "differ": failed}
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
