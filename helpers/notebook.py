"""What a notebook needs and a library does not: settings, seeds, sources, tables, results."""

from __future__ import annotations

import html
import inspect
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from IPython.display import display

# --- Settings ------------------------------------------------------------------------------

PROFILE_NAMES = ("tiny", "small", "full")

# `full` is the articles' configuration: VGG16 at batch 64 keeps up to 9 GiB of a card reserved.
FULL_NEEDS_BYTES = 10 * 1024**3


class Settings(SimpleNamespace):
    """The sizes a notebook works with, one attribute each, and the profile they came from."""

    def _repr_html_(self) -> str:
        return Table([vars(self)])._repr_html_()

    def __repr__(self) -> str:
        return str(Table([vars(self)]))


def resolve_profile(profile: str = "auto") -> str:
    """The profile to work in: "tiny" (tests), "small" (a CPU) or "full" (the articles' sizes).

    "auto" is the environment variable TUTORIAL_PROFILE where it is set, otherwise "full" on a
    CUDA GPU with at least 10 GiB and "small" anywhere else. Raises ValueError for other names.
    """
    if profile == "auto":
        profile = os.environ.get("TUTORIAL_PROFILE", "auto")
    if profile == "auto":
        return "full" if _cuda_bytes() >= FULL_NEEDS_BYTES else "small"
    if profile not in PROFILE_NAMES:
        raise ValueError(
            f"unknown profile {profile!r} (from PROFILE or the environment's TUTORIAL_PROFILE): "
            f"expected auto, {', '.join(PROFILE_NAMES)}"
        )
    return profile


def settings(
    profile: str, profiles: Mapping[str, Mapping[str, Any]], **parameters: Any
) -> Settings:
    """Choose the sizes of this run: those of the profile, unless a parameter says otherwise.

    profiles: sizes by name for each of "tiny", "small" and "full". parameters: the notebook's
    own parameters by the same names; None means "from the profile". Raises ValueError for an
    unknown profile, a parameter that no profile has, and a value of another kind than the
    profile's.
    """
    name = resolve_profile(profile)
    names = set().union(*profiles.values())
    for other in PROFILE_NAMES:
        if set(profiles.get(other, ())) != names:
            missing = ", ".join(sorted(names - set(profiles.get(other, ()))))
            raise ValueError(f"the profile {other!r} lacks {missing}: each needs all sizes")
    chosen = dict(profiles[name])
    for key, value in parameters.items():
        if key not in names:
            raise ValueError(f"{key} is no size of the profiles, which have {', '.join(chosen)}")
        if value is None:
            continue
        if _kind(value) != _kind(chosen[key]) and chosen[key] is not None:
            raise ValueError(
                f"{key.upper()} is {value!r}: expected a value like {chosen[key]!r}, or None for "
                "the profile's"
            )
        chosen[key] = value
    return Settings(profile=name, **chosen)


def _kind(value: Any) -> type:
    """Whole and broken numbers are one kind: EPOCHS=1 and LEARNING_RATE=1 are both meant."""
    return float if type(value) in (int, float) else type(value)


def data_root(data: str | os.PathLike | None) -> Path | None:
    """The folder that the parameter DATA names, or None for the sample in the repository.

    Raises FileNotFoundError or NotADirectoryError with the full path that was tried.
    """
    if data is None or data == "":
        return None
    path = Path(data).expanduser().absolute()
    if not path.exists():
        raise FileNotFoundError(
            f"DATA is {str(data)!r}, and there is no folder {path}: give the full path of the "
            "folder, or None for the sample that comes with the tutorial"
        )
    if not path.is_dir():
        raise NotADirectoryError(f"DATA is {path}, which is a file: give the folder that holds it")
    return path


def output_folder() -> Path:
    """Where a notebook writes its files: beside the executed copies when `make run` runs it (the
    environment variable TUTORIAL_RUNS), otherwise the working directory."""
    return Path(os.environ.get("TUTORIAL_RUNS") or ".")


def set_seed(seed: int) -> None:
    """Start the random numbers of Python, NumPy and torch (CPU and GPUs) from `seed`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --- The machine ---------------------------------------------------------------------------


def describe_machine() -> str:
    """One line for every notebook's start: what computes, its memory, and the torch version."""
    version = f"torch {torch.__version__.split('+')[0]}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        gib = _cuda_bytes() / 1024**3
        return f"GPU: {name}, {gib:.1f} GiB; {version}, CUDA {torch.version.cuda}"
    threads = torch.get_num_threads()
    plural = "thread" if threads == 1 else "threads"
    return f"CPU: {_cpu_name()}, {threads} {plural}, {_cpu_memory()}; {version}"


def _cuda_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "model unknown"


def _cpu_memory() -> str:
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return "memory unknown"
    return f"{size / 1024**3:.1f} GiB"


# --- Several processes ---------------------------------------------------------------------

STOP_SECONDS = 45  # torchrun gives its processes 30 to end before it kills them


def torchrun(script: str | Path, *arguments: str, processes: int = 2, timeout: float = 180) -> str:
    """Run a Python script in several processes of torchrun on this machine; what it printed.

    Each process finds its number in the environment, as `torch.distributed` expects it; ports are
    chosen among the free ones. Nothing is left behind, whatever happens: raises TimeoutError when
    the script takes longer than `timeout` seconds, RuntimeError with its messages when it fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
    environment = {
        **os.environ,
        # The helpers, wherever they lie; "" in the path of a notebook is the working directory.
        "PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path),
        # The processes share the cores; torchrun would warn that it had to choose.
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes)),
        # Without a network c10d warns that it cannot look up the name of its own machine.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # Files, not pipes: a pipe stays open as long as any process that inherited it.
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as messages,
        tempfile.TemporaryDirectory() as logs,  # which torchrun itself would leave behind
    ):
        command += [f"--log-dir={logs}", str(script), *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=messages)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{Path(script).name} did not end within {timeout:g} seconds and was stopped"
            ) from None
        finally:
            _stop(process)
        output.seek(0)
        messages.seek(0)
        if code != 0:
            raise RuntimeError(f"{Path(script).name} failed:\n{messages.read()[-4000:]}")
        sys.stderr.write(messages.read())
        return output.read()


def _stop(process: subprocess.Popen) -> None:
    """End torchrun so that it ends its processes first; killed outright, it would leave them."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- Showing -------------------------------------------------------------------------------


class Source:
    """Python source, shown in colour by a front end's own Markdown, which follows its theme."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"````python\n{self.text}\n````"


def show_source(*objects: Callable | type) -> Source:
    """Show the source of functions or classes, to read before they are used."""
    return Source("\n\n".join(inspect.getsource(o).rstrip() for o in objects))


class Table:
    """Rows with named columns, shown as a table in a notebook and as text elsewhere.

    Numbers are shown with thousands separators or four digits, None as n/a. `rows` and `columns`
    hold the values as they were given.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None):
        self.rows = [dict(row) for row in rows]
        self.columns = list(columns or dict.fromkeys(name for row in self.rows for name in row))

    def _cells(self) -> list[list[str]]:
        return [[format_value(row.get(name)) for name in self.columns] for row in self.rows]

    def _right(self) -> list[bool]:
        """Which columns hold numbers, and stand on the right."""
        columns = [[row.get(name) for row in self.rows] for name in self.columns]
        return [
            any(_is_number(v) for v in values) and all(v is None or _is_number(v) for v in values)
            for values in columns
        ]

    def __repr__(self) -> str:
        lines = [self.columns, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pads = [str.rjust if right else str.ljust for right in self._right()]
        texts = (
            "  ".join(pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True))
            for line in lines
        )
        return "\n".join(text.rstrip() for text in texts)

    def _repr_html_(self) -> str:
        styles = ["text-align: right" if right else "text-align: left" for right in self._right()]

        def line(tag: str, cells: list[str]) -> str:
            inner = "".join(
                f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
                for cell, style in zip(cells, styles, strict=True)
            )
            return f"<tr>{inner}</tr>"

        body = "".join(line("td", cells) for cells in self._cells())
        return f"<table><thead>{line('th', self.columns)}</thead><tbody>{body}</tbody></table>"

    def markdown(self) -> str:
        """The table in Markdown, for files."""
        rule = ["---:" if right else "---" for right in self._right()]
        lines = [self.columns, rule, *self._cells()]
        escaped = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in lines)
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Table:
    """Show rows (dictionaries) side by side; `columns` picks and orders what is shown."""
    return Table(rows, columns)


def format_value(value: Any) -> str:
    """A value as the tables show it: n/a, yes or no, 1,938, 0.6931."""
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value) or value == 0:
            return f"{value:g}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check(answer: Any, ok: bool | Callable[[Any], bool], hint: str) -> None:
    """Say whether an exercise is solved; None means that nobody has tried yet.

    ok: the verdict, or a function of the answer that gives it. hint: what a wrong answer is told.
    """
    if answer is None:
        print("Not answered yet: put your answer in place of None and run the cell again.")
        return
    try:
        right = bool(ok(answer) if callable(ok) else ok)
    except Exception as error:  # an answer of the wrong kind is wrong, not the end of the notebook
        print(f"Wrong: the check stopped with {type(error).__name__}: {error}. {hint}")
        return
    print("Right." if right else f"Wrong. {hint}")


# --- Results -------------------------------------------------------------------------------

RESULT_COLUMNS = (
    "notebook",
    "model",
    "recipe",
    "batch_size",
    "peak_mib",
    "peak_source",
    "reserved_mib",
    "device_used_mib",
    "seconds_per_step",
    "final_loss",
    "val_metric",
    "identical_to_baseline",
)
PEAK_SOURCES = ("cuda-allocated", "cpu-live-tensors", "predicted")
VERDICTS = ("holds", "holds if", "does not hold")

# Carries the results inside the notebook's output; front ends show the table beside it.
RESULT_MIME = "application/vnd.tutorial.results+json"


def result_row(
    model: str,
    recipe: str,
    batch_size: int,
    usage: Any = None,
    *,
    seconds_per_step: float | None = None,
    final_loss: float | None = None,
    val_metric: float | None = None,
    identical_to_baseline: bool | str | None = None,
    note: str | None = None,
) -> dict[str, Any]:
    """One line of the result table.

    usage: the measurement or prediction (anything with peak_mib, peak_source, reserved_mib and
    device_used_mib), or None where there is neither, with the reason in `note`.
    identical_to_baseline: "baseline" in the notebook's baseline row, True or False where loss,
    gradients and buffers were compared with it bit by bit, None where they were not.
    What is unknown stays None and is shown as n/a.
    """
    row = {
        "model": model,
        "recipe": recipe,
        "batch_size": batch_size,
        "seconds_per_step": seconds_per_step,
        "final_loss": final_loss,
        "val_metric": val_metric,
        "identical_to_baseline": identical_to_baseline,
        "note": note,
    }
    for name in ("peak_mib", "reserved_mib", "device_used_mib", "peak_source"):
        value = None if usage is None else getattr(usage, name)
        row[name] = round(value, 2) if isinstance(value, float) else value
    if row["peak_mib"] is None:  # a configuration that did not fit: its reason is the note
        row["peak_source"] = None
        row["note"] = note or getattr(usage, "failed", None)
    return {name: row[name] for name in (*RESULT_COLUMNS[1:], "note")}


def claim(text: str, figure: str, verdict: str, why: str = "") -> dict[str, str]:
    """A claim of one of the articles beside our figure: verdict is one of VERDICTS, why says
    under which condition, or what happens instead."""
    if verdict not in VERDICTS:
        raise ValueError(f"verdict is {verdict!r}: expected one of {', '.join(VERDICTS)}")
    return {"claim": text, "our figure": figure, "verdict": f"{verdict} {why}".strip()}


class _Results:
    """Results on their way out of the notebook: a table to look at, the values to collect."""

    def __init__(self, rows: list[dict[str, Any]], claims: list[dict[str, str]]):
        self.rows, self.claims = rows, claims
        shown = [name for name in RESULT_COLUMNS if any(r.get(name) is not None for r in rows)]
        self.table = Table(rows, shown)

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        return {
            RESULT_MIME: {"rows": self.rows, "claims": self.claims},
            "text/html": self.table._repr_html_(),
            "text/plain": repr(self.table),
        }


def record(rows: Sequence[Mapping[str, Any]], claims: Sequence[Mapping[str, str]] = ()) -> None:
    """Record the notebook's results and show them: its last code cell.

    rows come from `result_row`, claims from `claim`. `make run` collects them from the executed
    copy. Raises ValueError for a row that says what cannot be: an unknown source, a number that
    is none, a comparison of a prediction.
    """
    if not rows:
        raise ValueError("there is no result to record: give at least one row")
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    for number, row in enumerate(plain, start=1):
        for problem in _problems(row):
            raise ValueError(f"result row {number} ({row.get('recipe')}): {problem}")
    display(_Results(plain, [dict(entry) for entry in claims]))


def _plain(value: Any) -> Any:
    """Numbers of torch and NumPy as Python's own."""
    return value.item() if isinstance(value, (torch.Tensor, np.generic)) else value


def _problems(row: Mapping[str, Any]) -> Iterable[str]:
    expected = {*RESULT_COLUMNS[1:], "note"}
    if set(row) != expected:
        yield f"columns differ in {', '.join(sorted(set(row) ^ expected))}: make it with result_row"
        return
    if not isinstance(row["model"], str) or not isinstance(row["recipe"], str):
        yield "model and recipe are names"
    for name in ("batch_size", *RESULT_COLUMNS[4:11]):
        value = row[name]
        if name == "peak_source" or value is None:
            continue
        if not _is_number(value) or not math.isfinite(value):
            yield f"{name} is {value!r}: expected a finite number, or None with the reason in note"
    source = row["peak_source"]
    if row["peak_mib"] is None:
        if row["note"] is None:
            yield "without a peak it needs a note that says why"
    elif source not in PEAK_SOURCES:
        yield f"peak_source is {source!r}: expected one of {', '.join(PEAK_SOURCES)}"
    same = row["identical_to_baseline"]
    if same not in ("baseline", None) and not isinstance(same, bool):
        yield f"identical_to_baseline is {same!r}: expected True, False, 'baseline' or None"
    if source == "predicted" and isinstance(same, bool):
        yield "a prediction computes no values, so it cannot be compared with the baseline"
