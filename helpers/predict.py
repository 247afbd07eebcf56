"""What a training step would take on a CUDA GPU, without one.

A prediction is the real `helpers.train.train_step` on fake tensors: they have shapes and types but
no data, so nothing is computed and no memory is taken. torch has no fake CUDA tensors that work on
a machine without CUDA, so the tensors are fake CPU ones, and where CUDA would choose differently
(kernels, autocast's lists, optimizer kernels, workspaces) those choices are put in on top. The
requests for memory are then played to the rules of torch's caching allocator.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # FakeTensorMode loads it: not in the time of a prediction
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from helpers.allocator import Replay, replay, settled_reserved
from helpers.catalogue import Workload, find_workload, format_checkpoint
from helpers.cuda import (
    HALF_TYPES,
    MATRIX_PRODUCTS,
    TODAY,
    Gpu,
    Stack,
    aten,
    cuda_kernels,
    embedding_temporaries,
    find_gpu,
    gpu_of,
    matrix_product_temporaries,
)
from helpers.distributed import shard_model
from helpers.fake import RememberedResults
from helpers.memory import (
    MIB,
    PARTS,
    Block,
    Timeline,
    Tracker,
    _tensors,
    format_mib,
    round_up,
)
from helpers.models import blocks, legal_cuts, segments, sharding_units
from helpers.train import (
    Batch,
    LossFunction,
    OptimizerFunction,
    Recipe,
    TriedBatches,
    batch_size,
    build_optimizer,
    check_recipe,
    largest_batch_by_trying,
    make_optimizer,
    pick_device,
    split_batch,
    train_step,
)

# --- The step on fake tensors --------------------------------------------------------------


class PredictionError(ValueError):
    """The step cannot be predicted; the message names the line of the user's code."""


PHASES = ("forward", "backward", "recompute", "optimizer")
LAUNCH_SECONDS = 5e-6  # what starting a kernel takes at least


@dataclass
class Operation:
    """One operation of the step: its phase, module, arithmetic, bytes moved, and precision."""

    phase: str
    module: str  # the module whose forward is running, if one is
    flops: float
    traffic: int
    half: bool

    def seconds(self, gpu: Gpu) -> float:
        """How long it takes at least: bound by arithmetic, by memory or by its launch."""
        speed = (gpu.half_tflops if self.half else gpu.tflops) * 1e12
        return max(self.flops / speed, self.traffic / (gpu.bandwidth * 1e9), LAUNCH_SECONDS)


def estimated_seconds(operations: list[Operation], share: float, gpu: Gpu) -> float:
    """Roofline time of one step, of which `share` of the batch has run.

    The optimizer's operations do not grow with the batch. Good for ranking recipes, not for
    predicting a stopwatch.
    """
    seconds = 0.0
    for operation in operations:
        bound = operation.seconds(gpu)
        seconds += bound if operation.phase == "optimizer" else bound / share
    return seconds


class FakeStepTracker(Tracker):
    """A tracker that also counts operations and adds what CUDA's kernels allocate on their own."""

    def __init__(self, gpu: Gpu | None, torch_then: Stack = TODAY):
        super().__init__()
        self.gpu = gpu
        self._manages_workspace = torch_then.workspace
        self.operations: list[Operation] = []  # of the last step
        self.last_step = 0  # where it begins in `events`
        self._formulas: dict[Any, Callable | None] = {}
        self._has_workspace: set[bool] = set()
        self.output_bytes: dict[str, int] = {}  # of the modules of a sequence, by their number
        self._call = RememberedResults().call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping it off takes time at every operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is aten._local_scalar_dense.default and self._optimizers:
            # Optimizers that read a norm use it as a factor: any number leads to the same memory.
            return 1.0 if args[0].is_floating_point() else 1
        if self._optimizers:
            # torch knows the values of step counters and would count on; nobody reads them here.
            for tensor in _tensors(args):
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None
        result = self._record(func, args, kwargs)
        self._count(func, args, kwargs, result)
        if self.gpu is not None:
            if func in MATRIX_PRODUCTS:
                if self._manages_workspace:
                    self._take_workspace()
                self._take_and_return(matrix_product_temporaries(*args[-2:]))
            elif func is aten.embedding_dense_backward.default:
                self._take_and_return(embedding_temporaries(*args))
        return result

    def _count(self, func, args, kwargs, result) -> None:
        if func not in self._formulas:
            moves_nothing = func.is_view or func in NO_WORK
            formula = flop_registry.get(func.overloadpacket, _no_flops)
            self._formulas[func] = None if moves_nothing else formula
        formula = self._formulas[func]
        if formula is None:
            return
        tensors = list(_tensors((args, kwargs, result)))
        traffic = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        half = bool(tensors) and tensors[0].dtype in HALF_TYPES
        flops = formula(*args, **kwargs, out_val=result)
        module = self._stack[-1] if self._stack else ""
        self.operations.append(Operation(self.phase, module, flops, traffic, half))

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an input on the device."""
        copied = tensor.clone()
        self._set_role(copied, "inputs")
        return copied

    def add_block(self, size: int, part: str) -> Block:
        """Memory of `size` bytes that no tensor holds."""
        block = Block(size, self.phase, self._where(), part)
        self._add_event(block, True)
        return block

    def _take_and_return(self, sizes: list[int]) -> None:
        """Memory that a kernel takes beside its result and gives back when it is done."""
        for block in [self.add_block(size, "temporaries") for size in sizes]:
            self._add_event(block, False)

    def _take_workspace(self) -> None:
        """cuBLAS keeps a workspace for each thread that uses it: the main and the backward one."""
        in_backward = self.phase in ("backward", "recompute")
        if in_backward not in self._has_workspace:
            self._has_workspace.add(in_backward)
            self.add_block(self.gpu.workspace, "temporaries")

    def _module_ends(self, module: nn.Module, args, output) -> None:
        if isinstance(output, torch.Tensor) and self._stack:
            number = self._stack[-1].split(" ")[0]
            if number.isdigit():
                self.output_bytes[number] = output.untyped_storage().nbytes()
        super()._module_ends(module, args, output)

    def phase_peaks(self) -> dict[str, tuple[int, str]]:
        """The most live bytes in each phase, and the module where."""
        peaks = dict.fromkeys(PHASES, (0, ""))
        live = 0
        for (block, created), phase in zip(self.events, self.phases, strict=True):
            if not block.host:
                live += round_up(block.nbytes) if created else -round_up(block.nbytes)
                if created and live > peaks[phase][0]:
                    peaks[phase] = (live, block.where)
        return {phase: (size, self._module_name(where)) for phase, (size, where) in peaks.items()}

    def _step_begins(self, optimizer, args, kwargs) -> None:
        super()._step_begins(optimizer, args, kwargs)
        if not isinstance(optimizer, NoUpdate):
            self.add_block(0, "temporaries")  # marks the phase of those that allocate nothing

    def _step_ends(self, optimizer, args, kwargs) -> None:
        super()._step_ends(optimizer, args, kwargs)
        if self.gpu is None:
            return
        for group in optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                continue  # these keep their step counters on the device
            for parameter in group["params"]:
                step = optimizer.state.get(parameter, {}).get("step")
                if isinstance(step, torch.Tensor):
                    self._refs[step.untyped_storage()._cdata].block.host = True


NO_WORK = {aten.detach.default, aten.empty.memory_format, aten.empty_like.default}


def _no_flops(*args, **kwargs) -> int:
    return 0


class CalmScaler(torch.amp.GradScaler):
    """A gradient scaler that never finds an overflow, and so never reads data."""

    def __init__(self, enabled: bool):
        super().__init__("cpu", enabled=enabled)

    def get_scale(self) -> float:
        return 1.0

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


class NoUpdate(torch.optim.Optimizer):
    """Stands in where only forward and backward pass are asked for."""

    def __init__(self, params):
        super().__init__(list(params), {})

    def step(self, closure=None) -> None:
        """Nothing."""


@contextlib.contextmanager
def _replaced(owner, name: str, value) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _save_on_host(tracker: Tracker):
    """`save_on_cpu` for a device that is only imagined: the copies are counted as host memory."""

    class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda"):
            def pack(tensor):
                with tracker.on_host():
                    return torch.empty_like(tensor).copy_(tensor)

            super().__init__(pack, lambda packed: packed.clone())

    return SaveOnHost


@contextlib.contextmanager
def _foreach_as_on_cuda() -> Iterator[None]:
    """torch's optimizers and gradient clipping choose their foreach kernels on CUDA by default."""
    optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim hides it behind its class
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(_replaced(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]))
        for module in (optimizer, torch.utils._foreach_utils):
            types = [*module._foreach_supported_types, FakeTensor]
            enter(_replaced(module, "_foreach_supported_types", types))
        yield


@contextlib.contextmanager
def _process_left_as_it_was() -> Iterator[None]:
    """Random numbers, default type and switches of torch end as they began."""
    python, numpy, main = random.getstate(), np.random.get_state(), torch.get_rng_state()
    dtype = torch.get_default_dtype()
    autocast = torch.is_autocast_enabled("cpu")
    # Autocast drops its copies of weights when the outermost context is left: it must be ours.
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", autocast)
        for _ in range(depth):
            torch.autocast_increment_nesting()
        torch.set_default_dtype(dtype)
        torch.set_rng_state(main)
        np.random.set_state(numpy)
        random.setstate(python)


def _convert_parameters(self: nn.Module, fn, recurse: bool = True):
    """`nn.Module._apply` for fake parameters, which torch refuses to convert in place."""
    new: dict[int, nn.Parameter] = {}
    for module in self.modules() if recurse else [self]:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                with torch.no_grad():
                    converted = fn(parameter)
                new[id(parameter)] = nn.Parameter(converted, parameter.requires_grad)
            module._parameters[name] = new[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _build_model(model_fn: Callable[[], nn.Module], fake_mode: FakeTensorMode) -> nn.Module:
    with (
        _replaced(nn.Module, "_apply", _convert_parameters),
        # It looks at the numbers it draws. The inner name: transformers keeps the outer one.
        _replaced(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor),
    ):
        model = model_fn()
        tensors = [*model.parameters(), *model.buffers()]
        if any(not isinstance(tensor, FakeTensor) for tensor in tensors):
            # A copy of a real model with fake tensors in the place of its own.
            model = copy.deepcopy(model, {id(t): _fake(fake_mode, t) for t in tensors})
    return model.train()


def _register_in_order_of_moving(tracker: Tracker, model: nn.Module) -> None:
    """Count the parameters in the order in which `model.to("cuda")` would copy them."""

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tracker._see(tensor, "parameters")

    visit(model)
    tracker.register_model(model)


def ddp_buckets(model: nn.Module) -> list[int]:
    """Sizes in bytes of the buckets in which DistributedDataParallel sums gradients.

    Parameters are taken from the last to the first; the first bucket closes at 1 MiB, the others
    at 25 MiB (torch's defaults). The gradients exist beside them.
    """
    buckets: list[int] = []
    size, limit = 0, MIB
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        size += parameter.nbytes
        if size >= limit:
            buckets.append(size)
            size, limit = 0, 25 * MIB
    return [*buckets, size] if size else buckets


def _fewer_micro_batches(batch: Batch, recipe: Recipe) -> tuple[Batch, Recipe, float]:
    """A batch of fewer micro-batches that peaks like all of them, and its share of the samples.

    Two are enough, since from the second on gradients are there; a third where the last one is
    smaller than these.
    """
    sizes = [batch_size(piece) for piece in split_batch(batch, recipe.accumulate)]
    enough = sizes[:2] if sizes[-1] == sizes[min(1, len(sizes) - 1)] else [*sizes[:2], sizes[-1]]
    if len(sizes) <= len(enough):
        return batch, recipe, 1.0
    n_samples = sum(enough)
    batch_of_fewer = tree_map_only(torch.Tensor, lambda tensor: tensor[:n_samples], batch)
    return batch_of_fewer, replace(recipe, accumulate=len(enough)), n_samples / sum(sizes)


def _live_bytes(tracker: Tracker, start: int, live: int) -> int:
    for block, created in tracker.events[start:]:
        live += block.nbytes if created else -block.nbytes
    return live


MOST_STEPS = 4
ACCURACY = 0.005  # of a prediction, relative: what published measurements show


@dataclass
class Prediction:
    """What a training step would take. Sizes in bytes; the properties ending in _mib in MiB.

    peak_allocated and peak_reserved: as torch's CUDA caching allocator defines them; reserved is
    None for a CPU. split: the peak by part (see `helpers.memory.PARTS`; buffers are counted with
    the parameters, input batches with the activations, cuBLAS's workspace with the temporaries).
    phase_peaks: most bytes in each phase. peak_phase, peak_module: where the peak lies; among
    phases within ACCURACY of it the last one in the step, since no change to the others would
    lower it. fits_gpu: whether the step runs on the card it was predicted for, if there was one.
    host: most bytes of activations kept on the host.
    context: what the GPU holds beside torch's memory, as stated by `gpu` or given; device_used is
    reserved and context together. flops: of one optimizer step over the whole batch;
    recompute_flops: the share of them that repeats forward passes.
    """

    peak_allocated: int
    peak_reserved: int | None
    context: int
    split: dict[str, int]
    peak_phase: str
    peak_module: str
    host: int
    flops: float
    recompute_flops: float
    phase_peaks: dict[str, int]
    seconds: float
    share: float = field(repr=False)
    tracker: FakeStepTracker = field(repr=False)
    trace: list[tuple[int, int]] = field(repr=False)
    fits_gpu: bool | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def device_used(self) -> int | None:
        return None if self.peak_reserved is None else self.peak_reserved + self.context

    @property
    def peak_mib(self) -> float:
        return self.peak_allocated / MIB

    @property
    def reserved_mib(self) -> float | None:
        return None if self.peak_reserved is None else self.peak_reserved / MIB

    @property
    def peak_source(self) -> str:
        """Where the numbers come from, as the result table calls it."""
        return "predicted"

    @property
    def device_used_mib(self) -> float | None:
        return None if self.device_used is None else self.device_used / MIB

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes after every allocation and free, from the empty device on."""
        return self.tracker.timeline()

    @cached_property
    def expandable_reserved(self) -> int | None:
        """Peak reserved bytes on an endless card with expandable segments; None for a CPU."""
        if self.peak_reserved is None:
            return None
        return settled_reserved(self.trace, _last_step(self.tracker), expandable_segments=True)

    def replay(self, capacity: int | None = None, expandable_segments: bool = False) -> Replay:
        """Play the requests to an allocator on a card with `capacity` bytes left for torch."""
        return replay(self.trace, capacity, expandable_segments)

    def fits(self, memory: int, expandable_segments: bool = False) -> bool:
        """Whether the step runs on a card of `memory` bytes, its context taken off."""
        return self.replay(memory - self.context, expandable_segments).failed_at is None

    def step_seconds(self, gpu: Gpu) -> float:
        """Estimated time of one optimizer step on `gpu`, to rank recipes by."""
        return estimated_seconds(self.tracker.operations, self.share, gpu)

    def text(self) -> str:
        """The numbers for people, a line each."""
        split = ", ".join(f"{part} {format_mib(self.split[part])}" for part in PARTS)
        place = f"{self.peak_phase} pass" if self.peak_phase != "optimizer" else "optimizer step"
        lines = [
            f"peak allocated   {format_mib(self.peak_allocated)}",
            f"  of which       {split}",
            f"  in the         {place}" + (f", {self.peak_module}" if self.peak_module else ""),
            f"peak reserved    {format_mib(self.peak_reserved)}"
            f" (with expandable_segments:True {format_mib(self.expandable_reserved)})",
            f"device used      {format_mib(self.device_used)}"
            f" (reserved and a CUDA context of {format_mib(self.context)}, which is an assumption)",
            f"arithmetic       {self.flops / 1e12:,.2f} TFLOP a step"
            f", of which {self.recompute_flops / 1e12:,.2f} recomputed",
        ]
        if self.host:
            lines.append(f"host memory      {format_mib(self.host)} of activations")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The numbers under the names that the command line prints."""

        def mib(n_bytes: float | None) -> float | None:
            return None if n_bytes is None else round(n_bytes / MIB, 2)

        names = {"temporaries": "temporary_mib"}
        parts = {names.get(part, f"{part}_mib"): mib(self.split[part]) for part in PARTS}
        return {
            "peak_allocated_mib": mib(self.peak_allocated),
            "peak_reserved_mib": mib(self.peak_reserved),
            "expandable_reserved_mib": mib(self.expandable_reserved),
            "device_used_mib": mib(self.device_used),
            "context_mib": mib(self.context),
            "fits_gpu": self.fits_gpu,
            **parts,
            "host_mib": mib(self.host),
            "phase_peaks_mib": {phase: mib(size) for phase, size in self.phase_peaks.items()},
            "peak_phase": self.peak_phase,
            "peak_module": self.peak_module,
            "flops": self.flops,
            "recompute_flops": self.recompute_flops,
            "prediction_seconds": round(self.seconds, 3),
        }


DEFAULT_GPU = Gpu("a current GPU", memory_mib=16 * 1024)


def predict(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Batch],
    loss_fn: LossFunction,
    recipe: Recipe = Recipe(),
    optimizer_fn: OptimizerFunction | None = None,
    *,
    device: str = "cuda",
    gpu: Gpu | None = None,
    context: int | None = None,
    expandable_segments: bool = False,
    ddp: bool = False,
    ranks: int | None = None,
    stack: Stack = TODAY,
) -> Prediction:
    """Predict the memory of `train_step(model_fn(), batch_fn(), loss_fn, ...)` on a GPU.

    The arguments are those of `helpers.train.measure_step`, which does it for real. model_fn and
    batch_fn build on the CPU, as usual; they are called with fake tensors switched on, so weights
    of any size take no memory. optimizer_fn(params) makes the optimizer; None leaves the update
    out. device="cpu" predicts what `helpers.memory.measure` would read on a CPU. gpu: a card
    for its kernels, its context (unless `context` says how many bytes) and its memory: torch's
    allocator gives free segments back before it fails, so a card that is nearly full reserves less
    than an endless one. ddp: with the buckets of
    DistributedDataParallel. ranks: for the first of so many processes that share out weights,
    gradients and optimizer state (FSDP2, as `helpers.distributed.distribute` sets it up); the batch
    is then that of one process, and whole weights, while gathered, are temporaries. stack: as an
    older torch would do it, see `helpers.cuda.torch_stack`.

    Raises PredictionError where the model or the loss must know the data to decide something.
    """
    started = time.perf_counter()
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: a prediction is for 'cuda' or 'cpu'")
    on_cuda = device == "cuda"
    card = gpu or DEFAULT_GPU
    if ranks is not None and (ddp or ranks < 2):
        raise ValueError(f"ranks={ranks}, ddp={ddp}: expected 2 or more ranks, and DDP off")
    tracker = FakeStepTracker(card if on_cuda else None, stack)
    with contextlib.ExitStack() as contexts:
        enter = contexts.enter_context
        mesh = enter(_imagined_ranks(ranks)) if ranks is not None else None
        enter(_process_left_as_it_was())
        enter(_explained())
        fake_mode = enter(FakeTensorMode(allow_non_fake_inputs=True))
        if on_cuda:
            enter(cuda_kernels(card, stack))
            if stack.foreach:
                enter(_foreach_as_on_cuda())
            enter(_replaced(torch.autograd.graph, "save_on_cpu", _save_on_host(tracker)))
        share = _run_steps(
            tracker,
            fake_mode,
            model_fn,
            batch_fn,
            loss_fn,
            recipe,
            optimizer_fn or NoUpdate,
            on_cuda,
            ddp,
            mesh,
        )
    prediction = _summarise(tracker, share, started)
    if on_cuda:
        _reserve(prediction, card, gpu is not None, context, expandable_segments)
    return prediction


def predict_workload(
    workload: Workload,
    micro_batch: int,
    recipe: Recipe = Recipe(),
    optimizer: str | None = "adamw",
    **options: Any,
) -> Prediction:
    """`predict` for a model of the catalogue: `recipe.accumulate` micro-batches of `micro_batch`.

    optimizer: a name that `make_optimizer` knows, or None. Raises ValueError if the model cannot
    take such a batch.
    """
    if micro_batch < 1:
        raise ValueError(f"batch size {micro_batch}: expected 1 or more")
    batch = micro_batch * recipe.accumulate
    return predict_batch(workload, batch, recipe, optimizer, **options)


def predict_batch(
    workload: Workload,
    whole_batch: int,
    recipe: Recipe = Recipe(),
    optimizer: str | None = "adamw",
    **options: Any,
) -> Prediction:
    """`predict_workload` for a batch that is split into `recipe.accumulate` parts as in training.

    Where it cannot be divided evenly the first parts have one sample more than the others.
    """
    if whole_batch < recipe.accumulate:
        raise ValueError(
            f"a batch of {whole_batch} cannot be split into {recipe.accumulate} micro-batches"
        )
    if optimizer is None and recipe.optimizer_in_backward:
        raise ValueError("an optimizer step in the backward pass needs an optimizer")
    try:
        return predict(
            workload.model_fn,
            partial(workload.batch_fn, whole_batch),
            workload.loss_fn,
            recipe,
            optimizer and partial(make_optimizer, optimizer, lr=1e-3),
            **options,
        )
    except (RuntimeError, AssertionError, IndexError, TypeError) as error:
        if not _raised_in_forward(error):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{workload.title}: a batch of {-(-whole_batch // recipe.accumulate)} does not go "
            f"through the model: {reason[0]}"
        ) from error


def _raised_in_forward(error: Exception) -> bool:
    """Whether the error comes out of a module's forward pass and not out of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "_call_impl" for frame in frames)


def _run_steps(
    tracker, fake_mode, model_fn, batch_fn, loss_fn, recipe, optimizer_fn, on_cuda, ddp, mesh
) -> float:
    """Steps until the memory held between them is steady; the share of the batch that ran."""
    model = _build_model(model_fn, fake_mode)
    if mesh is not None:
        model = shard_model(model, sharding_units(model), mesh)
    check_recipe(recipe, model)
    optimizer = build_optimizer(model, optimizer_fn, recipe)
    scaler = CalmScaler(enabled=recipe.amp == "fp16")
    batch = tree_map_only(torch.Tensor, partial(_fake, fake_mode), batch_fn())
    share = 1.0
    to_device = lambda piece: piece  # noqa: E731
    if on_cuda:
        batch, recipe, share = _fewer_micro_batches(batch, recipe)
        to_device = partial(tree_map_only, torch.Tensor, tracker.on_device)
        with tracker.on_host():
            _see_all(tracker, batch)
    else:
        _see_all(tracker, batch)
    _register_in_order_of_moving(tracker, model)
    if ddp:
        for size in ddp_buckets(model):
            tracker.add_block(size, "gradients")
    with tracker:
        live, start = 0, 0
        for _ in range(MOST_STEPS):
            tracker.operations.clear()
            tracker.last_step = len(tracker.events)
            train_step(model, batch, loss_fn, optimizer, recipe, scaler, to_device=to_device)
            before, live = live, _live_bytes(tracker, start, live)
            start = len(tracker.events)
            if before == live:
                break
    return share


@contextlib.contextmanager
def _imagined_ranks(ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of this process, as the first, and others that do not exist: torch's fake backend.

    Its collectives return at once, so that FSDP itself can run in the prediction.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError(
            f"ranks={ranks}: a prediction imagines its processes, and this one has joined real "
            "ones; predict in a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _see_all(tracker: Tracker, batch: Batch) -> None:
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            tracker._see(tensor, "inputs")


def _fake(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor)


def _reserve(
    prediction: Prediction, gpu: Gpu, limited: bool, context: int | None, expandable: bool
) -> None:
    """Play the requests to the allocator, and complete `prediction` with what it reserved."""
    started = time.perf_counter()
    prediction.context = gpu.context_mib * MIB if context is None else context
    prediction.notes.pop("peak_reserved")
    capacity = None
    if limited:
        on_card = gpu.memory_mib * MIB - prediction.context
        prediction.fits_gpu = prediction.replay(on_card, expandable).failed_at is None
        capacity = on_card if prediction.fits_gpu else None
    prediction.peak_reserved = settled_reserved(
        prediction.trace, _last_step(prediction.tracker), capacity, expandable
    )
    prediction.seconds += time.perf_counter() - started


def _summarise(tracker: FakeStepTracker, share: float, started: float) -> Prediction:
    peak = tracker.peak()
    flops = dict.fromkeys(PHASES, 0.0)
    for operation in tracker.operations:
        flops[operation.phase] += operation.flops
    phase_peaks = tracker.phase_peaks()
    phase = [name for name in PHASES if phase_peaks[name][0] >= (1 - ACCURACY) * peak.bytes][-1]
    return Prediction(
        peak_allocated=peak.bytes,
        peak_reserved=None,
        context=0,
        split=peak.split,
        peak_phase=phase,
        peak_module=phase_peaks[phase][1],
        phase_peaks={name: size for name, (size, _) in phase_peaks.items()},
        host=_host_peak(tracker),
        flops=sum(f if name == "optimizer" else f / share for name, f in flops.items()),
        recompute_flops=flops["recompute"] / share,
        seconds=time.perf_counter() - started,
        share=share,
        tracker=tracker,
        trace=_trace(tracker),
        notes={"peak_reserved": "a CPU has no caching allocator"},
    )


def _trace(tracker: Tracker) -> list[tuple[int, int]]:
    """The tracker's events as requests to an allocator."""
    return [
        (id(block), block.nbytes if created else -1)
        for block, created in tracker.events
        if not block.host and block.nbytes
    ]


def _last_step(tracker: FakeStepTracker) -> int:
    """Where the last step begins in the trace."""
    earlier = tracker.events[: tracker.last_step]
    return sum(not block.host and block.nbytes > 0 for block, _ in earlier)


def _host_peak(tracker: Tracker) -> int:
    live = peak = 0
    for block, created in tracker.events:
        if block.host and block.role is None:
            live += block.nbytes if created else -block.nbytes
            peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Name the user's line when it asks a fake tensor for its data."""
    # torch logs a traceback for every shape that does not fit; the error itself says as much.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frame = _user_frame(error)
        raise PredictionError(
            f"{frame.filename}, line {frame.lineno}: `{frame.line}` needs the data of a tensor "
            f"({error.func}), and a prediction has shapes only. Compute it outside the step, or "
            "make the shape not depend on data."
        ) from error
    finally:
        log.disabled = disabled


def _user_frame(error: Exception) -> traceback.FrameSummary:
    """The innermost line that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (str(Path(torch.__file__).parent),)
    spec = sys.modules[__name__].__spec__
    if spec is not None:  # there is none where this code is a notebook's cells
        inside += (str(Path(spec.origin).parent),)
    return next((f for f in reversed(frames) if not f.filename.startswith(inside)), frames[-1])


# --- Plans ---------------------------------------------------------------------------------


def interpolated_trace(
    small: Prediction, large: Prediction, sizes: tuple[int, int], size: int
) -> list[tuple[int, int]] | None:
    """The requests at micro-batch `size` from those at two others, or None if they differ in kind.

    The step asks for the same blocks at every micro-batch; each is proportional to it or constant.
    """
    if len(small.trace) != len(large.trace):
        return None
    first, second = sizes
    names = {key: index for index, (key, n_bytes) in enumerate(small.trace) if n_bytes >= 0}
    trace = []
    for index, ((key, less), (_, more)) in enumerate(zip(small.trace, large.trace, strict=True)):
        if (less < 0) != (more < 0):
            return None
        if less < 0:
            trace.append((names[key], -1))
        else:
            grown = less + (more - less) * (size - first) // (second - first)
            trace.append((index, max(grown, 1)))
    return trace


def largest_batch(
    workload: Workload,
    recipe: Recipe,
    optimizer: str | None,
    gpu: Gpu,
    most: int = 4096,
) -> tuple[int, Prediction | None]:
    """The largest micro-batch up to `most` that runs on `gpu`, and its prediction; (0, None): none.

    Found by interpolating between two predictions and confirmed by real ones: this one fits, and
    one more sample does not. The allocator cuts its segments differently for each size, so a size
    that does not fit can have larger neighbours that do: LOOK_BEYOND of them are looked at too.
    """
    known: dict[int, Prediction] = {}

    def predicted(size: int) -> Prediction:
        if size not in known:
            known[size] = predict_workload(workload, size, recipe, optimizer, gpu=gpu)
        return known[size]

    if not predicted(1).fits_gpu:
        return 0, None
    probes = (2, 4)
    size = 1
    if most >= probes[1]:
        for probe in probes:
            predicted(probe)
        size = _largest_by_interpolation(known, probes, gpu, most)
    while size > 1 and not predicted(size).fits_gpu:
        size -= 1
    larger = size + 1
    while larger <= min(most, size + LOOK_BEYOND):
        may_fit = larger == size + 1 or _fits_by_interpolation(known, probes, larger, gpu)
        if may_fit and predicted(larger).fits_gpu:
            size = larger
        larger += 1
    return size, predicted(size)


LOOK_BEYOND = 8  # samples


def _fits_by_interpolation(
    known: dict[int, Prediction], probes: tuple[int, int], size: int, gpu: Gpu
) -> bool:
    if not all(probe in known for probe in probes):
        return True
    small, large = (known[probe] for probe in probes)
    trace = interpolated_trace(small, large, probes, size)
    capacity = gpu.memory_mib * MIB - small.context
    return trace is not None and replay(trace, capacity).failed_at is None


def largest_batch_here(
    workload: Workload,
    recipe: Recipe,
    optimizer: str,
    wanted: int,
    *,
    device: str | None = None,
    gpu: Gpu | None = None,
) -> TriedBatches:
    """`largest_batch_by_trying` on this machine's GPU, and advice from `plan` for `wanted`.

    gpu: the card to plan for, by default the one that torch uses, with the memory that other
    programs leave. Raises ValueError without a GPU: predictions need none, trying does.
    """
    target = pick_device(device)
    if target.type != "cuda" and gpu is None:
        raise ValueError(
            "torch sees no CUDA GPU to try on: helpers.predict.largest_batch predicts the largest "
            'batch for any card, or `python -m helpers plan MODEL --gpu "11 GiB"`'
        )
    found = largest_batch_by_trying(
        workload.model_fn,
        workload.batch_fn,
        workload.loss_fn,
        recipe,
        partial(make_optimizer, optimizer, lr=1e-3),
        wanted,
        device=device,
    )
    if found.largest == wanted:
        return replace(found, advice=f"{workload.title}: a micro-batch of {wanted} fits as it is")
    if gpu is None:
        gpu = gpu_of(torch.cuda.get_device_properties(target))
        free = torch.cuda.mem_get_info(target)[0] // MIB + gpu.context_mib
        gpu = replace(gpu, memory_mib=min(gpu.memory_mib, free))
    plans = plan(workload, wanted * recipe.accumulate, gpu, optimizer)
    return replace(found, advice=plans.text(workload.title))


def _largest_by_interpolation(known, probes: tuple[int, int], gpu: Gpu, most: int) -> int:
    fitting, failing = 1, most + 1
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        fits = _fits_by_interpolation(known, probes, middle, gpu)
        fitting, failing = (middle, failing) if fits else (fitting, middle)
    return fitting


# Segments of a sequence


@dataclass
class Profile:
    """What each child of a sequence costs: bytes kept for its backward pass, bytes beside what is
    kept while that runs, bytes of its output, and seconds of its forward pass; and whether it gives
    the same result for the batch in chunks (no child is taken to where nothing is said)."""

    kept: list[int]
    beside: list[int]
    output: list[int]
    seconds: list[float]
    in_chunks: list[bool] = field(default_factory=list)


def profile_sequence(prediction: Prediction, n_children: int, gpu: Gpu) -> Profile:
    """Read the profile off the last micro-batch of a plain prediction of an `nn.Sequential`."""
    tracker = prediction.tracker
    phases = tracker.phases
    end = max(i for i, phase in enumerate(phases) if phase == "backward") + 1
    begin = max((i for i in range(end) if phases[i] == "forward"), default=0) + 1
    start = max((i for i in range(begin) if phases[i] != "forward"), default=-1) + 1

    def child(where: str | int) -> int:
        """The child that an event belongs to; the loss counts with the last."""
        name = tracker._module_name(where).split(" ")[0].split(".")[0]
        return int(name) if name.isdigit() else n_children - 1

    born: dict[int, int] = {}
    live = 0
    for index, (block, created) in enumerate(tracker.events[:begin]):
        size = 0 if block.host else round_up(block.nbytes)
        live += size if created else -size
        if index >= start and created and size:
            born[id(block)] = child(block.where)
        elif not created:
            born.pop(id(block), None)
    kept = [0] * n_children
    sizes = {id(block): round_up(block.nbytes) for block, _ in tracker.events[start:begin]}
    for key, owner in born.items():
        kept[owner] += sizes[key]
    beside = [0] * n_children
    owner = n_children - 1
    for block, created in tracker.events[begin:end]:
        size = 0 if block.host else round_up(block.nbytes)
        live += size if created else -size
        if created:
            owner = min(owner, child(block.where))
        beside[owner] = max(beside[owner], live - sum(kept[: owner + 1]))
    seconds = [0.0] * n_children
    for operation in tracker.operations:
        name = operation.module.split(" ")[0]
        if operation.phase == "forward" and name.isdigit():
            seconds[int(name)] += operation.seconds(gpu)
    output = [tracker.output_bytes.get(str(index), 0) for index in range(n_children)]
    return Profile(kept, beside, output, seconds)


CHUNKS = (2, 4, 8, 16, 32)


def best_segments(
    profile: Profile, cuts: list[int], budget: int, most_chunks: int = 1
) -> tuple[tuple[int, ...], ...] | None:
    """The segments to recompute so that the peak stays within `budget` bytes, at the least time.

    A dynamic programme from the first child to the last: at each legal cut it holds, for every
    amount of bytes kept so far, the least time of recomputation; what is kept so far and the
    segment's own needs must fit. A segment that does not fit is tried in chunks of the batch, at
    most `most_chunks`, each recomputed by itself. None if no choice does. `cuts` as
    `helpers.models.legal_cuts`.
    """
    bounds = [0, *cuts, len(profile.kept)]
    # position -> choices (kept, seconds, segments), none of them worse than another in both numbers
    choices: dict[int, list[tuple[int, float, tuple]]] = {bound: [] for bound in bounds}
    choices[0] = [(0, 0.0, ())]
    for number, start in enumerate(bounds[:-1]):
        for kept, seconds, chosen in _not_worse(choices[start]):
            for stop in bounds[number + 1 :]:
                inside = range(start, stop)
                running, highest = kept, 0
                for index in inside:
                    running += profile.kept[index]
                    highest = max(highest, running + profile.beside[index])
                again = seconds + sum(profile.seconds[index] for index in inside)
                left = kept + profile.output[stop - 1]
                if highest <= budget:
                    if stop == bounds[number + 1]:
                        choices[stop].append((running, seconds, chosen))
                    if left < running:
                        choices[stop].append((left, again, (*chosen, (start, stop))))
                    continue
                chunks = _fewest_chunks(profile, inside, budget - kept, most_chunks)
                if chunks is not None:
                    launches = chunks * len(inside) * LAUNCH_SECONDS
                    chunked = (*chosen, (start, stop, chunks))
                    choices[stop].append((left, again + launches, chunked))
    ends = _not_worse(choices[bounds[-1]])
    return min(ends, key=lambda choice: choice[1])[2] if ends else None


def _fewest_chunks(profile: Profile, inside: range, room: int, most: int) -> int | None:
    """The fewest chunks in which a segment needs no more than `room` bytes, None if there are none.

    Beside one chunk there are the segment's whole output and its gradient, and the gradient of the
    whole input, once in chunks and once put together.
    """
    if not all(index < len(profile.in_chunks) and profile.in_chunks[index] for index in inside):
        return None
    ends = 2 * profile.output[inside[-1]]
    ends += 2 * profile.output[inside[0] - 1] if inside[0] else 0
    one = sum(profile.kept[index] for index in inside)
    one += max(profile.beside[index] for index in inside)
    fitting = (chunks for chunks in CHUNKS if chunks <= most and ends + one // chunks <= room)
    return next(fitting, None)


def _not_worse(choices: list[tuple[int, float, tuple]]) -> list[tuple[int, float, tuple]]:
    """The choices that no other one beats in both bytes and time."""
    front: list[tuple[int, float, tuple]] = []
    for choice in sorted(choices, key=lambda choice: choice[:2]):
        if not front or choice[1] < front[-1][1]:
            front.append(choice)
    return front


# The search


@dataclass(frozen=True)
class Plan:
    """A recipe that runs on the card.

    relative_time: its estimated time over that of the plain step. micro_batch: the largest of the
    `recipe.accumulate` parts of the batch; the others have one sample less where it cannot be
    divided evenly. changes: what differs from plain training beside time and memory. command:
    prints the same prediction again.
    """

    recipe: Recipe
    optimizer: str
    micro_batch: int
    prediction: Prediction
    relative_time: float
    changes: tuple[str, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        """The numbers under the names that the command line prints."""
        numbers = self.prediction.to_json()
        wanted = ("peak_allocated_mib", "peak_reserved_mib", "device_used_mib")
        return {
            "recipe": f"{self.optimizer}, {self.recipe.name}",
            **{name: numbers[name] for name in wanted},
            "micro_batch": self.micro_batch,
            "relative_time": round(self.relative_time, 3),
            "changes": list(self.changes),
            "command": self.command,
        }


@dataclass(frozen=True)
class Plans:
    """The recipes that fit, the fastest first; without any, `floor` says what is in the way."""

    plans: tuple[Plan, ...]
    floor: str | None
    gpu: Gpu

    def text(self, title: str) -> str:
        """The recipes for people, three lines each."""
        if not self.plans:
            return f"{title}: {self.floor}"
        lines = [
            f"{title} on {self.gpu.name} ({self.gpu.memory_mib:,} MiB): predicted, not measured; "
            "time relative to the plain float32 step, estimated"
        ]
        for number, plan in enumerate(self.plans, start=1):
            prediction = plan.prediction
            lines += [
                f"{number}. {plan.optimizer}, {plan.recipe.name}: micro-batch {plan.micro_batch}, "
                f"time x {plan.relative_time:.2f}, allocated "
                f"{format_mib(prediction.peak_allocated)}, reserved "
                f"{format_mib(prediction.peak_reserved)}, device used "
                f"{format_mib(prediction.device_used)}",
                f"   changes: {'; '.join(plan.changes) or 'nothing else'}",
                f"   {plan.command}",
            ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {"plans": [plan.to_json() for plan in self.plans], "floor": self.floor}


# The leanest kernel that does the same arithmetic, and the optimizers to choose from.
KERNELS = {"adamw": "adamw-fused", "adamw-forloop": "adamw-fused"}
CHOICE_OF_OPTIMIZERS = ("adamw-fused", "adafactor", "sgd")


def plan(
    workload: Workload,
    batch_size: int,
    budget: Gpu | str,
    optimizer: str | None = None,
    *,
    most: int = 8,
) -> Plans:
    """Recipes that train `workload` with batches of `batch_size` on a card, the fastest first.

    budget: a `Gpu`, or its name or size as text ("T4", "11 GiB"). A named `optimizer` is kept (its
    kernel may change); without one it is AdamW, where that cannot fit Adafactor, at last SGD. Only
    where nothing else fits, the word embeddings of a language model stay as they are, and the
    recipe's `changes` begin with that.
    Precision, micro-batches and what is recomputed are chosen; a model that is one `nn.Sequential`
    gets the segments that cost least. "Fits" means that the requests for memory, played to torch's
    allocator on that card, succeed. Times are estimates that rank, see `Prediction.step_seconds`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected 1 or more")
    gpu = find_gpu(budget) if isinstance(budget, str) else budget
    if gpu.memory_mib <= gpu.context_mib:
        raise ValueError(
            f"{gpu.memory_mib:,} MiB are no more than the CUDA context of {gpu.context_mib} MiB"
        )
    search = PlanSearch(workload, batch_size, gpu)
    names = (KERNELS.get(optimizer, optimizer),) if optimizer else CHOICE_OF_OPTIMIZERS
    plans = search.search(names, optimizer)
    if not plans and search.embeddings is not None:
        frozen = PlanSearch(_with_frozen(workload, search.embeddings), batch_size, gpu, search)
        plans = frozen.search(names, optimizer)
    return Plans(tuple(plans[:most]), None if plans else search.floor(), gpu)


def _with_frozen(workload: Workload, name: str) -> Workload:
    options = {key[2:].replace("-", "_"): value for key, value in workload.options.items()}
    return find_workload(workload.name, **(options | {"freeze": name}))


def _touch_weights(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Stands in for a loss: every weight gets a gradient, and nothing else takes memory."""
    return sum(p.sum() for p in model.parameters() if p.requires_grad)


LARGE_SHARE = 0.2  # of the parameters, from which on embeddings are worth freezing


class PlanSearch:
    """Tries recipes for one workload on one card, and remembers every prediction it made.

    An optimizer takes the same memory with every micro-batch, precision and recomputation. So its
    needs are found first, without the model's arithmetic, and where they are too much already
    nothing else is tried with it. whole: the search that trains everything, if this one freezes.
    """

    def __init__(
        self, workload: Workload, batch_size: int, gpu: Gpu, whole: PlanSearch | None = None
    ):
        self.workload = workload
        self.batch_size = batch_size
        self.gpu = gpu
        self.whole = whole
        self.capacity = (gpu.memory_mib - gpu.context_mib) * MIB  # left for torch's allocator
        self.found: dict[tuple[str, Recipe], Prediction] = {}
        self.found_expandable: dict[tuple[str, Recipe], Prediction] = {}
        self.leanest: tuple[Prediction, str, Recipe] | None = None
        self._known: dict[tuple[str, Recipe], Prediction] = {}
        self._needs: dict[tuple[str, bool], Prediction] = {}
        # At the peak of the batch in one pass: bytes beside weights and optimizer state, and those
        # of activations alone
        self._beyond: dict[tuple, int] = {}
        self._activations: dict[tuple, int] = {}
        with FakeTensorMode() as fake_mode, _process_left_as_it_was():
            model = _build_model(workload.model_fn, fake_mode)
        self.is_sequence = type(model) is nn.Sequential
        self.cuts = legal_cuts(model) if self.is_sequence else []
        self.in_chunks = [_chunks_change_nothing(child) for child in model.children()]
        self.has_batch_norm = any(
            isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
        )
        self.has_blocks = not self.is_sequence and bool(blocks(model))
        self.embeddings = _large_embeddings(model) if workload.name and whole is None else None

    def search(self, names: tuple[str, ...], wanted: str | None) -> list[Plan]:
        """Plans with the first of the optimizers that has any, the fastest first."""
        if self.whole is None and not self._note(names[0], Recipe()):
            self._learn(names[0], Recipe())
        for name in names:
            for amp in ("off", "bf16" if self.gpu.flash else "fp16"):
                self.try_recipes(name, Recipe(amp=amp))
            if self.found or self.found_expandable:
                return self._plans(wanted)
        return []

    def predicted(self, optimizer: str, recipe: Recipe) -> Prediction:
        key = (optimizer, recipe)
        if key not in self._known:
            self._known[key] = predict_batch(
                self.workload, self.batch_size, recipe, optimizer, gpu=self.gpu
            )
            self._remember_leanest(self._known[key], optimizer, recipe)
        return self._known[key]

    def _remember_leanest(self, prediction: Prediction, optimizer: str, recipe: Recipe) -> None:
        if self.leanest is None or prediction.peak_allocated < self.leanest[0].peak_allocated:
            self.leanest = prediction, optimizer, recipe

    def needs(self, optimizer: str, recipe: Recipe) -> Prediction:
        """The least that any step with this optimizer takes, whatever is computed in it."""
        early = recipe.optimizer_in_backward
        if (optimizer, early) not in self._needs:
            bare = replace(self.workload, loss_fn=_touch_weights)
            self._needs[optimizer, early] = predict_batch(
                bare, 1, Recipe(optimizer_in_backward=early), optimizer, gpu=self.gpu
            )
        return self._needs[optimizer, early]

    def _may_fit(self, optimizer: str, recipe: Recipe) -> bool:
        needs = self.needs(optimizer, recipe)
        if needs.peak_allocated <= self.capacity:
            return True
        if not self._known:
            self._remember_leanest(needs, optimizer, recipe)
        return False

    def try_recipes(self, optimizer: str, plain: Recipe) -> None:
        """From the fastest on: in pieces, with parts recomputed, with the update in backward."""
        layers = replace(plain, checkpoint="layers")
        pieces = None
        if self._may_fit(optimizer, plain):
            pieces = self._try_pieces(optimizer, plain)
            if pieces == 1:
                return
            if self.is_sequence:
                for fewer in (1, 2, 4, 8):
                    if pieces is None or fewer < pieces:
                        self._try_segments(optimizer, replace(plain, accumulate=fewer))
            elif self.has_blocks and self._note(optimizer, layers):
                return
        if plain.amp != "fp16" and self._try_in_backward(optimizer, plain):
            return
        if pieces is None and self.has_blocks and self._may_fit(optimizer, plain):
            self._try_pieces(optimizer, layers)

    def _try_in_backward(self, optimizer: str, plain: Recipe) -> bool:
        early = replace(plain, optimizer_in_backward=True)
        if not self._may_fit(optimizer, early):
            return False
        if self.has_blocks and not self._note(optimizer, replace(early, checkpoint="layers")):
            return False
        states = self.needs(optimizer, plain).split
        beyond = self._beyond.get((plain.amp, plain.checkpoint), 0)
        # It saves the gradients at most.
        least = states["parameters"] + states["optimizer"] + beyond - states["gradients"]
        return (least <= self.capacity and self._note(optimizer, early)) or self.has_blocks

    def _note(self, optimizer: str, recipe: Recipe) -> bool:
        """Predict, and keep the recipe if it fits, or would with expandable segments."""
        prediction = self.predicted(optimizer, recipe)
        if prediction.fits_gpu:
            self.found[optimizer, recipe] = prediction
            return True
        expanded = prediction.replay(self.capacity, expandable_segments=True)
        if expanded.failed_at is None:
            reserved = settled_reserved(
                prediction.trace, _last_step(prediction.tracker), self.capacity, True
            )
            self.found_expandable[optimizer, recipe] = replace(
                prediction, peak_reserved=reserved, fits_gpu=True
            )
        return False

    def _learn(self, optimizer: str, recipe: Recipe) -> None:
        """Remember what the batch takes in one pass, whatever the optimizer."""
        prediction, states = self.predicted(optimizer, recipe), self.needs(optimizer, recipe).split
        highest = max(prediction.phase_peaks[phase] for phase in PHASES[:-1])
        kind = recipe.amp, recipe.checkpoint
        self._beyond[kind] = highest - states["parameters"] - states["optimizer"]
        self._activations[kind] = prediction.split["activations"]

    def _try_pieces(self, optimizer: str, recipe: Recipe) -> int | None:
        """The number of micro-batches with which `recipe` fits, None if there is none.

        Only numbers that `piece_counts` names, from the first that a straight line from nothing to
        the whole batch lets hope for. A few more pieces than necessary cost next to no time.
        """
        states = self.needs(optimizer, recipe).split
        held = states["parameters"] + states["optimizer"]
        kind = recipe.amp, recipe.checkpoint
        if held + self._beyond.get(kind, 0) <= self.capacity:
            if self._note(optimizer, recipe):
                return 1
            self._learn(optimizer, recipe)
        room = self.capacity - held - states["gradients"]
        counts = piece_counts(self.batch_size)
        hopeful = [pieces for pieces in counts if self._activations[kind] / pieces <= room]
        for pieces in hopeful or counts[-1:]:
            if self._note(optimizer, replace(recipe, accumulate=pieces)):
                return pieces
        return None

    def _try_segments(self, optimizer: str, recipe: Recipe) -> None:
        """What costs least to recompute so that `recipe` fits; without chunks where that is enough.

        The allocator cannot use all of the card, and the profile does not see everything, so the
        budget shrinks until the prediction fits.
        """
        profile = profile_sequence(self.predicted(optimizer, recipe), len(self.in_chunks), self.gpu)
        profile = replace(profile, in_chunks=self.in_chunks)
        micro_batch = -(-self.batch_size // recipe.accumulate)
        tried = set()
        for most_chunks in (1, micro_batch):
            for shrunk in range(8):
                budget = int(self.capacity * 0.95**shrunk)
                ranges = best_segments(profile, self.cuts, budget, most_chunks)
                if ranges is None:
                    break
                if ranges not in tried:
                    tried.add(ranges)
                    if self._note(optimizer, replace(recipe, checkpoint=ranges or None)):
                        return

    def _plans(self, wanted: str | None) -> list[Plan]:
        without = {(name, recipe.amp) for name, recipe in self.found}
        expandable = {
            (name, recipe): prediction
            for (name, recipe), prediction in self.found_expandable.items()
            if (name, recipe.amp) not in without
        }
        optimizer = KERNELS.get(wanted, wanted) if wanted else CHOICE_OF_OPTIMIZERS[0]
        plain = (self.whole or self).predicted(optimizer, Recipe()).step_seconds(self.gpu)
        plans = [
            Plan(
                recipe,
                name,
                -(-self.batch_size // recipe.accumulate),
                prediction,
                prediction.step_seconds(self.gpu) / plain,
                self._changes(wanted, name, recipe, prediction, (name, recipe) in expandable),
                predict_command_line(
                    self.workload,
                    self.batch_size,
                    recipe,
                    name,
                    self.gpu,
                    expandable_segments=(name, recipe) in expandable,
                ),
            )
            for (name, recipe), prediction in (self.found | expandable).items()
        ]
        return sorted(plans, key=lambda plan: plan.relative_time)

    def _changes(
        self,
        wanted: str | None,
        name: str,
        recipe: Recipe,
        prediction: Prediction,
        expandable: bool,
    ) -> tuple[str, ...]:
        changes = []
        if self.whole is not None:
            changes.append(f"{self.whole.embeddings} is not trained: another result")
        if wanted is None and name != CHOICE_OF_OPTIMIZERS[0]:
            changes.append(f"another optimizer than AdamW: {name}")
        elif wanted is not None and name != wanted:
            changes.append(f"the kernel of {wanted} is {name}: same arithmetic")
        if name == "adamw-8bit":
            changes.append("needs bitsandbytes: the optimizer's state in 8 bits, another result")
        if recipe.amp != "off":
            changes.append(f"{recipe.amp} autocast: most arithmetic in half precision")
        if recipe.accumulate > 1 and self.has_batch_norm:
            changes.append("BatchNorm sees micro-batches, not the batch")
        if self.batch_size % recipe.accumulate:
            pieces = describe_pieces(self.batch_size, recipe.accumulate)
            changes.append(f"the batch of {self.batch_size} in {pieces}: each weighs by its size")
        if recipe.checkpoint is not None:
            share = prediction.recompute_flops / max(1.0, prediction.flops)
            changes.append(f"{share:.0%} of the arithmetic is recomputation: same result")
        if isinstance(recipe.checkpoint, tuple) and any(len(r) > 2 for r in recipe.checkpoint):
            changes.append("parts run in chunks of the batch: same result, sums in another order")
        if recipe.optimizer_in_backward:
            changes.append("the update runs in the backward pass: no clipping, no accumulation")
        if expandable:
            changes.append("needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, on Linux")
        return tuple(changes)

    def floor(self) -> str:
        """What the leanest recipe that was tried still needs, and what would lower it."""
        prediction, optimizer, recipe = self.leanest
        usable = self.gpu.memory_mib * MIB - prediction.context
        parts = prediction.split
        states = parts["parameters"] + parts["gradients"] + parts["optimizer"]
        if prediction.peak_phase == "optimizer" or states > usable:
            cure = (
                "an optimizer with less state (adafactor, sgd), the optimizer step in the "
                "backward pass, frozen embeddings (--freeze), or weights in bf16 (--dtype) lower it"
            )
            what = (
                f"weights {format_mib(parts['parameters'])}, gradients "
                f"{format_mib(parts['gradients'])}, state of {optimizer} "
                f"{format_mib(parts['optimizer'])} and temporaries "
                f"{format_mib(parts['temporaries'])}"
            )
        else:
            what = (
                f"activations of one micro-batch: {format_mib(parts['activations'])} at "
                f"{prediction.peak_module or 'the loss'}, beside {format_mib(states)} of weights, "
                "gradients and optimizer state"
            )
            cure = "shorter texts or smaller images, or chunks of the batch, lower it"
        return (
            f"nothing fits {self.gpu.memory_mib:,} MiB with a CUDA context of "
            f"{format_mib(prediction.context)}: the leanest recipe tried ({optimizer}, "
            f"{recipe.name}) takes {format_mib(prediction.peak_allocated)}. In the way: {what}; "
            f"{cure}"
        )


def piece_counts(batch: int) -> list[int]:
    """Numbers of micro-batches worth trying: divisors of the batch, or doubled where they gape."""
    divisors = [n for n in range(2, batch + 1) if batch % n == 0]
    counts = [1]
    while counts[-1] < batch:
        following = next(n for n in divisors if n > counts[-1])
        counts.append(following if following <= 2.5 * counts[-1] else 2 * counts[-1])
    return counts[1:]


def _chunks_change_nothing(child: nn.Module) -> bool:
    """Whether a child of a sequence may run in chunks of the batch, as `segments` sees it."""
    try:
        segments(nn.Sequential(child), [(0, 1, 2)])
    except ValueError:
        return False
    return True


def _large_embeddings(model: nn.Module) -> str | None:
    """The name of a trained embedding that is a large share of all parameters, or None."""
    total = sum(p.numel() for p in model.parameters())
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module.weight.requires_grad
        and module.weight.numel() >= LARGE_SHARE * total
    ]
    return names[0] if names else None


def describe_pieces(batch: int, pieces: int) -> str:
    """How a batch is split, such as "2 micro-batches of 7 and 3 of 6"."""
    size, larger = divmod(batch, pieces)
    if not larger:
        return f"{pieces} micro-batches of {size}"
    unit = "micro-batch" if larger == 1 else "micro-batches"
    return f"{larger} {unit} of {size + 1} and {pieces - larger} of {size}"


def predict_command_line(
    workload: Workload,
    batch: int,
    recipe: Recipe,
    optimizer: str,
    gpu: Gpu | None = None,
    expandable_segments: bool = False,
) -> str:
    """The command that predicts a recipe for a model of the catalogue, for a whole batch."""
    even = batch % recipe.accumulate == 0
    options = {
        **workload.options,
        "--batch-size": batch // recipe.accumulate if even else None,
        "--whole-batch": None if even else batch,
        "--accumulate": recipe.accumulate if recipe.accumulate > 1 else None,
        "--optimizer": optimizer,
        "--amp": None if recipe.amp == "off" else recipe.amp,
        "--checkpoint": format_checkpoint(recipe.checkpoint),
        "--clip-norm": recipe.clip_norm,
        "--gpu": gpu and gpu.name,
    }
    switches = {
        "--optimizer-in-backward": recipe.optimizer_in_backward,
        "--offload": recipe.offload,
        "--no-amp-cache": not recipe.amp_cache,
        "--zero-grad zero": not recipe.set_to_none,
        "--expandable-segments": expandable_segments,
    }
    words = ["python", "-m", "helpers", "predict", shlex.quote(workload.name)]
    for option, value in options.items():
        if value is not None:
            words += [option, shlex.quote(str(value))]
    return " ".join(words + [switch for switch, on in switches.items() if on])
