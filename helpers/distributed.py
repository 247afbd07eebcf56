"""Several processes that train one model: starting them, sharing the batches, adding things up.

The processes are started by torchrun, which is also what ends them all when one of them fails.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
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


def distribute(
    model: nn.Module, device: torch.device, units: Sequence[nn.Module] | None = None
) -> nn.Module:
    """`model` on `device`, ready for all processes to train it together, where there are several.

    Without `units` every process holds a copy, wrapped in DistributedDataParallel. With them each
    holds its share of every weight, gradient and optimizer state (FSDP2): the whole weights of a
    unit exist only while it computes, those outside all units from the first to the last use.
    """
    if not dist.is_initialized():
        if units is not None:
            raise ValueError(
                "a model is sharded over several processes, and this is one alone: start it "
                "through torchrun --nproc-per-node=2 -m helpers ..."
            )
        return model.to(device)
    if units is not None:
        # Shared out on its way to the device, which so never holds the whole model.
        return shard_model(model, units, init_device_mesh(device.type, (dist.get_world_size(),)))
    # gradient_as_bucket_view saves one copy of the gradients.
    return nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)


def shard_model(model: nn.Module, units: Sequence[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """Share the weights of `model` among the processes of `mesh`, in place, see `distribute`."""
    for unit in units:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def is_ddp(model: nn.Module) -> bool:
    """Whether `model` is wrapped in DistributedDataParallel."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def is_sharded(model: nn.Module) -> bool:
    """Whether each process holds only its share of the weights of `model`."""
    return isinstance(model, FSDPModule)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that train `model` together; None if this one does so alone."""
    if is_ddp(model):
        return model.process_group
    return dist.group.WORLD if is_sharded(model) else None


def process_count(model: nn.Module) -> int:
    """How many processes train `model` together."""
    group = group_of(model)
    return 1 if group is None else dist.get_world_size(group)


def process_rank(model: nn.Module) -> int:
    """Which of them this one is, from 0."""
    group = group_of(model)
    return 0 if group is None else dist.get_rank(group)


def wait_for_all(model: nn.Module) -> None:
    """Go on when every process is here."""
    group = group_of(model)
    if group is not None:
        dist.barrier(group)


def from_all(model: nn.Module, value: Any) -> list[Any]:
    """`value` of each process, in the order of their ranks."""
    group = group_of(model)
    if group is None or dist.get_backend(group) == "fake":  # imagined ones are all like this one
        return [value] * process_count(model)
    values = [None] * process_count(model)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def gradients_stay_here(model: nn.Module) -> Iterator[None]:
    """Within this context gradients add up in each process alone: all micro-batches but the last.

    The processes so exchange gradients once a step. A sharded model holds whole gradients until
    then, not shares.
    """
    if is_ddp(model):
        with model.no_sync():
            yield
    elif is_sharded(model):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def pieces_in_all(model: nn.Module, accumulate: int, samples: int) -> int:
    """How many of `accumulate` micro-batches this process makes of its samples.

    At most one a sample. The processes of a sharded model meet in every micro-batch, so there it is
    what all of them can make.
    """
    pieces = min(accumulate, samples)
    if is_sharded(model) and accumulate > 1:
        return min(from_all(model, pieces))
    return pieces


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor put together from the shares of all processes; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# What snapshots of a sharded model hold: whole tensors, which only the first process gets. Every
# process has to call these. The imports stay inside: they take long, and few need them.


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights and buffers of `model`; of a sharded one on the CPU."""
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(**WHOLE_ON_CPU))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state of the optimizer of `model`; of a sharded one on the CPU."""
    # Before the first step torch would make a state by taking one, which counts as a step later.
    if not is_sharded(model) or not optimizer.state:
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**WHOLE_ON_CPU))


def load_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: dict[str, torch.Tensor],
    state: dict[str, Any],
) -> None:
    """Put back what `model_state` and `optimizer_state` gave; each process takes its share."""
    if not is_sharded(model):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=StateDictOptions(**WHOLE_ON_CPU),
    )


WHOLE_ON_CPU = {"full_state_dict": True, "cpu_offload": True}


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
