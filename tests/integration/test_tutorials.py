"""The cells of the notebooks in docs/tutorials run one after the other, as a reader runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BOOKS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_the_cells_of_a_tutorial_run(book: Path, tmp_path: Path) -> None:
    """In a process of their own, as a notebook's are."""
    cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in source for source in sources)
    program = tmp_path / f"{book.stem}.py"
    program.write_text("\n\n".join(sources), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(BOOKS) == 5
    for book in BOOKS:
        cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
        assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []
