"""Committed outputs: what makes them stale, what is executed, what may not be in them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from helpers.__main__ import main
from helpers.publish import (
    changed_cells,
    execute,
    imported_helpers,
    notebook_fingerprint,
    read_notebook,
    refresh,
    unfit_outputs,
    why_stale,
    write_notebook,
)

ROOT = Path(__file__).parent.parent
SOURCES = {
    "value": "X = 1\nX",
    "empty": "",
    "profile": "import os\nfrom pathlib import Path\nfrom helpers.execute import find_notebooks\n"
    "_ = Path(os.environ['TUTORIAL_RUNS'], 'a.csv').write_text('1')\n"
    "os.environ['TUTORIAL_PROFILE']",
}


@pytest.fixture
def package(tmp_path):
    """A made-up package: a imports b inside a function, c stands alone."""
    folder = tmp_path / "helpers"
    folder.mkdir()
    (folder / "a.py").write_text("def f():\n    from helpers.b import g\n    return g\n")
    (folder / "b.py").write_text("g = 1\n")
    (folder / "c.py").write_text("h = 1\n")
    return folder


@pytest.fixture
def make(tmp_path):
    """Write a notebook, given its code cells by their ids; those called clock… get the tag."""

    def write(sources, name="01_small"):
        cells = [nbformat.v4.new_markdown_cell("# Small\nText.", id="title")]
        for key, source in sources.items():
            tags = {"tags": ["clock"]} if key.startswith("clock") else {}
            cells.append(nbformat.v4.new_code_cell(source, id=key, metadata=tags))
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
        write_notebook(read_notebook(path), path)
        return path

    return write


def cell(notebook, key):
    return next(cell for cell in notebook["cells"] if cell["id"] == key)


# --- Staleness -----------------------------------------------------------------------------


def test_imports_are_followed(package):
    assert imported_helpers("from helpers.a import f", package) == {"a", "b"}
    assert imported_helpers("script = 'import helpers.c'\nimport torch", package) == {"c"}
    # Judged by Python itself, on the real package.
    code = "import sys\nfrom helpers.publish import refresh\nprint(*sys.modules)"
    loaded = {name.split(".")[1] for name in run(code).split() if name.startswith("helpers.")}
    assert "execute" in loaded
    assert loaded <= imported_helpers("from helpers.publish import refresh", ROOT / "helpers")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def executed(make, package, sources=None):
    """A notebook that looks executed, with its fingerprint."""
    path = make(sources or {"first": "from helpers.a import f", "second": "1 + 1"})
    notebook = read_notebook(path)
    for number, key in enumerate(("first", "second"), start=1):
        cell(notebook, key)["execution_count"] = number
    notebook["metadata"]["tutorial"] = notebook_fingerprint(notebook, package)
    return notebook


def test_nothing_changed(make, package):
    assert why_stale(executed(make, package), package) is None


def test_text_does_not_make_it_stale(make, package):
    notebook = executed(make, package)
    cell(notebook, "title")["source"] = ["# Other"]
    cell(notebook, "second")["metadata"]["tags"] = ["clock"]
    (package / "c.py").write_text("h = 2\n")
    assert why_stale(notebook, package) is None


@pytest.mark.parametrize("module", ["a", "b"])
def test_a_comment_in_a_helper_makes_it_stale(make, package, module):
    notebook = executed(make, package)
    with open(package / f"{module}.py", "a") as file:
        file.write("# a comment\n")
    assert why_stale(notebook, package) == f"changed: helpers.{module}"


def test_a_comment_in_a_cell_makes_it_stale(make, package):
    notebook = executed(make, package)
    cell(notebook, "second")["source"] = ["1 + 1  # two"]
    assert why_stale(notebook, package) == "its code has changed"


def test_a_helper_that_came_or_went_makes_it_stale(make, package):
    notebook = executed(make, package)
    (package / "b.py").write_text("from helpers.c import h\n")
    assert why_stale(notebook, package) == "changed: helpers.b, helpers.c"
    cell(notebook, "first")["source"] = ["from helpers.no_such import f"]
    with pytest.raises(FileNotFoundError, match="no_such"):
        why_stale(notebook, package)


def test_without_outputs_it_is_stale(make, package):
    assert why_stale(read_notebook(make({"first": "1"})), package) == "it has no outputs"


# --- Execution -----------------------------------------------------------------------------


def test_what_is_stale_is_executed_and_nothing_else(make, tmp_path):
    path = make(SOURCES)
    assert refresh(path, ROOT / "helpers") == "executed (it has no outputs)"
    first = path.read_bytes()
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert [c.execution_count for c in notebook.cells[1:]] == [1, None, 2]
    assert unfit_outputs(read_notebook(path)) == []
    value, _, profile = (c["outputs"] for c in read_notebook(path)["cells"][1:])
    assert value[0]["data"]["text/plain"] == ["1"]
    assert profile[0]["data"]["text/plain"] == ["'small'"]
    assert list(tmp_path.glob("*.csv")) == []  # its files went elsewhere
    # Nothing of the kernel, the interpreter or the hour is kept.
    assert set(notebook.metadata) == {"kernelspec", "tutorial"}
    assert {key for c in notebook.cells for key in c.metadata} <= {"tags"}

    assert refresh(path, ROOT / "helpers") == "nothing has changed"
    assert path.read_bytes() == first
    assert refresh(path, ROOT / "helpers", force=True) == "executed (FORCE)"
    assert path.read_bytes() == first


def test_what_only_a_clock_may_change(make):
    tick = "import time\ntime.perf_counter()"
    path = make({"clock_1": tick, "other": tick})
    refresh(path, ROOT / "helpers")
    said = refresh(path, ROOT / "helpers", force=True)
    assert said.endswith("NOT THE SAME as before, without the tag clock: other")


def test_printed_lines_are_one_output(make):
    source = "import sys, time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.3)"
    path = make({"prints": source})
    (output,) = cell(execute(read_notebook(path), path.parent), "prints")["outputs"]
    assert output["text"] == ["0\n", "1\n", "2\n"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 / 0", "code cell 2 (`1 / 0`): ZeroDivisionError"),
        ("import os\nos._exit(137)", "code cell 2 (`import os`): the kernel died"),
        ("import warnings\nwarnings.warn('old')", "cell bad: it wrote to stderr"),
        ("import sys\nsys.prefix", "cell bad: its output holds a path of this machine"),
        ("object()", "cell bad: its output holds an address in memory"),
        ("print('x' * 400_000)", "at most"),
    ],
    ids=["raises", "dies", "warns", "path", "address", "large"],
)
def test_a_run_that_is_not_clean_leaves_the_file_alone(make, source, expected):
    path = make({"good": "1", "bad": source})
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        refresh(path, ROOT / "helpers")
    assert path.read_bytes() == before


STREAM = {"output_type": "stream", "name": "stdout"}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({**STREAM, "text": ["UserWarning: x"]}, "a warning"),
        ({**STREAM, "text": ["in /home/me/x.py"]}, "a path"),
        ({**STREAM, "text": [r"C:\Users\me"]}, "a path"),
        ({**STREAM, "text": ["2026-01-31 12:00:01"]}, "a time stamp"),
        ({**STREAM, "text": ["\r 10%|#", "\r 20%|#"]}, "a progress bar"),
        ({**STREAM, "name": "stderr", "text": ["x"]}, "stderr"),
        ({"output_type": "error", "ename": "E", "evalue": "", "traceback": []}, "ended in E"),
        (
            {
                "output_type": "display_data",
                "metadata": {},
                "data": {"application/vnd.jupyter.widget-view+json": {}, "text/plain": ["x"]},
            },
            "without a kernel",
        ),
        ({**STREAM, "text": ["peak 12:30 of 1/2, 20 %, a/tmp/b, 0x1f"]}, None),
    ],
)
def test_what_may_not_be_committed(output, expected):
    code = {"cell_type": "code", "id": "x", "execution_count": 1, "source": ["1"], "metadata": {}}
    problems = unfit_outputs({"cells": [{**code, "outputs": [output]}]})
    assert (problems == []) if expected is None else (expected in problems[0])


def test_pictures_need_a_text():
    picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "iVBO"}}
    told = {**picture, "metadata": {"image/png": {"alt": "A line."}}}
    code = {"cell_type": "code", "id": "x", "execution_count": 1, "source": ["1"], "metadata": {}}
    assert "no text" in unfit_outputs({"cells": [{**code, "outputs": [picture]}]})[0]
    assert unfit_outputs({"cells": [{**code, "outputs": [told]}]}) == []
    told_by_cell = {**code, "metadata": {"alt": "A line."}, "outputs": [picture]}
    assert unfit_outputs({"cells": [told_by_cell]}) == []


def test_counts_must_be_those_of_one_run():
    code = {"cell_type": "code", "id": "x", "execution_count": 2, "source": ["1"], "outputs": []}
    assert unfit_outputs({"cells": [code]}) == ["execution counts are [2]: expected 1 to 1"]


def test_changed_cells():
    def notebook(text, tags=()):
        output = {**STREAM, "text": [text]}
        code = {"cell_type": "code", "id": "x", "metadata": {"tags": tags}, "outputs": [output]}
        return {"cells": [code]}

    assert changed_cells(notebook("a"), notebook("b")) == ["x"]
    assert changed_cells(notebook("a"), notebook("a")) == []
    assert changed_cells(notebook("a"), notebook("b", ["clock"])) == []


def test_the_command(make, tmp_path, monkeypatch, capsys):
    make({"good": "1"}, "01_good")
    make({"bad": "1 / 0"}, "02_bad")
    (tmp_path / "repo" / "notebooks").mkdir(parents=True)
    shutil.copytree(ROOT / "helpers", tmp_path / "repo" / "helpers")
    for path in tmp_path.glob("*.ipynb"):
        path.rename(tmp_path / "repo" / "notebooks" / path.name)
    monkeypatch.setattr("helpers.__main__.repository", lambda: tmp_path / "repo")
    assert main(["notebooks"]) == 1
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first == "01_good ... executed (it has no outputs)"
    assert second.startswith("02_bad ... FAILED, left as it was: code cell 1 (`1 / 0`)")
    assert main(["notebooks", "--only", "01"]) == 0
    assert capsys.readouterr().out == "01_good ... nothing has changed\n"
