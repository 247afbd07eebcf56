"""A run to read without Jupyter and without a network: a page for each notebook, and a first page.

nbconvert turns the notebooks into HTML. The frame is our own: nbconvert's loads scripts and fonts
from other addresses, and is wider than a phone.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# What is too wide for the screen scrolls inside its own box, never the page.
PAGE_STYLE = """
body { margin: 0 auto; max-width: 54rem; padding: 1rem; color: #1a1a1a; background: #fff;
       font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.25; }
a { color: #0b5394; }
img { display: block; max-width: 100%; height: auto; }
pre, code { font-family: ui-monospace, Consolas, monospace; font-size: .85rem;
            overflow-wrap: normal; }
p code, li code, td code { overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem; overflow-x: auto; white-space: pre; }
.input_area, .highlight { background: #f5f5f5; }
.highlight pre { line-height: 1.4; }
.cell { margin: 1rem 0; }
.output_area { margin: .5rem 0; overflow-x: auto; }
table { display: block; overflow-x: auto; width: max-content; max-width: 100%;
        border-collapse: collapse; overflow-wrap: normal; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #d0d0d0; }
figure { margin: 1rem 0; }
figcaption { font-size: .85rem; color: #444; }
.problem { color: #a61c00; }
"""
BADGES_TAG = "badges"  # on the cell whose pictures come from other addresses


def write_pages(
    runs: Path,
    names: Sequence[str],
    *,
    results: str,
    about: str,
    problems: Mapping[str, str] | None = None,
) -> Path:
    """Leave a page for each executed notebook of a folder, and index.html before them; its path.

    names: the notebooks, without ".ipynb"; one that left no file is only listed. results: the
    table of results as HTML. about: the machine and the profile. problems: by name, what kept a
    notebook from its results.
    """
    executed = {name: runs / f"{name}.ipynb" for name in names}
    notebooks = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in executed.items()
        if path.exists()
    }
    for name, notebook in notebooks.items():
        back = '<p><a href="index.html">All results</a></p>'
        body = f"{back}\n{_notebook_body(notebook, set(notebooks))}\n{back}"
        page = _page(_title(notebook, name), body, _code_colours())
        (runs / f"{name}.html").write_text(page, encoding="utf-8")
    sections = [
        "<h1>Train models that are bigger than your GPU: results</h1>",
        f"<p>{html.escape(about)}</p>",
        "<h2>All results</h2>",
        results,
    ]
    for name in names:
        sections += _section(name, notebooks.get(name), (problems or {}).get(name))
    index = runs / "index.html"
    index.write_text(_page("Results", "\n".join(sections)), encoding="utf-8")
    return index


def _section(name: str, notebook: Mapping[str, Any] | None, problem: str | None) -> Iterator[str]:
    """A notebook on the first page: its title, which is the link to its page, and its figures."""
    if notebook is None:
        yield f"<h2>{html.escape(name)}</h2>"
    else:
        title = html.escape(_title(notebook, name))
        yield f'<h2><a href="{name}.html">{title}</a></h2>'
    if problem is not None:
        yield f'<p class="problem">Failed: {html.escape(problem)}</p>'
    for cell in [] if notebook is None else notebook["cells"]:
        for output in cell.get("outputs", ()):
            alt = output.get("metadata", {}).get("image/png", {}).get("alt")
            if alt:
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                yield (
                    f'<figure><img src="data:image/png;base64,{picture}" alt="{html.escape(alt)}">'
                    f"<figcaption>{html.escape(alt)}</figcaption></figure>"
                )


def _notebook_body(notebook: Mapping[str, Any], pages: set[str]) -> str:
    """The cells as HTML; links to notebooks lead to their pages, or to the notebooks folder."""
    import nbformat  # with nbconvert a second, which other commands do without
    from nbconvert import HTMLExporter

    kept = [c for c in notebook["cells"] if BADGES_TAG not in c["metadata"].get("tags", ())]
    exporter = HTMLExporter(
        template_name="basic",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    whole = nbformat.reads(json.dumps({**notebook, "cells": kept}), as_version=4)
    body, _ = exporter.from_notebook_node(whole)

    def page_of(link: re.Match) -> str:
        name = link[1]
        return f'href="{name}.html' if name in pages else f'href="../notebooks/{name}.ipynb'

    return re.sub(r'href="(?:\./)?(\d\d_\w+)\.ipynb', page_of, body)


def _title(notebook: Mapping[str, Any], name: str) -> str:
    first = "".join(notebook["cells"][0]["source"]) if notebook["cells"] else ""
    heading = re.match(r"#\s+(.+)", first)
    return heading[1].strip() if heading else name


def _page(title: str, body: str, more_style: str = "") -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{PAGE_STYLE}{more_style}</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _code_colours() -> str:
    from pygments.formatters import HtmlFormatter  # nbconvert brings it

    return HtmlFormatter(style="default").get_style_defs(".highlight")
