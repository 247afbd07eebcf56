"""What the training loop costs beside the shortest loop one can write, and what recomputation
costs.

`make bench` runs it. Ratios of times measured in alternation in one run; results are kept in
data/benchmarks/loop.json with the machine and the torch version. Run it with nothing else at work.
"""

import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import vgg16
from helpers.notebook import describe_machine
from helpers.train import CATS_DOGS, Recipe, make_optimizer, measure_step, train, train_step

RESULTS = Path(__file__).parents[2] / "data" / "benchmarks"
PAIRS = 40


def pictures(count: int, pixels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, pixels, pixels, generator=generator), torch.arange(count) % 2


def hand_written(model, loader, optimizer) -> None:
    """The shortest loop that trains: the yardstick."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def save(name: str, result: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"machine": describe_machine(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def test_the_loop_costs_next_to_nothing():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loader = DataLoader(TensorDataset(*pictures(16 * 16, 64)), batch_size=16)
        torch.manual_seed(0)
        model = vgg16(width=0.25)
        optimizer = make_optimizer("momentum", model.parameters(), lr=0.001)
        ours = partial(
            train, model, loader, None, CATS_DOGS, optimizer, epochs=1, evaluate_train=False
        )
        theirs = partial(hand_written, model, loader, optimizer)
        ours(), theirs()
        ratios = []
        for pair in range(PAIRS):  # whoever goes second may find a warmer machine
            order = (ours, theirs) if pair % 2 else (theirs, ours)
            spent = {function: seconds(function) for function in order}
            ratios.append(spent[ours] / spent[theirs])
    finally:
        torch.set_num_threads(threads)
    quartiles = statistics.quantiles(ratios, n=4)
    save(
        "loop", {"median_ratio": statistics.median(ratios), "quartiles": quartiles, "pairs": PAIRS}
    )


def test_checkpointing_costs_its_recomputation():
    """Time with checkpointing beside the plain step plus one more forward pass of the segments."""
    batch = pictures(32, 96)
    torch.manual_seed(0)
    model = vgg16(width=0.25)
    optimizer = make_optimizer("momentum", model.parameters(), lr=0.001)
    plain = partial(train_step, model, batch, CATS_DOGS.loss, optimizer, Recipe())
    pools = partial(train_step, model, batch, CATS_DOGS.loss, optimizer, Recipe(checkpoint="pools"))
    features = model[:31]

    def recomputed() -> None:
        with torch.no_grad():
            features(batch[0])

    for function in (plain, pools, recomputed):
        function()
    overhead, bound = [], []
    for _ in range(PAIRS // 2):
        t_plain, t_pools, t_forward = seconds(plain), seconds(pools), seconds(recomputed)
        overhead.append(t_pools / t_plain)
        bound.append((t_plain + t_forward) / t_plain)
    arguments = (partial(vgg16, width=0.25), partial(pictures, 32, 96), CATS_DOGS.loss)
    peaks = [
        measure_step(
            *arguments, recipe, partial(make_optimizer, "momentum", lr=0.001), repeats=0
        ).peak_mib
        for recipe in (Recipe(), Recipe(checkpoint="pools"))
    ]
    save(
        "checkpointing",
        {
            "time_ratio": statistics.median(overhead),
            "time_ratio_bound": statistics.median(bound),
            "memory_ratio": peaks[1] / peaks[0],
        },
    )
