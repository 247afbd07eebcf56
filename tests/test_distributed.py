"""Processes that share batches: nothing lost or twice, and the weights of one process."""

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
