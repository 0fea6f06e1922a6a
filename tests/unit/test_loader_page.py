"""docs/reference/loader.md has every argument of `ReuseLoader`, in order, with its default."""

import inspect
import re
from pathlib import Path

from loaders import ReuseLoader

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "loader.md"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ?(.*?) \| .+ \|$", re.MULTILINE)


def written() -> dict[str, str]:
    section = PAGE.read_text(encoding="utf-8").split("## Every argument")[1].split("\n## ")[0]
    return {
        name.strip("`"): default.strip("`").replace('"', "'")
        for names, default in ROW.findall(section)
        for name in names.split(", ")
    }


def meant() -> dict[str, str]:
    parameters = inspect.signature(ReuseLoader).parameters.values()
    return {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}


def test_the_page_has_every_argument_with_its_default() -> None:
    assert written() == meant()
