"""How notebooks are executed: where they are, in which kernel they run, what to say of failures."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CELL_TIMEOUT = 1800  # seconds; the longest cells train for minutes on two cores


def repository() -> Path:
    """The folder that holds the notebooks and this package.

    Raises FileNotFoundError where the package was installed without them.
    """
    root = Path(importlib.util.find_spec("helpers").origin).parent.parent
    if not (root / "notebooks").is_dir():
        raise FileNotFoundError(
            f"{root} has no folder notebooks: run this in a clone of the repository, where "
            "`pip install -e .` was run"
        )
    return root


def find_notebooks(folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """The numbered notebooks of a folder in order, or those whose names begin as `only` says.

    Raises FileNotFoundError where there are none.
    """
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    names = ", ".join(path.stem for path in found) or "none"
    for start in only:
        if not any(path.stem.startswith(start) for path in found):
            raise FileNotFoundError(f"no notebook begins with {start!r} in {folder} ({names})")
    if not found:
        raise FileNotFoundError(f"no notebook in {folder}: their names begin with two digits")
    return [path for path in found if not only or path.stem.startswith(tuple(only))]


@contextlib.contextmanager
def private_kernel(runs: Path, **environment: str) -> Iterator[str]:
    """A kernel that is sure to be this interpreter, whatever is registered as python3 here.

    runs: the folder that notebooks write their files into, see `helpers.notebook.output_folder`.
    environment: variables that the kernel finds beside those of this process.
    """
    from ipykernel.kernelspec import get_kernel_dict

    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "kernels", "this-python", "kernel.json")
        spec.parent.mkdir(parents=True)
        env = {
            # Threads that wait spin for a moment and then sleep: those that go on spinning
            # collapse when anything else wants a core, those that sleep at once are slower.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
            # Frozen modules matter to a debugger only, which warns of them at every start.
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TQDM_DISABLE": "1",  # nobody watches the bars
            "TUTORIAL_RUNS": str(runs.absolute()),
            **environment,
        }
        spec.write_text(json.dumps({**get_kernel_dict(), "env": env}))
        before = os.environ.get("JUPYTER_PATH")
        os.environ["JUPYTER_PATH"] = folder if before is None else folder + os.pathsep + before
        try:
            yield spec.parent.name
        finally:
            os.environ.pop("JUPYTER_PATH")
            if before is not None:
                os.environ["JUPYTER_PATH"] = before


def kernel_config() -> Any:
    """Talk to kernels encrypted where it can be done: newer ones warn of plain connections."""
    import zmq
    from jupyter_client.manager import KernelManager
    from traitlets.config import Config

    possible = hasattr(KernelManager, "transport_encryption") and zmq.has("curve")
    return Config({"KernelManager": {"transport_encryption": "auto"}} if possible else {})


def describe_cell(cells: Sequence[Mapping[str, Any]]) -> str:
    """The last code cell of those given, by its number in the executed copy and its first line."""
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    if not code:
        return "before the first code cell"
    lines = code[-1].strip().splitlines() or [""]
    return f"code cell {len(code)} (`{lines[0]}`)"


def describe_error(error: Exception, timeout: float) -> str:
    name = type(error).__name__
    if name in ("PapermillExecutionError", "CellExecutionError"):
        return f"{error.ename}: {error.evalue}"
    if name == "CellTimeoutError":
        return f"it took longer than {timeout:g} seconds"
    if name == "DeadKernelError":
        return "the kernel died (out of memory, or a crash in native code)"
    return f"{name}: {error}"
