"""Mutates the records of a run and of its checkpoint, and looks at them with the commands.

    python -m tests.fuzz.fuzz_results --seconds 60 --seed 0

A command may refuse a folder, in one line and with exit code 2. Anything else ends the program with
exit code 1, after the seed of that input and the input.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from perfect import compare, list_runs
from perfect.errors import FolderError
from perfect.runs.folder import RunFolder

RECORD: dict[str, Any] = {
    **dict.fromkeys(("accuracy", "perplexity", "wall_seconds", "stall_seconds"), 0.9),
    **dict.fromkeys(("steps", "decoded_samples", "served_samples", "train_samples"), 1200),
    "status": "completed", "name": "a", "seed": 0, "accuracy_on": "test", "error": "why",
    "environment": {"torch": "2"}, "config": {"phases": [{"reuse": 1}], "offload": {"x": 1}},
    "phases": [{"name": "only", "reuse": 1, "first_step": 0, "last_step": 9, "lr_start": 0.1}],
    "switches": [{"step": 9, "reason": "flat"}], "trace": [{"seen": 1}], "chosen": {"offload": {}},
    "offload": {"transfer_seconds": 1.0, "peak_bytes": 5, "phases": [{"name": "x", "seconds": 1}]},
}  # fmt: skip
METRICS = b"step,wall_seconds,decoded,lr,val_accuracy,train_loss\n1,1,9,0.1,,2\n2,2,,,0.5,\n"
CHECKPOINT = {"global_step": 5, "epoch": 1, "state_dict": {}, "loops": {}, "lr_schedulers": []}
DEEP = "@deep@"
VALUES: tuple[Any, ...] = (
    None, True, -1, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), "", "x", "\ud800",
    "\x1b[31m\0", "<script>", "[/red]", [], {}, [[]], [None], [{}], {"": 1}, DEEP,
)  # fmt: skip
BYTES = (b"", b"\xff", b"\0", b'"', b",", b"9" * 400, b"1e300", b"x" * 200_000)


def mutated(value: Any, rng: random.Random) -> Any:
    """Return the value with another one somewhere in it, or without a part of it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(VALUES)
    whole, keys = type(value)(value), [*value] if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    whole[key] = mutated(value[key], rng)
    if rng.random() < 0.1:
        del whole[key]
    return whole


def damaged(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(BYTES) + text[at + rng.randrange(3) :]


def try_one(folder: Path, rng: random.Random) -> None:
    """Make the run `b` of the folder, and look at it beside `a`."""
    record, depth = mutated(mutated(RECORD, rng), rng), rng.choice((40, 900, 100_000))
    text = json.dumps(record).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode()
    (folder / "b/run.json").write_bytes(damaged(text, rng) if rng.random() < 0.2 else text)
    (folder / "b/metrics.csv").write_bytes(damaged(METRICS, rng))
    runs = [str(folder / name) for name in "ab"]
    looks = (compare, runs), (list_runs, ["ls", str(folder)]), (list_runs, ["show", runs[1]])
    for command, given in looks:
        said, wrong = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            code = command.main(given)
        lines = wrong.getvalue().count("\n")
        assert (code, lines) in ((0, 0), (2, 1)), f"exit code {code}: {wrong.getvalue()[:1000]}"
    torch.save(mutated(CHECKPOINT, rng), folder / "b/last.ckpt")
    with contextlib.suppress(FolderError):
        assert type(RunFolder(folder / "b").checkpoint_step()) is int


def fuzz(seconds: float, seed: int) -> int:
    """Try inputs for so long, and return their number."""
    end, tried = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in "ab":
            (folder := Path(scratch) / name).mkdir()
            (folder / "config.yaml").touch()
            (folder / "run.json").write_text(json.dumps(RECORD))
        while time.monotonic() < end:
            try:
                try_one(Path(scratch), random.Random(seed + tried))
            except Exception:
                files = {
                    path.name: path.read_bytes()[:2000] for path in Path(scratch, "b").iterdir()
                }
                sys.stderr.write(f"--seed {seed + tried}: {files}\n")
                raise
            tried += 1
    return tried


def main() -> int:
    parser = argparse.ArgumentParser(description="Looks at mutated folders of runs.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.stdout.write(f"{fuzz(given.seconds, given.seed)} inputs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
