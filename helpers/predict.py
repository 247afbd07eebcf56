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
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from helpers.allocator import Replay, replay
from helpers.catalogue import Workload
from helpers.cuda import (
    HALF_TYPES,
    MATRIX_PRODUCTS,
    TODAY,
    Gpu,
    Stack,
    aten,
    cuda_kernels,
    embedding_temporaries,
)
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
from helpers.train import (
    Batch,
    LossFunction,
    OptimizerFunction,
    Recipe,
    batch_size,
    build_optimizer,
    check_recipe,
    make_optimizer,
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
    """One operation of the step: its phase, arithmetic, bytes read and written, and precision."""

    phase: str
    flops: float
    traffic: int
    half: bool


def estimated_seconds(operations: list[Operation], share: float, gpu: Gpu) -> float:
    """Roofline time of one step: each operation is bound by arithmetic, memory or its launch.

    `share` of the batch has run; the optimizer's operations do not grow with it. Good for ranking
    recipes, not for predicting a stopwatch.
    """
    seconds = 0.0
    for operation in operations:
        speed = (gpu.half_tflops if operation.half else gpu.tflops) * 1e12
        bound = max(
            operation.flops / speed, operation.traffic / (gpu.bandwidth * 1e9), LAUNCH_SECONDS
        )
        seconds += bound if operation.phase == "optimizer" else bound / share
    return seconds


class FakeStepTracker(Tracker):
    """A tracker that also counts operations and adds what CUDA's kernels allocate on their own."""

    def __init__(self, gpu: Gpu | None, torch_then: Stack = TODAY):
        super().__init__()
        self.gpu = gpu
        self._manages_workspace = torch_then.workspace
        self.operations: list[Operation] = []  # of the last step
        self._formulas: dict[Any, Callable | None] = {}
        self._has_workspace: set[bool] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is aten._local_scalar_dense.default and self._optimizers:
            # Optimizers that read a norm use it as a factor: any number leads to the same memory.
            return 1.0 if args[0].is_floating_point() else 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._count(func, args, kwargs or {}, result)
        if self.gpu is not None:
            if func in MATRIX_PRODUCTS and self._manages_workspace:
                self._take_workspace()
            elif func is aten.embedding_dense_backward.default:
                blocks = [
                    self.add_block(size, "temporaries") for size in embedding_temporaries(*args)
                ]
                for block in blocks:
                    self._add_event(block, False)
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
        self.operations.append(Operation(self.phase, flops, traffic, half))

    def add_block(self, size: int, part: str) -> Block:
        """Memory of `size` bytes that no tensor holds."""
        block = Block(size, self.phase, self._where(), part)
        self._add_event(block, True)
        return block

    def _take_workspace(self) -> None:
        """cuBLAS keeps a workspace for each thread that uses it: the main and the backward one."""
        in_backward = self.phase in ("backward", "recompute")
        if in_backward not in self._has_workspace:
            self._has_workspace.add(in_backward)
            self.add_block(self.gpu.workspace, "temporaries")

    def phase_peaks(self) -> dict[str, tuple[int, str]]:
        """The most live bytes in each phase, and the module where."""
        peaks = dict.fromkeys(PHASES, (0, ""))
        live = 0
        for (block, created), phase in zip(self.events, self.phases, strict=True):
            if not block.host:
                live += round_up(block.nbytes) if created else -round_up(block.nbytes)
                if live > peaks[phase][0]:
                    peaks[phase] = (live, block.where)
        return {phase: (size, self._module_name(where)) for phase, (size, where) in peaks.items()}

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


def _build_model(model_fn: Callable[[], nn.Module]) -> nn.Module:
    with (
        _replaced(nn.Module, "_apply", _convert_parameters),
        _replaced(nn.init, "trunc_normal_", lambda tensor, *args, **kwargs: tensor),
    ):
        model = model_fn()
        if any(not isinstance(p, FakeTensor) for p in (*model.parameters(), *model.buffers())):
            model = copy.deepcopy(model)  # under the fake mode: shapes are copied, data is not
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


def _two_micro_batches(batch: Batch, recipe: Recipe) -> tuple[Batch, Recipe, float]:
    """A batch of two micro-batches that peaks like all of them, and its share of the samples."""
    pieces = split_batch(batch, recipe.accumulate)
    if len(pieces) <= 2:
        return batch, recipe, 1.0
    n_samples = batch_size(pieces[0]) + batch_size(pieces[1])
    share = n_samples / batch_size(batch)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor[:n_samples], batch)
    return batch, replace(recipe, accumulate=2), share


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
    lower it. host: most bytes of activations kept on the host.
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
    expandable_segments: bool = False
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
    def device_used_mib(self) -> float | None:
        return None if self.device_used is None else self.device_used / MIB

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes after every allocation and free, from the empty device on."""
        return self.tracker.timeline()

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
            f"peak reserved    {format_mib(self.peak_reserved)}",
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
            "device_used_mib": mib(self.device_used),
            "context_mib": mib(self.context),
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
    gpu: Gpu = DEFAULT_GPU,
    context: int | None = None,
    expandable_segments: bool = False,
    ddp: bool = False,
    stack: Stack = TODAY,
) -> Prediction:
    """Predict the memory of `train_step(model_fn(), batch_fn(), loss_fn, ...)` on a GPU.

    The arguments are those of `helpers.train.measure_step`, which does it for real. model_fn and
    batch_fn build on the CPU, as usual; they are called with fake tensors switched on, so weights
    of any size take no memory. optimizer_fn(params) makes the optimizer; None leaves the update
    out. device="cpu" predicts what `helpers.memory.measure` would read on a CPU. gpu: the card, for
    its context (or `context`, in bytes) and its kernels. ddp: with the buckets of
    DistributedDataParallel. stack: as an older torch would do it, see `helpers.cuda.torch_stack`.

    Raises PredictionError where the model or the loss must know the data to decide something.
    """
    started = time.perf_counter()
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r}: a prediction is for 'cuda' or 'cpu'")
    on_cuda = device == "cuda"
    tracker = FakeStepTracker(gpu if on_cuda else None, stack)
    with contextlib.ExitStack() as contexts:
        enter = contexts.enter_context
        enter(_process_left_as_it_was())
        enter(_explained())
        fake_mode = enter(FakeTensorMode(allow_non_fake_inputs=True))
        if on_cuda:
            enter(cuda_kernels(gpu, stack))
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
        )
    return _summarise(tracker, share, gpu, context, expandable_segments, on_cuda, started)


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
    if optimizer is None and recipe.optimizer_in_backward:
        raise ValueError("an optimizer step in the backward pass needs an optimizer")
    try:
        return predict(
            workload.model_fn,
            partial(workload.batch_fn, micro_batch * recipe.accumulate),
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
            f"{workload.title}: a batch of {micro_batch} does not go through the model: {reason[0]}"
        ) from error


def _raised_in_forward(error: Exception) -> bool:
    """Whether the error comes out of a module's forward pass and not out of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "_call_impl" for frame in frames)


def _run_steps(
    tracker, fake_mode, model_fn, batch_fn, loss_fn, recipe, optimizer_fn, on_cuda, ddp
) -> float:
    """Steps until the memory held between them is steady; the share of the batch that ran."""
    model = _build_model(model_fn)
    check_recipe(recipe, model)
    optimizer = build_optimizer(model, optimizer_fn, recipe)
    scaler = CalmScaler(enabled=recipe.amp == "fp16")
    batch = tree_map_only(torch.Tensor, partial(_fake, fake_mode), batch_fn())
    share = 1.0
    to_device = lambda piece: piece  # noqa: E731
    if on_cuda:
        batch, recipe, share = _two_micro_batches(batch, recipe)
        to_device = partial(tree_map_only, torch.Tensor, torch.clone)
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
            train_step(model, batch, loss_fn, optimizer, recipe, scaler, to_device=to_device)
            before, live = live, _live_bytes(tracker, start, live)
            start = len(tracker.events)
            if before == live:
                break
    return share


def _see_all(tracker: Tracker, batch: Batch) -> None:
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            tracker._see(tensor, "inputs")


def _fake(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor)


def _summarise(tracker, share, gpu, context, expandable_segments, on_cuda, started) -> Prediction:
    peak = tracker.peak()
    trace = _trace(tracker)
    flops = dict.fromkeys(PHASES, 0.0)
    for operation in tracker.operations:
        flops[operation.phase] += operation.flops
    phase_peaks = tracker.phase_peaks()
    phase = [name for name in PHASES if phase_peaks[name][0] >= (1 - ACCURACY) * peak.bytes][-1]
    return Prediction(
        peak_allocated=peak.bytes,
        peak_reserved=replay(trace, None, expandable_segments).peak_reserved if on_cuda else None,
        context=(gpu.context_mib * MIB if context is None else context) if on_cuda else 0,
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
        trace=trace,
        expandable_segments=expandable_segments,
        notes={} if on_cuda else {"peak_reserved": "a CPU has no caching allocator"},
    )


def _trace(tracker: Tracker) -> list[tuple[int, int]]:
    """The tracker's events as requests to an allocator."""
    return [
        (id(block), block.nbytes if created else -1)
        for block, created in tracker.events
        if not block.host and block.nbytes
    ]


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
    inside = (str(Path(torch.__file__).parent), sys.modules[__name__].__spec__.origin)
    return next((f for f in reversed(frames) if not f.filename.startswith(inside)), frames[-1])
