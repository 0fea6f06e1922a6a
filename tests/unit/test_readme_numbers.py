"""README: each number is that of a result file, and it stays short."""

from pathlib import Path

import pytest
import readme_numbers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_number_of_readme_is_that_of_its_file() -> None:
    assert readme_numbers.corrected(TEXT) == (TEXT, [])


def test_readme_fits_on_a_screen_or_two() -> None:
    assert len(TEXT.splitlines()) <= 90


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("9,002<!--", "9,003<!--", "9,003 is 9,002 in 2026-11-22_gpu_peers.md"),
        ("0.735<!--", "0.736<!--", "0.736 is 0.735"),
        ("[-0.39<!--", "[-0.38<!--", "-0.38 is -0.39"),
        ("2.16<!--", "2.15<!--", "2.15 is 2.16 in pyproject.toml"),
        ("Limits\n", "Limits of 12\n", "12 has no source"),
        ("> device MiB", "> device bytes", "leads to no number"),
    ],
)
def test_a_changed_digit_and_a_number_without_a_source_are_found(
    right: str, wrong: str, said: str
) -> None:
    assert right in TEXT
    written, found = readme_numbers.corrected(TEXT.replace(right, wrong, 1))
    assert len(found) == 1 and said in found[0]
    assert (written == TEXT) == (" is " in found[0])


def test_the_promises_are_taken_from_what_the_demo_printed(tmp_path: Path) -> None:
    log = tmp_path / "demo.txt"
    line = "held    kill -9: 85 of 85 tensors (equal). Otherwise: begin anew"
    log.write_text(f"  12 s  kill -9: trains\n{line}\npage    index.html\n", encoding="utf-8")
    told = readme_numbers.promises_of(log)
    assert told.pop("measured") and told == {
        "kill -9": {
            "ours": "85 of 85 tensors (equal)", "otherwise": "begin anew", "verdict": "held",
        }
    }  # fmt: skip
