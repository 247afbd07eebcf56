"""The notebooks as readers get them: with a first cell that works anywhere, and with outputs.

Outputs are kept in git, so a notebook says which code they came from: a fingerprint of its code
cells and of the helpers that they import. `make notebooks` executes those where it has changed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.execute import (
    CELL_TIMEOUT,
    describe_cell,
    describe_error,
    kernel_config,
    private_kernel,
)
from helpers.pages import BADGES_TAG

# --- The first cell ------------------------------------------------------------------------

BOOTSTRAP_TAG = "bootstrap"
BOOTSTRAP_CELL = """\
# Makes the tutorial's helpers importable. In its repository they are at hand; anywhere
# else (Colab, Kaggle, an empty folder) the repository is fetched, once. Then the
# machine is checked. Packages that are installed stay as they are.
class Stop(Exception):
    def _render_traceback_(self):  # Jupyter shows this sentence instead of a traceback
        return [str(self)]


def get_helpers(copy="larger-models"):
    import os
    import subprocess
    import sys
    from pathlib import Path

    published = "ADDRESS"
    source, here = os.environ.get("TUTORIAL_SOURCE") or published, Path.cwd()
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
        root = here / copy
        if not (root / "helpers/bootstrap.py").exists():
            raise Stop(
                f"{source} is a repository, but not the tutorial's: remove the folder "
                f"{copy} and give the right address."
            )
    sys.modules.pop("helpers", None)  # in case another package has this name
    sys.path.insert(0, str(root))


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


def open_links(address: str, name: str) -> dict[str, str]:
    """Where a notebook of the published repository opens, by platform.

    Empty while the address is, or where it is not GitHub's, which is all that the two can open.
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    if found is None:
        return {}
    page = f"{found[1]}/blob/main/notebooks/{name}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{page}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src=https://github.com/{page}",
    }


BADGE_PICTURES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}


def with_badges(notebook: Mapping[str, Any], address: str, name: str) -> dict[str, Any]:
    """The notebook with its badges below the title, or with none where there are no links."""
    cells = [cell for cell in notebook["cells"] if not has_tag(cell, BADGES_TAG)]
    badges = [
        f"[![Open in {platform}]({BADGE_PICTURES[platform]})]({link})"
        for platform, link in open_links(address, name).items()
    ]
    if badges:
        metadata = {"tags": [BADGES_TAG]}
        source = [" ".join(badges)]
        cell = {"cell_type": "markdown", "id": BADGES_TAG, "metadata": metadata, "source": source}
        cells.insert(1, cell)
    return {**notebook, "cells": cells}


def write_first_cells(paths: list[Path], address: str) -> list[Path]:
    """Put today's badges and first code cell into the notebooks; those that changed."""
    changed = []
    for path in paths:
        notebook = with_badges(read_notebook(path), address, path.stem)
        if write_notebook(with_bootstrap(notebook, address), path):
            changed.append(path)
    return changed


# --- Outputs -------------------------------------------------------------------------------

CLOCK_TAG = "clock"  # on cells whose outputs hold times, which no two runs share
FINGERPRINTS = "tutorial"  # where the notebook's metadata keeps what its outputs came from
PUBLISHED_PROFILE = "small"
MOST_OUTPUT_BYTES = 300 * 1024
UNWANTED_TYPES = ("application/vnd.jupyter.widget-view+json", "application/javascript")


def imported_helpers(code: str, package: Path) -> set[str]:
    """The modules of `helpers` that some code imports, and those that they import in turn.

    package: the folder of the modules. Imports count wherever they stand: inside functions too,
    and in scripts that a cell writes.
    """
    found: set[str] = set()
    waiting = [code]
    while waiting:
        names = set(re.findall(r"\b(?:from|import)\s+helpers\.(\w+)", waiting.pop())) - found
        found |= names
        waiting += [(package / f"{name}.py").read_text(encoding="utf-8") for name in sorted(names)]
    return found


def notebook_fingerprint(notebook: Mapping[str, Any], package: Path) -> dict[str, Any]:
    """What the outputs of a notebook depend on: its code cells, and each helper module by name.

    Text is not part of it. Raises FileNotFoundError where the code imports a module that the
    package does not have.
    """
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    modules = sorted(imported_helpers("\n".join(sources), package))
    texts = {name: (package / f"{name}.py").read_text(encoding="utf-8") for name in modules}
    return {
        "code": _short_hash(json.dumps(sources)),
        "helpers": {name: _short_hash(text) for name, text in texts.items()},
    }


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def has_outputs(notebook: Mapping[str, Any]) -> bool:
    """Whether a notebook was executed: counts, since a cell may have nothing to show."""
    return any(cell.get("execution_count") is not None for cell in notebook["cells"])


def why_stale(notebook: Mapping[str, Any], package: Path) -> str | None:
    """Why a notebook's outputs are not those of its code and helpers of today, or None."""
    if not has_outputs(notebook):
        return "it has no outputs"
    old = notebook["metadata"].get(FINGERPRINTS, {})
    new = notebook_fingerprint(notebook, package)
    if old == new:
        return None
    if old.get("code") != new["code"]:
        return "its code has changed"
    modules = {**old.get("helpers", {}), **new["helpers"]}
    changed = [
        name for name in modules if old.get("helpers", {}).get(name) != new["helpers"].get(name)
    ]
    return f"changed: {', '.join(f'helpers.{name}' for name in changed)}"


def execute(
    notebook: Mapping[str, Any],
    folder: Path,
    profile: str = PUBLISHED_PROFILE,
    timeout: float = CELL_TIMEOUT,
) -> dict[str, Any]:
    """Run all cells in a fresh kernel; the notebook with the outputs of this run.

    folder: the working directory, where the notebook lies. timeout: seconds for a cell. Raises
    RuntimeError with the cell's first line and what happened.
    """
    import nbclient  # with nbformat half a second, which other commands do without
    import nbformat

    executed = nbformat.reads(json.dumps(notebook), as_version=4)
    started: list[Mapping[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as files,
        private_kernel(Path(files), TUTORIAL_PROFILE=profile) as kernel,
    ):
        client = nbclient.NotebookClient(
            executed,
            kernel_name=kernel,
            timeout=timeout,
            record_timing=False,
            config=kernel_config(),
            resources={"metadata": {"path": str(folder)}},
            on_cell_start=lambda cell, cell_index: started.append(cell),
        )
        try:
            client.execute()
        except Exception as error:  # also a kernel that died, or a cell that took too long
            problem = f"{describe_cell(started)}: {describe_error(error, timeout)}"
            raise RuntimeError(problem) from None
    result = json.loads(nbformat.writes(executed))
    for cell in result["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = list(_joined(cell["outputs"]))
    # Not the kernel that happened to run it, nor its version of Python.
    return {**result, "metadata": copy.deepcopy(notebook["metadata"])}


def _joined(outputs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Outputs with what was printed in a row as one: how it arrives in pieces is chance."""
    last = None
    for output in outputs:
        if last is not None and last["output_type"] == output["output_type"] == "stream":
            if last["name"] == output["name"]:
                text = "".join(last["text"]) + "".join(output["text"])
                last["text"] = text.splitlines(keepends=True)
                continue
        if last is not None:
            yield last
        last = dict(output)
    if last is not None:
        yield last


def unfit_outputs(notebook: Mapping[str, Any]) -> list[str]:
    """What outputs should not be committed, with the cell's id; nothing if all of them are fine."""
    problems = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            problems += [f"cell {cell['id']}: {problem}" for problem in _unfit(output)]
            described = output.get("metadata", {}).get("image/png", {}) | cell["metadata"]
            if "image/png" in output.get("data", {}) and not described.get("alt"):
                problems.append(
                    f"cell {cell['id']}: its picture has no text for those who cannot see it: show "
                    'a helpers.plot.Picture, or give the cell\'s metadata an "alt"'
                )
    code = [c for c in notebook["cells"] if c["cell_type"] == "code" and "".join(c["source"])]
    counts = [cell["execution_count"] for cell in code]
    if counts != list(range(1, len(counts) + 1)):
        problems.append(f"execution counts are {counts}: expected 1 to {len(counts)}")
    size = len(json.dumps(notebook, ensure_ascii=False).encode())
    if size > MOST_OUTPUT_BYTES:
        problems.append(f"it takes {size / 1024:.0f} KiB: {MOST_OUTPUT_BYTES / 1024:.0f} at most")
    return problems


# What would be another text on another machine or at another time.
UNFIT_TEXTS = {
    "a warning": r"Warning\b",
    "a path of this machine": r"(?<![\w.])/(home|root|Users|tmp|usr|opt|var|mnt|work|content)/|"
    r"\b[A-Z]:\\|site-packages",
    "an address in memory": r"\b0x[0-9a-f]{6,}",
    "a time stamp": r"\b\d{4}-\d\d-\d\d[T ]\d\d:|\b\d\d:\d\d:\d\d\b",
    "a progress bar": r"\r(?!\n)|\d%\|",
}


def _unfit(output: Mapping[str, Any]) -> Iterator[str]:
    if output["output_type"] == "error":
        yield f"it ended in {output['ename']}"
    if output.get("name") == "stderr":
        yield f"it wrote to stderr: {''.join(output['text'])[:200]!r}"
    texts = ["".join(output.get("text", ""))]
    for kind, content in output.get("data", {}).items():
        if kind in UNWANTED_TYPES:
            yield f"its output is {kind}, which shows nothing without a kernel"
        if not kind.startswith("image/") or kind == "image/svg+xml":
            texts.append(content if isinstance(content, str) else _flat(content))
    own = [str(place) for place in (Path.home(), Path(sys.prefix), Path(tempfile.gettempdir()))]
    for text in texts:
        for what, pattern in UNFIT_TEXTS.items():
            found = re.search(pattern, text)
            if found is not None:
                around = text[max(0, found.start() - 30) : found.end() + 50]
                yield f"its output holds {what}: {around!r}"
        for place in own:
            if len(place) > 4 and place in text:
                yield f"its output holds a path of this machine: {place}"


def _flat(content: Any) -> str:
    return "".join(content) if isinstance(content, list) else json.dumps(content)


def changed_cells(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Cells without the tag `clock` whose outputs differ between two runs of the same code."""
    before = {cell["id"]: cell for cell in old["cells"] if cell["cell_type"] == "code"}
    return [
        cell["id"]
        for cell in new["cells"]
        if cell["cell_type"] == "code"
        and not has_tag(cell, CLOCK_TAG)
        and cell["id"] in before
        and cell["outputs"] != before[cell["id"]]["outputs"]
    ]


def refresh(
    path: Path, package: Path, *, force: bool = False, timeout: float = CELL_TIMEOUT
) -> str:
    """Execute a notebook in place if its outputs are stale; one line about what was done.

    The file is written only when the run was clean. Raises RuntimeError, naming the cell.
    """
    old = read_notebook(path)
    reason = why_stale(old, package)
    if reason is None and not force:
        return "nothing has changed"
    new = execute(old, path.parent, timeout=timeout)
    problems = unfit_outputs(new)
    if problems:
        raise RuntimeError("; ".join(problems))
    new["metadata"][FINGERPRINTS] = notebook_fingerprint(new, package)
    write_notebook(new, path)
    differing = changed_cells(old, new) if reason is None else []
    note = f"; NOT THE SAME as before, without the tag {CLOCK_TAG}: {', '.join(differing)}"
    return f"executed ({reason or 'FORCE'})" + (note if differing else "")
