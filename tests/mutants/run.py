"""Do the tests notice a fault? Each mutant of the lists beside this file is one, put in on purpose.

    offload.toml  perfect.toml ..  -->  a copy of the tree  -->  one mutant at a time: its suspects,
    name, file, old -> new              in a temporary           tier by tier, until a test fails
    suspects (test files)               folder

A mutant is caught where pytest ends with a failed test. A mutant with which no test can be
collected is broken, not caught. A mutant that no suspect catches in any tier has survived: either
it changes nothing that matters, and the list needs another one, or a test is missing.

That the tree without mutants is green is for CI to show. So that a test which fails here anyway
does not count, those that caught a mutant are run once more without one at the end.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Tier:
    """A set of tests that is run together, the quickest first."""

    name: str
    folders: tuple[str, ...]
    """Under tests/; empty: all of them."""
    arguments: tuple[str, ...]
    """Of pytest."""
    fake_gpu: Mapping[str, str] | None = None
    """Where it runs on the fake GPU (tests/fakecuda/): what the environment says of it."""


TIERS = (
    Tier("test", ("unit", "property"), ("-m", "not gpu", "--tier", "test")),
    Tier("ci", (), ("-m", "not gpu", "--tier", "ci")),
    Tier("all", (), ("-m", "not gpu", "--tier", "all")),
)
GPU_TIERS = {
    mode: Tier(f"gpu, {mode}", (), ("-m", "gpu", "--tier", "ci"), said)
    for mode, said in (
        ("in order", {}),
        ("async", {"FAKE_CUDA_ASYNC": "1", "FAKE_CUDA_DEVICES": "4"}),
        ("shuffled", {"FAKE_CUDA_SHUFFLE": "1"}),
    )
}
ALL_TIERS = (*TIERS, *GPU_TIERS.values())
OWN = "tests/unit/test_mutants.py"
"""Says that a mutant's lines are not there: while it is in its file they are not."""
PYTEST = (
    "-q", "-p", "no:cacheprovider", "-p", "no_shrinking", "--hypothesis-seed=0", f"--ignore={OWN}",
)  # fmt: skip

CAUGHT, SURVIVED, BROKEN, SLOW, ANYWAY = "caught", "SURVIVED", "BROKEN", "TOO SLOW", "FAILS ANYWAY"


@dataclass(frozen=True)
class Mutant:
    """A fault: `new` in the place of `old`, which stands in `file` once."""

    name: str
    file: str
    old: str
    new: str
    suspects: tuple[str, ...]
    """Globs of test files under tests/, the likeliest first."""
    fake_gpu: str = ""
    """The mode of the fake GPU in which its tests run; empty: they run on the CPU."""

    def applied_to(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant '{self.name}': its `old` stands {count} times in {self.file}, not once:"
                f" give the lines as they are now: {self.old!r}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    name: str
    file: str
    old: str
    new: str
    verdict: str
    tier: str = ""
    """The first in which a test fails."""
    test: str = ""
    """The first that fails; of a broken mutant, what pytest said."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one run of pytest."""

    code: int | None
    """None: it was ended for taking too long."""
    failed: tuple[str, ...]
    last_words: str


def read(folder: Path = HERE) -> list[Mutant]:
    """All lists, in the order of their names."""
    found: list[Mutant] = []
    for path in sorted(folder.glob("*.toml")):
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
        found += [Mutant(**{**row, "suspects": tuple(row["suspects"])}) for row in rows]
    return found


def files_of(suspects: Iterable[str], tests: Path) -> list[str]:
    """The test files that globs stand for, relative to `tests`, none twice."""
    found = [path for glob in suspects for path in sorted(tests.glob(glob))]
    return list(dict.fromkeys(path.relative_to(tests).as_posix() for path in found))


def copy_tree(target: Path) -> None:
    """What git knows of, as it is now, and what was compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    paths += [path.relative_to(ROOT) for path in ROOT.glob("loaders/**/_pictures*.so")]
    paths += [path.relative_to(ROOT) for path in ROOT.glob(".fakecuda/**/*")]
    for path in paths:
        if (ROOT / path).is_file():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path)


def pytest_in(tree: Path, tier: Tier, arguments: Sequence[str], limit: float) -> Outcome:
    """One run over a copy of the tree, on the machine or the fake GPU of the tier."""
    paths = os.pathsep.join((str(tree), str(tree / "tests" / "mutants")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", *PYTEST, *arguments]
    if tier.fake_gpu is not None:
        environment |= tier.fake_gpu
        command = [sys.executable, str(tree / "tests" / "fakecuda" / "on_gpu.py"), *command]
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # no example of another mutant
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, limit))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, code = process.communicate()[0], None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    # A failed set-up or clean-up of a test (a leak) is an error of this test.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", said, flags=re.MULTILINE)
    words = [line for line in said.splitlines() if line.strip()]
    return Outcome(code, tuple(failed), " | ".join(words[-3:])[:300])


def judge(mutant: Mutant, tree: Path, limit: float, whole_tier: bool) -> Result:
    """Which test notices it: suspects of all tiers first, then (where wanted) everybody."""
    path, since = tree / mutant.file, time.monotonic()
    source = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied_to(source), encoding="utf-8")
    try:
        verdict, tier, test = _tried(mutant, tree, since + limit, whole_tier)
    finally:
        path.write_text(source, encoding="utf-8")
    seconds = round(time.monotonic() - since, 1)
    fault = mutant.name, mutant.file, mutant.old, mutant.new
    return Result(*fault, verdict, tier, test, seconds)


def _tried(mutant: Mutant, tree: Path, deadline: float, whole_tier: bool) -> tuple[str, str, str]:
    """Verdict, tier, and the test."""
    suspects = files_of(mutant.suspects, tree / "tests")
    passed: set[tuple[tuple[str, ...], str]] = set()
    ran = False
    for whole in (False, True) if whole_tier else (False,):
        for tier in (GPU_TIERS[mutant.fake_gpu],) if mutant.fake_gpu else TIERS:
            folders = tier.folders or ("",)
            files = [f for f in suspects if f.startswith(folders)]
            if whole:
                files = [path for path in folders if (tree / "tests" / path).is_dir()]
            files = [file for file in files if (tier.arguments, file) not in passed]
            if not files:
                continue
            arguments = ["-x", *tier.arguments, *(f"tests/{file}" for file in files)]
            outcome = pytest_in(tree, tier, arguments, deadline - time.monotonic())
            if outcome.code is None:
                return SLOW, tier.name, ""
            if outcome.code == 1 and outcome.failed:
                return CAUGHT, tier.name, outcome.failed[0]
            if outcome.code not in (0, 5):  # 5: none of these files has a test of this tier
                return BROKEN, tier.name, f"pytest exits {outcome.code}: {outcome.last_words}"
            ran = ran or outcome.code == 0
            passed.update((tier.arguments, file) for file in files)
    return (SURVIVED, "", "") if ran else (BROKEN, "", "no suspect has a test of any tier")


def without_mutants(results: list[Result], tree: Path, limit: float) -> list[Result]:
    """Who was caught by a test that fails anyway was not."""
    anyway: set[tuple[str, str]] = set()
    for tier in ALL_TIERS:
        caught = [one for one in results if (one.verdict, one.tier) == (CAUGHT, tier.name)]
        tests = sorted({one.test for one in caught})
        if not tests:
            continue
        outcome = pytest_in(tree, tier, tests, limit)
        if outcome.code not in (0, 1):
            print(f"{tier.name}: the tests could not be run again: {outcome.last_words}")
        anyway |= {(tier.name, test) for test in outcome.failed}
    return [
        replace(one, verdict=ANYWAY) if (one.tier, one.test) in anyway else one for one in results
    ]


def row(result: Result) -> str:
    said = result.tier if result.verdict == CAUGHT else result.verdict
    first = f"{said:<12} {result.seconds:>6.1f} s  {result.file}: {result.name}"
    return f"{first}\n{'':>23}{result.test}" if result.test else first


def summary(results: Sequence[Result]) -> str:
    counts = {tier.name: 0 for tier in ALL_TIERS}
    for one in results:
        key = one.tier if one.verdict == CAUGHT else one.verdict
        counts[key] = counts.get(key, 0) + 1
    seconds = sum(one.seconds for one in results)
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{len(results)} mutants in {seconds:.0f} s: {said}"


def write(results: Sequence[Result], path: Path) -> None:
    import torch

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "HEAD"),
        "changed_since": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tiers": [asdict(tier) for tier in ALL_TIERS],
        "summary": summary(results),
        "mutants": [asdict(one) for one in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def judged(path: Path) -> dict[tuple[str, str, str], Result]:
    """What an earlier run found of mutants that are as they were then."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    found = [Result(**row) for row in rows]
    return {(one.file, one.old, one.new): one for one in found}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this in their name or file")
    parser.add_argument("--list", action="store_true", help="their names, and nothing is run")
    parser.add_argument("--out", type=Path, help="a JSON file for the results, as they come")
    parser.add_argument(
        "--go-on", action="store_true", help="keep the results that the file of --out has already"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds a mutant")
    parser.add_argument(
        "--whole-tier", action="store_true", help="all tests for those that suspects let pass"
    )
    parser.add_argument(
        "--check-clean", action=argparse.BooleanOptionalAction, default=True,
        help="at the end run the tests that failed without any mutant",
    )  # fmt: skip
    asked = parser.parse_args(given)
    mutants = [one for one in read() if asked.only in one.name or asked.only in one.file]
    if asked.go_on and asked.out is None:
        parser.error("--go-on needs --out: the results of the run that was ended")
    if asked.list:
        for one in mutants:
            print(f"{one.file}: {one.name}")
        return 0
    if not mutants:
        parser.error(f"no mutant has {asked.only!r} in its name or file")
    known = judged(asked.out) if asked.go_on else {}
    asked_for = {(one.file, one.old, one.new) for one in mutants}
    others = [one for fault, one in known.items() if fault not in asked_for]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for one in mutants:
            try:
                one.applied_to((tree / one.file).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                parser.error(str(error))
        for one in mutants:
            found = known.get((one.file, one.old, one.new))
            results.append(found or judge(one, tree, asked.limit, asked.whole_tier))
            print(row(results[-1]), flush=True)
            if asked.out is not None:  # a run takes long, and may be ended
                write([*others, *results], asked.out)
        if asked.check_clean:
            results = without_mutants(results, tree, 10 * asked.limit)
            for one in results:
                if one.verdict == ANYWAY:
                    print(row(one))
    print(summary(results))
    if asked.out is not None:
        write([*others, *results], asked.out)
    return 0 if all(one.verdict == CAUGHT for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
