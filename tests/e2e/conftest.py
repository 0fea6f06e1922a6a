"""Small real runs: tiny JPEG pictures on disk, a YAML over them, and the CLI to run it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from support import elastic_programs

from perfect.train import main

HERE = Path(__file__).parent
CLASSES = ("blue", "green", "red")
WORDS = ("the", "cat", "dog", "saw", "a", "bird", "and", "sang", "in", "its", "tree", ".")


def write_pictures(root: Path, each: int, seed: int) -> None:
    """Noisy pictures whose strongest channel is their class."""
    rng = np.random.default_rng(seed)
    for channel, name in enumerate(CLASSES):
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 160, (12, 16, 3), dtype=np.uint8)
            pixels[..., 2 - channel] += 60
            Image.fromarray(pixels).save(folder / f"{number:03d}.jpg", quality=85, subsampling=0)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    write_pictures(root / "train", 24, seed=0)
    write_pictures(root / "val", 10, seed=1)
    return root


@pytest.fixture
def recipe(pictures: Path) -> dict[str, Any]:
    """60 training pictures in batches of 8; 46 + 16 steps."""
    return {
        "model": {"name": "pilot"},
        "data": {
            "name": "imagefolder", "root": str(pictures), "picture_size": 16, "holdout": 12,
        },
        "augment": [{"name": "flip"}],
        "loader": {"batch_size": 8, "buffer_batches": 2, "workers": 2},
        "phases": [
            {"name": "pretrain", "passes": 2, "reuse": 3, "ema": True,
             "lr": {"kind": "constant", "lr": 0.05, "warmup": 0.2}},
            {"name": "finetune", "passes": 2, "ema": True, "lr": {"kind": "linear", "lr": 0.05}},
        ],
        "ema": {"decay": 0.9},
        "trainer": {"accelerator": "cpu", "threads": 1, "validate_every": 1.0},
        "checkpoint": {"every_steps": 5},
    }  # fmt: skip


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(recipe: dict[str, Any], name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    return write


@pytest.fixture
def train(
    write_yaml: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> Callable[..., tuple[int, Path]]:
    """Runs the CLI in this process; returns its exit code and the run folder."""

    def run(recipe: dict[str, Any], *options: str, out: str = "run") -> tuple[int, Path]:
        folder = tmp_path / out
        code = main([str(write_yaml(recipe)), "--out", str(folder), *options])
        return code, folder

    return run


@pytest.fixture
def start(
    write_yaml: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> Callable[..., subprocess.Popen[str]]:
    """The real command in a process of its own."""

    def launch(recipe: dict[str, Any], out: str = "run") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "perfect.train", str(write_yaml(recipe))]
        command += ["--out", str(tmp_path / out)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    return launch


@pytest.fixture
def read_run() -> Callable[[Path], dict[str, Any]]:
    return lambda folder: json.loads((folder / "run.json").read_text())


@pytest.fixture
def outcome() -> Callable[[Path], dict[str, Any]]:
    """What two runs of the same configuration must agree on, however often they were stopped."""
    keys = (
        "status", "accuracy", "best_accuracy", "steps", "decoded_samples", "served_samples",
        "phases", "switches", "trace",
    )  # fmt: skip

    def read(folder: Path) -> dict[str, Any]:
        run = json.loads((folder / "run.json").read_text())
        return {key: run[key] for key in keys}

    return read


@pytest.fixture(scope="session")
def shares() -> dict[str, str]:
    """What `share` found already, by recipe."""
    return {}


@pytest.fixture
def share(
    train: Callable[..., tuple[int, Path]], shares: dict[str, str]
) -> Callable[[int, dict[str, Any]], str]:
    """`share(60, recipe)` is "60%" of what its step takes, or the first share above it in which
    the step fits: the CPU decides how much scratch a convolution needs."""

    def find(percent: int, recipe: dict[str, Any]) -> str:
        key = yaml.safe_dump([percent, recipe])
        tries = (f"{tried}%" for tried in range(percent, 101, 5))
        if key not in shares:
            shares[key] = next(
                budget
                for budget in tries
                if train(recipe | {"offload": {"budget": budget}}, "--check", out="check")[0] == 0
            )
        return shares[key]

    return find


@pytest.fixture(scope="module")
def nursery() -> Iterator[Any]:
    """Forks the programs of a swarm. It imports for seconds, once."""
    from benchmarks.swarms.swarm import Nursery

    with Nursery(str(HERE.parent / "support" / "program_nursery.py")) as nursery:
        yield nursery


@pytest.fixture
def programs(nursery: Any, tmp_path: Path) -> Iterator[Any]:
    found = elastic_programs.Programs(nursery, tmp_path)
    yield found
    for process in found.begun:
        process.kill()
    for process in found.begun:
        process.wait()


@pytest.fixture
def swarm_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    """60 pictures, 8 lanes of 2: 12 steps a pass of 3 serves, 4 steps a fresh pass."""
    return recipe | {
        "loader": {"batch_size": 16, "buffer_batches": 2, "workers": 1},
        "phases": [
            {"name": "pretrain", "passes": 3, "reuse": 3, "ema": True,
             "lr": {"kind": "constant", "lr": 0.05, "warmup": 0.2}},
            {"name": "finetune", "passes": 3, "ema": True, "lr": {"kind": "linear", "lr": 0.05}},
        ],
        "elastic": {"secret_file": "secret", "lanes": 8},
    }  # fmt: skip


@pytest.fixture
def beside_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes where the swarm's secret file is."""
    (tmp_path / "secret").write_text("0123456789abcdef" * 2)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a few words, each told by the one before it; bytes and no merges but two."""
    root = tmp_path_factory.mktemp("text")
    (root / "wikitext-2").mkdir()
    (root / "gpt2_bpe").mkdir()
    rng = np.random.default_rng(0)
    for part, words in (("train", 12_000), ("valid", 1_500), ("test", 1_500)):
        said, now = [], 0
        for _ in range(words):
            now = (now * 5 + 1 + int(rng.random() < 0.1)) % len(WORDS)
            said.append(WORDS[now])
        (root / "wikitext-2" / f"wiki.{part}.tokens").write_text(" ".join(said))
    visible = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters = [*visible, *(chr(256 + n) for n in range(256 - len(visible)))]
    tokens = [*letters, "th", "the"]
    (root / "gpt2_bpe" / "encoder.json").write_text(
        json.dumps({token: n for n, token in enumerate(tokens)})
    )
    (root / "gpt2_bpe" / "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    return root
