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
import linecache
import math
import random
import re
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
import torch._dynamo  # FakeTensorMode needs it; loaded here so that no prediction's time includes it
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
from helpers.memory import MIB, PARTS, Block, Peak, Timeline, Tracker
from helpers.train import (
    Batch,
    LossFunction,
    OptimizerFunction,
    Recipe,
    batch_size,
    build_optimizer,
    check_recipe,
    split_batch,
    train_step,
)

aten = torch.ops.aten

# --- Cards ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What a prediction has to know about a card.

    context_mib: memory that NVML counts before torch has allocated anything (CUDA context, kernels).
    flash: whether PyTorch's flash attention runs on it (compute capability 8.0 and above).
    workspace: bytes of cuBLAS workspace per thread that multiplies matrices.
    """

    name: str
    memory_mib: int
    context_mib: int = 500
    flash: bool = True
    workspace: int = 8_519_680


# --- Older stacks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """What older versions of torch did otherwise where it shows in memory; defaults are today's.

    Needed to compare predictions with measurements that others have published. Numbers are those
    of issues and pull requests of pytorch/pytorch. (That gradients were zeroed in place before
    2.0, PR 92731, is `Recipe.set_to_none`.)

    softmax_keeps_input: softmax and log_softmax kept their input for the backward pass beside
    their result. Up to 1.10 (issue 49600, PR 65242).
    gelu_in_float32: it was on autocast's float32 list. Up to 1.9 (PR 59639).
    foreach: optimizers and clipping chose foreach kernels on CUDA. From 2.0 on (PR 92306).
    workspace: cuBLAS's workspace came out of torch's allocator. From 2.0 on (PR 83461).
    flash_attention: version of its kernel. 1 in 2.0 and 2.1 (PR 105602): it returned its result as
    [batch, query, head, width] in memory, whatever the layout of its inputs.
    """

    softmax_keeps_input: bool = False
    gelu_in_float32: bool = False
    foreach: bool = True
    workspace: bool = True
    flash_attention: int = 2


def torch_stack(version: str) -> Stack:
    """The stack of a version of torch, such as "1.10" or "2.1.0.dev20230623"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is no version of torch: expected for example '1.10'")
    number = int(match[1]), int(match[2])
    return Stack(
        softmax_keeps_input=number <= (1, 10),
        gelu_in_float32=number <= (1, 9),
        foreach=number >= (2, 0),
        workspace=number >= (2, 0),
        flash_attention=1 if number <= (2, 1) else 2,
    )


TODAY = Stack()

# --- CUDA's choices ------------------------------------------------------------------------

# CUDA's autocast runs these in float32 whatever comes in (torch docs, "CUDA Ops that can autocast
# to float32", and ATen/autocast_mode.h).
AUTOCAST_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
).split()
# These get float32 as the type of their result, without a converted copy of their input.
AUTOCAST_FLOAT32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
# These convert to the widest type among their inputs.
AUTOCAST_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
).split()
AUTOCAST_HALF = ("prelu", "addmv", "addr", "mv")  # on CUDA's list of half operations, not on the CPU's
HALF_TYPES = (torch.float16, torch.bfloat16)
AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def without_autocast():
    """Operations called inside are not cast (again)."""
    return torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEY)


def _operation(name: str):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _cast(values, dtype: torch.dtype):
    """Floating-point tensors among `values` (nested lists allowed) as `dtype`."""

    def convert(value):
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
        if isinstance(value, (list, tuple)):
            return type(value)(convert(item) for item in value)
        return value

    return [convert(value) for value in values]


def _in_float32(operation):
    def kernel(*args, **kwargs):
        args = _cast(args, torch.float32)
        kwargs = dict(zip(kwargs, _cast(kwargs.values(), torch.float32), strict=True))
        with without_autocast():
            return operation(*args, **kwargs)

    return kernel


def _with_float32_result(operation):
    def kernel(tensor, *args, **kwargs):
        has_dtype = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
        if tensor.dtype in HALF_TYPES and not has_dtype:
            kwargs["dtype"] = torch.float32
        with without_autocast():
            return operation(tensor, *args, **kwargs)

    return kernel


def _in_widest_type(operation):
    def kernel(*args, **kwargs):
        floats = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        widest = torch.float32 if any(t.dtype == torch.float32 for t in floats) else floats[0].dtype
        with without_autocast():
            return operation(*_cast(args, widest), **kwargs)

    return kernel


def _in_half(operation):
    def kernel(*args, **kwargs):
        args = _cast(args, torch.get_autocast_dtype("cpu"))
        with without_autocast():
            return operation(*args, **kwargs)

    return kernel


def _cross_entropy_loss(
    logits, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0
):
    # A composite on CUDA: log_softmax gives float32 without a converted copy of the logits.
    with without_autocast():
        if logits.dtype in HALF_TYPES:
            logits = aten.log_softmax.int(logits, 1 if logits.dim() > 1 else 0, torch.float32)
            if target.is_floating_point() or label_smoothing > 0:
                return aten.cross_entropy_loss.default(
                    logits, target, weight, reduction, ignore_index, label_smoothing
                )
            return aten.nll_loss_nd.default(logits, target, weight, reduction, ignore_index)
        return aten.cross_entropy_loss.default(
            logits, target, weight, reduction, ignore_index, label_smoothing
        )


def _dropout(tensor, p, train):
    """CUDA's dropout is one operation whose mask takes a byte per element."""
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    return aten.native_dropout.default(tensor, p, train)[0]


def _softmax_kernel(kernel):
    def softmax(tensor, dim, dtype=None):
        # CUDA reads float16 and writes float32 at once; other types are converted first.
        if tensor.dtype == torch.float16 and dtype == torch.float32:
            return kernel(tensor, dim, True)
        return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)

    return softmax


def _keeping_input(kernel, backward):
    """A softmax of torch up to 1.10, see `Stack`."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, dim, half_to_float):
            result = kernel(tensor, dim, half_to_float)
            ctx.save_for_backward(tensor, result)
            ctx.dim = dim
            return result

        @staticmethod
        def backward(ctx, grad):
            tensor, result = ctx.saved_tensors
            return backward(grad, result, ctx.dim, tensor.dtype), None, None

    return Softmax.apply


def _attention(flash: bool, flash_version: int):
    """CUDA's choice among the kernels of scaled_dot_product_attention."""

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive_mask(attn_mask, query.dtype)
        alignment = 8 if query.dtype in HALF_TYPES else 4
        plain = query.dim() == 4 and not enable_gqa and query.dtype != torch.float64
        dims = {query.size(-1), value.size(-1)}
        can_flash = flash and torch.backends.cuda.flash_sdp_enabled() and attn_mask is None
        can_flash &= query.dim() == 4 and query.dtype in HALF_TYPES
        can_flash &= len(dims) == 1 and max(dims) <= 256
        if can_flash:
            output = _flash(query, key, value, dropout_p, is_causal, scale, enable_gqa)
            if flash_version == 1:
                output = output.transpose(1, 2).contiguous().transpose(1, 2)
            return output
        can_efficient = plain and torch.backends.cuda.mem_efficient_sdp_enabled()
        if can_efficient and all(dim % alignment == 0 for dim in dims):
            if attn_mask is not None:
                shape = (query.size(0), query.size(1), query.size(2), key.size(2))
                attn_mask = _aligned(attn_mask, 16 if alignment == 8 else 8).expand(shape)
            keeps_graph = torch.is_grad_enabled() and any(
                t.requires_grad for t in (query, key, value)
            )
            return aten._scaled_dot_product_efficient_attention.default(
                query, key, value, attn_mask, keeps_graph, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _additive_mask(mask, dtype):
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


def _aligned(mask, alignment: int):
    """The mask as the memory-efficient kernel can read it: rows padded to a multiple."""
    if all(stride % alignment == 0 for stride in mask.stride()[:-1]):
        return mask
    missing = -mask.size(-1) % alignment
    return nn.functional.pad(mask, (0, missing))[..., : mask.size(-1)]


def _flash(query, key, value, dropout_p, is_causal, scale, enable_gqa):
    head_dim = query.size(-1)
    missing = -head_dim % 8
    if missing:
        query, key, value = (nn.functional.pad(t, (0, missing)) for t in (query, key, value))
        scale = head_dim**-0.5 if scale is None else scale
    output = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :head_dim] if missing else output


@contextlib.contextmanager
def cuda_kernels(gpu: Gpu, torch_then: Stack = TODAY) -> Iterator[None]:
    """Within this context CPU tensors go through the operations that CUDA would choose.

    The choices are registered in torch's dispatcher, so they hold in the backward pass, in
    recomputation and inside composite operations, and vanish with the registration.
    """
    library = torch.library.Library("aten", "IMPL")

    def register(name: str, kernel, key: str) -> None:
        library.impl(name, kernel, key, allow_override=True)

    try:
        register("dropout", _dropout, "AutogradCPU")
        for name, kernel, backward in (
            ("softmax.int", aten._softmax, aten._softmax_backward_data),
            ("log_softmax.int", aten._log_softmax, aten._log_softmax_backward_data),
        ):
            if torch_then.softmax_keeps_input:
                kernel = _keeping_input(kernel, backward)
            register(name, _softmax_kernel(kernel), "AutogradCPU")
        attention = _attention(gpu.flash, torch_then.flash_attention)
        register("scaled_dot_product_attention", attention, "AutogradCPU")
        if torch_then.gelu_in_float32:
            register("gelu", _in_float32(aten.gelu.default), "AutocastCPU")
        for names, make_kernel in (
            (AUTOCAST_FLOAT32, _in_float32),
            (AUTOCAST_FLOAT32_RESULT, _with_float32_result),
            (AUTOCAST_WIDEST, _in_widest_type),
            (AUTOCAST_HALF, _in_half),
        ):
            for name in names:
                register(name, make_kernel(_operation(name)), "AutocastCPU")
        register("cross_entropy_loss", _cross_entropy_loss, "AutocastCPU")
        for name in ("cat", "stack", "avg_pool3d"):  # on the CPU's lists, but not on CUDA's
            register(name, _uncast(_operation(name)), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _uncast(operation):
    def kernel(*args, **kwargs):
        with without_autocast():
            return operation(*args, **kwargs)

    return kernel


MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def _embedding_temporaries(grad, indices, num_weights, padding_idx, scale_grad_by_freq) -> list[int]:
    """What CUDA's embedding backward allocates beside its result, in bytes.

    Up to 3,072 indices nothing. Beyond, it sorts them and sums rows in groups of ten, in float32
    (ATen/native/cuda/EmbeddingBackwardKernel.cu).
    """
    numel = indices.numel()
    if numel <= 3072 and not scale_grad_by_freq:
        return []
    groups = numel // 10 + min(numel, num_weights)
    index_size = indices.element_size()
    per_index = [numel * index_size] * 3  # sorted, original positions, segment offsets
    per_segment = [min(numel, num_weights) * index_size] * 2
    sums = groups * grad.size(-1) * max(4, grad.element_size())
    return [*per_index, *per_segment, groups * index_size, sums]


# --- The step on fake tensors --------------------------------------------------------------


class PredictionError(RuntimeError):
    """The step cannot be predicted; the message names the line of the user's code."""


@dataclass
class Work:
    """Floating-point operations and bytes read and written, by phase of one training step."""

    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    traffic: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


PHASES = ("forward", "backward", "recompute", "optimizer")


class FakeStepTracker(Tracker):
    """A tracker that also counts operations and adds what CUDA's kernels allocate on their own."""

    def __init__(self, gpu: Gpu | None, torch_then: Stack = TODAY):
        super().__init__()
        self.gpu = gpu
        self._manages_workspace = torch_then.workspace
        self.work = Work()
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
                blocks = [self._add_block(size) for size in _embedding_temporaries(*args)]
                for block in blocks:
                    self._add_event(block, False)
        return result

    def _count(self, func, args, kwargs, result) -> None:
        if func not in self._formulas:
            is_view = func.is_view or func in (aten.detach.default, aten.empty.memory_format)
            self._formulas[func] = None if is_view else flop_registry.get(func.overloadpacket, _no_flops)
        formula = self._formulas[func]
        if formula is None:
            return
        if formula is not _no_flops:
            self.work.flops[self.phase] += formula(*args, **kwargs, out_val=result)

    def _add_block(self, size: int) -> Block:
        block = Block(size, self.phase, self._where(), "temporaries")
        self._add_event(block, True)
        return block

    def _take_workspace(self) -> None:
        """cuBLAS keeps one workspace for each thread that uses it: the main and the backward one."""
        in_backward = self.phase in ("backward", "recompute")
        if in_backward not in self._has_workspace:
            self._has_workspace.add(in_backward)
            self._add_block(self.gpu.workspace)

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
    # Autocast drops its copies of the weights when the outermost context is left: that must be ours.
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
    with _replaced(nn.Module, "_apply", _convert_parameters), _replaced(
        nn.init, "trunc_normal_", lambda tensor, *args, **kwargs: tensor
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


@dataclass
class Prediction:
    """What a training step would take. Sizes in bytes; the properties ending in _mib in MiB.

    peak_allocated and peak_reserved: as torch's CUDA caching allocator defines them; reserved is
    None for a CPU. split: the peak by part (see `helpers.memory.PARTS`; buffers are counted with
    the parameters, input batches with the activations, cuBLAS's workspace with the temporaries).
    peak_phase, peak_module: where the peak lies. host: most bytes of activations kept on the host.
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
    work: Work
    seconds: float
    tracker: Tracker = field(repr=False)
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
    stack: Stack = TODAY,
) -> Prediction:
    """Predict the memory of `train_step(model_fn(), batch_fn(), loss_fn, ...)` on a GPU.

    The arguments are those of `helpers.train.measure_step`, which does it for real. model_fn and
    batch_fn build on the CPU, as usual; they are called with fake tensors switched on, so weights
    of any size take no memory. optimizer_fn(params) makes the optimizer; None leaves the update
    out. device="cpu" predicts what `helpers.memory.measure` would read on a CPU. stack: as an older
    torch would do it, see `torch_stack`.

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
            tracker, fake_mode, model_fn, batch_fn, loss_fn, recipe, optimizer_fn or NoUpdate, on_cuda
        )
    return _summarise(tracker, share, gpu, context, expandable_segments, on_cuda, started)


def _run_steps(
    tracker, fake_mode, model_fn, batch_fn, loss_fn, recipe, optimizer_fn, on_cuda
) -> float:
    """Steps until the memory held between them is steady; returns the share of the batch that ran."""
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
    with tracker:
        live, start = 0, 0
        for _ in range(MOST_STEPS):
            tracker.work = Work()
            train_step(
                model, batch, loss_fn, optimizer, recipe, scaler, to_device=to_device
            )
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
    work = Work(
        {phase: flops if phase == "optimizer" else flops / share for phase, flops in tracker.work.flops.items()},
        dict(tracker.work.traffic),
    )
    notes = {}
    if not on_cuda:
        notes["peak_reserved"] = "a CPU has no caching allocator"
    return Prediction(
        peak_allocated=peak.bytes,
        peak_reserved=replay(trace, None, expandable_segments).peak_reserved if on_cuda else None,
        context=(gpu.context_mib * MIB if context is None else context) if on_cuda else 0,
        split=peak.split,
        peak_phase=peak.phase,
        peak_module=peak.module,
        host=_host_peak(tracker),
        flops=sum(work.flops.values()),
        recompute_flops=work.flops["recompute"],
        work=work,
        seconds=time.perf_counter() - started,
        tracker=tracker,
        trace=trace,
        expandable_segments=expandable_segments,
        notes=notes,
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
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frame = _user_frame(error)
        raise PredictionError(
            f"{frame.filename}, line {frame.lineno}: `{frame.line}` needs the data of a tensor "
            f"({error.func}), and a prediction has shapes only. Compute it outside the step, or "
            "make the shape not depend on data."
        ) from error


def _user_frame(error: Exception) -> traceback.FrameSummary:
    """The innermost line that is neither torch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = (str(Path(torch.__file__).parent), sys.modules[__name__].__spec__.origin)
    return next((f for f in reversed(frames) if not f.filename.startswith(inside)), frames[-1])
