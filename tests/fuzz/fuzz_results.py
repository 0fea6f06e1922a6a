"""Mutates the records of a run and of its checkpoint, and looks at them with the commands.

    cd tests; python -m fuzz.fuzz_results --seconds 60 --seed 0

A command may refuse a folder, in one line and with exit code 2. Anything else ends the program with
exit code 1, after the seed of that input and the input.
"""

import contextlib
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support.fuzzing import TryOne, damaged, deepened, main, mutated

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


def try_one(folder: Path, rng: random.Random) -> None:
    """Make the run `b` of the folder, and look at it beside `a`."""
    text = deepened(json.dumps(mutated(mutated(RECORD, rng), rng)), rng)
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


@contextlib.contextmanager
def fuzzer() -> Iterator[TryOne]:
    """Give what tries one input, in a folder with two runs."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in "ab":
            (folder := Path(scratch) / name).mkdir()
            (folder / "config.yaml").touch()
            (folder / "run.json").write_text(json.dumps(RECORD))

        def try_noted(rng: random.Random) -> None:
            try:
                try_one(Path(scratch), rng)
            except Exception as error:
                files = {one.name: one.read_bytes()[:2000] for one in Path(scratch, "b").iterdir()}
                error.add_note(str(files))
                raise

        yield try_noted


if __name__ == "__main__":
    sys.exit(main(__doc__, fuzzer))
