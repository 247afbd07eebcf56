"""The first cell: found, fetched or asked for; and what it says of machines that cannot do it."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest

from helpers.bootstrap import (
    NEEDED_PACKAGES,
    SetupProblem,
    check_machine,
    install_missing,
    prepare_kernel,
)
from helpers.publish import (
    bootstrap_source,
    has_tag,
    read_notebook,
    repository_address,
    with_badges,
    with_bootstrap,
)

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# --- The cell in the notebooks -------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_starts_with_the_same_cell(path):
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert code[0].source == bootstrap_source(repository_address(ROOT)), (
        "`python -m helpers bootstrap` writes it"
    )
    assert [has_tag(cell, "bootstrap") for cell in code] == [True] + [False] * (len(code) - 1)


def notebook_of(*cells):
    return json.loads(nbformat.writes(nbformat.v4.new_notebook(cells=list(cells))))


def test_the_cell_comes_before_all_code_once():
    text = nbformat.v4.new_markdown_cell("# T")
    code, more = (nbformat.v4.new_code_cell(source) for source in ("1", "2"))
    once = with_bootstrap(notebook_of(text, code, more), "")
    assert [cell["cell_type"] for cell in once["cells"]] == ["markdown", "code", "code", "code"]
    assert has_tag(once["cells"][1], "bootstrap")
    assert with_bootstrap(once, "") == once
    moved = {**once, "cells": [*once["cells"][:1], *once["cells"][2:], once["cells"][1]]}
    assert with_bootstrap(moved, "") == once
    published = with_bootstrap(once, "https://example.org/a/tutorial")
    assert '"https://example.org/a/tutorial"' in "".join(published["cells"][1]["source"])
    assert len(published["cells"]) == 4


def test_badges_come_with_an_address_on_github_and_go_with_it():
    text = nbformat.v4.new_markdown_cell("# T")
    plain = notebook_of(text, nbformat.v4.new_code_cell("1"))
    published = with_badges(plain, "https://github.com/me/tutorial.git", "01_x")
    title, badges, _ = published["cells"]
    assert title == plain["cells"][0] and badges["cell_type"] == "markdown"
    (source,) = badges["source"]
    page = "me/tutorial/blob/main/notebooks/01_x.ipynb"
    assert f"](https://colab.research.google.com/github/{page})" in source
    assert f"](https://kaggle.com/kernels/welcome?src=https://github.com/{page})" in source
    assert "![Open in Colab](https://" in source and "![Open in Kaggle](https://" in source
    again = with_badges(published, "https://github.com/other/tutorial/", "01_x")
    assert len(again["cells"]) == 3 and "other/tutorial/blob" in again["cells"][1]["source"][0]
    for address in ("", "https://example.org/me/tutorial"):
        assert with_badges(published, address, "01_x") == plain


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_badges_are_those_of_the_address(path):
    notebook = read_notebook(path)
    assert with_badges(notebook, repository_address(ROOT), path.stem) == notebook, (
        "`python -m helpers bootstrap` writes them"
    )


@pytest.mark.parametrize("address", ['https://x/"+evil()+"', "git@host:a/b", "/a/folder"])
def test_the_address_is_one(address):
    with pytest.raises(ValueError, match="expected https"):
        bootstrap_source(address)


# --- Where the helpers come from -----------------------------------------------------------

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """An interpreter that has every package of this one, but not the helpers."""
    folder = tmp_path_factory.mktemp("stranger")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("[lL]ib/**/site-packages")
    places = [place for place in sys.path if Path(place).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(places))
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    found = run_code(python, "import importlib.util as u; print(u.find_spec('helpers'))", folder)
    assert found.stdout.strip() == "None", found
    return python


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A git repository of the helpers, the data and nothing else, as files to be cloned."""
    work = tmp_path_factory.mktemp("repository")
    for name in ("helpers", "data"):
        shutil.copytree(
            ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__", "gpu")
        )
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run(["git", *IDENTITY, *command], cwd=work, check=True)
    bare = tmp_path_factory.mktemp("bare") / "tutorial.git"
    subprocess.run(["git", "clone", "-q", "--bare", work, bare], check=True)
    return bare


def run_code(python, code, cwd=None, **environment):
    given = {**os.environ, "PYTHONPATH": "", "TUTORIAL_SOURCE": "", **environment}
    return subprocess.run([python, "-c", code], cwd=cwd, env=given, capture_output=True, text=True)


# The cell without what the helpers do after it, which needs torch and seconds.
CELL = bootstrap_source("").replace("\nprepare_kernel()", "\nprint(prepare_kernel.__module__)")


def test_it_is_fetched_once(stranger, repository, tmp_path):
    done = run_code(stranger, CELL, tmp_path, TUTORIAL_SOURCE=str(repository))
    assert done.stdout == "helpers.bootstrap\n", done.stderr
    assert (tmp_path / "larger-models" / "data" / "comments").is_dir()
    again = run_code(stranger, CELL, tmp_path, TUTORIAL_SOURCE="/no/such/place")
    assert again.stdout == "helpers.bootstrap\n", again.stderr


def test_a_clone_of_it_is_used_as_it_lies(stranger, repository, tmp_path):
    clone, elsewhere = tmp_path / "a clone", tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "-q", repository, clone], check=True)
    (clone / "notebooks").mkdir()
    elsewhere.mkdir()
    for cwd, source in ((clone, ""), (clone / "notebooks", ""), (elsewhere, str(clone))):
        done = run_code(stranger, CELL, cwd, TUTORIAL_SOURCE=source)
        assert done.stdout == "helpers.bootstrap\n", done.stderr
        assert not (cwd / "larger-models").exists()


def test_another_package_called_helpers_is_no_obstacle(stranger, repository, tmp_path):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("")
    done = run_code(stranger, CELL, tmp_path, TUTORIAL_SOURCE=str(repository))
    assert done.stdout == "helpers.bootstrap\n", done.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "put the address of its repository .* into the environment variable TUTORIAL_SOURCE"),
        ("/no/such/place", r"Could not get the tutorial from /no/such/place \(.+\): check"),
        # Port 9 of this machine answers nobody: what a machine without internet looks like.
        ("https://127.0.0.1:9/t.git", r"from https://127.0.0.1:9/t.git \(fatal: .+\): check"),
    ],
    ids=["no address", "nothing there", "no internet"],
)
def test_without_an_address_it_is_one_sentence(stranger, tmp_path, source, expected):
    done = run_code(stranger, CELL, tmp_path, TUTORIAL_SOURCE=source)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(expected, last) and last.endswith(".")
    assert list(tmp_path.iterdir()) == []


def test_another_repository_is_told_from_the_tutorial(stranger, tmp_path):
    other, cwd = tmp_path / "other.git", tmp_path / "cwd"
    subprocess.run(["git", "init", "-q", "--bare", other], check=True)
    cwd.mkdir()
    done = run_code(stranger, CELL, cwd, TUTORIAL_SOURCE=str(other))
    assert done.returncode != 0
    assert "is a repository, but not the tutorial's" in done.stderr.strip().splitlines()[-1]


def test_without_git_it_is_one_sentence(stranger, repository, tmp_path):
    done = run_code(stranger, CELL, tmp_path, TUTORIAL_SOURCE=str(repository), PATH="")
    assert "git" in done.stderr.strip().splitlines()[-1]


def execute(python, path, source, cwd):
    """Execute a notebook with papermill as a reader does, its kernel the same interpreter."""
    command = [python, "-m", "papermill", path, cwd / "out.ipynb", "-p", "PROFILE", "tiny"]
    given = {**os.environ, "PYTHONPATH": "", "JUPYTER_PATH": "", "HOME": str(cwd)}
    given["TUTORIAL_SOURCE"] = str(source)
    return subprocess.run(
        [*command, "--no-progress-bar", "--cwd", cwd],
        cwd=cwd, env=given, capture_output=True, text=True,
    )  # fmt: skip


def test_jupyter_shows_the_sentence_and_no_traceback(stranger, tmp_path):
    done = execute(stranger, NOTEBOOKS[0], "/no/such/place", tmp_path)
    assert done.returncode != 0
    outputs = [
        output
        for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells
        for output in cell.get("outputs", ())
    ]
    (error,) = (output for output in outputs if output.output_type == "error")
    (sentence,) = error.traceback
    assert sentence.startswith("Could not get the tutorial from /no/such/place (fatal: ")
    assert not [output for output in outputs if output.output_type == "stream"]


# The shortest; all of them run in empty folders the same way.
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem.startswith("01")])
def test_alone_in_an_empty_folder(stranger, repository, tmp_path, path):
    done = execute(stranger, path, repository, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


# --- What is missing -----------------------------------------------------------------------


def test_the_packages_are_those_of_the_requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    bounds = dict(
        re.match(r"([a-z0-9-]+)>=([0-9.]+)", line).groups() for line in lines if "  #" in line
    )
    for package, oldest in NEEDED_PACKAGES.values():
        assert package in bounds
        assert oldest in (None, re.match(r"\d+\.\d+", bounds[package])[0])


@pytest.fixture
def pip(monkeypatch):
    """Stands in for pip: keeps the commands and the constraints that they named."""
    calls = []

    def run(command, **options):
        (constraints,) = (a.partition("=")[2] for a in command if a.startswith("--constraint="))
        calls.append((command, Path(constraints).read_text().splitlines()))
        return subprocess.CompletedProcess(command, run.code, "", run.error)

    run.code, run.error, run.calls = 0, "", calls
    monkeypatch.setattr("helpers.bootstrap.subprocess.run", run)
    return run


def hide(monkeypatch, *names):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "helpers.bootstrap.importlib.util.find_spec",
        lambda name, *rest: None if name in names else real(name, *rest),
    )


def test_nothing_is_installed_where_nothing_is_missing(pip):
    install_missing()
    assert pip.calls == []


def test_only_what_is_missing_is_installed(pip, monkeypatch, capsys):
    hide(monkeypatch, "tqdm")
    install_missing()
    ((command, constraints),) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert [word for word in command[4:] if not word.startswith("-")] == ["tqdm>=4.66"]
    assert not any("requirements" in word or "upgrade" in word for word in command)
    for package in ("torch", "torchvision"):
        assert f"{package}=={importlib.metadata.version(package)}" in constraints
    assert capsys.readouterr().out == "Installing what is missing: tqdm\n"


def test_any_pynvml_that_imports_stays(pip, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    install_missing()
    assert pip.calls == []
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import raises ModuleNotFoundError
    install_missing()
    assert pip.calls[0][0][-1] == "nvidia-ml-py3"


@pytest.mark.parametrize("name", ["torch", "torchvision"])
def test_torch_is_never_installed(pip, monkeypatch, name):
    hide(monkeypatch, name, "tqdm")
    with pytest.raises(SetupProblem, match=f"^Not installed: {name}; https://pytorch.org"):
        install_missing()
    assert pip.calls == []


def test_no_internet_is_one_sentence(pip, monkeypatch):
    hide(monkeypatch, "tqdm")
    pip.code = 1
    pip.error = "WARNING: Retrying\nERROR: No matching distribution found for tqdm\nERROR: see x\n"
    with pytest.raises(SetupProblem, match=r"Could not install tqdm>=4.66 \(ERROR: No matching"):
        install_missing()


# --- The machine ---------------------------------------------------------------------------


def test_this_machine_can_do_it_without_a_word():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        prepare_kernel()
    assert said.getvalue() == ""


class FakeTensor:
    def __init__(self, error=None, total=8):
        self.error, self.total = error, total

    def __mul__(self, other):
        if self.error is not None:
            raise self.error
        return self

    def sum(self):
        return self

    def item(self):
        return self.total


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def gpu(monkeypatch):
    """Make torch one with a GPU of a capability, a build's kernels and an error to raise."""
    import torch

    def become(capability, kernels, error=None, total=8):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla P100")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "ones", lambda *size, device=None: FakeTensor(error, total))
        nms = types.SimpleNamespace(ops=types.SimpleNamespace(nms=lambda *a: None))
        monkeypatch.setitem(sys.modules, "torchvision", nms)

    return become


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [((7, 5), CUDA_13), ((8, 9), CUDA_13), ((12, 1), CUDA_13), ((6, 0), CUDA_12_6),
     ((6, 1), CUDA_12_6), ((9, 0), ["compute_80"])],
)  # fmt: skip
def test_cards_that_the_build_knows(gpu, capability, kernels):
    gpu(capability, kernels)
    check_machine()


@pytest.mark.parametrize(
    ("capability", "kernels", "build"),
    [((6, 0), CUDA_13, "CUDA 12.6 have it"), ((6, 1), CUDA_13, "CUDA 12.6 have it"),
     ((7, 0), CUDA_13, "CUDA 12.6 have it"), ((12, 0), CUDA_12_6, "a newer build"),
     ((8, 0), ["sm_75", "sm_86", "sm_90a"], "a newer build")],
)  # fmt: skip
def test_a_card_whose_kernels_the_build_lacks(gpu, capability, kernels, build):
    gpu(capability, kernels)
    with pytest.raises(SetupProblem) as caught:
        check_machine()
    said = str(caught.value)
    assert f"capability {capability[0]}.{capability[1]}" in said and build in said
    assert "CUDA 13.0" in said and kernels[0] in said and "T4" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "has no code for"),
        ("CUDA error: device-side assert triggered\nmore", r"\(CUDA error.*triggered\); .*restart"),
        ("CUDA out of memory. Tried to allocate", "nvidia-smi lists them"),
    ],
)
def test_a_device_that_fails_at_the_first_operation(gpu, error, expected):
    gpu((7, 5), CUDA_13, RuntimeError(error))
    with pytest.raises(SetupProblem, match=expected):
        check_machine()


def test_a_device_that_computes_wrongly(gpu):
    gpu((7, 5), CUDA_13, total=0)
    with pytest.raises(SetupProblem, match="8 expected, got 0"):
        check_machine()


def fail_to_import(monkeypatch, name, error):
    real = importlib.import_module

    def import_module(wanted, *rest):
        if wanted == name:
            raise error
        return real(wanted, *rest)

    monkeypatch.setattr("helpers.bootstrap.importlib.import_module", import_module)


def test_the_wrong_pair(monkeypatch):
    fail_to_import(
        monkeypatch, "torchvision", RuntimeError("operator torchvision::nms does not exist")
    )
    with pytest.raises(SetupProblem) as caught:
        check_machine()
    said = str(caught.value)
    assert re.match(r"torchvision [\d.]+\S* was not made for torch [\d.]+", said)
    assert "torchvision::nms" in said and "restart the kernel" in said and "\n" not in said


def test_a_pair_that_breaks_only_when_called(monkeypatch):
    import torchvision

    def nms(*arguments):
        raise RuntimeError("Couldn't load custom C++ ops.")

    monkeypatch.setattr(torchvision.ops, "nms", nms)
    with pytest.raises(SetupProblem, match="was not made for torch"):
        check_machine()


def test_a_broken_torch(monkeypatch):
    fail_to_import(monkeypatch, "torch", OSError("libcudnn.so.9: cannot open shared object file"))
    with pytest.raises(SetupProblem, match=r"torch cannot be imported \(libcudnn.*restart"):
        check_machine()


def test_versions(monkeypatch):
    real = importlib.metadata.version
    versions = {}
    monkeypatch.setattr(
        "helpers.bootstrap.importlib.metadata.version",
        lambda package: versions.get(package) or real(package),
    )
    versions["tokenizers"] = "0.19.1"
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    with pytest.raises(SetupProblem, match="tokenizers 0.19.1 is installed, and 0.21 or newer"):
        check_machine()
    versions["tokenizers"], versions["torch"] = None, "2.99.0+cu130"
    with pytest.raises(
        SetupProblem, match=r"torch 2\..* is loaded .* 2.99.0\+cu130 has been .* res"
    ):
        check_machine()


def test_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SetupProblem, match="Python 3.9, and 3.10 or newer"):
        prepare_kernel()
