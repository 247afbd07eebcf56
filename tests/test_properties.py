"""What must not change, on made-up recipes, sizes and models: 100 examples, with SOAK=1 500.

The judge is torch alone: the plain step, the full batch.
"""

import copy
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from helpers.models import legal_cuts
from helpers.train import Recipe, build_optimizer, make_optimizer, make_scaler, train_step

CPU = torch.device("cpu")
SOAK = os.environ.get("SOAK") == "1"


def examples(count):
    """`make test` tries the same examples every time, `make soak` five times as many new ones."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count * (5 if SOAK else 1),
        deadline=None,
        derandomize=not SOAK,
        suppress_health_check=slow,
        database=None,
    )


# --- Models ----------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """ResNet-50's block, small."""

    def __init__(self, width, dropout):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False),
            nn.BatchNorm2d(width // 2), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.layers(x))


class SmallResNet(nn.Module):
    """Like ResNet-50: stages of blocks with BatchNorm, and no sequence as a whole."""

    def __init__(self, width, stages, dropout):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.stages = nn.ModuleList(
            nn.Sequential(*(Bottleneck(width, dropout) for _ in range(blocks))) for blocks in stages
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2) if x.shape[-1] > 2 else stage(x)
        return self.head(x.mean((2, 3)))


class SmallTransformer(nn.Module):
    """Attention and feed-forward layers, whose images are read as rows of tokens."""

    def __init__(self, width, layers, dropout):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(width, 3))

    def forward(self, x):
        x = self.embed(x.flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@st.composite
def sequences(draw, batch_norm=True, dropout=True):
    """A flat convolutional sequence of some layers, in-place activations among them."""
    width = draw(st.sampled_from([2, 4, 5]))
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    kinds = ["conv", "relu", "relu_", "pool", "group", "elu_", "spectral"]
    kinds += ["batch", "frozen"] if batch_norm else []
    kinds += ["dropout", "dropout2d"] if dropout else []
    pixels = 8
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=9)):
        if kind[-1] == "_" and isinstance(layers[-1], (nn.ReLU, nn.ELU)):
            continue  # an activation's gradient needs its result: torch refuses to overwrite it
        if kind == "pool":
            if pixels == 1:
                continue
            pixels //= 2
        layers.append(
            {
                "conv": lambda: nn.Conv2d(width, width, 3, padding=1),
                "spectral": lambda: nn.utils.parametrizations.spectral_norm(
                    nn.Conv2d(width, width, 1)
                ),
                "relu": nn.ReLU,
                "relu_": partial(nn.ReLU, inplace=True),
                "elu_": partial(nn.ELU, inplace=True),
                "pool": partial(nn.MaxPool2d, 2),
                "group": partial(nn.GroupNorm, 1, width),
                "batch": partial(nn.BatchNorm2d, width),
                "frozen": lambda: nn.Conv2d(width, width, 1).requires_grad_(False),
                "dropout": partial(nn.Dropout, 0.3),
                "dropout2d": partial(nn.Dropout2d, 0.3),
            }[kind]()
        )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * pixels**2, 3))


@st.composite
def models(draw):
    """Any of the three kinds; parameters from a fixed seed."""
    torch.manual_seed(0)
    kind = draw(st.sampled_from(["sequence", "resnet", "transformer"]))
    if kind == "sequence":
        return draw(sequences())
    dropout = draw(st.sampled_from([0.0, 0.3]))
    if kind == "resnet":
        stages = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
        return SmallResNet(draw(st.sampled_from([4, 6])), stages, dropout)
    return SmallTransformer(draw(st.sampled_from([4, 8])), draw(st.integers(1, 3)), dropout)


@st.composite
def ways_to_recompute(draw, model):
    """Whatever `checkpoint` takes for this model."""
    if not isinstance(model, nn.Sequential):
        return draw(st.sampled_from(["layers", "layers/2", "selective"]))
    cuts = legal_cuts(model)
    ways = [st.just("layers"), st.integers(2, len(cuts) + 1)]
    if any(isinstance(module, nn.MaxPool2d) for module in model):
        ways.append(st.just("pools"))
    bounds = draw(st.lists(st.sampled_from([0, *cuts, len(model)]), min_size=2, unique=True))
    bounds = sorted(bounds)[: len(bounds) // 2 * 2]
    ways.append(st.just(tuple(zip(bounds[::2], bounds[1::2], strict=True))))
    return draw(st.one_of(ways))


@st.composite
def recipes(draw):
    """Every switch but checkpointing; those that exclude each other never together."""
    in_backward = draw(st.booleans())
    return Recipe(
        amp=draw(st.sampled_from(["off", "bf16"] if in_backward else ["off", "fp16", "bf16"])),
        accumulate=1 if in_backward else draw(st.integers(1, 4)),
        clip_norm=None if in_backward else draw(st.sampled_from([None, 0.1, 100.0])),
        optimizer_in_backward=in_backward,
        offload=draw(st.booleans()),
        amp_cache=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
    )


def pictures(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 3, 8, 8, generator=generator).to(dtype),
        torch.randint(3, (count,), generator=generator),
    )


def classify(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


# --- Recomputation changes nothing -------------------------------------------------------------


def after_steps(model, recipe, optimizer, count, steps):
    """Everything that some steps leave behind, and the random numbers that come next."""
    model = copy.deepcopy(model).train()
    optimizer = build_optimizer(model, partial(make_optimizer, optimizer, lr=0.05), recipe)
    scaler = make_scaler(recipe, CPU)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    outputs = []
    model.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    for step in range(steps):
        result = train_step(model, pictures(count, seed=step), classify, optimizer, recipe, scaler)
        outputs += [result.loss, torch.tensor(result.stepped)]
    numbers = torch.tensor([random.random(), np.random.rand(), scaler.get_scale()])
    gradients = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    state = [value for values in optimizer.state.values() for value in values.values()]
    state = [torch.as_tensor(value) for value in state if value is not None]
    rng = torch.get_rng_state()
    return [*outputs, numbers, *gradients, *model.parameters(), *model.buffers(), *state, rng]


@pytest.mark.filterwarnings("ignore:checkpointing saves nothing here")  # some are frozen that far
@examples(40)
@given(data=st.data())
def test_recomputation_changes_no_bit(data):
    """Outputs, gradients, parameters, buffers, optimizer state, scale and RNG states."""
    model = data.draw(models())
    recipe = data.draw(recipes())
    how = data.draw(ways_to_recompute(model))
    optimizer = data.draw(st.sampled_from(["sgd", "momentum", "adamw", "adafactor"]))
    count, steps = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    arguments = optimizer, count, steps
    plain = after_steps(model, recipe, *arguments)
    again = after_steps(model, Recipe(**(vars(recipe) | {"checkpoint": how})), *arguments)
    assert len(plain) == len(again)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# --- Accumulation is the full batch ------------------------------------------------------------


def mean_over_samples(weights, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_over_labelled(weights, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=-100)


def weighted_mean(weights, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], weight=weights.to(batch[0].dtype))


# Of each loss: what it averages over.
AVERAGES = {
    mean_over_samples: lambda weights, batch: len(batch[1]),
    mean_over_labelled: lambda weights, batch: (batch[1] != -100).sum(),
    weighted_mean: lambda weights, batch: weights[batch[1]].sum(),
}


@examples(40)
@given(data=st.data())
def test_accumulation_has_the_full_batchs_gradients(data):
    """Whatever the loss averages over and however the pieces fall."""
    torch.manual_seed(0)
    model = data.draw(sequences(batch_norm=False, dropout=False)).eval()  # no spectral iterations
    dtype, bound = data.draw(st.sampled_from([(torch.float32, 1e-6), (torch.float64, 1e-12)]))
    loss, weights = data.draw(st.sampled_from(list(AVERAGES))), torch.tensor([0.2, 1.0, 3.0])
    weights = weights.double()
    x, labels = pictures(data.draw(st.integers(1, 12)), dtype)
    if loss is mean_over_labelled:
        hidden = data.draw(st.lists(st.booleans(), min_size=len(labels) - 1, max_size=12))
        labels[1:][torch.tensor(hidden[: len(labels) - 1], dtype=torch.bool)] = -100
    pieces = data.draw(st.integers(1, 15))
    model = model.to(dtype)
    judge = copy.deepcopy(model)
    expected = loss(weights, judge, (x, labels))
    expected.backward()
    recipe = Recipe(accumulate=pieces)
    result = train_step(
        model, (x, labels), partial(loss, weights),
        build_optimizer(model, partial(make_optimizer, "sgd", lr=0.1), recipe), recipe,
        count=partial(AVERAGES[loss], weights),
    )  # fmt: skip
    assert abs(result.loss - expected) <= bound * max(1, abs(expected))
    for ours, theirs in zip(model.parameters(), judge.parameters(), strict=True):
        if theirs.grad is not None:
            largest = max(1, theirs.grad.abs().max())
            assert (ours.grad - theirs.grad).abs().max() <= bound * largest


# --- A skipped step ------------------------------------------------------------------------------


@examples(20)
@given(data=st.data())
def test_a_step_that_the_scaler_skips_changes_the_scale_alone(data):
    """The overflow may come from the data (forward) or from the loss (backward)."""
    model = data.draw(models()).train()
    how = data.draw(st.one_of(st.none(), ways_to_recompute(model)))
    recipe = Recipe(
        amp="fp16",
        accumulate=data.draw(st.integers(1, 3)),
        clip_norm=data.draw(st.sampled_from([None, 1.0])),
        checkpoint=how,
    )
    name = data.draw(st.sampled_from(["momentum", "adamw"]))
    optimizer = build_optimizer(model, partial(make_optimizer, name, lr=0.01), recipe)
    scaler = make_scaler(recipe, CPU)
    x, labels = pictures(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "warnings.warn", lambda *_, **__: None
        )  # frozen that far: not the matter here
        for _ in range(data.draw(st.integers(0, 2))):
            train_step(model, (x, labels), classify, optimizer, recipe, scaler)
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        scale, factor = scaler.get_scale(), 1.0
        if data.draw(st.booleans()):
            x = x.clone()
            x[data.draw(st.integers(0, 5))] = torch.inf
        else:
            factor = 1e38
        result = train_step(
            model, (x, labels), lambda m, b: classify(m, b) * factor, optimizer, recipe, scaler
        )
    assert not result.stepped and scaler.get_scale() == scale / 2
    after = [model.state_dict(), optimizer.state_dict()["state"]]
    assert str(after) == str(before)
    for name, value in before[0].items():
        assert torch.equal(after[0][name], value), name
    for index, values in before[1].items():
        for key, value in values.items():
            assert value is None or torch.equal(after[1][index][key], value)
