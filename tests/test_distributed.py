"""Processes that share batches: nothing lost or twice, and the weights of one process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from helpers.distributed import ShardedBatches, distribute, process_group, shard
from helpers.train import CATS_DOGS, Recipe, build_optimizer, make_optimizer, train


@pytest.mark.parametrize("samples", [16, 17, 18, 19, 24])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_shares_are_the_batches(samples, processes):
    batches = BatchSampler(SequentialSampler(range(samples)), batch_size=8, drop_last=False)
    shares = [ShardedBatches(batches, rank, processes) for rank in range(processes)]
    together = [sorted(sum(parts, [])) for parts in zip(*shares, strict=True)]
    expected = [batch for batch in batches if len(batch) >= processes]
    assert together == expected
    assert all(len(share) == len(expected) for share in shares)
    assert shares[0].left_out == samples - sum(map(len, expected))
    for parts in zip(*shares, strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_needs_no_sharing():
    loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=2)
    assert shard(loader) is loader
    with process_group() as device:
        assert device.type == "cpu" and not dist.is_initialized()
        model = nn.Linear(2, 2)
        assert distribute(model, device) is model


def loaders():
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(37, 6, generator=generator, dtype=torch.float64),
        torch.randint(3, (37,), generator=generator),
    )
    return (
        DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        DataLoader(data, batch_size=10),
    )


def train_all(wrap, recipe, folder=None, epochs=2, resume=False):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    optimizer = build_optimizer(model, lambda p: make_optimizer("momentum", p, lr=0.1), recipe)
    train_loader, val_loader = map(shard, loaders())
    results = train(
        model, train_loader, val_loader, CATS_DOGS, optimizer, epochs=epochs, recipe=recipe,
        save_dir=folder, resume=resume, snapshot_steps=None if folder is None else 2,
    )  # fmt: skip
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    figures = [(r.train_loss, r.train_score, r.val_loss, r.val_score, r.steps) for r in results]
    return weights, figures


RECIPE = Recipe(accumulate=3, checkpoint=((0, 2),), clip_norm=1.0)


def worker(rank, rendezvous, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

    def wrap(model):
        return distribute(model, torch.device("cpu"))

    torch.save(train_all(wrap, RECIPE), f"{out}/plain_{rank}.pt")
    train_all(wrap, RECIPE, f"{out}/stopped", epochs=1)
    torch.save(train_all(wrap, RECIPE, f"{out}/stopped", resume=True), f"{out}/resumed_{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_train_like_one(tmp_path):
    expected, figures = train_all(lambda model: model, RECIPE)
    mp.spawn(worker, args=(tmp_path / "rendezvous", tmp_path), nprocs=2)
    for name in ("plain_0", "plain_1", "resumed_0", "resumed_1"):
        weights, theirs = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert (weights - expected).abs().max() < 1e-12
        for ours, other in zip(figures, theirs, strict=True):
            assert ours == pytest.approx(other, rel=1e-6)  # the loss is float32


# --- torchrun --------------------------------------------------------------------------------

TRAIN = "train comments --model tiny --seq-len 16 --limit 64 --batch-size 16 --dropout 0 --lr 1e-3"


def torchrun(*arguments):
    """`torchrun --nproc-per-node=2 -m helpers ...` in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    return subprocess.Popen(
        [*command, "-m", "helpers", *TRAIN.split(), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def running(process_ids=None, parent=None):
    """Which of the processes run, of those given or of those that `parent` started (from /proc)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(path.parent.name)
        wanted = int(its_parent) == parent if process_ids is None else pid in process_ids
        if wanted and state != "Z":
            found.append(pid)
    return found


def test_the_command_trains_alike_in_one_process_and_in_two(tmp_path):
    alone = [sys.executable, "-m", "helpers", *TRAIN.split(), "--save", str(tmp_path / "one")]
    subprocess.run(alone, check=True, capture_output=True)
    job = torchrun("--accumulate", 2, "--checkpoint", "layers", "--save", tmp_path / "two")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert "2 process(es)" in output and "Warning" not in output
    weights = [
        torch.load(tmp_path / name / "epoch_1.pt", weights_only=True) for name in ("one", "two")
    ]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-6


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_process_that_is_gone_ends_the_job(tmp_path, sent):
    job = torchrun("--epochs", 100_000, "--save", tmp_path, "--timeout", 10)
    workers = []
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "snapshot.pt").exists():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        workers = running(parent=job.pid)
        assert len(workers) == 2
        os.kill(max(workers), sent)
        output, _ = job.communicate(timeout=100)
        assert job.returncode != 0, output
        assert running(workers) == []
    finally:
        for pid in running([job.pid, *workers]):
            os.kill(pid, signal.SIGKILL)
        job.communicate()


def test_a_process_that_raises_ends_the_job_with_its_sentence(tmp_path):
    job = torchrun("--checkpoint", "pools")
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert (
        "checkpoint='pools': XLMRobertaForSequenceClassification is not an nn.Sequential" in output
    )
