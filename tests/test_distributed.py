"""Processes that share batches: nothing lost or twice, and the weights of one process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from helpers.distributed import ShardedBatches, distribute, process_group, shard, whole_tensor
from helpers.memory import measure
from helpers.models import sharding_units
from helpers.predict import predict
from helpers.train import CATS_DOGS, Recipe, build_optimizer, make_optimizer, train, train_step


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


def train_all(wrap, recipe, folder=None, epochs=2, resume=False, optimizer="momentum"):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    optimizer = build_optimizer(model, lambda p: make_optimizer(optimizer, p, lr=0.1), recipe)
    train_loader, val_loader = map(shard, loaders())
    results = train(
        model, train_loader, val_loader, CATS_DOGS, optimizer, epochs=epochs, recipe=recipe,
        save_dir=folder, resume=resume, snapshot_steps=None if folder is None else 2,
    )  # fmt: skip
    weights = torch.cat(
        [whole_tensor(parameter.detach()).reshape(-1) for parameter in model.parameters()]
    )
    figures = [(r.train_loss, r.train_score, r.val_loss, r.val_score, r.steps) for r in results]
    return weights, figures


RECIPE = Recipe(accumulate=3, checkpoint=((0, 2),), clip_norm=1.0)
IN_BACKWARD = Recipe(checkpoint=((0, 2),), optimizer_in_backward=True)


def with_ddp(model):
    return distribute(model, torch.device("cpu"))


def with_shards(model):
    return distribute(model, torch.device("cpu"), sharding_units(model))


def worker(rank, rendezvous, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for wrap in (with_ddp, with_shards):
        folder = f"{out}/{wrap.__name__}"
        torch.save(train_all(wrap, RECIPE), f"{folder}_plain_{rank}.pt")
        train_all(wrap, RECIPE, f"{folder}_stopped", epochs=1)
        torch.save(
            train_all(wrap, RECIPE, f"{folder}_stopped", resume=True),
            f"{folder}_resumed_{rank}.pt",
        )
    adam = train_all(with_shards, RECIPE, f"{folder}_adam", epochs=1, optimizer="adamw")
    torch.save(adam, f"{out}/adam_{rank}.pt")
    torch.save(train_all(with_shards, IN_BACKWARD), f"{out}/in_backward_{rank}.pt")
    with pytest.raises(ValueError, match="of another run: sharded is True there and nothing here"):
        train_all(with_ddp, RECIPE, f"{out}/with_shards_stopped", resume=True)
    with pytest.raises(ValueError, match="optimizer_in_backward and DistributedDataParallel"):
        train_all(with_ddp, IN_BACKWARD)
    torch.save(
        {
            "ddp": collectives(with_ddp),
            "without no_sync": collectives(with_ddp, synchronize_always=True),
            "shards": collectives(with_shards),
        },
        f"{out}/collectives_{rank}.pt",
    )
    torch.save([share_of(*case) for case in SHARES], f"{out}/shares_{rank}.pt")
    dist.destroy_process_group()


ACCUMULATE = 4


def collectives(wrap, synchronize_always=False):
    """How often gloo did what in one step, as torch's profiler saw it."""
    model = wrap(nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 3)))
    if synchronize_always:
        model.no_sync = contextlib.nullcontext
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.1)
    batch = torch.ones(8, 600), torch.zeros(8, dtype=torch.long)
    for _ in range(2):  # DDP sorts its buckets anew after the first step
        with torch.profiler.profile() as profile:
            train_step(model, batch, CATS_DOGS.loss, optimizer, Recipe(accumulate=ACCUMULATE))
    names = [event.name for event in profile.events()]
    return {name: names.count(name) for name in ("gloo:all_reduce", "c10d::_reduce_scatter_base_")}


class Tower(nn.Module):
    """Not a sequence: what lies outside its repeated blocks is gathered with the model itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(300, 201)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(201, 201), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(201, 7)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def uneven_sequence():
    """Rows that two processes cannot share evenly."""
    return nn.Sequential(nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 401), nn.Linear(401, 7))


SHARES = [
    (uneven_sequence, Recipe()),
    (uneven_sequence, Recipe(checkpoint=((0, 2), (2, 4)), clip_norm=1.0)),
    (uneven_sequence, Recipe(accumulate=3)),
    (Tower, Recipe(checkpoint="layers")),
]
PART_NAMES = ("parameters", "gradients", "optimizer")
adamw = partial(make_optimizer, "adamw", lr=0.1)


def some_batch():
    return torch.ones(9, 300), torch.zeros(9, dtype=torch.long)


def share_of(model_fn, recipe):
    """Bytes that this process holds after a step, by part, and the measured peak of a step."""
    model = with_shards(model_fn())
    optimizer = build_optimizer(model, adamw, recipe)
    batch = some_batch()
    for _ in range(2):
        with measure(model, optimizer, inputs=batch) as usage:
            train_step(model, batch, CATS_DOGS.loss, optimizer, recipe)
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    parts = list(model.parameters()), [p.grad for p in model.parameters()], states
    return {
        **{name: held(tensors) for name, tensors in zip(PART_NAMES, parts, strict=True)},
        "peak": usage.peak_bytes,
    }


def held(tensors):
    """Bytes of the storages behind tensors, in units of 512; of shared-out ones the share here."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(-(-size // 512) * 512 for size in sizes.values())


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The folder with what two processes left that did everything of `worker`."""
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(worker, args=(folder / "rendezvous", folder), nprocs=2)
    return folder


def test_gradients_are_exchanged_once_a_step(two_processes):
    counts = torch.load(two_processes / "collectives_0.pt", weights_only=True)
    # The weights of a layer of 600 x 600 are more than the first bucket's 1 MiB.
    buckets, shares = 2, 1  # and one sum says how many samples all processes have
    assert counts["ddp"]["gloo:all_reduce"] == buckets + shares
    assert counts["without no_sync"]["gloo:all_reduce"] == ACCUMULATE * buckets + shares
    assert counts["shards"]["c10d::_reduce_scatter_base_"] == 3  # one a unit


@pytest.mark.parametrize("case", range(len(SHARES)))
def test_shares_are_as_predicted(two_processes, case):
    """Parts of the first process to the byte; the other has at most as much."""
    model_fn, recipe = SHARES[case]
    arguments = model_fn, some_batch, CATS_DOGS.loss, recipe, adamw
    predicted = predict(*arguments, device="cpu", ranks=2)
    whole_weights = sum(parameter.nbytes for parameter in model_fn().parameters())
    first, second = (
        torch.load(two_processes / f"shares_{rank}.pt", weights_only=True)[case]
        for rank in range(2)
    )
    for name in PART_NAMES:
        assert predicted.timeline.parts[name][-1] == first[name] >= second[name], name
    assert first["parameters"] == pytest.approx(whole_weights / 2, rel=0.02)
    # gloo copies what it adds up (NCCL does not), and its threads let go of buffers when they may.
    more = first["peak"] - predicted.peak_allocated
    assert 0 <= more < 2 * whole_weights
    assert predict(*arguments, ranks=4).timeline.parts["parameters"][-1] == pytest.approx(
        whole_weights / 4, rel=0.05
    )


def test_a_prediction_leaves_no_process_group():
    with pytest.raises(ValueError, match="ranks=1"):
        predict(uneven_sequence, some_batch, CATS_DOGS.loss, ranks=1)
    predict(uneven_sequence, some_batch, CATS_DOGS.loss, ranks=2)
    assert not dist.is_initialized()


def test_two_processes_train_like_one(two_processes):
    runs = {
        f"{wrap.__name__}_{kind}": {"recipe": RECIPE}
        for wrap in (with_ddp, with_shards)
        for kind in ("plain", "resumed")
    }
    runs["in_backward"] = {"recipe": IN_BACKWARD}
    runs["adam"] = {"recipe": RECIPE, "epochs": 1, "optimizer": "adamw"}
    for name, arguments in runs.items():
        expected, figures = train_all(lambda model: model, **arguments)
        for rank in range(2):
            weights, theirs = torch.load(two_processes / f"{name}_{rank}.pt", weights_only=True)
            assert (weights - expected).abs().max() < 1e-12, name
            for ours, other in zip(figures, theirs, strict=True):
                assert ours == pytest.approx(other, rel=1e-6)  # the loss is float32


# --- torchrun --------------------------------------------------------------------------------

TRAIN = "train comments --model tiny --seq-len 16 --limit 64 --batch-size 16 --dropout 0 --lr 1e-3"


def torchrun(*arguments, machines=("--nproc-per-node=2", "--standalone")):
    """`torchrun --nproc-per-node=2 -m helpers ...` in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", *machines]
    return subprocess.Popen(
        [*command, "-m", "helpers", *TRAIN.split(), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


def as_two_machines(*arguments):
    """Two agents of torchrun on this machine that meet at a port, with one process each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    machines = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test"]
    machines += [f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost"]
    return [torchrun(*arguments, machines=machines) for _ in range(2)]


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
    how = ["--accumulate", 2, "--checkpoint", "layers", "--save"]
    jobs = {"two": [torchrun(*how, tmp_path / "two")]}
    jobs["machines"] = as_two_machines("--shard", *how, tmp_path / "machines")
    try:
        for name, (first, *others) in jobs.items():
            outputs = [job.communicate(timeout=240)[0] for job in (first, *others)]
            assert all(job.returncode == 0 for job in (first, *others)), "\n".join(outputs)
            (output,) = [text for text in outputs if "process(es)" in text]
            assert "2 process(es)" in output and "Warning" not in output
            weights = [
                torch.load(tmp_path / run / "epoch_1.pt", weights_only=True)
                for run in ("one", name)
            ]
            assert weights[0].keys() == weights[1].keys()
            for key, tensor in weights[0].items():
                assert (tensor - weights[1][key]).abs().max() < 1e-6
    finally:
        for job in sum(jobs.values(), []):
            job.terminate()
            job.communicate()


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


def test_one_process_cannot_share_out():
    with pytest.raises(ValueError, match="one alone: start it through torchrun"):
        with_shards(nn.Sequential(nn.Linear(2, 2)))


def test_a_process_that_raises_ends_the_job_with_its_sentence(tmp_path):
    job = torchrun("--checkpoint", "pools")
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert (
        "checkpoint='pools': XLMRobertaForSequenceClassification is not an nn.Sequential" in output
    )
