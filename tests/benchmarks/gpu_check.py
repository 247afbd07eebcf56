"""Predictions beside real training steps on the GPU of this machine.

`make gpu-check` runs it, in under five minutes: every configuration of the grid for real in a
process of its own, while its prediction is made beside it. One JSON file a machine is left in
data/gpu/. Without a GPU nothing is measured and nothing is written. Another interpreter, with
other versions of torch and transformers: `make gpu-check PY=path/to/python`.
"""

import contextlib
import json
import multiprocessing
import os
import platform
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from helpers.catalogue import Workload, find_workload
from helpers.cuda import Gpu, gpu_of
from helpers.memory import MIB, measure, nvml_memory, timed
from helpers.predict import predict
from helpers.train import (
    Recipe,
    build_optimizer,
    is_out_of_memory,
    make_optimizer,
    make_scaler,
    train_step,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "data" / "gpu"
SECONDS_IN_ALL = 280
SECONDS_A_RUN = 60
SECONDS_TO_BEGIN = 10  # with less left no other run is begun
STEPS = 4

# --- The grid ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One configuration: what is trained and how.

    evaluates: passes in eval mode follow the steps, before NVML is read, as at an epoch's end.
    """

    workload: Workload
    micro_batch: int
    recipe: Recipe
    optimizer: str
    cudnn_benchmark: bool = False
    evaluates: bool = False

    def batch(self):
        return self.workload.batch_fn(self.micro_batch * self.recipe.accumulate)


def article_model() -> nn.Sequential:
    """The VGG16 article's model: ten children, of which the first holds all convolutions."""
    features, pool, _ = torchvision.models.vgg16().children()
    dense = [nn.Linear(25_088, 4096), nn.ReLU(), nn.Dropout(0.5)]
    dense += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 2)]
    return nn.Sequential(features, pool, nn.Flatten(), *dense)


def article_loss(model, batch) -> torch.Tensor:
    """The article's loop wants gradients of the images too."""
    pictures, labels = batch
    return F.cross_entropy(model(pictures.requires_grad_()), labels)


def random_pictures(count: int, size: int = 224):
    return torch.rand(count, 3, size, size), torch.arange(count) % 2


def article_workload() -> Workload:
    return Workload("the VGG16 article's model", article_model, random_pictures, article_loss)


def padded(batch_fn, count: int) -> dict[str, torch.Tensor]:
    """A batch with padding: transformers drops a mask of ones where it can look at the data."""
    batch = batch_fn(count)
    batch["attention_mask"][:, -8:] = 0
    return batch


def text_workload(name: str, **options) -> Workload:
    workload = find_workload(name, **options)
    changes = {**vars(workload), "batch_fn": partial(padded, workload.batch_fn)}
    return Workload(**changes)


def grid() -> dict[str, Check]:
    """The configurations by name, the most telling ones first."""
    checks: dict[str, Check] = {}
    article = article_workload()
    flat = find_workload("vgg16", num_labels=2, image_size=224)
    for benchmark in (False, True):
        options = dict(cudnn_benchmark=benchmark, evaluates=True)
        for name, workload, how in (
            ("plain", article, None),
            # checkpoint_sequential(model, 2, ...) cuts ten children in the middle and does not
            # recompute the last segment
            ("two segments", article, ((0, 5),)),
            ("pools", flat, "pools"),
        ):
            title = f"vgg16 {name}, cudnn.benchmark {'on' if benchmark else 'off'}"
            checks[title] = Check(workload, 64, Recipe(checkpoint=how), "momentum", **options)
    large = partial(Check, text_workload("xlm-roberta-large", num_labels=1, seq_len=192), 16)
    checks["xlm-r large plain"] = large(Recipe(), "adamw-fused")
    checks["xlm-r large fp16"] = large(Recipe(amp="fp16"), "adamw-fused")
    checks["xlm-r large layers"] = large(Recipe(checkpoint="layers"), "adamw-fused")
    everything = Recipe(amp="fp16", checkpoint="layers", accumulate=2)
    checks["xlm-r large fp16, layers, accumulate 2"] = large(everything, "adamw")
    resnet = find_workload("resnet50", num_labels=2, image_size=224)
    checks["resnet50 plain"] = Check(resnet, 64, Recipe(), "momentum")
    checks["resnet50 fp16"] = Check(resnet, 64, Recipe(amp="fp16"), "momentum")
    gpt2 = text_workload("gpt2", seq_len=512)
    checks["gpt2 plain"] = Check(gpt2, 8, Recipe(), "adamw")
    checks["gpt2 bf16"] = Check(gpt2, 8, Recipe(amp="bf16"), "adamw")
    base = partial(Check, text_workload("xlm-roberta-base", num_labels=1, seq_len=192), 32)
    checks["xlm-r base fp16"] = base(Recipe(amp="fp16"), "adamw")
    checks["xlm-r base layers"] = base(Recipe(checkpoint="layers"), "adamw")
    checks["xlm-r base accumulate 4"] = Check(base.args[0], 8, Recipe(accumulate=4), "adamw")
    for optimizer in (
        "adamw", "adamw-forloop", "adamw-fused", "adam", "sgd", "momentum", "adafactor",
    ):  # fmt: skip
        checks[f"xlm-r base {optimizer}"] = base(Recipe(), optimizer)
    return checks


# --- One run -------------------------------------------------------------------------------


def used_before_cuda() -> int | None:
    """Bytes in use on the only card before CUDA has started here; None if there are several."""
    with contextlib.suppress(Exception):  # a reading that is not there is not worth a failure
        import pynvml

        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() == 1:
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            version = getattr(pynvml, "nvmlMemory_v2", None)
            options = {} if version is None else {"version": version}
            return pynvml.nvmlDeviceGetMemoryInfo(card, **options).used
    return None


def mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / MIB


def start_cuda(device: torch.device) -> dict[str, float | None]:
    """Start CUDA: MiB in use before (by others), and MiB that the context takes; None: unknown."""
    if device.type != "cuda":
        return {"used_before_mib": None, "context_mib": None}
    before = used_before_cuda()
    number = torch.ones(1, device=device)
    after = nvml_memory(device).used
    known = before is not None and after is not None
    context = after - before - torch.cuda.memory_reserved(device) if known else None
    del number
    torch.cuda.empty_cache()
    return {"used_before_mib": mib(before), "context_mib": mib(context)}


def run(check: Check, device: torch.device) -> dict:
    """Train for real: `check`'s steps in one measurement, then some more for the time."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = check.cudnn_benchmark
    begun = start_cuda(device)
    try:
        model = check.workload.model_fn().to(device).train()
        optimizer = build_optimizer(
            model, partial(make_optimizer, check.optimizer, lr=1e-5), check.recipe
        )
        scaler = make_scaler(check.recipe, device)
        batch = check.batch()
        loss_fn = check.workload.loss_fn
        step = partial(train_step, model, batch, loss_fn, optimizer, check.recipe, scaler)
        with measure(model, optimizer, inputs=batch) as usage:
            updates = tries = 0
            while updates < STEPS and tries < 20:  # the scaler skips a step now and then
                updates += step().stepped
                tries += 1
            if check.evaluates:
                evaluate_once(model, batch, device)
        kept = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
        timing = timed(step, repeats=3, warmup=0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"failed": str(error).split(". ")[0], **begun}
    return {
        **begun,
        "max_memory_allocated_mib": usage.peak_mib,
        "max_memory_reserved_mib": usage.reserved_mib,
        "nvml_used_mib": usage.device_used_mib,
        "reserved_when_nvml_was_read_mib": mib(kept),
        "seconds_per_step": timing.median,
        "steps": updates,
        "peak_source": usage.peak_source,
        "notes": usage.notes,
    }


def evaluate_once(model: nn.Module, batch, device: torch.device) -> None:
    model.eval()
    with torch.no_grad():
        model(batch[0].to(device))
    model.train()


# --- Its prediction ------------------------------------------------------------------------


def this_card() -> Gpu:
    return gpu_of(torch.cuda.get_device_properties(0))


def predicted(check: Check, card: Gpu) -> dict:
    """The same step as `helpers.predict` sees it, without a GPU."""
    torch.set_num_threads(1)
    prediction = predict(
        check.workload.model_fn,
        check.batch,
        check.workload.loss_fn,
        check.recipe,
        partial(make_optimizer, check.optimizer, lr=1e-5),
        gpu=card,
    )
    names = ("peak_allocated_mib", "peak_reserved_mib", "device_used_mib", "context_mib")
    return {name: prediction.to_json()[name] for name in names}


# --- The whole check -----------------------------------------------------------------------


def processes():
    """Where processes come from: a server that has imported everything and never touched CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for a GPU forbids to fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "__main__",
            "transformers.models.xlm_roberta.modeling_xlm_roberta",
            "transformers.models.gpt2.modeling_gpt2",
            "helpers.predict",
        ]
    )
    return context


def run_and_send(connection, check: Check, device: str) -> None:
    try:
        connection.send(run(check, torch.device(device)))
    except Exception as error:  # the other configurations go on
        connection.send({"failed": f"{type(error).__name__}: {error}"})


def run_in_process(context, check: Check, seconds: float, device: str = "cuda") -> dict:
    """`run` in a process of its own, which is ended after `seconds`."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_and_send, args=(theirs, check, device))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return {"failed": f"stopped after {seconds:.0f} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"failed": f"the process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def machine() -> dict:
    """GPU, driver and versions."""
    import torchvision as vision
    import transformers

    driver = None
    with contextlib.suppress(Exception):  # as in used_before_cuda
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        driver = driver.decode() if isinstance(driver, bytes) else driver
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "gpu_memory_mib": mib(
            torch.cuda.get_device_properties(0).total_memory if has_gpu else None
        ),
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": vision.__version__,
        "transformers": transformers.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
    }


def check_all(checks: dict[str, Check], measure_one, predictions, deadline: float) -> list[dict]:
    """A row for every configuration; those for which the time is too short say so.

    measure_one(check, seconds) measures; predictions: a future of each prediction by name.
    """
    rows = []
    for name, check in checks.items():
        left = deadline - time.monotonic()
        measured = {"failed": "not run: the time was up"}
        if left >= SECONDS_TO_BEGIN:
            measured = measure_one(check, min(SECONDS_A_RUN, left))
        row = {"name": name, "measured": measured, "predicted": predictions[name].result()}
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def line_of(row: dict) -> str:
    measured = row["measured"]
    if "failed" in measured:
        return f"{row['name']:<42} {measured['failed']}"
    peak, guess = measured["max_memory_allocated_mib"], row["predicted"]["peak_allocated_mib"]
    error = f"{100 * (guess / peak - 1):+.2f} %"
    return f"{row['name']:<42} allocated {peak:,.0f} MiB, predicted {guess:,.0f} ({error})"


def file_name(about: dict) -> str:
    parts = (about["gpu"], "torch", about["torch"], "transformers", about["transformers"])
    return (
        "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json"
    )


def write(rows: list[dict], about: dict, seconds: float, folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(about)
    result = {"machine": about, "seconds": round(seconds, 1), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    if not torch.cuda.is_available():
        print("No CUDA GPU here: nothing was measured, and nothing was written.")
        return 0
    started = time.monotonic()
    context = processes()
    checks = grid()
    with ProcessPoolExecutor(1, mp_context=context) as pool:  # CUDA starts in a process that ends
        card = pool.submit(this_card).result()
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        predictions = {name: pool.submit(predicted, check, card) for name, check in checks.items()}
        measure_one = partial(run_in_process, context)
        rows = check_all(checks, measure_one, predictions, started + SECONDS_IN_ALL)
    path = write(rows, machine(), time.monotonic() - started)
    print(f"{len(rows)} configurations in {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
