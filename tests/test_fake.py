"""Remembered results against torch's own, operation by operation and step by step."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from helpers.catalogue import find_workload
from helpers.fake import RememberedResults
from helpers.predict import predict_workload
from helpers.train import Recipe

aten = torch.ops.aten


def requests(prediction):
    """Sizes and the order in which they come and go; which blocks, not where they lie."""
    names = {key: index for index, (key, size) in enumerate(prediction.trace) if size >= 0}
    return [(names[key], size) for key, size in prediction.trace]


@pytest.mark.parametrize(
    "name, optimizer, recipe, options",
    [
        ("distilbert-base-uncased", "adafactor", Recipe(checkpoint="layers"), dict(seq_len=16)),
        ("gpt2", "adamw", Recipe(clip_norm=1.0), dict(seq_len=16)),
        ("vgg16", "sgd", Recipe(accumulate=2), dict(image_size=32)),
        ("resnet18", "adamw-fused", Recipe(optimizer_in_backward=True), dict(image_size=64)),
    ],
)
def test_a_step_asks_for_the_same_memory(name, optimizer, recipe, options, monkeypatch):
    workload = find_workload(name, **options)
    ours = predict_workload(workload, 2, recipe, optimizer)
    monkeypatch.setattr(RememberedResults, "call", lambda self, func, args, kw: func(*args, **kw))
    theirs = predict_workload(workload, 2, recipe, optimizer)
    assert requests(ours) == requests(theirs)
    assert (ours.flops, ours.split) == (theirs.flops, theirs.split)


def twice(func, *args, **kwargs):
    """The result when it is new, and when it is remembered."""
    results = RememberedResults()
    return [results.call(func, args, kwargs) for _ in range(2)]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def test_new_tensors_own_their_storage():
    with FakeTensorMode():
        a = torch.empty(4, 6)
        for first, second in (
            twice(aten.mm.default, a, torch.empty(6, 2)),
            twice(aten.mul.Tensor, a, 2),
            twice(aten.native_layer_norm.default, a, [6], None, None, 1e-5),
        ):
            pairs = (
                zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
            )
            for one, other in pairs:
                assert (one.shape, one.stride(), one.dtype) == (
                    other.shape, other.stride(), other.dtype
                )  # fmt: skip
                assert len({storage(one), storage(other), storage(a)}) == 3


def test_views_share_and_work_in_place_returns_the_argument():
    with FakeTensorMode():
        a = torch.empty(4, 6)
        for first, second in (
            twice(aten.t.default, a),
            twice(aten._unsafe_view.default, a, [24]),  # no view by its schema
            twice(aten.slice.Tensor, a, 1, 2, 4),
        ):
            assert storage(first) == storage(second) == storage(a)
            assert (first.shape, first.stride(), first.storage_offset()) == (
                second.shape, second.stride(), second.storage_offset()
            )  # fmt: skip
        assert all(result is a for result in twice(aten.add_.Tensor, a, 1))


def test_lists_of_tensors_are_remembered_too():
    with FakeTensorMode():
        many = [torch.empty(4, 6), torch.empty(3)]
        first, second = twice(aten._foreach_mul.Scalar, many, 2)
        assert [t.shape for t in first] == [t.shape for t in second] == [t.shape for t in many]
        owners = {storage(tensor) for tensor in [*first, *second, *many]}
        assert type(first) is type(second) and len(owners) == 6
        assert twice(aten._foreach_add_.Scalar, many, 1) == [None, None]


def test_equal_numbers_of_different_types_are_told_apart():
    results = RememberedResults()
    with FakeTensorMode():
        a = torch.empty(3, dtype=torch.int64)
        dtypes = [results.call(aten.mul.Tensor, (a, n), {}).dtype for n in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_what_depends_on_data_is_asked_for_each_time():
    results = RememberedResults()
    with FakeTensorMode():
        for value in (1.0, 2.0):
            constant = torch.tensor(value)
            assert results.call(aten._local_scalar_dense.default, (constant,), {}) == value
        with pytest.raises(DataDependentOutputException):
            results.call(aten._local_scalar_dense.default, (torch.empty(()),), {})
