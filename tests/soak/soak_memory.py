"""Twenty minutes of training with two loader workers: neither memory nor open files may grow.

`make soak` runs it and keeps the curve in data/benchmarks/soak.json. SOAK_MINUTES sets another
length. Training runs in a process of its own, watched from here through the system's own counts.
"""

import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import psutil  # comes with ipykernel
import pytest
import torch

from helpers.data import PET_CLASSES, cats_vs_dogs, draw_pet
from helpers.memory import MIB
from helpers.models import vgg16
from helpers.notebook import describe_machine
from helpers.train import CATS_DOGS, Recipe, build_optimizer, make_optimizer, train

RESULT = Path(__file__).parents[2] / "data" / "benchmarks" / "soak.json"
MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
WARM_UP = min(3.0, MINUTES / 3)  # minutes that do not count: caches fill, allocators settle
EVERY = 2.0  # seconds between samples
WORKERS = 2
LARGEST_GROWTH = 1.0  # MiB a minute
RECIPE = Recipe(amp="bf16", accumulate=2, checkpoint="pools", clip_norm=1.0)


def draw_folder(folder: Path) -> None:
    """Photos in JPEG, PNG and grey, so that workers open, decode and close files all the time."""
    for split, count in (("train", 48), ("val", 16)):
        for number in range(count):
            kind = PET_CLASSES[number % 2]
            path = folder / split / kind / f"{number}.{'png' if number % 5 == 0 else 'jpg'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = draw_pet(kind, random.Random(f"{split} {number}"))
            (picture.convert("L") if number % 7 == 0 else picture).save(path)


def train_for_ever(folder: Path, log: Path) -> None:
    """Train, save, stop and go on from the snapshot, until somebody ends this process."""
    torch.set_num_threads(1)
    sys.stdout = open(log, "w")  # noqa: SIM115 - as long as the process
    loaders = cats_vs_dogs(folder / "photos", image_size=64, batch_size=8, workers=WORKERS)
    torch.manual_seed(0)
    model = vgg16(width=0.125)
    epochs = 0
    while True:
        epochs += 3
        optimizer = build_optimizer(model, partial(make_optimizer, "adamw", lr=1e-4), RECIPE)
        results = train(
            model, loaders.train, loaders.val, CATS_DOGS, optimizer, epochs=epochs, recipe=RECIPE,
            save_dir=folder / "run", resume=True, snapshot_steps=3,
        )  # fmt: skip
        # Here nothing is on its way: no picture is being read, no batch handed over.
        gc.collect()
        print(len(results), sample(psutil.Process())["open_files"], flush=True)


def sample(process: psutil.Process) -> dict[str, float | int | None]:
    """Resident memory in MiB and open files of the training process and its workers."""
    workers = process.children(recursive=True)
    return {
        "main_mib": process.memory_info().rss / MIB,
        "workers_mib": sum(worker.memory_info().rss for worker in workers) / MIB,
        "workers": len(workers),
        "open_files": sum(one.num_fds() for one in (process, *workers)),
    }


def growth(samples: list[dict]) -> float:
    """MiB a minute: the slope of all memory by time, least squares."""
    minutes = [one["minutes"] for one in samples]
    memory = [one["main_mib"] + one["workers_mib"] for one in samples]
    return statistics.linear_regression(minutes, memory).slope


def logged(log: Path) -> tuple[int, list[int]]:
    """Epochs, and open files after every third one, from the second time on."""
    lines = [line.split() for line in log.read_text().splitlines()]
    numbers = [[int(word) for word in words] for words in lines if words[0].isdigit()]
    return numbers[-1][0], [files for _, files in numbers[1:]]


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="Windows counts no open files")
def test_memory_and_open_files_stay(tmp_path):
    draw_folder(tmp_path / "photos")
    log = tmp_path / "log.txt"
    child = multiprocessing.get_context("spawn").Process(
        target=train_for_ever, args=(tmp_path, log), daemon=False
    )
    child.start()
    samples = []
    try:
        process = psutil.Process(child.pid)
        while not (tmp_path / "run" / "snapshot.pt").exists():
            assert child.is_alive(), "training ended before its first snapshot"
            time.sleep(0.2)
        start = time.monotonic()
        while (passed := time.monotonic() - start) < MINUTES * 60:
            assert child.is_alive(), f"training ended after {passed:.0f} seconds"
            one = sample(process)
            if one["workers"] >= WORKERS:  # not between two epochs, where they are being started
                samples.append({"minutes": passed / 60, **one})
            time.sleep(EVERY)
    finally:
        for one in [*psutil.Process(child.pid).children(recursive=True), child]:
            one.kill()
        child.join()
    counted = [one for one in samples if one["minutes"] >= WARM_UP]
    epochs, files = logged(log)
    result = {
        "machine": describe_machine(),
        "minutes": MINUTES,
        "warm_up_minutes": WARM_UP,
        "workers": WORKERS,
        "recipe": RECIPE.name,
        "epochs": epochs,
        "growth_mib_per_minute": round(growth(counted), 3),
        "open_files": sorted(set(files)),
        "columns": list(samples[0]),
        "samples": [
            [round(value, 2) for value in one.values()] for one in samples[:: round(10 / EVERY)]
        ],
    }
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}))
    if MINUTES >= 20:
        rows = ",\n  ".join(json.dumps(row) for row in result.pop("samples"))
        text = json.dumps(result, indent=1).removesuffix("\n}")
        RESULT.write_text(f'{text},\n "samples": [\n  {rows}\n ]\n}}\n')
    assert growth(counted) < LARGEST_GROWTH
    assert len(set(files)) == 1, files
