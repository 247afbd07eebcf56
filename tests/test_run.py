"""The commands: the runner on small made-up notebooks, the summary, the report, the errors."""

import csv
import json
import os
import sys
from pathlib import Path

import nbformat
import pytest

from helpers.__main__ import (
    NotebookRun,
    benchmark_blocks,
    data_parameter,
    find_notebooks,
    main,
    parse_assignment,
    replace_block,
    report_blocks,
    run_notebook,
    run_notebooks,
    write_summary,
)
from helpers.notebook import RESULT_COLUMNS, result_row

PARAMETERS = 'PROFILE = "auto"\nDATA = None\nSIZE = None'
RECORD = """
from types import SimpleNamespace
from helpers.notebook import record, result_row
usage = SimpleNamespace(
    peak_mib=2.0, peak_source="cpu-live-tensors", reserved_mib=None, device_used_mib=None
)
record([result_row("net", f"size {SIZE}", 4, usage, final_loss=0.5)])
"""


@pytest.fixture
def make(tmp_path):
    """Write a notebook of a parameters cell and further code cells."""
    folder = tmp_path / "a folder"
    folder.mkdir()

    def write(name, *sources, parameters=PARAMETERS):
        tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        cells = [nbformat.v4.new_markdown_cell(f"# {name}\nTeaches a\nthing. Then more."), tagged]
        cells += [nbformat.v4.new_code_cell(source) for source in sources]
        kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})
        path = folder / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def test_run_collects_what_a_notebook_recorded(make, runs, capfd):
    check = "import os, sys, pathlib\nassert pathlib.Path('01_good.ipynb').exists()\n"
    check += f"assert sys.executable == {sys.executable!r}\nassert PROFILE == 'tiny'"
    path = make("01_good", check, RECORD)
    run = run_notebook(path, runs, {"SIZE": 7, "PROFILE": "tiny"})
    assert run.problem is None
    assert [row["recipe"] for row in run.rows] == ["size 7"]
    assert run.rows[0]["reserved_mib"] is None
    assert (runs / "01_good.ipynb").exists()
    output = capfd.readouterr()
    assert output.out == output.err == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\nraise RuntimeError('the reason')", "code cell 2 (`x = 1`): RuntimeError: the re"),
        ("import os\nos._exit(137)", "code cell 2 (`import os`): the kernel died"),
        ("import time; time.sleep(60)", "longer than 3 seconds"),
        ("import sys\nsys.exit(0)", "(`import sys`) ended in an error"),
        ("x = (", "SyntaxError"),
    ],
    ids=["raises", "dies", "hangs", "exits", "syntax"],
)
def test_a_failure_names_the_cell(make, runs, source, expected):
    run = run_notebook(make("01_bad", source, RECORD), runs, {}, timeout=3)
    assert expected in run.problem
    assert run.rows == []


def test_a_failure_lets_the_others_run(make, runs, capsys):
    paths = [make("01_bad", "1 / 0"), make("02_good", RECORD)]
    bad, good = run_notebooks(paths, runs)
    assert "ZeroDivisionError" in bad.problem and good.problem is None
    assert len(good.rows) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "FAILED" in lines[0] and "1 result" in lines[1]


def test_an_unknown_parameter_is_refused(make, runs):
    run = run_notebook(make("01_good", RECORD), runs, {"SIZES": 1})
    assert "no parameter SIZES" in run.problem and "SIZE" in run.problem
    assert not (runs / "01_good.ipynb").exists()


def test_a_notebook_without_results_fails(make, runs):
    assert "recorded no result" in run_notebook(make("01_silent", "1 + 1"), runs, {}).problem


def test_files_of_a_notebook_go_beside_its_executed_copy(make, runs):
    write = "from helpers.notebook import output_folder\n"
    write += "_ = (output_folder() / 'mine.csv').write_text('id')"
    assert run_notebook(make("01_writes", write, RECORD), runs, {}).problem is None
    assert (runs / "mine.csv").read_text() == "id"


def test_an_old_copy_never_passes_for_a_new_one(make, runs):
    run_notebook(make("01_x", RECORD), runs, {})
    run_notebook(make("01_x", RECORD, parameters="OTHER = 1"), runs, {"SIZE": 1})
    assert not (runs / "01_x.ipynb").exists()


def test_other_kernels_called_python3_do_not_matter(make, runs, tmp_path, monkeypatch):
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/no/such/python"], "display_name": "x"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    assert run_notebook(make("01_good", RECORD), runs, {}).problem is None
    assert os.environ["JUPYTER_PATH"] == str(tmp_path / "jupyter")


def test_data_goes_where_it_is_read(make, tmp_path):
    photos, comments = tmp_path / "photos", tmp_path / "comments"
    pictures = make("01_x", "cats_vs_dogs(DATA)")
    texts = make("05_x", "jigsaw(DATA, tokenizer=tokenizer)")
    assert data_parameter(pictures, photos, comments) == {"DATA": str(photos)}
    assert data_parameter(texts, photos, comments) == {"DATA": str(comments)}
    assert data_parameter(texts, photos, None) == {}


def test_find_notebooks(make):
    folder = make("01_a").parent
    make("02_b")
    make("draft")
    assert [path.stem for path in find_notebooks(folder)] == ["01_a", "02_b"]
    assert [path.stem for path in find_notebooks(folder, ["02"])] == ["02_b"]
    with pytest.raises(FileNotFoundError, match="'03'.*01_a, 02_b"):
        find_notebooks(folder, ["03"])


def test_parse_assignment():
    assert parse_assignment("EPOCHS=3") == ("EPOCHS", 3)
    assert parse_assignment("AMP=bf16") == ("AMP", "bf16")
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_assignment("EPOCHS 3")


def example_run():
    rows = [
        result_row("net", "plain", 4, final_loss=1 / 3, identical_to_baseline="baseline", note="a"),
        result_row("net", "other", 4, identical_to_baseline=True, note="b"),
    ]
    claims = [{"claim": "c", "our figure": "1", "verdict": "holds"}]
    return NotebookRun("01_x", 90.0, rows, claims)


def test_summary(runs):
    write_summary([example_run()], runs, "tiny")
    with open(runs / "summary.csv", newline="") as file:
        plain, other = csv.DictReader(file)
    assert tuple(plain) == RESULT_COLUMNS
    assert plain["notebook"] == "01_x" and float(plain["final_loss"]) == 1 / 3
    assert plain["identical_to_baseline"] == "baseline" and plain["peak_mib"] == "n/a"
    assert other["identical_to_baseline"] == "true" and other["final_loss"] == "n/a"
    text = (runs / "summary.md").read_text()
    assert "torch" in text and "Profile `tiny`" in text and "- net, plain: a" in text


def test_report(make, tmp_path):
    notebooks = make("01_x").parent.rename(tmp_path / "notebooks")
    (tmp_path / "runs").mkdir()
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.tutorial]\nrepository = ""\n')
    with pytest.raises(FileNotFoundError, match="make run"):
        report_blocks(tmp_path)
    write_summary([example_run()], tmp_path / "runs", "tiny")
    blocks = report_blocks(tmp_path)
    assert "| net | plain |" in blocks["result-table"] and "torch" in blocks["result-table"]
    assert "[01_x](notebooks/01_x.ipynb) | Teaches a thing. | 1.5 |" in blocks["notebooks"]
    assert "| c | 1 | holds |" in blocks["claims"]
    assert "colab" not in blocks["notebooks"]
    project.write_text('[tool.tutorial]\nrepository = "https://github.com/a/b"\n')
    assert "/github/a/b/blob/main/notebooks/01_x.ipynb)" in report_blocks(tmp_path)["notebooks"]
    (notebooks / "02_new.ipynb").write_text((notebooks / "01_x.ipynb").read_text())
    with pytest.raises(ValueError, match="02_new"):
        report_blocks(tmp_path)


def test_report_of_the_benchmarks(tmp_path):
    with pytest.raises(FileNotFoundError, match="make bench"):
        benchmark_blocks(tmp_path)
    blocks = benchmark_blocks(Path(__file__).parents[1] / "data" / "benchmarks")
    assert "ogc_resnet50_b64" in blocks["published"] and "torch" in blocks["published"]
    assert "hand-written loop" in blocks["benchmarks"]
    assert "MiB a minute; open files" in blocks["benchmarks"]


def test_replace_block():
    text = "a\n<!-- t:start -->\nold\n<!-- t:end -->\nb"
    new = replace_block(text, "t", "new\n")
    assert new == "a\n<!-- t:start -->\nnew\n<!-- t:end -->\nb"
    assert replace_block(new, "t", "new") == new
    with pytest.raises(ValueError, match="markers"):
        replace_block(text, "other", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--only", "77"], "no notebook"),
        (["run", "--data", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["run", "--profile", "huge"], "unknown profile 'huge'"),
        (["run", "--set", "EPOCHS"], "NAME=VALUE"),
    ],
)
def test_errors_are_one_sentence(arguments, expected, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_defects_are_not_hidden(monkeypatch):
    monkeypatch.setattr("helpers.__main__.repository", lambda: int("a defect"))
    with pytest.raises(ValueError, match="a defect"):
        main(["run"])


def test_a_run_leaves_pages_too(make, tmp_path, monkeypatch, capsys):
    make("01_good", RECORD).parent.rename(tmp_path / "notebooks")
    monkeypatch.setattr("helpers.__main__.repository", lambda: tmp_path)
    assert main(["run", "--set", "SIZE=3"]) == 0
    assert "size 3" in (tmp_path / "runs" / "index.html").read_text()
    assert "size 3" in (tmp_path / "runs" / "01_good.html").read_text()
    assert "runs/index.html" in capsys.readouterr().out
