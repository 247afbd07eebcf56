"""VGG16 against torchvision's, and checkpointing that leaves no trace but less memory."""

import copy
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.models import (
    ArticleVgg16,
    blocks,
    checkpointing,
    hugging_face_checkpointing,
    legal_cuts,
    segments,
    vgg16,
)


def state_after(model, how, x, steps=2):
    """Everything a few steps leave behind: losses, gradients, parameters, buffers, RNG state."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        with checkpointing(model, how):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*losses, *gradients, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def assert_same_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def small_vgg():
    torch.manual_seed(0)
    return vgg16(num_classes=2, width=0.1)


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_vgg16_is_torchvisions_given_its_weights():
    judge = torchvision.models.vgg16(weights=None, num_classes=2).eval()
    model = vgg16(num_classes=2).eval()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), judge.parameters(), strict=True):
            ours.copy_(theirs)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(x), judge(x))
    kinds = [type(module) for module in model]
    assert kinds[:31] == [type(module) for module in judge.features]
    assert kinds[-7:] == [type(module) for module in judge.classifier]


@pytest.mark.parametrize("arguments", [{"num_classes": 0}, {"width": 0.0}])
def test_vgg16_refuses_impossible_sizes(arguments):
    with pytest.raises(ValueError, match="num_classes >= 1 and width > 0"):
        vgg16(**arguments)


@pytest.mark.parametrize("segments", [None, 2, 3])
def test_the_articles_ten_children_are_the_same_network(small_vgg, images, segments):
    torch.manual_seed(0)
    article = ArticleVgg16(width=0.1, segments=segments)
    assert len(article) == 10
    calls = []
    article[0].register_forward_hook(lambda *_: calls.append("convolutions"))
    assert_same_bits(state_after(small_vgg, None, images), state_after(article, None, images))
    assert len(calls) == (2 if segments is None else 4)  # of two steps, and recomputed or not


@pytest.mark.parametrize("how", [2, 3, 7, 25, "pools", "layers", [(4, 5), (9, 10)], [(0, 21)]])
def test_checkpointed_vgg16_ends_with_the_same_bits(small_vgg, images, how):
    assert_same_bits(state_after(small_vgg, None, images), state_after(small_vgg, how, images))


@pytest.mark.parametrize(
    "build",
    [
        lambda: torchvision.models.resnet50(weights=None, num_classes=2),
        lambda: torchvision.models.densenet121(weights=None, num_classes=2),
        lambda: torchvision.models.vit_b_16(weights=None, image_size=32, num_classes=2),
    ],
    ids=["resnet50", "densenet121", "vit_b_16"],
)
def test_models_that_are_no_sequence_end_with_the_same_bits(build, images):
    torch.manual_seed(0)
    model = build()
    assert_same_bits(state_after(model, None, images), state_after(model, "layers", images))


@pytest.mark.parametrize("how", ["layers/2", "layers/5", "selective"])
def test_other_ways_to_recompute_blocks_end_with_the_same_bits(images, how):
    torch.manual_seed(0)
    model = torchvision.models.vit_b_16(
        weights=None, image_size=32, num_classes=2, dropout=0.1, attention_dropout=0.1
    )
    assert_same_bits(state_after(model, None, images), state_after(model, how, images))


def test_selective_checkpointing_runs_no_linear_layer_twice():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2))  # noqa: E731
    model = nn.ModuleDict({"blocks": nn.Sequential(block(), block())})
    model.forward = model["blocks"].forward
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func is torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    counts = {}
    for how in ("layers", "selective"):
        products.clear()
        with Count():
            with checkpointing(model, how):
                loss = model(torch.randn(3, 6)).sum()
            loss.backward()
        counts[how] = sum(products)
    assert counts == {"layers": 4, "selective": 2}


@pytest.mark.parametrize("how", ["layers/0", "layers/x", "layers/"])
def test_every_nth_layer_needs_a_number(how):
    with pytest.raises(ValueError, match="N = 1, 2, 3"):
        with checkpointing(torchvision.models.vit_b_16(weights=None), how):
            pass


@pytest.mark.parametrize("chunks", [1, 2, 3, 9])
def test_chunks_of_the_batch_give_the_whole_batchs_gradients(small_vgg, images, chunks):
    model = small_vgg.double()
    ranges = ((0, 5, chunks), (5, 10, 2))
    plain = state_after(model, None, images.double(), steps=1)
    chunked = state_after(model, ranges, images.double(), steps=1)
    for a, b in zip(plain, chunked, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "layer, name", [(nn.BatchNorm1d(4), "BatchNorm"), (nn.Dropout(0.5), "dropout")]
)
def test_chunks_that_would_change_the_result_are_refused(layer, name):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    with pytest.raises(ValueError, match=name):
        segments(model, [(0, 2, 4)])
    with pytest.raises(ValueError, match="chunks=\\[0\\]"):
        segments(model, [(0, 1, 0)])


def test_spectral_norm_vectors_are_updated_once():
    """A buffer that the forward pass reads and writes: recomputing must start from the old one."""
    torch.manual_seed(0)
    spectral_norm = nn.utils.parametrizations.spectral_norm
    blocks = [nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks)
    x = torch.randn(5, 6)
    assert_same_bits(state_after(model, None, x, 3), state_after(model, [(0, 2)], x, 3))


def test_recomputation_runs_each_segment_twice(small_vgg, images):
    calls = []
    small_vgg[0].register_forward_hook(lambda *_: calls.append("first convolution"))
    small_vgg[39].register_forward_hook(lambda *_: calls.append("last layer"))
    with checkpointing(small_vgg, "pools"):
        loss = small_vgg(images).sum()
    loss.backward()
    assert calls.count("first convolution") == 2
    assert calls.count("last layer") == 1


def test_checkpointing_leaves_no_trace_on_the_model(small_vgg):
    before = set(vars(small_vgg))
    with pytest.raises(RuntimeError, match="stop"), checkpointing(small_vgg, "pools"):
        raise RuntimeError("stop")
    assert set(vars(small_vgg)) == before


def test_checkpointing_keeps_less_for_the_backward_pass(small_vgg, images):
    def kept(how):
        sizes = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            checkpointing(small_vgg, how),
        ):
            small_vgg(images)
        return sum(sizes.values())

    assert kept("pools") < kept(2) < kept(None)


def test_no_cut_in_front_of_an_in_place_activation(small_vgg):
    cuts = legal_cuts(small_vgg)
    assert len(cuts) == 24
    assert not any(isinstance(small_vgg[i], nn.ReLU) for i in cuts)
    for count in range(2, 26):
        ranges = segments(small_vgg, count)
        assert len(ranges) == count - 1
        assert all(start == 0 or start in cuts for start, _ in ranges)


@pytest.mark.parametrize(
    "how, message",
    [
        (1, "2 to 25"),
        (26, "2 to 25"),
        (True, "number of segments"),
        ("pool", "'pools', 'layers' or ranges"),
        ([(1, 5)], "in-place ReLU"),
        ([(5, 5)], "ascend"),
        ([(0, 5), (4, 9)], "ascend"),
        ([(0, 41)], "ascend"),
    ],
)
def test_segments_that_a_model_cannot_have(small_vgg, how, message):
    with pytest.raises(ValueError, match=message):
        segments(small_vgg, how)


def test_an_in_place_activation_behind_a_pool_belongs_to_its_segment():
    layers = [nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.ReLU(inplace=True))
    assert segments(model, "pools") == [(0, 3), (3, 5)]
    images = torch.randn(2, 3, 16, 16)
    gradients = []
    for how in (None, "pools"):
        model.zero_grad()
        with checkpointing(model, how):
            model(images).sum().backward()
        gradients.append(model[0].weight.grad.clone())
    assert torch.equal(*gradients)


def test_pools_need_pools():
    with pytest.raises(ValueError, match="no nn.MaxPool2d"):
        segments(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "pools")


def test_layers_need_blocks():
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="no repeated blocks"), checkpointing(model, "layers"):
        pass


def test_a_block_that_starts_in_place_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.Sequential(
                *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)) for _ in range(2))
            )

        def forward(self, x):
            return self.stages(x)

    with pytest.raises(ValueError, match="inplace=False"), checkpointing(Model(), "layers"):
        pass


def test_blocks_are_the_repeated_parts():
    assert len(blocks(torchvision.models.resnet50(weights=None))) == 16
    assert len(blocks(torchvision.models.vit_b_16(weights=None))) == 12


def test_a_frozen_trunk_is_announced(small_vgg, images):
    small_vgg[:31].requires_grad_(False)
    with pytest.warns(UserWarning, match="saves nothing here"), checkpointing(small_vgg, "pools"):
        small_vgg(images)


def test_no_warning_and_no_recomputation_without_gradients(small_vgg, images):
    calls = []
    small_vgg[0].register_forward_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with checkpointing(small_vgg.eval(), "pools"):
            small_vgg(images)
    assert len(calls) == 1


class OldModel(nn.Module):
    """Stands for a model of an older transformers: one method name, keyword arguments or none."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.switched = gradient_checkpointing_kwargs

    def gradient_checkpointing_disable(self):
        self.switched = "off"


class OldestModel(nn.Module):
    def gradient_checkpointing_enable(self):
        self.switched = "on"


class NewModel(nn.Module):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs=None):
        self.switched = activation_checkpointing_kwargs

    def activation_checkpointing_disable(self):
        self.switched = "off"


class UnsupportedModel(NewModel):
    supports_gradient_checkpointing = False


def test_hugging_faces_switch_under_each_of_its_names():
    non_reentrant = {"use_reentrant": False}
    for model, expected in [
        (OldModel(), non_reentrant),
        (NewModel(), non_reentrant),
        (OldestModel(), "on"),
    ]:
        hugging_face_checkpointing(model)
        assert model.switched == expected
    for model in (OldModel(), NewModel()):
        hugging_face_checkpointing(model, enable=False)
        assert model.switched == "off"


@pytest.mark.parametrize("model", [UnsupportedModel(), nn.Linear(2, 2)])
def test_models_without_hugging_faces_switch(model):
    with pytest.raises(ValueError, match="Recipe\\(checkpoint='layers'\\)"):
        hugging_face_checkpointing(model)
