"""What a CUDA GPU does differently from a CPU, as far as it shows in memory: cards and kernels.

Fake tensors with CUDA as their device do not work on a machine without it, so predictions run on
fake CPU tensors, and this module makes torch choose for them as it would on CUDA.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from helpers.memory import MIB

aten = torch.ops.aten

# --- Cards ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """What a prediction has to know about a card.

    memory_mib: memory that programs can use, in MiB, which is less than the name says. context_mib:
    what NVML counts before torch has allocated anything, see CONTEXT_MIB. flash: whether PyTorch's
    flash attention runs on it (compute capability 8.0 and above). tflops, half_tflops: 1e12
    operations a second in float32 and, on Tensor Cores where there are any, in half precision;
    bandwidth: 1e9 bytes a second to and from its memory (all three from NVIDIA's data sheets; they
    rank recipes by time and decide nothing about memory). workspace: bytes of cuBLAS workspace a
    thread.
    """

    name: str
    memory_mib: int
    flash: bool = True
    tflops: float = 15.0
    half_tflops: float = 60.0
    bandwidth: float = 600.0
    context_mib: int = 500
    workspace: int = 8_519_680


# The CUDA context: the driver's own memory and the kernels that have been loaded. Since CUDA 11.7
# kernels are loaded when they are first used: 274 MiB after one tensor (pytorch#86509), 426 MiB on
# an RTX 6000 Ada with torch 2.10 (unsloth-zoo#1053), and more with every library that runs, so 500
# is a guess on the safe side. Before 11.7 all were loaded at once: 1,343 MiB on a V100 with CUDA
# 11.2 (Hugging Face's guide "Efficient training on a single GPU").
CONTEXT_MIB = {"CUDA 11.7 and later": 500, "before CUDA 11.7": 1343}

_HOPPER_WORKSPACE = 32 * 1024**2  # torch asks for more where the compute capability is 9.0

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("1050Ti", 4040, False, 2.1, 2.1, 112),
        Gpu("1060", 6070, False, 4.4, 4.4, 192),
        Gpu("1080", 8113, False, 8.9, 8.9, 320),
        Gpu("1080Ti", 11178, False, 11.3, 11.3, 484),
        Gpu("P100", 16276, False, 9.3, 9.3, 732),
        Gpu("V100", 16160, False, 15.7, 125, 900),
        Gpu("V100-32GB", 32510, False, 15.7, 125, 900),
        Gpu("T4", 15093, False, 8.1, 65, 320),
        Gpu("2080Ti", 11019, False, 13.4, 53.8, 616),
        Gpu("RTX6000", 24220, False, 16.3, 130, 672),
        Gpu("3060", 12044, True, 12.7, 51, 360),
        Gpu("3080", 10009, True, 29.8, 59.5, 760),
        Gpu("3090", 24259, True, 35.6, 71, 936),
        Gpu("4060", 7933, True, 15.1, 60, 272),
        Gpu("4090", 24217, True, 82.6, 165, 1008),
        Gpu("A10G", 22731, True, 31.2, 70, 600),
        Gpu("L4", 22563, True, 30.3, 121, 300),
        Gpu("A6000", 48670, True, 38.7, 155, 768),
        Gpu("A100", 40335, True, 19.5, 312, 1555),
        Gpu("A100-80GB", 81151, True, 19.5, 312, 2039),
        Gpu("H100", 81090, True, 67, 989, 3350, workspace=_HOPPER_WORKSPACE),
        Gpu("H200", 143156, True, 67, 989, 4800, workspace=_HOPPER_WORKSPACE),
    )
}


def find_gpu(name: str) -> Gpu:
    """A card by name ("T4", "1080 Ti") or by size ("11 GiB", "6000 MiB").

    Raises ValueError for anything else, with what is known.
    """
    size = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(GiB|MiB)\s*", name, re.IGNORECASE)
    if size:
        mib = float(size[1]) * (1024 if size[2].lower() == "gib" else 1)
        if mib >= 1:
            return Gpu(f"{float(size[1]):g} {size[2][0].upper()}iB", round(mib))
    for known, gpu in GPUS.items():
        if _bare_name(known) == _bare_name(name):
            return gpu
    raise ValueError(
        f"no card or size {name!r}: expected a size such as '11 GiB' or '6000 MiB' "
        f"(1 GiB = 1024 MiB), or one of {', '.join(GPUS)}"
    )


def gpu_of(properties) -> Gpu:
    """A card as torch describes it: `torch.cuda.get_device_properties(device)`."""
    workspace = _HOPPER_WORKSPACE if properties.major == 9 else Gpu.workspace
    memory_mib = properties.total_memory // MIB
    return Gpu(properties.name, memory_mib, flash=properties.major >= 8, workspace=workspace)


def _bare_name(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla|gtx|rtx", "", name.lower()) or name.lower()


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
AUTOCAST_HALF = (
    "prelu",
    "addmv",
    "addr",
    "mv",
)  # on CUDA's list of half operations, not on the CPU's
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
        floats = [
            t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
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
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        *,
        scale=None,
        enable_gqa=False,
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


def matrix_product_temporaries(*matrices: torch.Tensor) -> list[int]:
    """Bytes of copies that CUDA makes of matrices whose strides cuBLAS cannot read.

    Rows or columns must lie one element apart and not overlap, so a gradient expanded from one
    number, as of `output.sum()`, is copied (ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas).
    """
    return [m.numel() * m.itemsize for m in matrices if not _readable_by_cublas(m)]


def _readable_by_cublas(matrix: torch.Tensor) -> bool:
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def embedding_temporaries(grad, indices, num_weights, padding_idx, scale_grad_by_freq) -> list[int]:
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
