"""The frame: requirements, make targets, and the rules that keep the helpers easy to take along."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "helpers").glob("*.py"))

# A module imports from lower floors only.
FLOORS = {
    "__main__": 3,
    "predict": 2,
    "plot": 2,
    "publish": 2,
    "kaggle": 2,
    "notebook": 2,
    "train": 1,
    "allocator": 1,
    "cuda": 1,
    "catalogue": 1,
    "bootstrap": 0,
    "data": 0,
    "execute": 0,
    "distributed": 0,
    "fake": 0,
    "fetch": 0,
    "models": 0,
    "pages": 0,
    "memory": 0,
    "snapshot": 0,
}


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names(path):
    return pytest.param(path, id=path.stem)


def test_environment_holds_the_same_list():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [part["pip"] for part in environment["dependencies"] if isinstance(part, dict)]
    assert pip == [line.partition("  #")[0] for line in requirements()]


def test_every_requirement_says_what_needs_it():
    *packages, last = requirements()
    assert last == "-e ."
    for line in packages:
        assert re.fullmatch(r"[a-z0-9-]+>=[0-9.]+  # .{5,}", line), line


def test_torch_has_no_upper_bound():
    assert not any("<" in line or "==" in line for line in requirements())


def test_python_versions_agree():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text
    assert "python>=3.10" in (ROOT / "environment.yml").read_text()
    assert "(3, 10)" in (ROOT / "Makefile").read_text()


def test_installing_the_package_replaces_nothing():
    assert "dependencies" not in _project_keys()


def _project_keys():
    project = (ROOT / "pyproject.toml").read_text().partition("[project]\n")[2].partition("\n[")[0]
    return re.findall(r"^([a-z-]+) =", project, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "target", ["run", "test", "lab", "soak", "bench", "notebooks", "report", "kaggle", "clean"]
)
def test_make_knows(target):
    # -n: says what it would do; -o: takes the set-up for done.
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/ready", target, "ONLY=02", "DATA=a folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if target == "run":
        assert "-m helpers run" in done.stdout
        assert "--only 02" in done.stdout and "--data 'a folder'" in done.stdout


def test_style():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [names(path) for path in MODULES])
def test_modules_import_downwards_only(path):
    if path.stem == "__init__":
        assert not [n for n in ast.walk(tree(path)) if isinstance(n, (ast.Import, ast.ImportFrom))]
        return
    floor = FLOORS[path.stem]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "helpers" for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "no relative imports"
            assert node.module != "helpers", "from helpers.x import name"
            assert "*" not in {alias.name for alias in node.names}
            if node.module.startswith("helpers."):
                assert FLOORS[node.module.split(".")[1]] < floor, f"imports {node.module}"


@pytest.mark.parametrize("path", [names(path) for path in MODULES])
def test_modules_can_be_taken_along_as_cells(path):
    """A notebook that holds a module's code as cells has no __file__ and is itself __main__."""
    used = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    assert "__file__" not in used
    blocks = [ast.unparse(node.test) for node in tree(path).body if isinstance(node, ast.If)]
    assert path.stem == "__main__" or not any("__name__" in test for test in blocks)


def test_top_level_names_are_unique():
    owners = {}
    for path in MODULES:
        for name in _top_level_names(tree(path)):
            owners.setdefault(name, []).append(path.stem)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


def _top_level_names(module):
    """Names that a module defines (not those it imports), once each."""
    found = set()
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def test_unpublished_address_can_be_read():
    assert re.search(
        r'^\[tool\.tutorial\]\n(#.*\n)*repository = "[^"]*"$',
        (ROOT / "pyproject.toml").read_text(),
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize(
    "block", ["result-table", "notebooks", "disk-space", "claims", "published", "benchmarks"]
)
def test_readme_has_the_generated_blocks(block):
    text = (ROOT / "README.md").read_text()
    assert text.count(f"<!-- {block}:start -->") == text.count(f"<!-- {block}:end -->") == 1
