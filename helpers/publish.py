"""The notebooks as readers get them: a first cell that works anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# --- The first cell ------------------------------------------------------------------------

BOOTSTRAP_TAG = "bootstrap"
BOOTSTRAP_CELL = """\
# Makes the tutorial's helpers importable. In its repository they are at hand; anywhere
# else (Colab, Kaggle, an empty folder) the repository is fetched, once. Then the
# machine is checked. Packages that are installed stay as they are.
class Stop(Exception):
    def _render_traceback_(self):  # Jupyter shows this sentence instead of a traceback
        return [str(self)]


def get_helpers(source="ADDRESS", copy="larger-models"):
    import os
    import subprocess
    import sys
    from pathlib import Path

    source, here = os.environ.get("TUTORIAL_SOURCE") or source, Path.cwd()
    places = [here, *here.parents, here / source, here / copy]
    root = next((p for p in places if (p / "helpers/bootstrap.py").exists()), None)
    if root is None and not source:
        raise Stop(
            "The tutorial's helpers are not here: put the address of its repository "
            "(or its folder) into the environment variable TUTORIAL_SOURCE, as in "
            "%env TUTORIAL_SOURCE=https://... in a cell above, and run this cell."
        )
    if root is None:
        command = ["git", "clone", "--quiet", "--depth=1", source, copy]
        quiet = dict(os.environ, GIT_TERMINAL_PROMPT="0")  # ask for no password
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, env=quiet
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            reason = reason.strip().splitlines()[-1]
            raise Stop(
                f"Could not get the tutorial from {source} ({reason}): check the "
                "address, and the internet (Kaggle has a switch for it in Settings)."
            ) from None
    sys.modules.pop("helpers", None)  # in case another package has this name
    sys.path.insert(0, str(root or here / copy))


try:
    from helpers.bootstrap import prepare_kernel
except ModuleNotFoundError:
    get_helpers()
    from helpers.bootstrap import prepare_kernel

prepare_kernel()"""


def bootstrap_source(address: str) -> str:
    """The first code cell of every notebook; address: of the repository, "" while it has none."""
    if not re.fullmatch(r"(https://[\w./~-]+)?", address):
        raise ValueError(
            f"the address of the repository is {address!r}: expected https://..., or nothing"
        )
    return BOOTSTRAP_CELL.replace('"ADDRESS"', json.dumps(address))


def repository_address(root: Path) -> str:
    """What pyproject.toml says: the address of the published repository, "" where there is none."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")  # Python 3.10 has no tomllib
    found = re.search(r'^\[tool\.tutorial\]\n(?:#.*\n)*repository = "([^"]*)"', text, re.MULTILINE)
    if found is None:
        raise ValueError('pyproject.toml needs [tool.tutorial] with repository = "" or the address')
    return found[1]


def has_tag(cell: Mapping[str, Any], tag: str) -> bool:
    """Whether a notebook's cell has a tag."""
    return tag in cell["metadata"].get("tags", ())


def with_bootstrap(notebook: Mapping[str, Any], address: str) -> dict[str, Any]:
    """The notebook with the first cell of today in front of its code, whatever it had before."""
    old = [cell for cell in notebook["cells"] if has_tag(cell, BOOTSTRAP_TAG)]
    cells = [cell for cell in notebook["cells"] if not has_tag(cell, BOOTSTRAP_TAG)]
    source = bootstrap_source(address)
    if len(old) == 1 and "".join(old[0]["source"]) == source:
        cell = old[0]  # with its output
    else:
        cell = {
            "cell_type": "code",
            "execution_count": None,
            "id": BOOTSTRAP_TAG,
            "metadata": {"tags": [BOOTSTRAP_TAG]},
            "outputs": [],
            "source": source.splitlines(keepends=True),
        }
    kinds = [cell["cell_type"] for cell in cells]
    cells.insert(kinds.index("code") if "code" in kinds else len(cells), cell)
    return {**notebook, "cells": cells}


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook as it is in its file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_notebook(notebook: Mapping[str, Any], path: Path) -> bool:
    """Write a notebook in the layout that Jupyter uses; False if the file held just that."""
    text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def write_bootstrap_cells(paths: list[Path], address: str) -> list[Path]:
    """Put today's first cell into the notebooks; those that changed."""
    return [
        path for path in paths if write_notebook(with_bootstrap(read_notebook(path), address), path)
    ]
