"""The hook of mkdocs.yml: pages that are generated, and links that leave docs/.

A notebook of docs/tutorials becomes a page; docs_reference.py writes the pages of the reference,
which are stubs in a checkout. A result page of benchmarks/results becomes a page of the site, and
any other file that a page links to is copied into the site.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
ELSEWHERE = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the results, and each file that a page links to."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    import docs_reference

    books = {f"tutorials/{book.stem}.md": page_of(book) for book in DOCS.rglob("*.ipynb")}
    for path, text in (books | docs_reference.pages()).items():
        if (stub := files.get_file_from_path(path)) is not None:
            files.remove(stub)
        files.append(File.generated(config, path, content=text))
    results = sorted(RESULTS.glob("*.md"))
    for page in results:
        files.append(File.generated(config, site_path(page), abs_src_path=str(page)))
    for target in {t for page in (*DOCS.rglob("*.md"), *results) for t in targets(page)}:
        if target.is_file() and files.get_file_from_path(site_path(target)) is None:
            files.append(File.generated(config, site_path(target), abs_src_path=str(target)))
    return files


def site_path(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix().replace(".ipynb", ".md")
    if path.is_relative_to(RESULTS):
        return "results/" + path.relative_to(RESULTS).as_posix()
    return "source/" + path.relative_to(ROOT).as_posix() + ".txt" * (path.suffix == ".md")


def targets(page: Path) -> Iterator[Path]:
    for _, _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in link:
            yield Path(os.path.normpath(page.parent / link))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to where their targets lie in the site; a folder's link becomes its name."""
    source = page.file.abs_src_path
    if source is None or not Path(source).is_relative_to(ROOT):
        return markdown

    def moved(match: re.Match[str]) -> str:
        mark, text, link, anchor = match.groups()
        target = Path(os.path.normpath(Path(source).parent / link))
        if "://" in link or not target.exists():
            return match[0]
        if target.is_dir():
            return text
        place = os.path.relpath(site_path(target), os.path.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({place}{anchor or ''})"

    return LINK.sub(moved, markdown).replace("][", "]\\[")  # no page has links by reference


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page or a style sheet would load anything from another host."""
    for file in Path(config.site_dir).rglob("*"):
        if file.suffix in (".html", ".css") and (
            found := ELSEWHERE.search(file.read_text(encoding="utf-8"))
        ):
            raise PluginError(f"{file} loads from another host: {found[0]}")


def page_of(notebook: Path) -> str:
    """A notebook as Markdown. Notebooks are kept without outputs."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts.append(f"This page is the notebook `docs/tutorials/{notebook.name}`; CI runs its cells.")
    return "\n\n".join(parts)
