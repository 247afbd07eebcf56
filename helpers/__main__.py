"""All commands of the tutorial: `python -m helpers COMMAND`, with `--help` for each.

A command is an `add_…` function, which describes it to argparse and names the function that does
it, and an entry in COMMANDS.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from helpers.execute import (
    CELL_TIMEOUT,
    describe_cell,
    describe_error,
    find_notebooks,
    kernel_config,
    private_kernel,
    repository,
)
from helpers.fetch import SOURCES, fetch
from helpers.notebook import (
    RESULT_COLUMNS,
    RESULT_MIME,
    Table,
    data_root,
    describe_machine,
    format_value,
    resolve_profile,
    set_seed,
)
from helpers.pages import write_pages
from helpers.publish import (
    open_links,
    read_notebook,
    refresh,
    repository_address,
    write_first_cells,
)

# --- Running the notebooks -----------------------------------------------------------------


@dataclass
class NotebookRun:
    """What became of one notebook: its results, or the problem that kept it from them."""

    name: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, str]] = field(default_factory=list)
    problem: str | None = None


def run_notebook(
    path: Path, runs: Path, parameters: Mapping[str, Any], timeout: float = CELL_TIMEOUT
) -> NotebookRun:
    """Execute a notebook in a fresh kernel, its folder as working directory, into `runs`.

    timeout: seconds for a single cell. Whatever goes wrong is in the result, with the cell.
    """
    # Here, since these take a second that no other command needs.
    import nbformat
    import papermill

    run = NotebookRun(path.stem)
    executed = runs / path.name
    executed.unlink(missing_ok=True)
    known = papermill.inspect_notebook(str(path))
    unknown = [name for name in parameters if name not in known]
    if unknown:
        run.problem = (
            f"it has no parameter {', '.join(unknown)}; it knows {', '.join(known) or 'none'}"
        )
        return run
    started: list[Mapping[str, Any]] = []  # every cell, when it starts
    start = time.perf_counter()
    try:
        with private_kernel(runs) as kernel:
            papermill.execute_notebook(
                path,
                executed,
                parameters,
                kernel_name=kernel,
                cwd=path.parent,
                execution_timeout=timeout,
                progress_bar=False,
                config=kernel_config(),
                on_cell_start=lambda cell, cell_index: started.append(cell),
            )
        notebook = nbformat.read(executed, as_version=4)
        run.problem = _unfinished(notebook)
        run.rows, run.claims = recorded(notebook)
        if run.problem is None and not run.rows:
            run.problem = "it recorded no result: its last code cell calls record(rows)"
    except Exception as error:  # dead kernels and timeouts too; the other notebooks still run
        run.problem = f"{describe_cell(started)}: {describe_error(error, timeout)}"
    run.seconds = time.perf_counter() - start
    return run


def _unfinished(notebook: Mapping[str, Any]) -> str | None:
    """The first code cell that did not run or ended in an error.

    Told by counts and outputs, not by papermill's status: that reads "completed" for cells that
    a dead kernel never saw.
    """
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code" or not cell["source"].strip():
            continue
        if cell["execution_count"] is None:
            return f"{describe_cell(notebook['cells'][: index + 1])} did not run"
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            return f"{describe_cell(notebook['cells'][: index + 1])} ended in an error"
    return None


def recorded(notebook: Mapping[str, Any]) -> tuple[list[dict], list[dict]]:
    """The rows and claims that an executed notebook recorded in its outputs."""
    rows: list[dict] = []
    claims: list[dict] = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            results = output.get("data", {}).get(RESULT_MIME)
            if results is not None:
                rows += results["rows"]
                claims += results["claims"]
    return rows, claims


def data_parameter(path: Path, photos: Path | None, comments: Path | None) -> dict[str, str]:
    """DATA for one notebook: the comments where it reads comments, the photos otherwise."""
    cells = read_notebook(path)["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    data = comments if re.search(r"\bjigsaw\(", code) else photos
    return {} if data is None else {"DATA": str(data)}


def run_notebooks(
    notebooks: Sequence[Path],
    runs: Path,
    *,
    photos: Path | None = None,
    comments: Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout: float = CELL_TIMEOUT,
) -> list[NotebookRun]:
    """Execute notebooks one after the other, one line of progress each."""
    runs.mkdir(parents=True, exist_ok=True)
    done = []
    for path in notebooks:
        print(f"{path.stem} ...", end=" ", flush=True)
        given = {**data_parameter(path, photos, comments), **(parameters or {})}
        run = run_notebook(path, runs, given, timeout)
        results = "1 result" if len(run.rows) == 1 else f"{len(run.rows)} results"
        print(f"{run.seconds:.0f} s, " + ("FAILED" if run.problem else results), flush=True)
        done.append(run)
    return done


# --- The summary ---------------------------------------------------------------------------


def write_summary(done: Sequence[NotebookRun], runs: Path, profile: str) -> Table:
    """Leave summary.csv, summary.md and summary.json in `runs`; return the table of results."""
    rows = [{"notebook": run.name, **row} for run in done for row in run.rows]
    table = Table(rows, RESULT_COLUMNS)
    with open(runs / "summary.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(RESULT_COLUMNS)
        writer.writerows([_csv_value(row[name]) for name in RESULT_COLUMNS] for row in rows)
    machine = describe_machine()
    notes = [f"- {row['model']}, {row['recipe']}: {row['note']}" for row in rows if row["note"]]
    lines = [table.markdown(), "", f"Profile `{profile}`. {machine}.", *([""] if notes else [])]
    (runs / "summary.md").write_text("\n".join(lines + notes) + "\n", encoding="utf-8")
    summary = {
        "machine": machine,
        "profile": profile,
        "problems": {run.name: run.problem for run in done if run.problem},
        "minutes": {run.name: run.seconds / 60 for run in done},
        "rows": rows,
        "claims": [claim for run in done for claim in run.claims],
    }
    (runs / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return table


def _csv_value(value: Any) -> Any:
    """Unrounded, and readable by any program: n/a, true, false, numbers without commas."""
    return format_value(value) if value is None or isinstance(value, bool) else value


def add_run(commands) -> None:
    parser = commands.add_parser("run", help="execute the notebooks into runs/")
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="these notebooks")
    parser.add_argument("--data", metavar="DIR", help="photos of cats and dogs, not the sample")
    parser.add_argument("--comments", metavar="DIR", help="comments, not the sample")
    parser.add_argument("--profile", help="auto, tiny, small or full; otherwise auto")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="other parameters, for example EPOCHS=3",
    )
    parser.add_argument("--timeout", type=float, default=CELL_TIMEOUT, help="seconds for a cell")
    parser.set_defaults(function=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Execute the notebooks, leave the summary, print it; 1 if any of them failed."""
    root = repository()
    profile = resolve_profile(options.profile or "auto")
    parameters = dict(parse_assignment(text) for text in options.set)
    if options.profile:
        parameters["PROFILE"] = profile
    photos, comments = data_root(options.data), data_root(options.comments)
    notebooks = find_notebooks(root / "notebooks", options.only)
    done = run_notebooks(
        notebooks,
        root / "runs",
        photos=photos,
        comments=comments,
        parameters=parameters,
        timeout=options.timeout,
    )
    results = write_summary(done, root / "runs", profile)
    write_pages(
        root / "runs",
        [run.name for run in done],
        results=results._repr_html_(),
        about=f"Profile {profile}. {describe_machine()}.",
        problems={run.name: run.problem for run in done if run.problem},
    )
    print(f"\n{results}\n")
    failed = [run for run in done if run.problem]
    for run in failed:
        print(f"{run.name}: {run.problem} (executed so far: runs/{run.name}.ipynb)")
    print("Executed notebooks, summary.csv and summary.md are in runs/; runs/index.html shows all.")
    return 1 if failed else 0


def parse_assignment(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is a Python literal, or else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{text!r} is no assignment: write NAME=VALUE, for example EPOCHS=3")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


# --- The notebooks as readers get them --------------------------------------------------------


def add_bootstrap(commands) -> None:
    parser = commands.add_parser(
        "bootstrap", help="write the first code cell and the badges into every notebook"
    )
    parser.set_defaults(function=bootstrap_command)


def bootstrap_command(options: argparse.Namespace) -> None:
    """Give every notebook the first cell that finds or gets the helpers."""
    root = repository()
    changed = write_first_cells(find_notebooks(root / "notebooks"), repository_address(root))
    print("Changed:", ", ".join(path.stem for path in changed) or "nothing")


def add_notebooks(commands) -> None:
    parser = commands.add_parser(
        "notebooks", help="execute the notebooks in place where their outputs are stale"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NN", help="these notebooks")
    parser.add_argument("--force", action="store_true", help="fresh ones too")
    parser.set_defaults(function=notebooks_command)


def notebooks_command(options: argparse.Namespace) -> int:
    """Give the notebooks in git the outputs of a clean run; 1 if one of them could not get it."""
    root = repository()
    failed = 0
    for path in find_notebooks(root / "notebooks", options.only):
        print(f"{path.stem} ...", end=" ", flush=True)
        try:
            print(refresh(path, root / "helpers", force=options.force), flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"FAILED, left as it was: {error}", flush=True)
    return 1 if failed else 0


def add_kaggle(commands) -> None:
    parser = commands.add_parser(
        "kaggle", help="write copies of the notebooks that stand alone into build/kaggle/"
    )
    parser.set_defaults(function=kaggle_command)


def kaggle_command(options: argparse.Namespace) -> None:
    """Write a self-contained copy of every lesson into build/kaggle."""
    from helpers.kaggle import write_lessons

    root = repository()
    for path in write_lessons(find_notebooks(root / "notebooks"), root, root / "build" / "kaggle"):
        print(f"{path.relative_to(root)}: {path.stat().st_size / 1024:.0f} KiB")


# --- The report ----------------------------------------------------------------------------

README_COLUMNS = (
    "notebook",
    "model",
    "recipe",
    "batch_size",
    "peak_mib",
    "peak_source",
    "seconds_per_step",
    "val_metric",
    "identical_to_baseline",
)


def replace_block(text: str, name: str, content: str) -> str:
    """Put content between the markers `<!-- name:start -->` and `<!-- name:end -->`.

    Raises ValueError where the pair is not there exactly once.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"README.md needs one pair of markers {start} and {end}, in this order")
    before, after = text.split(start)[0], text.split(end)[1]
    return f"{before}{start}\n{content.strip()}\n{end}{after}"


def report_blocks(root: Path) -> dict[str, str]:
    """The generated parts of README.md, by the name of their markers, from the last `make run`."""
    path = root / "runs" / "summary.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: `make run` writes it")
    summary = json.loads(path.read_text(encoding="utf-8"))
    notebooks = find_notebooks(root / "notebooks")
    for name in (path.stem for path in notebooks):
        if name not in summary["minutes"] or name in summary["problems"]:
            raise ValueError(f"the last `make run` has no results of {name}: run all notebooks")
    machine = f"From a run with the profile `{summary['profile']}`. {summary['machine']}."
    address = repository_address(root)
    lessons = [
        {
            "notebook": f"[{path.stem}](notebooks/{path.name})",
            "what it teaches": _first_sentence(path),
            "minutes": round(summary["minutes"][path.stem], 1),
            **{where: f"[open]({link})" for where, link in open_links(address, path.stem).items()},
        }
        for path in notebooks
    ]
    folders = {"environment": Path(sys.prefix), "samples": root / "data", "runs": root / "runs"}
    sizes = [
        {"what": what, "MiB": round(folder_bytes(folder) / 1024**2, 1)}
        for what, folder in folders.items()
    ]
    claims = summary["claims"]
    return {
        "result-table": f"{Table(summary['rows'], README_COLUMNS).markdown()}\n\n{machine}",
        "notebooks": f"{Table(lessons).markdown()}\n\n{machine}",
        "disk-space": Table(sizes).markdown(),
        "claims": f"{Table(claims).markdown()}\n\n{machine}" if claims else "",
    }


def benchmark_blocks(folder: Path) -> dict[str, str]:
    """The parts of README.md that come from the last `make bench`; results are kept in `folder`."""

    def read(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: `make bench` or `make soak` writes it")
        return json.loads(path.read_text(encoding="utf-8"))

    published, loop, checkpointing = read("published"), read("loop"), read("checkpointing")
    groups = [
        {
            "readings": group["group"],
            "rows": group["rows"],
            "as on the row's stack: median, worst": _two_errors(group, "then"),
            "as on today's software: median, worst": _two_errors(group, "today"),
        }
        for group in published["groups"]
    ]
    rows = [
        {
            "row": row["id"],
            "model and configuration": f"{row['model']}; {row['configuration']}",
            "reading": row["reading"],
            "torch": row["torch"],
            "measured MiB": row["measured_mib"],
            "predicted MiB, row's stack": row["predicted_then_mib"],
            "error": f"{row['error_then']:+.1%}",
            "predicted MiB, today": row["predicted_today_mib"],
            "error today": f"{row['error_today']:+.1%}",
        }
        for row in published["rows"]
    ]
    left_out = [{"row": row["id"], "why": row["reason"]} for row in published["misses"]]
    left_out += [{"row": row["id"], "why": row["reason"]} for row in published["not_scored"]]
    details = (
        "<details>\n<summary>Every row</summary>\n\n"
        f"{Table(rows).markdown()}\n\n{published['note']}\n\n"
        f"Missed, or not scored:\n\n{Table(left_out).markdown()}\n</details>"
    )
    ratios = [
        {
            "what": "our loop / the shortest hand-written loop, seconds",
            "ratio": loop["median_ratio"],
        },
        {"what": "cut at the pools / plain, seconds", "ratio": checkpointing["time_ratio"]},
        {
            "what": "plain and one more forward pass of the segments / plain, seconds",
            "ratio": checkpointing["time_ratio_bound"],
        },
        {"what": "cut at the pools / plain, peak memory", "ratio": checkpointing["memory_ratio"]},
    ]
    summary = f"{Table(groups).markdown()}\n\nPredicted on: {published['machine']}."
    return {
        "published": f"{summary}\n\n{details}",
        "benchmarks": f"{Table(ratios).markdown()}\n\nMeasured on: {loop['machine']}.\n\n"
        f"{_soak_sentence(read('soak'))}",
    }


def _soak_sentence(soak: Mapping[str, Any]) -> str:
    files = " to ".join(str(count) for count in soak["open_files"])
    return (
        f"`make soak`: {soak['minutes']:g} minutes of training with {soak['workers']} loader "
        f"workers ({soak['epochs']} epochs). After the first {soak['warm_up_minutes']:g} minutes "
        f"memory grew by {soak['growth_mib_per_minute']:.2f} MiB a minute; open files: {files} "
        f"after every third epoch. Measured on: {soak['machine']}."
    )


def _two_errors(group: Mapping[str, Any], stack: str) -> str:
    return f"{group[f'median_{stack}']:.2%}, {group[f'worst_{stack}']:.2%}"


def _first_sentence(path: Path) -> str:
    """The sentence below the title of a notebook."""
    source = "".join(read_notebook(path)["cells"][0]["source"])
    below = source.partition("\n")[2].strip()
    paragraph = " ".join(below.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0]


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def add_report(commands) -> None:
    parser = commands.add_parser("report", help="write the last run's results into README.md")
    parser.set_defaults(function=report_command)


def report_command(options: argparse.Namespace) -> None:
    """Fill the generated parts of README.md, and the first cells and badges of the notebooks."""
    root = repository()
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    blocks = report_blocks(root) | benchmark_blocks(root / "data" / "benchmarks")
    for name, content in blocks.items():
        text = replace_block(text, name, content)
    readme.write_text(text, encoding="utf-8")
    write_first_cells(find_notebooks(root / "notebooks"), repository_address(root))
    print("README.md holds the results of the last run.")


# --- Predicting ----------------------------------------------------------------------------

# helpers.predict and helpers.catalogue are imported in the commands: with torch they take seconds.

OPTIMIZER_NAMES = (
    "sgd", "momentum", "adam", "adamw", "adamw-fused", "adamw-forloop", "adafactor",
    "adamw-8bit",
)  # fmt: skip


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Options that say what is trained."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a torchvision or Hugging Face name, a folder or config.json, or module:function",
    )
    parser.add_argument("--image-size", type=int, metavar="P", help="pixels a side (224)")
    parser.add_argument("--seq-len", type=int, metavar="L", help="tokens a text (512)")
    parser.add_argument("--num-labels", type=int, metavar="K", help="outputs of a classifier")
    parser.add_argument("--attention", choices=("sdpa", "eager"))
    parser.add_argument("--dtype", choices=("bf16", "fp16"), help="weights in half precision")
    parser.add_argument("--freeze", metavar="NAME", help="parameters not to train: *embeddings*")
    parser.add_argument("--batch", metavar="MODULE:FUNCTION", help="batch for a model function")
    parser.add_argument("--json", action="store_true", help="print JSON")


def workload_of(options: argparse.Namespace):
    """The model, batch and loss that `add_workload`'s options name."""
    from helpers.catalogue import find_workload

    return find_workload(
        options.model,
        num_labels=options.num_labels,
        image_size=options.image_size,
        seq_len=options.seq_len,
        attention=options.attention,
        dtype=options.dtype,
        freeze=options.freeze,
        batch=options.batch,
    )


def add_predict(commands) -> None:
    parser = commands.add_parser(
        "predict", help="the peak memory that a training step would take on a GPU"
    )
    add_workload(parser)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--batch-size", type=int, default=8, metavar="N", help="micro-batch (8)")
    sizes.add_argument(
        "--whole-batch", type=int, metavar="N", help="batch, split into micro-batches"
    )
    parser.add_argument("--accumulate", type=int, default=1, metavar="K", help="micro-batches (1)")
    parser.add_argument("--optimizer", choices=OPTIMIZER_NAMES, default="adamw")
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward only")
    parser.add_argument("--optimizer-in-backward", action="store_true")
    parser.add_argument("--amp", choices=("fp16", "bf16"), help="autocast")
    parser.add_argument("--no-amp-cache", action="store_true", help="keep no half weights")
    parser.add_argument(
        "--checkpoint",
        metavar="HOW",
        help="what is recomputed: a number of segments, pools, layers, layers/2, selective, or "
        "ranges of a sequence such as 0-5,7-9",
    )
    parser.add_argument("--clip-norm", type=float, metavar="NORM")
    parser.add_argument("--offload", action="store_true", help="activations in host memory")
    parser.add_argument("--zero-grad", choices=("none", "zero"), default="none")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel's buckets too")
    parser.add_argument(
        "--shard-over",
        type=int,
        metavar="RANKS",
        help="one of so many processes that share out the weights (FSDP2); the batch is its own",
    )
    parser.add_argument("--gpu", help='a card such as T4, or a size such as "11 GiB"')
    parser.add_argument("--context", type=int, metavar="MIB", help="the CUDA context, if known")
    parser.add_argument("--expandable-segments", action="store_true")
    parser.set_defaults(function=predict_command)


def predict_command(options: argparse.Namespace) -> None:
    """Print what one training step would take."""
    from helpers.catalogue import parse_checkpoint
    from helpers.cuda import find_gpu
    from helpers.predict import describe_pieces, predict_batch
    from helpers.train import Recipe

    recipe = Recipe(
        amp=options.amp or "off",
        accumulate=options.accumulate,
        checkpoint=parse_checkpoint(options.checkpoint),
        clip_norm=options.clip_norm,
        optimizer_in_backward=options.optimizer_in_backward,
        offload=options.offload,
        amp_cache=not options.no_amp_cache,
        set_to_none=options.zero_grad == "none",
    )
    gpu = find_gpu(options.gpu) if options.gpu else None
    workload = workload_of(options)
    whole_batch = options.whole_batch
    if whole_batch is None:
        whole_batch = options.batch_size * options.accumulate
    prediction = predict_batch(
        workload,
        whole_batch,
        recipe,
        None if options.no_optimizer else options.optimizer,
        gpu=gpu,
        context=None if options.context is None else options.context * 1024**2,
        expandable_segments=options.expandable_segments,
        ddp=options.ddp,
        ranks=options.shard_over,
    )
    if options.json:
        print(json.dumps(prediction.to_json(), indent=2))
        return
    batch = f"batch {whole_batch}"
    if options.accumulate > 1:
        batch += f" in {describe_pieces(whole_batch, options.accumulate)}"
    optimizer = "no optimizer" if options.no_optimizer else options.optimizer
    print(f"{workload.title}, {batch}, {optimizer}, {recipe.name}: predicted, not measured")
    print(prediction.text())
    if gpu is not None:
        verdict = "fits" if prediction.fits_gpu else "does not fit"
        print(f"{verdict} a card of {gpu.memory_mib:,} MiB ({gpu.name})")


# --- Real data -----------------------------------------------------------------------------


def add_data(commands) -> None:
    parser = commands.add_parser("data", help="download real photos or comments")
    parser.add_argument("name", choices=SOURCES, metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="new or empty folder; otherwise downloads/NAME"
    )
    parser.set_defaults(function=data_command)


def data_command(options: argparse.Namespace) -> int:
    """Download, verify and unpack one kind of real data; Ctrl-C keeps what has come."""
    try:
        fetch(options.name, options.folder)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def add_plan(commands) -> None:
    parser = commands.add_parser("plan", help="the fastest recipes that fit a GPU")
    add_workload(parser)
    parser.add_argument("--batch-size", type=int, required=True, metavar="N", help="whole batch")
    parser.add_argument("--optimizer", choices=OPTIMIZER_NAMES, help="keep to this one")
    parser.add_argument("--gpu", required=True, help='a card such as T4, or a size: "11 GiB"')
    parser.set_defaults(function=plan_command)


def plan_command(options: argparse.Namespace) -> int:
    """Print recipes that fit, the fastest first; 1 if there is none."""
    from helpers.predict import plan

    workload = workload_of(options)
    plans = plan(workload, options.batch_size, options.gpu, options.optimizer)
    if options.json:
        print(json.dumps(plans.to_json(), indent=2))
    else:
        print(plans.text(workload.title))
    return 0 if plans.plans else 1


# --- The command line ----------------------------------------------------------------------

# --- Training from the command line, also through torchrun -----------------------------------


def add_train(commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train one of the two tasks; through torchrun on several GPUs or processes",
        description="Train and print one line an epoch. On several GPUs: torchrun "
        "--nproc-per-node=2 -m helpers train cats-dogs; the batch is shared by the processes. On "
        "two machines, on each: torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
        "--rdzv-endpoint=HOST:PORT -m helpers train cats-dogs, HOST being one of them.",
    )
    add = parser.add_argument
    add("task", choices=("cats-dogs", "comments"))
    add("--data", metavar="DIR", help="photos, or the competition's files (default: the sample)")
    add("--model", default="xlm-roberta-base", help="comments: hub name, folder or size (small)")
    add("--width", type=float, default=1.0, help="cats-dogs: scales VGG16's channels")
    add("--image-size", type=int, default=224, metavar="P", help="cats-dogs: pixels a side")
    add("--seq-len", type=int, default=192, metavar="L", help="comments: longest text in tokens")
    add("--by-length", action="store_true", help="comments: batches of about one length")
    add("--attention", choices=("sdpa", "eager"), help="comments: default as transformers chooses")
    add("--freeze", metavar="NAME", help="parameters or a module not to train: *word_embeddings*")
    add("--limit", type=int, metavar="N", help="train on the first N samples only")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=32, metavar="N", help="of all processes together")
    add("--optimizer", choices=OPTIMIZER_NAMES, default="adamw")
    add("--lr", type=float, default=1e-4, help="learning rate")
    add("--dropout", type=float, metavar="P", help="of every dropout layer (default: the model's)")
    add("--amp", choices=("off", "fp16", "bf16"), default="off")
    add("--accumulate", type=int, default=1, metavar="K", help="micro-batches per process")
    add("--checkpoint", metavar="HOW", help="segments, pools, layers, layers/2, selective")
    add("--clip-norm", type=float, metavar="X")
    add("--shard", action="store_true", help="FSDP2: each process keeps a share of the weights")
    add("--save", metavar="DIR", help="keep weights and a snapshot to go on from")
    add("--resume", action="store_true", help="go on from the snapshot in --save")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=300, help="seconds to wait for another process")
    parser.set_defaults(function=train_command)


def train_command(options: argparse.Namespace) -> None:
    """Train in this process, or together with those that torchrun started."""
    from torch import nn

    from helpers.distributed import (
        distribute,
        process_count,
        process_group,
        process_rank,
        shard,
    )
    from helpers.models import freeze, sharding_units
    from helpers.train import Recipe, build_optimizer, make_optimizer, train

    how = options.checkpoint
    recipe = Recipe(
        amp=options.amp,
        accumulate=options.accumulate,
        checkpoint=int(how) if how is not None and how.isdigit() else how,
        clip_norm=options.clip_norm,
    )
    with process_group(options.timeout) as device:
        set_seed(options.seed)  # the same weights in every process
        model, train_loader, val_loader, task = _task_parts(options)
        for module in model.modules():
            if options.dropout is not None and isinstance(module, nn.Dropout):
                module.p = options.dropout
        if options.freeze is not None:
            freeze(model, options.freeze)
        model = distribute(model, device, sharding_units(model) if options.shard else None)
        set_seed(options.seed + process_rank(model))  # other dropout masks in each process
        optimizer_fn = partial(make_optimizer, options.optimizer, lr=options.lr)
        results = train(
            model,
            shard(train_loader),
            shard(val_loader),
            task,
            build_optimizer(model, optimizer_fn, recipe),
            epochs=options.epochs,
            recipe=recipe,
            evaluate_train=False,
            save_dir=options.save,
            resume=options.resume,
        )
        if process_rank(model) == 0:
            columns = ["epoch", "train_loss", "val_loss", "val_score", "steps", "seconds"]
            rows = [{name: getattr(result, name) for name in columns} for result in results]
            print(f"{describe_machine()}; {process_count(model)} process(es); {recipe.name}")
            print(Table(rows, columns))


def _task_parts(options: argparse.Namespace) -> tuple:
    """Model, loaders and task as the command line says."""
    from helpers.data import cats_vs_dogs, comment_texts, jigsaw
    from helpers.models import vgg16, xlmr
    from helpers.train import CATS_DOGS, COMMENTS

    if options.task == "cats-dogs":
        data = cats_vs_dogs(
            data_root(options.data),
            image_size=options.image_size,
            batch_size=options.batch_size,
            seed=options.seed,
            train_limit=options.limit,
        )
        return vgg16(len(data.classes), options.width), data.train, data.val, CATS_DOGS
    root = data_root(options.data)
    parts = xlmr(
        options.model,
        texts=comment_texts(root),
        seed=options.seed,
        attention=options.attention,
    )
    data = jigsaw(
        root,
        tokenizer=parts.tokenizer,
        max_length=options.seq_len,
        batch_size=options.batch_size,
        seed=options.seed,
        train_limit=options.limit,
        by_length=options.by_length,
    )
    return parts.model, data.train, data.val, COMMENTS


COMMANDS = (
    add_run, add_notebooks, add_bootstrap, add_kaggle, add_data, add_report, add_train,
    add_predict, add_plan
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that its user can mend are one sentence and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m helpers", description="The tutorial's tools.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.function(options) or 0
    except (ValueError, OSError) as error:
        if not _raised_by_helpers(error):
            raise
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _raised_by_helpers(error: BaseException) -> bool:
    """Whether our own code raised it, in words for the user; any other is a defect to be seen."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__package__") == "helpers"


if __name__ == "__main__":
    sys.exit(main())
