"""The pages of a run: all that is needed is in them, and they ask nobody for anything."""

import html.parser
import re
from pathlib import Path

import nbformat
import pytest

from helpers.pages import write_pages

ROOT = Path(__file__).parent.parent
# One transparent pixel.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)
CODE = "x = '<b>' + \"&\"  # " + "long " * 40 + "\nprint(x)"


def code_cell(source, *outputs):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=1)


def output(**data):
    kinds = {"png": "image/png", "html": "text/html", "markdown": "text/markdown"}
    metadata = {"image/png": {"alt": 'Peak <12> & "more"'}} if "png" in data else {}
    data = {kinds[kind]: content for kind, content in data.items()}
    return nbformat.v4.new_output("display_data", {**data, "text/plain": "?"}, metadata=metadata)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    badge = "[![Open in Colab](https://example.org/badge.svg)](https://example.org)"
    cells = [
        nbformat.v4.new_markdown_cell(
            "# 1 · First\nSee [the next](02_b.ipynb#Part) and [3](03_c.ipynb)"
        ),
        nbformat.v4.new_markdown_cell(badge, metadata={"tags": ["badges"]}),
        nbformat.v4.new_markdown_cell("## Part\n[Article](https://example.org/article)"),
        code_cell(CODE, nbformat.v4.new_output("stream", text="<b>&\n")),
        code_cell("table", output(html="<table><tr><td>1,938</td></tr></table>")),
        code_cell("source", output(markdown="````python\ndef seen():\n    ...\n````")),
        code_cell("figure", output(png=PNG)),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "01_a.ipynb")
    second = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("No title.")])
    nbformat.write(second, folder / "02_b.ipynb")
    write_pages(
        folder,
        ["01_a", "02_b", "04_died"],
        results="<table><tr><td>48.09</td></tr></table>",
        about="A machine & more.",
        problems={"04_died": "code cell 2 (`<x>`): the kernel died"},
    )
    return folder


class Reader(html.parser.HTMLParser):
    """All tags of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.styles, self.inside = [], "", "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_data(self, data):
        if self.inside == "style":
            self.styles += data
        else:
            self.text += data

    def handle_endtag(self, tag):
        self.inside = ""

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


PAGES = pytest.mark.parametrize("name", ["index", "01_a", "02_b"])


@PAGES
def test_a_page_asks_nobody(runs, name):
    page = Reader(runs / f"{name}.html")
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {t for t, _ in page.tags}
    for tag, attributes in page.tags:
        for key, value in attributes.items():
            if key in ("src", "srcset", "poster", "data", "background", "action"):
                assert value.startswith("data:image/png;base64,"), (tag, key, value[:80])
            assert not key.startswith("on") and (key != "style" or "url(" not in value)
    assert page.styles and "@import" not in page.styles and "url(" not in page.styles


@PAGES
def test_a_page_suits_a_phone(runs, name):
    page = Reader(runs / f"{name}.html")
    (viewport,) = (meta for meta in page.all("meta") if meta.get("name") == "viewport")
    assert viewport["content"].startswith("width=device-width")
    assert page.all("html") == [{"lang": "en"}]


@PAGES
def test_links_lead_somewhere(runs, name):
    for link in Reader(runs / f"{name}.html").all("a"):
        target = link["href"].partition("#")[0]
        outside = target.startswith(("https://", "../notebooks/"))
        assert outside or (runs / target).exists(), target


def test_everything_is_there(runs):
    page = Reader(runs / "01_a.html")
    assert CODE in page.text and "<b>&\n" in page.text
    assert "def seen():" in page.text and "1,938" in page.text
    assert "badge" not in (runs / "01_a.html").read_text()
    (picture,) = page.all("img")
    assert picture["alt"] == 'Peak <12> & "more"' and picture["src"].endswith(PNG)
    links = [link["href"] for link in page.all("a")]
    assert "02_b.html#Part" in links and "../notebooks/03_c.ipynb" in links


def test_the_first_page(runs):
    page = Reader(runs / "index.html")
    links = [link["href"] for link in page.all("a")]
    assert links == ["01_a.html", "02_b.html"]
    for text in ("48.09", "A machine & more.", "1 · First", "02_b", "(`<x>`): the kernel died"):
        assert text in page.text
    (picture,) = page.all("img")
    assert picture["alt"] == 'Peak <12> & "more"'


def test_code_of_every_notebook_is_whole(tmp_path):
    names = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for name in names:
        (tmp_path / f"{name}.ipynb").write_bytes(
            (ROOT / "notebooks" / f"{name}.ipynb").read_bytes()
        )
    write_pages(tmp_path, names, results="", about="")
    for name in names:
        page = Reader(tmp_path / f"{name}.html")
        assert [tag for tag, a in page.tags if tag == "script" or "http" in a.get("src", "")] == []
        for cell in nbformat.read(tmp_path / f"{name}.ipynb", 4).cells:
            if cell.cell_type == "code":
                assert cell.source.strip() in page.text
            else:
                heading = re.match(r"#+ (.+)", cell.source)
                assert heading is None or heading[1].replace("`", "") in page.text
