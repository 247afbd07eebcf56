"""The check on a GPU, as far as a machine without one can tell: its grid, its runs, its file."""

import importlib
import json
import pickle
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from helpers.catalogue import Workload
from helpers.cuda import gpu_of
from helpers.train import OPTIMIZERS, Recipe, measure_step

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
gpu_check = importlib.import_module("gpu_check")
Check = gpu_check.Check
ON_CPU = torch.device("cpu")


def small_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def small_batch(count):
    return torch.ones(count, 8), torch.zeros(count, dtype=torch.long)


def small_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def failing_loss(model, batch):
    raise ValueError("no loss today")


def slow_loss(model, batch):
    time.sleep(60)


def small_check(loss=small_loss, **options):
    workload = Workload("small", small_model, small_batch, loss)
    return Check(workload, 4, options.pop("recipe", Recipe()), "momentum", **options)


def test_the_grid_covers_what_it_promises():
    checks = gpu_check.grid()
    assert {check.optimizer for check in checks.values()} == {*OPTIMIZERS} - {
        "adamw-8bit"
    }  # optional
    for size in ("base", "large"):
        recipes = [c.recipe for name, c in checks.items() if name.startswith(f"xlm-r {size}")]
        assert any(recipe.amp == "fp16" for recipe in recipes)
        assert any(recipe.checkpoint == "layers" for recipe in recipes)
        assert any(recipe.accumulate > 1 for recipe in recipes)
    articles = [check for name, check in checks.items() if name.startswith("vgg16")]
    assert [check.cudnn_benchmark for check in articles] == [False] * 3 + [True] * 3
    assert all(check.evaluates for check in articles)
    assert all(any(part in name for name in checks) for part in ("resnet50", "gpt2"))
    pickle.dumps(checks)


def test_batches_have_padding_in_every_micro_batch():
    check = gpu_check.grid()["xlm-r base accumulate 4"]
    batch = check.batch()
    assert len(batch["input_ids"]) == 32
    assert (batch["attention_mask"].sum(dim=1) < 192).all()


def test_the_article_is_cut_as_checkpoint_sequential_cuts_it():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    runs = []
    for index, child in enumerate(model):
        child.register_forward_hook(lambda *_, index=index: runs.append(index))
    x = torch.ones(1, 2, requires_grad=True)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    ((first, last),) = gpu_check.grid()["vgg16 two segments, cudnn.benchmark off"].recipe.checkpoint
    again = {index for index in runs if runs.count(index) == 2}
    assert again <= set(range(first, last)) and last - 1 not in range(5, 10)
    assert set(runs[10:]) <= set(range(first, last)) and max(runs[10:]) >= last - 2


def test_the_article_has_ten_children():
    with torch.device("meta"):
        assert len(gpu_check.article_model()) == 10


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(amp="fp16"), Recipe(accumulate=2)])
def test_a_run_measures_what_measure_step_measures(recipe):
    check = small_check(recipe=recipe)
    result = gpu_check.run(check, ON_CPU)
    step = measure_step(
        small_model,
        check.batch,
        small_loss,
        recipe,
        partial(gpu_check.make_optimizer, "momentum", lr=1e-5),
        repeats=0,
    )
    # measure_step also counts the two numbers of the fp16 scaler
    slack = 1024 / gpu_check.MIB if recipe.amp == "fp16" else 0
    assert result["max_memory_allocated_mib"] == pytest.approx(step.peak_mib, abs=slack)
    assert result["steps"] == gpu_check.STEPS and result["seconds_per_step"] > 0
    assert result["nvml_used_mib"] is None and "NVIDIA" in result["notes"]["device_used_bytes"]
    json.dumps(result)


def test_evaluation_leaves_the_model_in_training():
    check = small_check(evaluates=True)
    assert gpu_check.run(check, ON_CPU)["steps"] == gpu_check.STEPS
    model = small_model().train()
    gpu_check.evaluate_once(model, small_batch(2), ON_CPU)
    assert model.training


def test_a_prediction_has_the_four_numbers():
    properties = SimpleNamespace(name="some card", total_memory=8 * 1024**3, major=8)
    numbers = gpu_check.predicted(small_check(), gpu_of(properties))
    assert numbers["device_used_mib"] == numbers["peak_reserved_mib"] + numbers["context_mib"]
    assert 0 < numbers["peak_allocated_mib"] < numbers["peak_reserved_mib"]


def test_the_card_as_torch_describes_it():
    def card(major):
        properties = SimpleNamespace(name="any", total_memory=8 * 1024**3, major=major)
        return gpu_of(properties)

    assert card(7).memory_mib == 8192 and not card(7).flash
    assert card(8).flash and card(8).workspace == 8_519_680
    assert card(9).workspace == 32 * 1024**2


def test_every_run_has_a_process_of_its_own():
    context = gpu_check.processes()
    run = partial(gpu_check.run_in_process, context, device="cpu")
    assert run(small_check(), 60)["steps"] == gpu_check.STEPS
    assert run(small_check(failing_loss), 60) == {"failed": "ValueError: no loss today"}
    assert run(small_check(slow_loss), 0.1) == {"failed": "stopped after 0 s"}


def test_rows_say_what_was_not_run(capsys):
    prediction = Future()
    prediction.set_result({"peak_allocated_mib": 110.0})
    checks = {"first": small_check(), "second": small_check()}
    given = []

    def measure_one(check, seconds):
        given.append(seconds)
        return {"max_memory_allocated_mib": 100.0}

    predictions = dict.fromkeys(checks, prediction)
    rows = gpu_check.check_all(checks, measure_one, predictions, time.monotonic() + 30)
    assert [row["name"] for row in rows] == ["first", "second"]
    assert 25 < given[0] <= 30
    late = gpu_check.check_all(checks, measure_one, predictions, time.monotonic() + 1)
    assert all("not run" in row["measured"]["failed"] for row in late)
    printed = capsys.readouterr().out
    assert "allocated 100 MiB, predicted 110 (+10.00 %)" in printed and "not run" in printed


def test_the_file_names_the_machine(tmp_path):
    about = gpu_check.machine() | {"gpu": "NVIDIA H200 NVL", "torch": "2.9.0+cu130"}
    about["transformers"] = "5.0.0"
    path = gpu_check.write([{"name": "x"}], about, 12.34, tmp_path / "gpu")
    assert path.name == "nvidia-h200-nvl-torch-2.9.0-cu130-transformers-5.0.0.json"
    written = json.loads(path.read_text())
    assert written["machine"]["gpu"] == "NVIDIA H200 NVL" and written["rows"] == [{"name": "x"}]
    assert {"driver", "cuda", "torchvision", "python"} <= set(written["machine"])


def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "gpu")
    assert gpu_check.main() == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "gpu").exists()
