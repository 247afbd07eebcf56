"""Lessons that stand alone: what they hold, what is refused, and that results are the same."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import ipykernel.kernelspec
import nbformat
import pytest

from helpers.__main__ import main, run_notebook
from helpers.kaggle import (
    attached_competition,
    export_lesson,
    pack_sample,
    read_library,
    write_lessons,
)

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "data" / "comments"
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
EVERY = pytest.mark.parametrize("name", [path.name for path in LESSONS])
MAGIC = re.compile(r"%%writefile (\S+)\n")


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The folder with a copy of every lesson."""
    folder = tmp_path_factory.mktemp("kaggle")
    write_lessons(LESSONS, ROOT, folder)
    return folder


def code_of(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# --- Every lesson --------------------------------------------------------------------------


@EVERY
def test_cells_compile_and_import_nothing_of_this_repository(copies, name):
    for source in code_of(copies / name):
        for node in ast.walk(ast.parse(MAGIC.sub("", source))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module.split(".")[0] != "helpers"
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "helpers" for alias in node.names)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"^(from|import) helpers\b", node.value, re.MULTILINE)
    assert (copies / name).stat().st_size < 1e6


def test_every_name_is_defined_and_every_import_needed(copies, tmp_path):
    """ruff reads a notebook as one program from top to bottom, but skips cells that are files."""
    for path in copies.glob("*.ipynb"):
        for number, source in enumerate(code_of(path)):
            if MAGIC.match(source):
                (tmp_path / f"{path.stem}_{number}.py").write_text(MAGIC.sub("", source))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    done = subprocess.run(
        [*command, "--select=F821,F823,F401,E9", copies, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("04_*.py")), "the processes of lesson 4 read a file"


@EVERY
def test_what_a_lesson_shows_stands_in_open_cells(copies, name):
    lesson = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    copy = nbformat.read(copies / name, as_version=4)
    shown = re.findall(r"^show_source\(([^)]*)\)", "\n".join(c.source for c in lesson.cells), re.M)
    assert shown
    text = "\n".join(c.source for c in copy.cells if not c.metadata.get("jupyter"))
    for helper in re.split(r",\s*", ", ".join(shown)):
        assert re.search(rf"(def|class) {helper.split('.')[-1]}\b", text), helper
    assert not any("show_source(" in c.source for c in copy.cells if c.cell_type == "code")


@EVERY
def test_parameters_can_still_be_given(copies, name):
    copy = nbformat.read(copies / name, as_version=4)
    (cell,) = [c for c in copy.cells if "parameters" in c.metadata.get("tags", ())]
    assert {"PROFILE", "DATA", "SEED"} <= set(re.findall(r"^([A-Z_]+) =", cell.source, re.M))


def test_the_command_writes_the_copies(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("helpers.__main__.repository", lambda: tmp_path)
    for name in ("helpers", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / LESSONS[0].name).symlink_to(LESSONS[0])
    assert main(["kaggle"]) == 0
    assert (tmp_path / "build" / "kaggle" / LESSONS[0].name).is_file()
    assert re.search(rf"{LESSONS[0].name}: \d+ KiB", capsys.readouterr().out)


# --- A lesson made up ----------------------------------------------------------------------

LOW = '''\
"""The lower module."""

import functools
import math
import os as system
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal

# --- Numbers ---

# How many.
COUNT, OTHER = 2, 3
UNUSED = math.pi
REGISTERED = []


def unused():
    return system.getcwd()


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args):
        return COUNT * function(*args)

    return wrapper


@dataclass
class Point:
    """A point."""

    x: "Decimal"
    y: int = COUNT  # the default

    def far(self) -> float:
        return _length(self)


def _length(point):
    return math.hypot(point.x, point.y)


REGISTERED.append(Point)
'''
HIGH = '''\
"""The upper module: it uses the lower one."""

from __future__ import annotations

from helpers.low import COUNT, Point, doubled

ORIGIN = Point(0)


@doubled
def shift(point: Point, by: int = COUNT) -> Point:
    return point.x + by


def text() -> str:
    COUNT = "hidden"
    return COUNT
'''


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "helpers"
    folder.mkdir()
    (folder / "low.py").write_text(LOW)
    (folder / "high.py").write_text(HIGH)
    (folder / "kaggle.py").write_text((ROOT / "helpers" / "kaggle.py").read_text())
    return read_library(folder)


def lesson(*cells):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def export(library, *cells):
    copy = export_lesson(lesson(*cells), library, SAMPLE)
    return [cell.source for cell in copy.cells if cell.cell_type == "code"]


def run(cells):
    space = {"__name__": __name__}
    for cell in cells:
        exec(cell, space)  # noqa: S102
    return space


def test_only_what_is_needed_comes_along(library):
    cells = export(library, "from helpers.high import shift", "moved = shift(Point_like)")
    text = "\n".join(cells)
    assert "def shift" in text and "def doubled" in text and "class Point" in text
    for needless in ("UNUSED", "def unused", "system", "ORIGIN", "def text"):
        assert needless not in text
    # The comment and what stands behind the code stay.
    assert "# How many.\nCOUNT, OTHER = 2, 3" in text and "# the default" in text


def test_what_comes_along_works(library):
    cells = export(
        library,
        "from helpers.low import Point\nfrom helpers.high import ORIGIN, shift",
        "far = Point(3, 4).far()",
        "moved = shift(Point(1))",
        "start = ORIGIN",
    )
    cells.remove(next(cell for cell in cells if cell.startswith("from __future__")))
    space = run(cells)
    assert (space["far"], space["moved"], space["start"].y) == (5.0, 6, 2)
    assert space["REGISTERED"] == [space["Point"]]  # what is done to a class when it is made


def test_definitions_come_before_the_first_cell_that_needs_them(library):
    cells = export(
        library,
        "from helpers.low import Point, doubled",
        "print('nothing yet')",
        "corner = Point(1)",
        "@doubled\ndef four():\n    return 4",
    )
    order = [next(i for i, cell in enumerate(cells) if text in cell) for text in (
        "nothing yet", "class Point", "corner =", "def doubled", "def four"
    )]  # fmt: skip
    assert order == sorted(order)


def test_a_shown_helper_is_defined_where_it_is_shown(library):
    cells = export(
        library,
        "from helpers.low import Point",
        "print('before')",
        "print('same cell')\nshow_source(Point)",
        "print('after')\ncorner = Point(1)",
    )
    places = [i for i, cell in enumerate(cells) if "class Point" in cell]
    assert len(places) == 1
    assert "same cell" in "".join(cells[: places[0]]) and "after" in cells[-1]


@pytest.mark.parametrize(
    "cell",
    [
        "Point(1)\nCOUNT = 5",
        "p = Point(1)\nfor COUNT in (1, 2):\n    pass",
        "p = Point(1)\nimport cmath as math",
        "def _length():\n    return Point(1)",
        "with open('x') as Point:\n    pass",
    ],
)
def test_a_name_that_the_helpers_need_cannot_be_taken(library, cell):
    with pytest.raises(ValueError, match=r"code cell 2 \(`.*rename it in the lesson"):
        export(library, "from helpers.low import Point", cell + "\nPoint")


@pytest.mark.parametrize(
    "cell", ["Point(1)\nUNUSED = 5", "def f():\n    COUNT = 1\n    return Point(COUNT)",
             "Point(1)\nimport math", "[COUNT for COUNT in (Point(1), 2)]"]
)  # fmt: skip
def test_names_of_no_consequence_may_be_used(library, cell):
    assert export(library, "from helpers.low import Point", cell)


def test_helpers_that_contradict_each_other_are_refused(library, tmp_path):
    third = '"""Third."""\n\nimport cmath as math\n\n\ndef root(x):\n    return math.sqrt(x)\n'
    (tmp_path / "helpers" / "third.py").write_text(third)
    cells = ("from helpers.low import Point\nfrom helpers.third import root", "root(Point(1).x)")
    with pytest.raises(ValueError, match="math is c?math and c?math: rename one of them"):
        export(read_library(tmp_path / "helpers"), *cells)


@pytest.mark.parametrize(
    "cell",
    [
        "import helpers.low",
        "from helpers.low import Point as P",
        "from helpers.low import nothing",
        "def f():\n    from helpers.low import Point",
        "%%time\nfrom helpers.low import Point",
        "from helpers.low import Point\nshow_source(print)",
    ],
)
def test_imports_that_cannot_be_taken_along_are_refused(library, cell):
    with pytest.raises(ValueError, match="code cell 1"):
        export(library, cell)


def test_scripts_of_other_processes_read_a_file(library, tmp_path, monkeypatch):
    script = "SCRIPT = '''\nfrom helpers.low import Point\nprint(Point(3, 4).far())\n'''"
    cells = export(library, "print('first')", script)
    (place,) = [i for i, cell in enumerate(cells) if cell.startswith("%%writefile")]
    assert "first" in cells[place - 1]
    name = MAGIC.match(cells[place])[1]
    (tmp_path / name).write_text(MAGIC.sub("", cells[place]))
    (tmp_path / "script.py").write_text(run(cells[place + 1 :])["SCRIPT"])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "5.0\n", done.stderr


# --- Data ----------------------------------------------------------------------------------


def test_nothing_attached(tmp_path, capsys):
    assert attached_competition("dogs-vs-cats", str(tmp_path)) is None
    assert "dogs-vs-cats is not among the inputs" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["", "competitions"])
def test_attached_files_are_used_where_they_lie(tmp_path, place, capsys):
    folder = tmp_path / place / "some-files"
    folder.mkdir(parents=True)
    assert attached_competition("some-files", str(tmp_path)) == str(folder)
    assert str(folder) in capsys.readouterr().out


def test_packed_pictures_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.kaggle.tempfile.gettempdir", lambda: str(tmp_path / "temp"))
    (tmp_path / "temp" / "dogs-vs-cats.unfinished").mkdir(parents=True)  # of a stopped run
    mounted = tmp_path / "input" / "dogs-vs-cats"
    mounted.mkdir(parents=True)
    with zipfile.ZipFile(mounted / "train.zip", "w") as packed:
        packed.writestr("train/cat.0.jpg", b"a picture")
    for _ in range(2):
        folder = Path(attached_competition("dogs-vs-cats", str(tmp_path / "input")))
        assert (folder / "train" / "cat.0.jpg").read_bytes() == b"a picture"
        (mounted / "train.zip").write_bytes(b"not read again")
    assert [path.name for path in folder.parent.iterdir()] == ["dogs-vs-cats"]


def test_the_sample_travels_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = pack_sample(SAMPLE)
    exec(code, {})
    files = sorted(SAMPLE.glob("*.csv"))
    assert len(files) == 3
    for path in files:
        assert (tmp_path / "data" / "comments" / path.name).read_bytes() == path.read_bytes()
    mine = tmp_path / "data" / "comments" / files[0].name
    mine.write_text("mine")
    exec(code, {})
    assert mine.read_text() == "mine"


# --- Executed ------------------------------------------------------------------------------

# Sent to a process of its own, as `measure_step` does it on a GPU; the first cell is a reader's.
ELSEWHERE = (
    """\
# Helpers: mine


def twice(number):
    return 2 * number
""",
    """\
arguments = (
    partial(vgg16, width=1 / 16), partial(tuple, [images[:4], labels[:4]]),
    CATS_DOGS.loss, Recipe(), momentum, 2, 0, SEED, torch.device("cpu"),
)
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
    assert pool.submit(twice, 21).result() == 42
    there = pool.submit(_measure_step, *arguments).result()
here = _measure_step(*arguments)
assert type(there) is StepMeasurement
assert (there.peak_mib, there.fingerprint) == (here.peak_mib, here.fingerprint)
""",
)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Kernels are of an interpreter that has every package of this one, but not the helpers."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "python"], check=True)
    (packages,) = (tmp_path / "python").glob("[lL]ib/**/site-packages")
    places = [place for place in sys.path if Path(place).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(places))
    python = tmp_path / "python" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    question = "import importlib.util as u; print(u.find_spec('helpers'))"
    answer = subprocess.run([python, "-c", question], cwd=tmp_path, capture_output=True, text=True)
    assert answer.stdout == "None\n"
    spec = ipykernel.kernelspec.get_kernel_dict()
    spec["argv"][0] = str(python)
    monkeypatch.setattr("ipykernel.kernelspec.get_kernel_dict", lambda: spec)


def test_pasted_cell_by_cell_the_copy_gives_the_lesson_s_results(
    copies, tmp_path, monkeypatch, request
):
    name = "01_vgg16_baseline.ipynb"
    (tmp_path / "lesson").mkdir()
    expected = run_notebook(
        ROOT / "notebooks" / name, tmp_path / "lesson", {"PROFILE": "tiny"}, timeout=120
    )
    request.getfixturevalue("stranger")
    monkeypatch.setenv("TUTORIAL_PROFILE", "tiny")
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs").mkdir()
    pasted = tmp_path / "empty" / name
    nbformat.write(lesson(*code_of(copies / name), *ELSEWHERE), pasted)
    found = run_notebook(pasted, tmp_path / "runs", {}, timeout=120)
    assert expected.problem is None and found.problem is None, found.problem
    assert [untimed(row) for row in found.rows] == [untimed(row) for row in expected.rows]
    assert len(found.rows) > 1


def untimed(row):
    """All but the seconds; as text, so that the last digit counts."""
    return json.dumps({**row, "seconds_per_step": None})
