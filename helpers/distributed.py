"""Several processes that train one model: starting them, sharing the batches, adding things up.

The processes are started by torchrun, which is also what ends them all when one of them fails.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

TIMEOUT = 300  # seconds that a process waits for the others; torch's default is half an hour


@contextlib.contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[torch.device]:
    """Join the processes that torchrun started, and leave them at the end; gives this one's device.

    Outside torchrun there is one process, and nothing to join. NCCL connects GPUs, gloo CPUs.
    timeout: seconds after which waiting for a process that hangs ends with an error.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    device = torch.device(device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield device
        return
    if on_gpu and device.index >= torch.cuda.device_count():
        raise ValueError(
            f"torchrun started {device.index + 1} or more processes here, but torch sees "
            f"{torch.cuda.device_count()} GPUs: lower --nproc-per-node"
        )
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if on_gpu else None,
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def distribute(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` on `device`, wrapped in DistributedDataParallel where there are several processes."""
    model = model.to(device)
    if not dist.is_initialized():
        return model
    # gradient_as_bucket_view saves one copy of the gradients.
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def is_ddp(model: nn.Module) -> bool:
    """Whether `model` is wrapped in DistributedDataParallel."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def process_count(model: nn.Module) -> int:
    """How many processes train `model` together."""
    return dist.get_world_size(model.process_group) if is_ddp(model) else 1


def process_rank(model: nn.Module) -> int:
    """Which of them this one is, from 0."""
    return dist.get_rank(model.process_group) if is_ddp(model) else 0


def wait_for_all(model: nn.Module) -> None:
    """Go on when every process is here."""
    if is_ddp(model):
        dist.barrier(model.process_group)


def from_all(model: nn.Module, value: Any) -> list[Any]:
    """`value` of each process, in the order of their ranks."""
    values = [value] * process_count(model)
    if is_ddp(model):
        dist.all_gather_object(values, value, group=model.process_group)
    return values


class ShardedBatches(Sampler):
    """This process's share of every batch; together the shares are the batches of one process.

    Shares differ by one sample at most. A last batch with fewer samples than processes would leave
    one of them without any, so it is not given out; `left_out` says how many samples that are.
    """

    def __init__(self, batches: Any, rank: int, processes: int) -> None:
        self.batches, self.rank, self.processes = batches, rank, processes
        samples = len(batches.sampler)
        rest = samples % batches.batch_size
        too_few = 0 < rest < processes and not batches.drop_last
        self.left_out = rest if too_few else 0

    def __len__(self) -> int:
        return len(self.batches) - (self.left_out > 0)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            if len(batch) >= self.processes:
                yield batch[self.rank :: self.processes]


def shard(loader: DataLoader) -> DataLoader:
    """A loader of this process's share of each of `loader`'s batches; the same one without others.

    Every process draws the same order from the same seed, so that together they see each sample
    once. What is left out is announced by the first process.
    """
    if not dist.is_initialized():
        return loader
    batches = ShardedBatches(loader.batch_sampler, dist.get_rank(), dist.get_world_size())
    if loader.batch_size is None or loader.batch_size < batches.processes:
        raise ValueError(
            f"batch_size={loader.batch_size} is less than the {batches.processes} processes: each "
            "needs at least one sample"
        )
    if batches.left_out and batches.rank == 0:
        print(
            f"A last batch of {batches.left_out} samples is left out: there are "
            f"{batches.processes} processes, and each needs one."
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )
