"""README.md and docs/: every path, link and import that they show is there."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import docs_reference
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "README.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    RESULTS,
    *sorted((ROOT / "docs").rglob("*.md")),
]
TOPS = ("benchmarks", "configs", "docs", "examples", "loaders", "offload", "perfect", "scripts")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join((*TOPS, 'tests', 'trainers'))})/[\w./+*-]*[\w*]")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("perfect", "trainers", "loaders", "offload")
EXTRA = re.compile(r"\bperfect[\w-]*\[[a-z]+\]")
HERE = re.compile(r"pip install '\.\[([a-z]+)\]")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
DOTTED = re.compile(r"`[^`\n]*?\b((?:offload|loaders|perfect|trainers)(?:\.[A-Za-z_]\w*)+)")
FILES = ("md", "yaml", "py", "png")
NUMBER = re.compile(r"(\d{4})-[\w-]+\.md")


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as GitHub makes it."""
    heads = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    assert {p for p in PATH.findall(LINK.sub("]", text(page))) if not any(ROOT.glob(p))} == set()


def cells(row: str) -> int:
    """The cells of a table's row; a pipe in code is none of its borders."""
    return re.sub(r"`[^`]*`", "", row).replace(r"\|", "").count("|") - 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    tables = [table.splitlines() for table in TABLE.findall(text(page))]
    assert all(set(rule) <= set("|-: ") for _, rule, *_ in tables)
    assert [row for head, *rows in tables for row in rows if cells(row) != cells(head)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(text(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def shown_imports() -> list[tuple[str, str]]:
    """(page, statement) of every import in a python block, each statement once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in CODE.findall(text(page)):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    found.setdefault(ast.unparse(node), name(page))
    return [(page, statement) for statement, page in found.items()]


@pytest.mark.parametrize(("page", "statement"), shown_imports())
def test_every_import_that_a_page_shows_works(page: str, statement: str) -> None:
    (node,) = ast.parse(statement).body
    if isinstance(node, ast.Import):
        for alias in node.names:
            importlib.import_module(alias.name)
        return
    assert isinstance(node, ast.ImportFrom) and node.module
    module = importlib.import_module(node.module)
    assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize(
    "promised",
    [
        "from perfect import LoaderCallback, ReuseLoader",
        "from perfect import Phase, PhaseSwitch, ReuseLoader, Schedule",
        "from perfect import OffloadStrategy",
        "from trainers import OffloadStrategy",
        "from loaders import ReuseLoader",
        "from loaders.augment import Chain, Flip, RandomResizedCrop",
        "from loaders.backends import open_source",
        "import offload",
    ],
)
def test_a_public_import_is_still_shown(promised: str) -> None:
    assert promised in {statement for _, statement in shown_imports()}


def attributes_shown(module: str) -> set[tuple[str, str]]:
    """(page, name) of every `module.name` in a page's python blocks."""
    return {
        (name(page), node.attr)
        for page in PAGES
        for block in CODE.findall(text(page))
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == module
    }


def test_what_the_pages_call_of_offload_is_public() -> None:
    import offload

    shown = attributes_shown("offload")
    assert {"capture", "plan", "Runner", "within"} <= {attribute for _, attribute in shown}
    assert {attribute for _, attribute in shown} <= set(offload.__all__)


def resolves(dotted: str) -> bool:
    module, *rest = dotted.split(".")
    found = importlib.import_module(module)
    for i, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join((module, *rest[: i + 1])))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_every_dotted_name_of_ours_is_there() -> None:
    found = {
        (name(page), dotted)
        for page in PAGES
        for dotted in DOTTED.findall(text(page))
        if dotted.rsplit(".", 1)[1] not in FILES
    }
    assert len(found) > 10
    assert {(page, dotted) for page, dotted in found if not resolves(dotted)} == set()


@pytest.mark.parametrize("command", ["python -m perfect.train", "python -m perfect.compare"])
def test_a_promised_command_is_shown_and_has_a_main(command: str) -> None:
    assert any(command in text(page) for page in PAGES)
    assert callable(importlib.import_module(command.split()[-1]).main)


def test_the_promised_scripts_are_shown_and_installed() -> None:
    scripts = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]["scripts"]
    assert set(scripts) == {
        "perfect-anchor", "perfect-card", "perfect-compare", "perfect-replay", "perfect-runs",
        "perfect-step", "perfect-train",
    }  # fmt: skip
    assert all(script in text(ROOT / "README.md") for script in scripts)
    assert "python -m loaders.convert" in text(ROOT / "docs" / "backends.md")


def test_every_extra_is_told_and_every_extra_that_is_told_is_one() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    extras = set(project["optional-dependencies"])
    assert {
        extra for extra in extras if f"`{extra}`" not in text(ROOT / "docs" / "index.md")
    } == set()
    sources = [file for top in PACKAGES for file in (ROOT / top).rglob("*.py")]
    told = {found for file in (*PAGES, *sources) for found in EXTRA.findall(text(file))}
    assert told == set()  # it is not published: `pip install '.[dali]'`
    told_here = {found for file in (*PAGES, *sources) for found in HERE.findall(text(file))}
    assert {"dali", "ffcv", "remote"} <= told_here <= extras


def test_the_tree_has_every_folder_of_every_package() -> None:
    page = text(ROOT / "docs" / "architecture.md").split("## The tree")[1]
    tree = page.split("```")[1]
    folders = {file.parent.name for p in PACKAGES for file in (ROOT / p).rglob("__init__.py")}
    assert {folder for folder in folders if not re.search(rf"\b{folder}/", tree)} == set()


def test_every_decision_is_listed_and_every_gap_is_explained() -> None:
    folder = ROOT / "docs" / "decisions"
    listing = text(folder / "README.md")
    files = {match[1]: match[0] for p in folder.iterdir() if (match := NUMBER.match(p.name))}
    assert all(f"]({file})" in listing for file in files.values())
    numbers = {int(n) for n in files}
    gaps = {f"{n:04}" for n in range(1, max(numbers)) if n not in numbers}
    [explained] = re.findall(
        r"^Numbers that were never used: .*?\n\n", listing, re.DOTALL | re.MULTILINE
    )
    assert gaps == set(re.findall(r"\b\d{4}\b(?=[,.])", explained))


def test_every_configuration_of_a_figure_and_every_control_has_a_row() -> None:
    page = text(ROOT / "docs" / "reproduction.md")
    folders = [ROOT / "configs" / top for top in ("cifar10", "imagenet")]
    found = [file.stem for folder in folders for file in folder.iterdir()]
    figures = {f"`{name.split('_')[0]}_" for name in found if name.startswith("fig")}
    controls = {f"{name}`" for name in found if name.startswith("control")}
    section = page.split("## The figures")[1].split("\n## ")[0].replace("imagenet/", "")
    assert {name for name in figures if name not in section} == set()
    assert {name for name in controls if name not in page} == set()


def test_every_key_of_a_yaml_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    page = docs_reference.yaml_page()
    assert "| `eta` | whole number >= 2 | `3` | The best 1/eta of the jobs go on. |" in page
    assert "| `verify` | true or false | `true` | Each plan is proved free of races" in page
    monkeypatch.setattr(docs_reference, "key_notes", lambda model: {"seed": "A number."})
    with pytest.raises(RuntimeError, match=r"RunConfig\.model has no meaning"):
        docs_reference.yaml_page()


def test_each_point_of_the_security_page_has_a_test_that_exists() -> None:
    points = text(ROOT / "docs" / "security.md").split("\n- ")[1:]
    assert len(points) > 10
    for point in points:
        found = re.findall(r"<!-- (\S+)::(\w+) -->", point)
        assert found, point
        for file, test in found:
            assert f"def {test}(" in text(ROOT / "tests" / file), (file, test)
