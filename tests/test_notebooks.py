"""Every notebook, executed at its smallest size by the runner that `make run` uses."""

import ast
import math
import re
import warnings
from pathlib import Path

import nbformat
import papermill
import pytest

from helpers.__main__ import run_notebook
from helpers.notebook import RESULT_COLUMNS
from helpers.publish import has_outputs, read_notebook, unfit_outputs, why_stale

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "helpers"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
CELL_TIMEOUT = 120
LONGEST_LINE = 88


def read(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing cell id is only a warning
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameter_cells(notebook):
    return [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]


@EVERY
def test_format(path):
    assert re.match(r"\d\d_[a-z0-9_]+$", path.stem)
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert notebook.cells[0].source.startswith("# ")
    lines = [line for cell in code_cells(notebook) for line in cell.source.splitlines()]
    assert not [line for line in lines if len(line) > LONGEST_LINE]


@EVERY
def test_parameters_are_literals_in_one_cell(path):
    (cell,) = parameter_cells(read(path))
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        ast.literal_eval(statement.value)
        assert ast.unparse(statement.targets[0]).isupper()
    known = papermill.inspect_notebook(str(path))
    assert {"PROFILE", "DATA", "SEED"} <= set(known)
    assert ast.literal_eval(known["PROFILE"]["default"]) == "auto"


@EVERY
def test_links_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), target


@EVERY
def test_committed_outputs(path):
    """None in any notebook, or in all of them those of one clean run of today's code."""
    if not any(has_outputs(read(other)) for other in NOTEBOOKS):
        pytest.skip("no notebook has outputs: `make notebooks` gives them")
    reason = why_stale(read_notebook(path), PACKAGE)
    assert reason is None, f"{reason}: `make notebooks` executes it"
    assert unfit_outputs(read_notebook(path)) == []


@EVERY
def test_runs_and_records_results(path, tmp_path):
    run = run_notebook(path, tmp_path, {"PROFILE": "tiny", "SEED": 0}, timeout=CELL_TIMEOUT)
    assert run.problem is None
    executed = read(tmp_path / path.name)
    assert unfit_outputs(read_notebook(tmp_path / path.name)) == []
    assert len(run.rows) > 0
    assert sum(row["identical_to_baseline"] == "baseline" for row in run.rows) <= 1
    for row in run.rows:
        assert set(row) == {*RESULT_COLUMNS[1:], "note"}
        assert row["peak_mib"] is None or row["peak_mib"] > 0
        assert row["final_loss"] is None or math.isfinite(row["final_loss"])
    assert any(row["final_loss"] is not None for row in run.rows)
    # The last code cell is the one that records.
    last = [cell for cell in code_cells(executed) if cell.source.strip()][-1]
    assert "record(" in last.source


def test_questions_name_sections_that_exist():
    text = (NOTEBOOKS[0].parent / "QUESTIONS.md").read_text(encoding="utf-8")
    threads = re.findall(r"\[([\w./-]+)#(\d+)\]\((\S+)\)", text)
    named = re.findall(r"\]\((\d\d_\w+\.ipynb)\), \"([^\"]+)\"", text)
    assert len(threads) == len(named) == text.count("?**") > 0
    for repository, number, address in threads:
        assert address == f"https://github.com/{repository}/issues/{number}"
    for name, section in named:
        notebook = read(NOTEBOOKS[0].parent / name)
        cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        assert re.search(rf"^#+ {re.escape(section)}$", "\n".join(cells), re.MULTILINE), section
