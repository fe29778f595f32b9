"""The structure of a page, as a browser would read it."""

from html.parser import HTMLParser


class Outline(HTMLParser):
    """Collects tags with their attributes and titles of sections, and demands that tags are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "wbr"})

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)
