"""One training step, one loop for both tasks; every technique is a field of `Recipe`."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError
from tqdm.auto import tqdm

from helpers.distributed import (
    from_all,
    gradients_stay_here,
    group_of,
    is_ddp,
    is_sharded,
    load_states,
    model_state,
    optimizer_state,
    pieces_in_all,
    process_count,
    process_rank,
    wait_for_all,
    whole_tensor,
)
from helpers.memory import MIB, Timeline, Timing, Usage, measure, timed
from helpers.models import Checkpoint, checkpointing, unwrap, without_cache
from helpers.snapshot import (
    check_writable,
    loader_generators,
    read_snapshot,
    rng_state,
    set_rng_state,
    temporary_path,
    write_atomically,
)

Batch = Any  # (images, labels), or a dict of tensors such as a tokenizer returns
LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
OptimizerFunction = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# --- The recipe ----------------------------------------------------------------------------

AMP_DTYPES = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """What is switched on in a training step. The default is plain float32 training.

    amp: "off", "fp16" (with a gradient scaler) or "bf16": the type of autocast.
    accumulate: micro-batches that a batch is split into; gradients add up to the whole batch's.
    checkpoint: what is recomputed in the backward pass, see `helpers.models.checkpointing`.
    clip_norm: largest norm of all gradients together, or None.
    optimizer_in_backward: update each parameter as soon as its gradient is complete, and free it.
    offload: keep what the backward pass needs in host memory (`save_on_cpu`).
    amp_cache: autocast keeps its half-precision copies of the weights until it is left.
    set_to_none: free gradients between steps instead of filling them with zeros.

    Raises ValueError for unknown values and for switches that exclude each other.
    """

    amp: str = "off"
    accumulate: int = 1
    checkpoint: Checkpoint = None
    clip_norm: float | None = None
    optimizer_in_backward: bool = False
    offload: bool = False
    amp_cache: bool = True
    set_to_none: bool = True

    def __post_init__(self) -> None:
        if self.amp not in AMP_DTYPES:
            raise ValueError(f"amp={self.amp!r}: expected one of {', '.join(AMP_DTYPES)}")
        if (
            isinstance(self.accumulate, bool)
            or not isinstance(self.accumulate, int)
            or self.accumulate < 1
        ):
            raise ValueError(
                f"accumulate={self.accumulate!r}: expected a whole number of micro-batches, 1 or "
                "more"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(
                f"clip_norm={self.clip_norm!r}: expected a norm above 0, or None for no clipping"
            )
        if self.optimizer_in_backward:
            needs_whole_gradient = {
                f"accumulate={self.accumulate}": self.accumulate > 1,
                f"clip_norm={self.clip_norm}": self.clip_norm is not None,
                "amp='fp16'": self.amp == "fp16",
            }
            for switch, on in needs_whole_gradient.items():
                if on:
                    raise ValueError(
                        f"optimizer_in_backward and {switch} exclude each other: the update in "
                        "the backward pass frees each gradient before the others are known; "
                        "accumulation needs it kept, clipping needs the norm of all, and the fp16 "
                        "scaler must see all before one is used"
                    )

    @property
    def name(self) -> str:
        """A short name for tables, such as "bf16 + accumulate 4"; "plain" for the default."""
        parts = [self.amp] if self.amp != "off" else []
        parts += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        parts += [f"checkpoint {self.checkpoint}"] if self.checkpoint is not None else []
        parts += [f"clip {self.clip_norm:g}"] if self.clip_norm is not None else []
        parts += ["optimizer in backward"] if self.optimizer_in_backward else []
        parts += ["offload"] if self.offload else []
        parts += [] if self.amp_cache else ["no autocast cache"]
        parts += [] if self.set_to_none else ["gradients zeroed"]
        return " + ".join(parts) or "plain"


def check_recipe(recipe: Recipe, model: nn.Module) -> None:
    """Stop before training if `recipe` cannot work on `model`; `train` and its kin call it once."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter of the model requires a gradient: unfreeze at least one layer"
        )
    if recipe.optimizer_in_backward and is_ddp(model):
        raise ValueError(
            "optimizer_in_backward and DistributedDataParallel exclude each other: each process "
            "would update its weights before the gradients of the others have come"
        )
    if recipe.amp == "off":
        return
    for name, parameter in trained:
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"amp={recipe.amp!r} needs float32 parameters, but {name} is {parameter.dtype}: "
                "autocast makes the half-precision copies itself; use model.float(), or amp='off'"
            )
    last = list(model.modules())[-1]
    if isinstance(last, nn.Sigmoid):
        raise ValueError(
            "the model ends in a Sigmoid, which saturates in half precision: return logits and use "
            "binary_cross_entropy_with_logits, or amp='off'"
        )


def idle_switches(recipe: Recipe, device: torch.device) -> list[str]:
    """A sentence for each switch of `recipe` that saves nothing on `device` or beside the others.

    They do no harm to the result, so they are announced, not refused.
    """
    idle = {
        "offload saves nothing on a CPU: activations are in the host's memory already, and are "
        "copied there once more": recipe.offload and device.type == "cpu",
        "amp_cache=False saves nothing with amp='off': there are no half-precision copies of "
        "weights to keep": not recipe.amp_cache and recipe.amp == "off",
        "set_to_none=False has no effect with optimizer_in_backward: each gradient is freed as "
        "soon as it was used": not recipe.set_to_none and recipe.optimizer_in_backward,
    }
    return [sentence for sentence, on in idle.items() if on]


def choose_amp(device: torch.device) -> str:
    """The autocast type that a device is good at, announced in one line.

    bf16 needs compute capability 8.0 (older cards only emulate it, whatever
    `torch.cuda.is_bf16_supported()` says); older cards get fp16 with the scaler. A CPU gets bf16:
    its float16 kernels are many times slower.
    """
    if device.type != "cuda":
        choice, why = "bf16", "a CPU computes bfloat16 faster than float16"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        choice = "bf16" if major >= 8 else "fp16"
        why = f"compute capability {major}.{minor}, bfloat16 arithmetic begins with 8.0"
    print(f"autocast type: {choice} ({why})")
    return choice


# --- Optimizers ----------------------------------------------------------------------------


class AdamW8bitStates(torch.optim.Optimizer):
    """Stands in for bitsandbytes' AdamW8bit on fake tensors: the same tensors, no arithmetic.

    Both moments take a byte for each weight, with a float32 scale for every block of 256 and two
    maps of 256 values that all share; tensors of fewer than 4,096 weights keep float32 moments.
    The kernel works in place, without temporaries. Method: Dettmers et al. (2022),
    arXiv:2110.02861; sizes as in bitsandbytes/optim/optimizer.py (block-wise, as by default).
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Make the state of each parameter that has a gradient, as the first real step would."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self._new_state(parameter))

    def _new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if parameter.numel() < 4096:
            like = partial(torch.zeros_like, parameter, dtype=torch.float32)
            return {"moment 1": like(), "moment 2": like()}
        if not self.maps:
            self.maps = [torch.zeros(256), torch.zeros(256)]
        like = partial(torch.zeros_like, parameter, dtype=torch.uint8)
        state = {"moment 1": like(), "map 1": self.maps[0], "moment 2": like()}
        state["map 2"] = self.maps[1]
        blocks = -(-parameter.numel() // 256)
        return state | {"scales 1": torch.zeros(blocks), "scales 2": torch.zeros(blocks)}


def adamw_8bit(params: Iterable[nn.Parameter], lr: float, **options: Any) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit, an optional package; for a prediction what stands in for it.

    Raises ValueError without a CUDA GPU or without the package.
    """
    params = list(params)
    if any(isinstance(parameter, FakeTensor) for parameter in params):
        return AdamW8bitStates(params, lr)
    where = {parameter.device.type for parameter in params}
    if where != {"cuda"}:
        raise ValueError(
            f"optimizer='adamw-8bit' runs on CUDA GPUs only, and the model is on {sorted(where)}: "
            "take 'adafactor' for little state on any device; a prediction needs no GPU"
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"optimizer='adamw-8bit' needs the package bitsandbytes ({error}): "
            "`pip install bitsandbytes`, or take another optimizer"
        ) from None
    return AdamW8bit(params, lr=lr, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,  # the kernel that torch chooses: foreach on CUDA, a loop on the CPU
    "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adamw-forloop": partial(torch.optim.AdamW, foreach=False),
    "adafactor": torch.optim.Adafactor,
    "adamw-8bit": adamw_8bit,  # on a GPU with bitsandbytes, or predicted
}


def make_optimizer(
    name: str, params: Iterable[nn.Parameter], lr: float, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer called `name` (see OPTIMIZERS), with torch's defaults for other options."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r}: expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](params, lr=lr, **options)


class OptimizerInBackward(torch.optim.Optimizer):
    """Updates each parameter during the backward pass, as soon as its gradient is complete.

    So only one gradient exists at a time. `step` and `zero_grad` have nothing left to do; learning
    rate schedulers and `state_dict` work as for any optimizer. Method: the PyTorch tutorial
    "How to save memory by fusing the optimizer step into the backward pass".
    """

    def __init__(self, params: Iterable[nn.Parameter], optimizer_fn: OptimizerFunction) -> None:
        params = list(params)
        super().__init__(params, defaults={})
        self.optimizers = [optimizer_fn([parameter]) for parameter in params]
        self.updates = 0
        self._share()
        for parameter, optimizer in zip(params, self.optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._update, optimizer))

    def _share(self) -> None:
        """One list of groups and one state, so that schedulers and snapshots see everything."""
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state
        self.param_groups = [
            group for optimizer in self.optimizers for group in optimizer.param_groups
        ]

    def _update(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def step(self, closure: Callable | None = None) -> None:
        """Nothing: the backward pass has updated every parameter already."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the backward pass has freed every gradient already."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for optimizer, group in zip(self.optimizers, self.param_groups, strict=True):
            optimizer.param_groups = [group]
            optimizer.state = self.state


def build_optimizer(
    model: nn.Module, optimizer_fn: OptimizerFunction, recipe: Recipe
) -> torch.optim.Optimizer:
    """The optimizer of the trained (not frozen) parameters of `model`, as `recipe` wants it."""
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.optimizer_in_backward:
        return OptimizerInBackward(params, optimizer_fn)
    return optimizer_fn(params)


# --- Batches -------------------------------------------------------------------------------


def batch_size(batch: Batch) -> int:
    """Number of samples: the length of the first tensor of a tuple, list or mapping."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    if isinstance(batch, (Mapping, tuple, list)) and batch:
        return batch_size(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0])
    raise TypeError(
        "a batch is a tensor, or a tuple, list or mapping of tensors; found "
        f"{type(batch).__name__}: {batch!r:.60}"
    )


def split_batch(batch: Batch, pieces: int) -> list[Batch]:
    """`batch` in `pieces` parts (at most one a sample) whose sizes differ by one at most.

    A list of plain values beside the tensors, such as file names, is taken as one value a sample.
    Raises ValueError where parts of the batch have different numbers of samples.
    """
    samples = batch_size(batch)
    pieces = min(pieces, samples)
    return [batch] if pieces <= 1 else _split(batch, pieces, samples)


def _split(batch: Batch, pieces: int, samples: int) -> list[Batch]:
    if isinstance(batch, Mapping):
        parts = [_split(value, pieces, samples) for value in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*parts, strict=True)]
    if isinstance(batch, torch.Tensor) or _is_column(batch):
        found = len(batch) if not isinstance(batch, torch.Tensor) or batch.dim() else 0
        if found != samples:
            raise ValueError(
                f"a batch of {samples} samples cannot be split: a part of it has "
                f"{found or 'no'} rows. Accumulation needs one row a sample in every part; what "
                "all samples share belongs into the loss function"
            )
        if isinstance(batch, torch.Tensor):
            return list(batch.tensor_split(pieces))
        numbers = torch.arange(samples).tensor_split(pieces)
        return [batch[rows[0] : rows[-1] + 1] for rows in (part.tolist() for part in numbers)]
    if isinstance(batch, (tuple, list)):
        parts = [_split(value, pieces, samples) for value in batch]
        return [_same_kind(batch, values) for values in zip(*parts, strict=True)]
    batch_size(batch)  # says what is wrong
    raise AssertionError


def _is_column(batch: Batch) -> bool:
    """Whether this is a list of plain values, one a sample, and not one of tensors."""
    plain = (str, bytes, int, float, type(None))
    return isinstance(batch, (tuple, list)) and all(isinstance(value, plain) for value in batch)


def _same_kind(batch: tuple | list, values: Iterable[Any]) -> tuple | list:
    """`values` in a container like `batch`: a list, a tuple or a named tuple."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """`batch` on `device`; what is there already is not copied."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return _same_kind(batch, (move_batch(value, device) for value in batch))
    return batch


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


def pick_device(name: str | None = None) -> torch.device:
    """A CUDA GPU if there is one, else the CPU; any other device only when asked for by name."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


# --- The step ------------------------------------------------------------------------------

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)  # every method passes its argument through


def make_scaler(recipe: Recipe, device: torch.device) -> torch.amp.GradScaler:
    """The gradient scaler that fp16 needs; for every other recipe one that does nothing."""
    return torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")


@dataclass
class StepResult:
    """What one step did. loss: mean over the batch, without a graph; grad_norm: before clipping."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    stepped: bool  # False when the scaler found an overflow and skipped the update


def _forward_context(model: nn.Module, recipe: Recipe) -> contextlib.ExitStack:
    """Autocast, checkpointing and offload for one forward pass and its loss, and nothing else."""
    stack = contextlib.ExitStack()
    device = device_of(model).type
    dtype = AMP_DTYPES[recipe.amp]
    if dtype is not None:
        stack.enter_context(torch.autocast(device, dtype, cache_enabled=recipe.amp_cache))
    if recipe.offload:
        stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"))
    stack.enter_context(without_cache(model))
    stack.enter_context(checkpointing(model, recipe.checkpoint))
    return stack


def _counted(
    pieces: list[Batch], count: Callable[[Batch], Any], model: nn.Module
) -> tuple[list[Batch], list[Any]]:
    """The pieces with the terms that their losses average over, without pieces that have none.

    A mean over no terms is NaN, which no weight would remove again. Where several processes train
    together every piece stays, since all of them have to run as many.
    """
    counts = [count(piece) for piece in pieces]
    if group_of(model) is not None:
        return pieces, counts
    kept = [index for index, terms in enumerate(counts) if terms] or [0]
    return [pieces[index] for index in kept], [counts[index] for index in kept]


def _weights(counts: Sequence[Any], model: nn.Module) -> list[Any]:
    """Each micro-batch's share of all terms that the loss averages over; they add up to 1.

    DDP and FSDP average gradients over their processes, so there a share is taken of the mean count
    of a process: a process with fewer samples then weighs less, as in one big batch.
    """
    total = sum(counts)
    group = group_of(model)
    if group is not None:
        total = torch.as_tensor(total, dtype=torch.float64, device=device_of(model))
        dist.all_reduce(total, group=group)
        total = total / process_count(model)
    elif not total:
        raise ValueError(
            "the batch has no term to average over: it is empty, or `count` finds nothing in it"
        )
    elif isinstance(total, torch.Tensor):
        total = total.double()  # so that shares are exact for float64 losses too
    return [count / total for count in counts]


def _like(weight: Any, loss: torch.Tensor) -> Any:
    """A share that is a tensor in the loss's own type, so that it does not change it."""
    return weight.to(loss) if isinstance(weight, torch.Tensor) else weight


def train_step(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe = Recipe(),
    scaler: torch.amp.GradScaler | None = None,
    *,
    count: Callable[[Batch], Any] = batch_size,
    to_device: Callable[[Batch], Batch] | None = None,
) -> StepResult:
    """One optimizer step on `batch`, as `recipe` says; gradients stay readable until the next one.

    loss_fn(model, batch) returns the mean loss over `count(batch)` terms: samples by default, so
    give `count` when the loss averages over something else, such as tokens. Each of the
    `recipe.accumulate` micro-batches weighs by its share of the terms, which makes the sum of
    gradients equal the whole batch's, whatever the sizes. `scaler` comes from `make_scaler`;
    `to_device` moves a micro-batch to the model's device.
    """
    if scaler is None and recipe.amp == "fp16":
        raise ValueError(
            "amp='fp16' needs a gradient scaler: pass scaler=make_scaler(recipe, device)"
        )
    scaler = scaler or NO_SCALER
    to_device = to_device or partial(move_batch, device=device_of(model))

    optimizer.zero_grad(set_to_none=recipe.set_to_none)
    pieces = split_batch(batch, pieces_in_all(model, recipe.accumulate, batch_size(batch)))
    pieces, counts = _counted(pieces, count, model)
    weights = _weights(counts, model)
    buffers = _buffers_before(model) if scaler.is_enabled() else []
    loss_sum: torch.Tensor | float = 0.0
    for index, piece in enumerate(pieces):
        # Only the last micro-batch averages over processes; its forward must be inside too.
        is_last = index == len(pieces) - 1
        with nullcontext() if is_last else gradients_stay_here(model):
            with _forward_context(model, recipe):
                try:
                    loss = loss_fn(model, to_device(piece))
                except ValueError as error:
                    if "more than 1 value per channel" not in str(error):
                        raise
                    raise ValueError(
                        f"{error}: BatchNorm cannot train on one value a channel, and this batch "
                        f"has {batch_size(piece)} sample(s) in micro-batch {index + 1} of "
                        f"{len(pieces)}. Use fewer micro-batches or a larger batch, and leave out "
                        "a last batch that is too small (drop_last=True)"
                    ) from error
                loss = (
                    loss * _like(weights[index], loss) if counts[index] else loss.nan_to_num() * 0
                )
            if not loss.requires_grad:
                raise RuntimeError(NO_GRADIENT)
            try:
                scaler.scale(loss).backward()
            except CheckpointError as error:
                raise CheckpointError(f"{error}\n{DIFFERENT_RECOMPUTATION}") from error
        loss_sum = loss_sum + loss.detach()
        del loss
    if not _has_gradients(optimizer):
        raise RuntimeError(NO_GRADIENT)

    grad_norm = None
    if recipe.clip_norm is not None:
        scaler.unscale_(optimizer)  # clip true gradients, not scaled ones
        norm = torch.nn.utils.clip_grad_norm_(_parameters_of(optimizer), recipe.clip_norm)
        grad_norm = whole_tensor(norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    stepped = scaler.get_scale() >= scale
    for buffer, before in buffers if not stepped else ():
        buffer.copy_(before)
    return StepResult(loss_sum, grad_norm, stepped)


def _buffers_before(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Buffers that a forward pass may change, such as BatchNorm's statistics, with copies.

    A forward pass that overflows would leave NaN in them, although its update is skipped. Masks and
    tables of positions are no such buffers: those are neither floating-point nor single numbers.
    """
    found = [
        buffer
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point() or buffer.dim() == 0
    ]
    return [(buffer, buffer.clone()) for buffer in found]


NO_GRADIENT = (
    "no gradients reached the optimizer: is every layer frozen, was the loss detached, "
    "or was the optimizer built for another model?"
)
DIFFERENT_RECOMPUTATION = (
    "The recomputed segment did not repeat its forward pass. Usual causes: model.eval() or "
    "model.train() between forward and backward, Python's or NumPy's random numbers or a counter "
    "inside the segment, or another autocast setting."
)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, OptimizerInBackward):
        return optimizer.updates > 0
    return any(parameter.grad is not None for parameter in _parameters_of(optimizer))


# --- Tasks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is learnt: how a batch becomes logits and targets, their mean loss, and their score."""

    name: str
    forward: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    score_name: str
    score: Callable[[torch.Tensor, torch.Tensor], float | None]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean loss of a batch: the `loss_fn` of `train_step` and of predictions."""
        return self.criterion(*self.forward(model, batch))


def image_forward(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [batch, classes] and labels [batch] of (images, labels)."""
    images, labels = batch
    return model(images), labels


def image_criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, in float32 also under autocast."""
    return F.cross_entropy(logits.float(), labels)


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of samples whose largest logit is the label's, in 0 to 1, not rounded."""
    return (logits.argmax(dim=1) == labels).double().mean().item()


def comment_forward(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """One logit a comment [batch], and labels in 0 to 1 [batch], of a tokenized batch."""
    inputs = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    return model(**inputs).logits.squeeze(-1), batch["labels"]


def comment_criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy on float32 logits: a sigmoid first would saturate in half precision."""
    return F.binary_cross_entropy_with_logits(logits.float(), labels.float())


def roc_auc(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Area under the ROC curve (scikit-learn's), or None where only one class is present."""
    from sklearn.metrics import roc_auc_score

    positive = labels > 0.5
    if positive.all() or not positive.any():
        return None
    return float(roc_auc_score(positive.numpy(), logits.double().numpy()))


class GroupScore(NamedTuple):
    """ROC-AUC of one group with its bootstrap interval; None where the group has one class."""

    group: str
    count: int
    score: float | None
    low: float | None
    high: float | None


def roc_auc_interval(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile bootstrap interval of `roc_auc`, or None where only one class is present.

    Samples are drawn with replacement within each class, so that every resample has both. The
    caller's random numbers are not touched. Method: Efron and Tibshirani (1993), chapter 13.
    """
    positive = labels > 0.5
    if positive.all() or not positive.any():
        return None
    values, places = torch.unique(logits.double(), return_inverse=True)
    generator = torch.Generator().manual_seed(seed)

    def resample(places: torch.Tensor) -> torch.Tensor:
        """How often each value is drawn, as a share of all draws."""
        drawn = places[torch.randint(len(places), (len(places),), generator=generator)]
        return torch.bincount(drawn, minlength=len(values)).double() / len(places)

    areas = []
    for _ in range(resamples):
        toxic, other = resample(places[positive]), resample(places[~positive])
        # Share of pairs whose positive sample ranks above the negative one; ties count half.
        areas.append(toxic @ (other.cumsum(0) - other / 2))
    tail = (1 - level) / 2
    low, high = torch.stack(areas).quantile(torch.tensor([tail, 1 - tail]).double()).tolist()
    return low, high


def roc_auc_by_group(
    logits: torch.Tensor, labels: torch.Tensor, groups: Sequence[str], **interval: Any
) -> list[GroupScore]:
    """`roc_auc` of all samples ("all") and of each group, e.g. by language, in alphabetical order.

    groups: each sample's, in the order of `logits`. interval: options of `roc_auc_interval`.
    """
    if len(groups) != len(logits):
        raise ValueError(f"{len(groups)} groups for {len(logits)} samples: expected one for each")
    members = {"all": torch.ones(len(logits), dtype=torch.bool)}
    for group in sorted(set(groups)):
        members[group] = torch.tensor([one == group for one in groups])
    scores = []
    for group, chosen in members.items():
        selected = logits[chosen], labels[chosen]
        low, high = roc_auc_interval(*selected, **interval) or (None, None)
        scores.append(GroupScore(group, int(chosen.sum()), roc_auc(*selected), low, high))
    return scores


CATS_DOGS = Task("cats and dogs", image_forward, image_criterion, "accuracy", accuracy)
COMMENTS = Task("toxic comments", comment_forward, comment_criterion, "ROC-AUC", roc_auc)


# --- Evaluation ----------------------------------------------------------------------------


@dataclass
class EvalResult:
    """loss: mean per sample; score: the task's, None where undefined; all logits and targets."""

    loss: float
    score: float | None
    logits: torch.Tensor
    targets: torch.Tensor


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Iterable[Batch], task: Task, recipe: Recipe = Recipe()
) -> EvalResult:
    """Loss and score of `model` on `loader`, in eval mode without gradients; then the old mode."""
    was_training = model.training
    device, dtype = device_of(model), AMP_DTYPES[recipe.amp]
    model.eval()
    logits, targets, loss_sum = [], [], 0.0
    try:
        for batch in loader:
            batch = move_batch(batch, device)
            with torch.autocast(device.type, dtype) if dtype else nullcontext():
                outputs, labels = task.forward(unwrap(model), batch)
            loss_sum = loss_sum + task.criterion(outputs, labels) * len(labels)
            logits.append(outputs.float().cpu())
            targets.append(labels.cpu())
    finally:
        model.train(was_training)
    if not logits:
        raise ValueError("nothing to evaluate: the loader has no batch")
    shares = from_all(model, (float(loss_sum), torch.cat(logits), torch.cat(targets)))
    losses, logits, targets = zip(*shares, strict=True)
    all_logits, all_targets = torch.cat(logits), torch.cat(targets)
    broken = int(all_logits.isnan().reshape(len(all_logits), -1).any(dim=1).sum())
    if broken:  # the largest of NaN is its first: a score would look like one
        raise FloatingPointError(
            f"{broken} of {len(all_logits)} samples have a logit that is NaN, so there is no "
            f"score: the weights have diverged, or amp={recipe.amp!r} overflows. Lower the "
            "learning rate, clip the gradients (clip_norm=1.0), or try amp='bf16' or amp='off'"
        )
    return EvalResult(
        sum(losses) / len(all_targets),
        task.score(all_logits, all_targets),
        all_logits,
        all_targets,
    )


# --- Training ------------------------------------------------------------------------------


@dataclass
class EpochResult:
    """One epoch: losses are means per sample, scores in 0 to 1 not rounded; None: not computed."""

    epoch: int
    train_loss: float
    train_score: float | None
    val_loss: float | None
    val_score: float | None
    score_name: str
    steps: int
    skipped_steps: int
    seconds: float
    peak_mib: float
    peak_source: str
    reserved_mib: float | None
    device_used_mib: float | None


def optimizer_steps_per_epoch(loader: Any) -> int:
    """Optimizer steps in one epoch: one a batch, however many micro-batches that has."""
    return len(loader)


def is_interactive() -> bool:
    """Whether somebody may watch a progress bar: in a terminal or notebook, without TQDM_DISABLE.

    `tqdm.auto` does not heed that variable in a notebook's kernel, so it is read here.
    """
    return not os.environ.get("TQDM_DISABLE") and (
        sys.stderr.isatty() or "ipykernel" in sys.modules
    )


MAX_SKIPPED_IN_A_ROW = 20  # from the first scale of 65,536 the scaler is below 0.1 by then


def train(
    model: nn.Module,
    train_loader: Any,
    val_loader: Any,
    task: Task,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int,
    recipe: Recipe = Recipe(),
    scheduler: Any = None,
    evaluate_train: bool = True,
    save_dir: str | Path | None = None,
    save_all: bool = False,
    resume: bool = False,
    snapshot_steps: int | None = None,
) -> list[EpochResult]:
    """Train for `epochs`, evaluating after each; `scheduler` is stepped once an optimizer step.

    Peak memory: on a GPU of the whole epoch; on a CPU of the epoch's first two steps, since
    watching every tensor would slow the rest. `evaluate_train` scores the training data once more
    after the epoch. Scoring leaves all random numbers as they were, so it changes nothing of the
    training. Switches of the recipe that save nothing here are announced by a warning.

    `save_dir` keeps the weights of the last and of the best epoch as `epoch_N.pt` (with `save_all`
    those of every epoch), and everything needed to go on in `snapshot.pt`, written after every
    epoch and every `snapshot_steps` steps. With `resume` a run that was stopped goes on from there
    and ends with the same bits as one that was not; without a snapshot it starts anew.

    Raises FloatingPointError when the loss stops being finite, FileExistsError when `save_dir`
    holds another run, ValueError when its snapshot is of another model, recipe or optimizer, and
    OSError when the disk does not take the snapshot.
    """
    if epochs < 1:
        raise ValueError(f"epochs={epochs}: expected 1 or more")
    if snapshot_steps is not None and snapshot_steps < 1:
        raise ValueError(f"snapshot_steps={snapshot_steps}: expected 1 or more, or None")
    if save_dir is None and (resume or snapshot_steps is not None):
        raise ValueError("resume and snapshot_steps need a save_dir to keep snapshots in")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "scheduler: ReduceLROnPlateau waits for a score after each epoch, and here schedulers "
            "move once an optimizer step: use one that counts steps, such as OneCycleLR"
        )
    check_recipe(recipe, model)
    for sentence in idle_switches(recipe, device_of(model)):
        warnings.warn(sentence, stacklevel=2)
    scaler = make_scaler(recipe, device_of(model))
    folder = None if save_dir is None else Path(save_dir)
    what = (model, train_loader, val_loader, task, optimizer, recipe, scheduler, scaler)
    run = _Run(*what, folder, save_all, snapshot_steps)
    if save_dir is not None:
        run.begin(resume, epochs)
    while len(run.results) < epochs:
        started = time.perf_counter()
        loss = run.train_epoch(f"epoch {len(run.results) + 1}/{epochs}")
        generators = run.generators()
        train_score = evaluate(model, train_loader, task, recipe).score if evaluate_train else None
        validation = evaluate(model, val_loader, task, recipe) if val_loader is not None else None
        run.set_generators(generators)
        progress = run.progress
        run.results.append(
            EpochResult(
                epoch=len(run.results) + 1,
                train_loss=loss,
                train_score=train_score,
                val_loss=validation.loss if validation else None,
                val_score=validation.score if validation else None,
                score_name=task.score_name,
                steps=progress.steps,
                skipped_steps=progress.skipped,
                seconds=progress.seconds + time.perf_counter() - started,
                peak_mib=progress.peak_bytes / MIB,
                peak_source=progress.peak_source,
                reserved_mib=_mib(progress.reserved_bytes),
                device_used_mib=_mib(progress.device_used_bytes),
            )
        )
        run.progress = _Progress()
        if save_dir is not None:
            run.save_snapshot()
            run.save_weights()
    return run.results


def _mib(n_bytes: int | None) -> float | None:
    return None if n_bytes is None else n_bytes / MIB


@dataclass
class _Progress:
    """Where an epoch stands. losses, sizes: of each step and of this process; the rest adds up."""

    losses: list[torch.Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0  # before the run was stopped and resumed
    peak_bytes: int = 0
    peak_source: str = "n/a"
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None

    @property
    def steps(self) -> int:
        return len(self.losses)

    def mean_loss(self, model: nn.Module) -> float:
        """Mean per sample over all steps, and over the processes that share each step."""
        shares = from_all(
            model, (torch.stack(self.losses).double().cpu(), torch.tensor(self.sizes))
        )
        losses = torch.stack([losses for losses, _ in shares]).mean(dim=0)
        sizes = torch.stack([sizes for _, sizes in shares]).sum(dim=0)
        return float((losses * sizes).sum() / sizes.sum())

    def add_usage(self, usage: Usage) -> None:
        if usage.peak_bytes >= self.peak_bytes:
            self.peak_bytes, self.peak_source = usage.peak_bytes, usage.peak_source
            self.reserved_bytes = usage.reserved_bytes
            self.device_used_bytes = usage.device_used_bytes


@dataclass
class _Run:
    """A training run: what it works on, and where it stands."""

    model: nn.Module
    loader: Any
    val_loader: Any
    task: Task
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    scheduler: Any
    scaler: torch.amp.GradScaler
    folder: Path | None
    save_all: bool
    snapshot_steps: int | None
    results: list[EpochResult] = field(default_factory=list)
    progress: _Progress = field(default_factory=_Progress)
    epoch_start: dict[str, Any] = field(default_factory=dict)  # generators when the epoch began
    rng_now: dict[str, Any] | None = None  # set by resuming: the generators after what is done

    def train_epoch(self, title: str) -> float:
        """One pass over the loader, or the rest of one that was stopped; gives the mean loss."""
        self.model.train()
        progress = self.progress
        skip = progress.steps
        if not skip:
            self.epoch_start = self.generators()
        started = time.perf_counter()
        on_gpu = device_of(self.model).type == "cuda"
        with contextlib.ExitStack() as stack:
            if on_gpu:
                epoch_usage = stack.enter_context(measure(self.model, self.optimizer))
            # Only the length: tqdm.auto starts another pass over what it gets, which draws a seed.
            bar = stack.enter_context(
                tqdm(
                    total=len(self.loader),
                    initial=skip,
                    desc=title,
                    leave=False,
                    disable=not is_interactive(),
                )
            )
            for index, batch in enumerate(self.loader):
                if (
                    index < skip
                ):  # drawn again, so that whatever comes next is what it would have been
                    continue
                if self.rng_now is not None:
                    set_rng_state(self.rng_now)
                    self.rng_now = None
                self._step(batch, watched=not on_gpu and index < 2)
                bar.update()
                at_end = index + 1 == len(self.loader)
                if self.snapshot_steps and (index + 1) % self.snapshot_steps == 0 and not at_end:
                    self.save_snapshot(progress.seconds + time.perf_counter() - started)
        if on_gpu:
            progress.add_usage(epoch_usage)
        if not progress.losses:
            raise ValueError("nothing to train on: the loader has no batch")
        loss = progress.mean_loss(self.model)
        if not math.isfinite(loss) and not progress.skipped:
            raise FloatingPointError(
                f"the training loss became {loss} in {title}: lower the learning rate, "
                "clip the gradients (clip_norm=1.0), or look for NaN in the data"
            )
        return loss

    def _step(self, batch: Batch, watched: bool) -> None:
        progress = self.progress
        watch = measure(self.model, self.optimizer, inputs=batch) if watched else nullcontext()
        with watch as usage:
            result = train_step(
                self.model, batch, self.task.loss, self.optimizer, self.recipe, self.scaler
            )
        if watched:
            progress.add_usage(usage)
        progress.losses.append(result.loss)  # a tensor: reading it would stop the GPU every step
        progress.sizes.append(batch_size(batch))
        if result.stepped:
            progress.skipped_in_a_row = 0
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"{progress.skipped_in_a_row} steps in a row overflowed under "
                f"amp={self.recipe.amp!r}: the loss or the gradients are NaN or infinite. Try "
                "amp='bf16' or amp='off'; GTX 16xx cards are known for this in float16"
            )

    # Snapshots

    @property
    def snapshot_path(self) -> Path:
        return self.folder / "snapshot.pt"

    def begin(self, resume: bool, epochs: int) -> None:
        """Go on from the snapshot if asked to and there is one; never replace another run's."""
        found = sorted(path.name for path in self.folder.glob("epoch_*.pt"))
        if resume and self.snapshot_path.exists():
            self._load_snapshot(epochs)
            return
        found += [self.snapshot_path.name] if self.snapshot_path.exists() else []
        if found:
            raise FileExistsError(
                f"{self.folder} holds another run ({', '.join(found[:3])}), which this one would "
                "replace: choose another save_dir, move the files away, or go on from its "
                "snapshot.pt with resume=True"
            )
        if resume:
            print(f"No snapshot in {self.folder}: training starts from the beginning.")
        if process_rank(self.model) == 0:  # now and not after an epoch's work
            # Not the optimizer's state: where it is shared out, asking for it would create it.
            settings = self.optimizer.state_dict()["param_groups"]
            known = {"model": unwrap(self.model).state_dict(), "optimizer": settings}
            check_writable(self._rest() | known, self.snapshot_path)

    def save_snapshot(self, seconds: float = 0.0) -> None:
        """Write everything that going on needs. Of several processes the first writes for all."""
        if not self.progress.steps:
            self.epoch_start = self.generators()
        elif not math.isfinite(self.progress.losses[-1]) and self.progress.skipped_in_a_row == 0:
            raise FloatingPointError(
                f"the loss of step {self.progress.steps} is {float(self.progress.losses[-1])}: the "
                "last snapshot is kept, and none is written of weights that are spoilt. Lower the "
                "learning rate, clip the gradients (clip_norm=1.0), or look for NaN in the data"
            )
        rng = from_all(self.model, rng_state())
        epoch_start = from_all(self.model, self.epoch_start)
        state = self._state()
        if process_rank(self.model) == 0:
            value = state | {
                "results": [vars(result) for result in self.results],
                "progress": vars(replace(self.progress, seconds=seconds)),
                "epoch_start": epoch_start,
                "rng": rng,
            }
            write_atomically(value, self.snapshot_path)
        wait_for_all(self.model)

    def _state(self) -> dict[str, Any]:
        """The state of all that is trained; all processes have to ask for it together."""
        model = unwrap(self.model)
        weights = {"model": model_state(model)}
        return weights | {"optimizer": optimizer_state(model, self.optimizer)} | self._rest()

    def _rest(self) -> dict[str, Any]:
        return {
            "identity": self._identity(),
            "scaler": self.scaler.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
        }

    def _load_snapshot(self, epochs: int) -> None:
        snapshot = read_snapshot(self.snapshot_path)
        try:
            self._refuse_another_run(snapshot["identity"])
            results = [EpochResult(**result) for result in snapshot["results"]]
            progress = _Progress(**snapshot["progress"])
            starts, rng = snapshot["epoch_start"], snapshot["rng"]
            state = {name: snapshot[name] for name in ("model", "optimizer", "scaler", "scheduler")}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{self.snapshot_path} is no snapshot of this program ({error}): start anew in "
                "another folder"
            ) from error
        if len(results) > epochs or (len(results) == epochs and progress.steps):
            raise ValueError(
                f"{self.snapshot_path} has finished {len(results)} epochs already, more than "
                f"epochs={epochs}"
            )
        processes = process_count(self.model)
        if len(rng) != processes:
            raise ValueError(
                f"{self.snapshot_path} was written by {len(rng)} processes, this run has "
                f"{processes}: resume with as many"
            )
        load_states(unwrap(self.model), self.optimizer, state["model"], state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        rank = process_rank(self.model)
        self.results, self.progress, self.epoch_start = results, progress, starts[rank]
        self.set_generators(self.epoch_start)
        self.rng_now = rng[rank] if progress.steps else None
        temporary_path(self.snapshot_path).unlink(missing_ok=True)
        print(
            f"Going on from {self.snapshot_path}: {len(results)} epochs and {progress.steps} steps "
            "are done."
        )
        if results and not progress.steps:  # it may have been stopped before its weights were saved
            self.save_weights()

    def save_weights(self) -> None:
        """Save this epoch's weights as `epoch_N.pt`.

        Without `save_all`, those that this run wrote before are deleted, unless they are the best
        by validation score.
        """
        weights = model_state(unwrap(self.model))
        if process_rank(self.model) == 0:
            last = self.results[-1].epoch
            write_atomically(weights, self.folder / f"epoch_{last}.pt")
            best = max(
                self.results, key=lambda r: -math.inf if r.val_score is None else r.val_score
            ).epoch
            for result in self.results if not self.save_all else ():
                if result.epoch not in (best, last):
                    (self.folder / f"epoch_{result.epoch}.pt").unlink(missing_ok=True)
        wait_for_all(self.model)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on: anything else would be another run."""
        optimizer = self.optimizer
        if isinstance(optimizer, OptimizerInBackward):
            optimizer = optimizer.optimizers[0]
        tensors = unwrap(self.model).state_dict()
        identity = {f"recipe.{name}": value for name, value in vars(self.recipe).items()}
        identity |= {f"optimizer.{name}": str(value) for name, value in optimizer.defaults.items()}
        identity |= {f"model.{name}": f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}
        if is_sharded(self.model):
            identity["sharded"] = True  # the optimizer's state goes by names there, not by numbers
        return identity | {
            "task": self.task.name,
            "optimizer": type(optimizer).__name__,
            "scheduler": type(self.scheduler).__name__,
            "batches an epoch": len(self.loader),
        }

    def _refuse_another_run(self, found: dict[str, Any]) -> None:
        expected = self._identity()
        missing = object()
        for name in [*expected, *found]:
            here, there = expected.get(name, missing), found.get(name, missing)
            if here != there:
                here, there = ("nothing" if v is missing else repr(v) for v in (here, there))
                raise ValueError(
                    f"{self.snapshot_path} is of another run: {name} is {there} there and {here} "
                    "here. Use the same settings to go on, or another save_dir to start anew"
                )

    # Random numbers

    def _all_generators(self) -> list[torch.Generator]:
        return [*loader_generators(self.loader), *loader_generators(self.val_loader)]

    def generators(self) -> dict[str, Any]:
        """Where all random numbers of the run stand."""
        states = [generator.get_state() for generator in self._all_generators()]
        return {"rng": rng_state(), "generators": states}

    def set_generators(self, state: dict[str, Any]) -> None:
        """Put all random numbers where `generators` found them."""
        for generator, generator_state in zip(
            self._all_generators(), state["generators"], strict=True
        ):
            generator.set_state(generator_state)
        set_rng_state(state["rng"])


# --- Measuring one step --------------------------------------------------------------------


@dataclass
class StepMeasurement:
    """What `measure_step` saw; where the step did not fit only `failed`, the reason, is set."""

    peak_mib: float | None = None
    peak_source: str = "n/a"
    reserved_mib: float | None = None
    device_used_mib: float | None = None
    split: dict[str, int] | None = None  # bytes at the peak, by part
    timeline: Timeline | None = None
    peak_phase: str | None = None
    notes: dict[str, str] = field(default_factory=dict)  # reasons for what is None
    timing: Timing | None = None
    loss: float | None = None
    fingerprint: str | None = None
    failed: str | None = None


def fingerprint(model: nn.Module, loss: torch.Tensor) -> str:
    """One hash of loss, gradients, parameters, buffers and random number generators, bit by bit."""
    digest = hashlib.sha256()
    tensors = [
        loss,
        *model.parameters(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    tensors += [*model.buffers(), torch.get_rng_state()]
    if device_of(model).type == "cuda":
        tensors.append(torch.cuda.get_rng_state(device_of(model)))
    for tensor in tensors:
        digest.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def measure_step(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Batch],
    loss_fn: LossFunction,
    recipe: Recipe,
    optimizer_fn: OptimizerFunction,
    *,
    steps: int = 3,
    repeats: int = 5,
    seed: int = 0,
    device: str | None = None,
) -> StepMeasurement:
    """Run `steps` real training steps and tell memory, time and a fingerprint of where they ended.

    The arguments are those of `helpers.predict.predict`. These steps (steps that the fp16 scaler
    skips do not count, and more are taken in their place) are watched for memory,
    `repeats` more are timed. On a GPU everything happens in a process of its own, since memory
    that an earlier model leaves behind would show in the reading; there a configuration that runs
    out of memory comes back with `failed`.
    """
    target = pick_device(device)
    arguments = (model_fn, batch_fn, loss_fn, recipe, optimizer_fn, steps, repeats, seed, target)
    if target.type != "cuda":
        return _measure_step(*arguments)
    gc.collect()
    torch.cuda.empty_cache()  # what this process keeps in reserve, the other one cannot have
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_step, *arguments).result()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch's way, new or old, of saying that the GPU's memory is full."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and re.search(r"\bCUDA (error: )?out of memory", str(error)) is not None
    )


def _measure_step(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Batch],
    loss_fn: LossFunction,
    recipe: Recipe,
    optimizer_fn: OptimizerFunction,
    steps: int,
    repeats: int,
    seed: int,
    device: torch.device,
) -> StepMeasurement:
    torch.manual_seed(seed)
    try:
        model = model_fn().to(device).train()
        check_recipe(recipe, model)
        optimizer = build_optimizer(model, optimizer_fn, recipe)
        scaler = make_scaler(recipe, device)
        batch = batch_fn()
        step = partial(train_step, model, batch, loss_fn, optimizer, recipe, scaler)
        usages, updates = [], 0
        # A skipped step does not count: before the first update there is no optimizer state.
        while updates < steps and len(usages) - updates < MAX_SKIPPED_IN_A_ROW:
            with measure(model, optimizer, inputs=(batch, vars(scaler))) as usage:
                result = step()
            usages.append(usage)
            updates += result.stepped
        loss = result.loss
        ended = fingerprint(model, loss)
        usage = max(usages, key=lambda usage: usage.peak_bytes)
        timing = timed(step, repeats=repeats, warmup=0) if repeats else None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).split(". ")[0]
    else:
        return StepMeasurement(
            peak_mib=usage.peak_mib,
            peak_source=usage.peak_source,
            reserved_mib=usage.reserved_mib,
            device_used_mib=usage.device_used_mib,
            split=usage.split,
            timeline=usage.timeline,
            peak_phase=usage.peak_phase,
            notes=usage.notes,
            timing=timing,
            loss=float(loss),
            fingerprint=ended,
        )
    gc.collect()
    return StepMeasurement(failed=reason)


# --- Trying what fits ----------------------------------------------------------------------


@dataclass(frozen=True)
class TriedBatches:
    """What trying found. largest: the largest micro-batch that fits, 0 for none.

    tried: every size with the reason why it did not fit, None where it did. advice: what to do for
    the size that was wanted.
    """

    largest: int
    tried: dict[int, str | None]
    advice: str = ""


def largest_batch_by_trying(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Batch],
    loss_fn: LossFunction,
    recipe: Recipe,
    optimizer_fn: OptimizerFunction,
    wanted: int,
    *,
    device: str | None = None,
) -> TriedBatches:
    """The largest micro-batch up to `wanted` with which two steps run on this machine's GPU.

    The first three functions are those of a `helpers.catalogue.Workload`; a batch has
    `recipe.accumulate` micro-batches. Two steps, since the optimizer's state comes with the first.
    Sizes are doubled until one fails, and the gap is halved until it is closed; between two tries
    everything is freed. Errors other than full memory are raised as they are, and random number
    generators end as they began. `helpers.predict.largest_batch` tells the same without a GPU.
    """
    if wanted < 1:
        raise ValueError(f"wanted={wanted}: expected a batch of 1 or more")
    target = pick_device(device)
    tried: dict[int, str | None] = {}
    # Not from 1 on: a network with BatchNorm may need two samples.
    fitting, failing, size = 0, wanted + 1, min(2, wanted)
    while failing - fitting > 1:
        batch = partial(batch_fn, size * recipe.accumulate)
        reason = _why_full(
            partial(_two_steps, model_fn, batch, loss_fn, recipe, optimizer_fn, target)
        )
        _free_memory(target)
        tried[size] = reason
        fitting, failing = (size, failing) if reason is None else (fitting, size)
        still_growing = failing > wanted
        size = min(2 * fitting, wanted) if still_growing else (fitting + failing) // 2
    return TriedBatches(fitting, tried)


def _why_full(run: Callable[[], None]) -> str | None:
    """Why `run` does not fit the GPU, None if it does. Nothing of it is alive afterwards."""
    try:
        run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).split(". ")[0].splitlines()[0]
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error keeps no tensors
    else:
        return None
    return reason


def _two_steps(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Batch],
    loss_fn: LossFunction,
    recipe: Recipe,
    optimizer_fn: OptimizerFunction,
    device: torch.device,
) -> None:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = model_fn().to(device).train()
        check_recipe(recipe, model)
        optimizer = build_optimizer(model, optimizer_fn, recipe)
        scaler = make_scaler(recipe, device)
        batch = batch_fn()
        updates = skipped = 0
        while updates < 2 and skipped < MAX_SKIPPED_IN_A_ROW:
            result = train_step(model, batch, loss_fn, optimizer, recipe, scaler)
            updates, skipped = updates + result.stepped, skipped + (not result.stepped)
        float(result.loss)  # waits for the GPU: its errors come late


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
