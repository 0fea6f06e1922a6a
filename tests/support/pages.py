"""What a browser would make of a page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Its elements, their attributes, its text, the rows of its tables, and which rows are bold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("tr", "table"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._in_cell:
            self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def row(self, first: str) -> list[str]:
        """What stands behind it in its row."""
        return next(row[1:] for row in self.rows if row[:1] == [first])
