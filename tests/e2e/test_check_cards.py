"""`perfect-train --check --device`: what a run would need of cards that are not here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload.estimating.card import CARDS

Recipe = dict[str, Any]
Train = Callable[..., tuple[int, Path]]
LLAMA = Path(__file__).parents[2] / "configs" / "llama" / "tiny.yaml"


def test_the_table_is_narrow_and_the_folder_is_not_made(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(recipe, "--check", "--device", "rtx4090, a100-80")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and not folder.exists()
    assert max(map(len, lines)) <= 40
    assert any(line.startswith("rtx4090    whole     ≥") for line in lines)
    assert any(line.startswith("data: ") for line in lines)


def test_a_program_reads_the_figures_of_the_largest_batch(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["phases"][1]["batch_size"] = 16
    code, _ = train(recipe, "--check", "--device", "l4", "--json")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    read = json.loads(shown.out)
    assert read["title"].endswith("batches of 16")
    [card] = read["cards"]
    assert card["is_lower_bound"] and card["whole_bytes"] > card["context_bytes"]


def test_files_of_weights_are_not_read(
    recipe: Recipe, train: Train, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load(LLAMA.read_text()) | {"offload": {"budget": "50%"}}
    recipe["data"] |= {"root": str(text), "vocabulary": 258, "evaluation_samples": 8}
    recipe["model"] |= {"weights": "/there/is/none"}
    assert train(recipe, "--check")[0] == 2
    code, _ = train(recipe, "--check", "--device", "h200", "--price", "h200=3.5")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "cheapest: h200" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    "options, why",
    [
        (["--check", "--device", "rtx409"], "Did you mean rtx4090?"),
        (["--check", "--device", ","], "--device names no card"),
        (["--device", "l4"], "give --check, too"),
        (["--check", "--hours", "3"], "give --check --device NAMES, too"),
        (["--check", "--device", "l4", "--steps", "0"], "must be above 0"),
        (["--check", "--device", "l4", "--price", "l4"], "give NAME=DOLLARS"),
        (["--check", "--device", "l4", "--price", "l4=1"], "measure"),
        (["--check", "--device", "l4", "--price", "h200=1"], "the cards asked for are l4"),
    ],
)
def test_wrong_options_are_refused_by_name(
    options: list[str], why: str, recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train(recipe, *options)
    assert code == 2 and not folder.exists()
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_torn_card_file_is_refused(
    recipe: Recipe, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.json"
    torn.write_text((CARDS / "l4.json").read_text()[:200])
    assert train(recipe, "--check", "--device", str(torn))[0] == 2
    assert "torn.json" in capsys.readouterr().err
