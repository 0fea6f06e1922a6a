"""The cells of the notebooks in docs/tutorials run one after the other, as a reader runs them."""

import json
from pathlib import Path

import pytest

BOOKS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_the_cells_of_a_tutorial_run(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in source for source in sources)
    given: dict[str, object] = {"__name__": book.stem}
    for number, source in enumerate(sources):
        exec(compile(source, f"{book.name}, code cell {number}", "exec"), given)


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(BOOKS) == 4
    for book in BOOKS:
        cells = json.loads(book.read_text(encoding="utf-8"))["cells"]
        assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []
