"""docs/reference/loader.md has every argument of the loader's classes, with its default."""

import inspect
import re
from pathlib import Path

import pytest

from loaders import Cache, ReuseLoader, Workers

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "loader.md"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ?(.*?) \| .+ \|$", re.MULTILINE)


def written(heading: str) -> dict[str, str]:
    section = re.split(r"\n##+ ", PAGE.read_text(encoding="utf-8").split(f"# {heading}\n")[1])[0]
    return {
        name.strip("`"): default.strip("`").replace('"', "'")
        for names, default in ROW.findall(section)
        for name in names.split(", ")
    }


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("Every argument", ReuseLoader), ("Workers", Workers), ("Cache", Cache)],
)
def test_the_page_has_every_argument_with_its_default(heading: str, kind: type) -> None:
    parameters = inspect.signature(kind).parameters.values()
    meant = {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}
    assert written(heading) == meant
