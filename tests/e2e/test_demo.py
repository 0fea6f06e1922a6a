"""`make demo`: each promise on few pictures, and what is said of one that does not hold."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers import OffloadStrategy

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
SMALL = """
import sys
from pathlib import Path
from runpy import run_path
demo, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(demo), str(demo.parent)]
import make_pictures
make_pictures.photo = make_pictures.sketch  # small pictures
make_pictures.make(folder / "pictures", train=24, val=4)
import equal_decodes, four_rates, killed, too_large
run = run_path(str(demo / "__main__.py"))
begin, end, show = (run[name] for name in ("begin", "end", "show"))
made = [
    end(begin(promise, folder / promise.__name__, *more))
    for promise, more in (
        (equal_decodes, (folder / "pictures",)),
        (too_large, ()),
        (killed, (folder / "pictures",)),
        (four_rates, (folder / "pictures", 40, 20)),
    )
]
sys.exit(show(made, folder / "index.html"))
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo's modules, by name."""
    monkeypatch.syspath_prepend(str(DEMO))
    names = "children", "equal_decodes", "four_rates", "front_page", "killed", "too_large"
    found = {name: importlib.import_module(name) for name in names}
    path = DEMO / "__main__.py"
    spec = importlib.util.spec_from_file_location("demo_main", path)
    assert spec and spec.loader
    found["main"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found["main"])
    return SimpleNamespace(**found)


def test_a_planned_step_runs_before_the_limit_so_that_nothing_is_compiled_below_it(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs: list[tuple[Any, int | None]] = []

    class NotedChild:
        def __init__(self, log: Path, work: Any, strategy: Any, limit: int | None, samples: int):
            runs.append((strategy, limit))

        def result(self) -> list[float]:
            return [1.0]

    monkeypatch.setattr(demo.too_large, "Child", NotedChild)
    demo.too_large.run(tmp_path)
    planned = [limit for strategy, limit in runs if isinstance(strategy, OffloadStrategy)]
    assert planned[0] is None and planned[-1] is not None


def test_every_promise_is_run_and_the_page_has_them_all(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL, str(DEMO), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    said = ended.stdout.splitlines()
    assert len(said) == 5, ended.stderr
    assert ended.returncode == ("FAILED" in ended.stdout)
    decodes, fits, killed, rates, page = said
    assert "after 1,200 decodes" in decodes and "after 3,000" in decodes
    assert fits.startswith("held") and "bit for bit" in fits and "ends: RuntimeError" in fits
    assert killed.startswith("held") and "tensors of the last checkpoint equal" in killed
    assert "with the weights of a run by itself" in rates
    text = Path(page.split(maxsplit=1)[1]).read_text()
    assert text.count("<figure") == 2 and text.count("<h2>") == 4


def test_a_promise_that_does_not_hold_is_said_to_have_failed(
    demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = demo.front_page.Outcome("one", "ours", "other", held=True)
    dies = SimpleNamespace(PROMISE="two", run=lambda folder: 1 / 0)
    failed = demo.main.end(demo.main.begin(dies, tmp_path / "two"))
    assert not failed.held and (tmp_path / "two" / "log.txt").exists()
    page = tmp_path / "index.html"
    assert demo.main.show([held, held], page) == 0
    assert "2 of 2 promises held" in page.read_text() and "FAILED<" not in page.read_text()
    assert demo.main.show([held, failed], page) == 1
    assert "1 of 2 promises held" in page.read_text() and "FAILED<" in page.read_text()
    assert "FAILED  two: a process returned nothing" in capsys.readouterr().out
