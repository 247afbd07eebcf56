"""CUDA's choices on CPU tensors: which operations run, in which type, and that nothing stays."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.cuda import (
    GPUS,
    TODAY,
    Gpu,
    Stack,
    cuda_kernels,
    embedding_temporaries,
    find_gpu,
    matrix_product_temporaries,
    torch_stack,
)

ANY_GPU = Gpu("any", 16_000)


class Recorder(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(function, gpu=ANY_GPU, stack=TODAY):
    with FakeTensorMode(), cuda_kernels(gpu, stack), Recorder() as recorder:
        function()
    return recorder.names


def attention(dtype, mask=None, gpu=ANY_GPU, head_dim=64, **options):
    def run():
        query = torch.empty(2, 4, 32, head_dim, dtype=dtype, requires_grad=True)
        attn_mask = None if mask is None else torch.ones(2, 1, 32, 32, dtype=mask)
        F.scaled_dot_product_attention(query, query, query, attn_mask, **options)

    return operations(run, gpu)


def test_flash_attention_for_half_types_without_a_mask():
    names = attention(torch.bfloat16, is_causal=True)
    assert "_scaled_dot_product_flash_attention" in names
    assert "bmm" not in names


@pytest.mark.parametrize(
    "dtype, mask",
    [(torch.float16, torch.bool), (torch.float32, torch.bool), (torch.float32, None)],
)
def test_memory_efficient_attention_for_masks_and_float32(dtype, mask):
    assert "_scaled_dot_product_efficient_attention" in attention(dtype, mask, dropout_p=0.1)


def test_old_cards_have_no_flash_attention():
    names = attention(torch.float16, gpu=find_gpu("T4"))
    assert "_scaled_dot_product_efficient_attention" in names


def test_math_attention_where_the_fused_kernels_cannot():
    assert "bmm" in attention(torch.float32, head_dim=31)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "bmm" in attention(torch.float16)


def test_dropout_is_one_operation_with_a_mask_of_a_byte():
    assert operations(lambda: F.dropout(torch.empty(10), 0.5)) == ["empty", "native_dropout"]
    assert operations(lambda: F.dropout(torch.empty(10), 0.0)) == ["empty"]
    assert "native_dropout" not in operations(lambda: F.dropout(torch.empty(10), 0.5, False))


def test_dropout_works_on_real_tensors():
    with cuda_kernels(ANY_GPU):
        x = torch.ones(1000, requires_grad=True)
        F.dropout(x, 0.25).sum().backward()
    assert torch.isclose(x.grad, torch.tensor(4 / 3)).logical_or(x.grad == 0).all()
    assert 600 < torch.count_nonzero(x.grad) < 900


@pytest.mark.parametrize(
    "function, dtype",
    [
        (lambda x: F.layer_norm(x, (4,)), torch.float32),
        (lambda x: F.softmax(x, -1), torch.float32),
        (lambda x: x.exp(), torch.float32),
        (lambda x: x.pow(2), torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: F.mse_loss(x, x), torch.float32),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1])), torch.float32),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1]), label_smoothing=0.1), torch.float32),
        (lambda x: F.binary_cross_entropy_with_logits(x, x), torch.float32),
        (lambda x: F.gelu(x), torch.bfloat16),
        (lambda x: F.relu(x), torch.bfloat16),
        (lambda x: torch.cat([x, x]), torch.bfloat16),
        (lambda x: x @ x.T, torch.bfloat16),
        (lambda x: x.mean(), torch.bfloat16),
        (lambda x: torch.addcmul(torch.zeros(4), x, x), torch.float32),
        (lambda x: F.prelu(x, torch.ones(1)), torch.bfloat16),
    ],
)
def test_types_under_autocast_are_those_of_cuda(function, dtype):
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with cuda_kernels(ANY_GPU), torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype == dtype


def test_softmax_of_float16_makes_no_copy_of_its_input():
    def run():
        with torch.autocast("cpu", torch.float16):
            F.softmax(torch.empty(3, 4, dtype=torch.float16), -1)

    assert "_to_copy" not in operations(run)


def test_cross_entropy_equals_that_without_autocast():
    logits = torch.randn(6, 5).to(torch.bfloat16)
    labels = torch.tensor([0, 1, 2, -100, 4, 0])
    expected = F.cross_entropy(logits.float(), labels)
    with cuda_kernels(ANY_GPU), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.cross_entropy(logits, labels), expected)


def test_everything_is_as_before_afterwards():
    def names():
        with FakeTensorMode(), Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            x = F.layer_norm(torch.empty(2, 8, requires_grad=True), (8,))
            F.cross_entropy(F.dropout(x @ x.T), torch.zeros(2, dtype=torch.long))
            F.scaled_dot_product_attention(*[torch.empty(1, 1, 8, 8)] * 3)
        return recorder.names

    before = names()
    with cuda_kernels(ANY_GPU):
        assert names() != before
    assert names() == before
    with pytest.raises(ZeroDivisionError), cuda_kernels(ANY_GPU):
        1 / 0
    assert names() == before


def test_embedding_backward_sorts_only_above_3072_tokens():
    with FakeTensorMode():
        grad, few = torch.empty(3072, 8), torch.empty(3072, dtype=torch.long)
        assert embedding_temporaries(grad, few, 100, 0, False) == []
        grad, many = torch.empty(6144, 1024), torch.empty(6144, dtype=torch.long)
        sizes = embedding_temporaries(grad, many, 250_002, 0, False)
        # a row of sums for every token, and one for every ten of them, in float32
        assert max(sizes) == (6144 + 614) * 1024 * 4
        half = embedding_temporaries(grad.half(), many, 250_002, 0, False)
        assert max(half) == max(sizes)
        # no more groups than the table has rows
        assert max(embedding_temporaries(grad, many, 100, 0, False)) == (614 + 100) * 1024 * 4


def test_cards_by_name_and_by_size():
    assert find_gpu("T4") is GPUS["T4"]
    for name in ("1080Ti", "1080 ti", "GTX 1080 Ti", "GeForce GTX 1080Ti", "nvidia 1080ti"):
        assert find_gpu(name) is GPUS["1080Ti"]
    assert find_gpu("RTX 6000") is GPUS["RTX6000"]
    assert find_gpu("11 GiB").memory_mib == 11 * 1024
    assert find_gpu("6000MiB").memory_mib == 6000
    assert find_gpu("5.5 gib").name == "5.5 GiB"
    assert find_gpu(find_gpu("5.5 gib").name) == find_gpu("5.5 GiB")


@pytest.mark.parametrize("name", ["", "11 GB", "11", "0 GiB", "-3 GiB", "a lot", "9999Ti"])
def test_other_texts_are_no_card(name):
    with pytest.raises(ValueError, match="expected a size such as '11 GiB'"):
        find_gpu(name)


def test_stack_of_a_version():
    assert torch_stack("2.6.0+cu124") == TODAY
    old = torch_stack("1.8")
    assert old.softmax_keeps_input and old.gelu_in_float32 and not old.foreach
    assert torch_stack("2.1.0.dev20230623").flash_attention == 1
    with pytest.raises(ValueError, match="no version of torch"):
        torch_stack("newest")


def test_old_softmax_keeps_its_input():
    def kept_bytes(stack):
        kept = set()

        def pack(tensor):
            kept.add(tensor.untyped_storage()._cdata)
            return tensor

        with FakeTensorMode(), cuda_kernels(ANY_GPU, stack):
            x = torch.empty(100, 100, requires_grad=True) * 2
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = F.softmax(x, -1)
            result.sum().backward()
        return len(kept)

    assert kept_bytes(TODAY) == 1
    assert kept_bytes(Stack(softmax_keeps_input=True)) == 2


def test_matrices_that_cublas_cannot_read_are_copied():
    matrix = torch.zeros(6, 4)
    readable = (matrix, matrix.t(), matrix[:, :3], matrix[:3].t(), torch.zeros(2, 6, 4).mT)
    assert matrix_product_temporaries(*readable) == []
    expanded, every_other = torch.zeros(1).expand(6, 4), torch.zeros(6, 8)[:, ::2]
    assert matrix_product_temporaries(expanded, matrix) == [6 * 4 * 4]
    assert matrix_product_temporaries(every_other, expanded) == [6 * 4 * 4, 6 * 4 * 4]
