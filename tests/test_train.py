"""The step against full batches, hand-written loops and torch's own optimizers."""

import copy
import itertools
import math
import sys
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.data import cats_vs_dogs
from helpers.models import vgg16
from helpers.train import (
    CATS_DOGS,
    COMMENTS,
    OPTIMIZERS,
    OptimizerInBackward,
    Recipe,
    batch_size,
    build_optimizer,
    check_recipe,
    choose_amp,
    evaluate,
    fingerprint,
    make_optimizer,
    make_scaler,
    measure_step,
    move_batch,
    optimizer_steps_per_epoch,
    roc_auc,
    roc_auc_by_group,
    roc_auc_interval,
    split_batch,
    train,
    train_step,
)

CPU = torch.device("cpu")


def small_net(dtype=torch.float32, dropout=0.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    return net.to(dtype)


def samples(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 6, generator=generator, dtype=dtype),
        torch.randint(3, (count,), generator=generator),
    )


def mean_loss(model, batch):
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def one_step(recipe, batch, *, model=None, optimizer="sgd", **options):
    model = model or small_net(batch[0].dtype)
    optimizer = build_optimizer(model, partial(make_optimizer, optimizer, lr=0.1), recipe)
    result = train_step(
        model,
        batch,
        options.pop("loss_fn", mean_loss),
        optimizer,
        recipe,
        make_scaler(recipe, CPU),
        **options,
    )
    return model, result


# --- Accumulation is the big batch -----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 23), pieces=st.integers(1, 30))
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_accumulated_gradients_are_the_full_batch_gradients(dtype, bound, count, pieces):
    batch = samples(count, dtype)
    judge = small_net(dtype)
    loss = mean_loss(judge, batch)
    loss.backward()
    model, result = one_step(Recipe(accumulate=pieces), batch)
    assert math.isclose(result.loss.item(), loss.item(), rel_tol=1e-5 if bound > 1e-9 else 1e-12)
    for ours, theirs in zip(gradients(model), gradients(judge), strict=True):
        assert (ours - theirs).abs().max() <= bound


def masked_loss(model, batch):
    """A mean over the labels that are not -100, as language models have it: not over samples."""
    x, labels = batch
    return F.cross_entropy(model(x), labels, ignore_index=-100)


@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_a_loss_that_does_not_average_over_samples_needs_its_own_count(pieces):
    x, labels = samples(11, torch.float64)
    labels[:4] = -100
    judge = small_net(torch.float64)
    masked_loss(judge, (x, labels)).backward()
    model, _ = one_step(
        Recipe(accumulate=pieces),
        (x, labels),
        loss_fn=masked_loss,  # NaN for a micro-batch without a label
        count=lambda b: (b[1] != -100).sum(),
    )
    for ours, theirs in zip(gradients(model), gradients(judge), strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_a_micro_batch_without_any_term_is_left_out():
    """Divided by hand, a mean over nothing has a gradient of NaN whatever weighs it afterwards."""

    def mean_of_kept(model, batch):
        x, kept = batch
        return (model(x).square().sum(dim=1) * kept).sum() / kept.sum()

    x, _ = samples(6, torch.float64)
    kept = torch.tensor([0, 0, 0, 1, 1, 0]).double()
    judge = small_net(torch.float64)
    mean_of_kept(judge, (x, kept)).backward()
    model, _ = one_step(
        Recipe(accumulate=3), (x, kept), loss_fn=mean_of_kept, count=lambda batch: batch[1].sum()
    )
    for ours, theirs in zip(gradients(model), gradients(judge), strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("pieces", [1, 2, 3, 10, 99])
def test_split_batch_loses_nothing_whatever_the_kind(pieces):
    x, labels = samples(10)
    for batch in [(x, labels), [x, labels], {"a": x, "b": labels}, x]:
        parts = split_batch(batch, pieces)
        assert len(parts) == min(pieces, 10)
        assert sum(batch_size(part) for part in parts) == 10
        sizes = [batch_size(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(type(part) is type(batch) for part in parts)


Sample = namedtuple("Sample", "x names")


def test_named_tuples_and_plain_values_are_split_along():
    x, names = torch.arange(7), list("abcdefg")
    parts = split_batch(Sample(x, names), 3)
    assert [part.names for part in parts] == [list("abc"), list("de"), list("fg")]
    assert [part.x.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    moved = move_batch(Sample(x, names), CPU)
    assert type(moved) is Sample and moved.names == names
    nested = split_batch({"a": (x, [x]), "names": tuple(names)}, 2)
    assert nested[1]["a"][1][0].tolist() == [4, 5, 6] and nested[1]["names"] == tuple("efg")


@pytest.mark.parametrize("other", [torch.ones(4, 4), torch.ones(()), [1, 2]])
def test_parts_of_different_lengths_are_not_split_at_random(other):
    with pytest.raises(ValueError, match="10 samples cannot be split"):
        split_batch({"x": torch.ones(10), "other": other}, 2)


def test_a_batch_of_an_unknown_kind_is_named():
    with pytest.raises(TypeError, match="found str"):
        split_batch(["ab", "cd"], 2)
    with pytest.raises(TypeError, match="found object"):
        split_batch({"x": torch.ones(4), "other": object()}, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_batch_of_nothing_is_an_error_and_not_nan(accumulate):
    model = small_net()
    for batch, count in [(samples(0), batch_size), (samples(4), lambda b: (b[1] < 0).sum())]:
        with pytest.raises(ValueError, match="no term to average over"):
            one_step(Recipe(accumulate=accumulate), batch, model=model, count=count)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# --- Mixed precision -------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 4])
def test_clipping_sees_true_gradients_under_the_scaler(accumulate):
    """Without unscaling first, the norm would be 65,536 times too large and the update far too
    small."""
    batch = samples(3)
    judge = small_net()
    mean_loss(judge, batch).backward()
    true_norm = nn.utils.clip_grad_norm_(judge.parameters(), 0.1)
    model, result = one_step(Recipe(amp="fp16", accumulate=accumulate, clip_norm=0.1), batch)
    assert result.stepped
    assert math.isclose(result.grad_norm.item(), true_norm.item(), rel_tol=0.02)
    for ours, theirs in zip(gradients(model), gradients(judge), strict=True):
        assert (ours - theirs).abs().max() < 0.005


def test_a_skipped_step_changes_nothing_but_the_scale():
    recipe = Recipe(amp="fp16", clip_norm=1.0)
    model = small_net()
    optimizer = build_optimizer(model, partial(make_optimizer, "adamw", lr=0.1), recipe)
    scaler = make_scaler(recipe, CPU)
    train_step(model, samples(4), mean_loss, optimizer, recipe, scaler)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))
    scale = scaler.get_scale()
    result = train_step(
        model, samples(4), lambda m, b: mean_loss(m, b) * 1e30, optimizer, recipe, scaler
    )
    assert not result.stepped
    assert scaler.get_scale() == scale / 2
    after = (list(model.parameters()), optimizer.state_dict()["state"])
    for old, new in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new)
    for index, state in before[1].items():
        for key, value in state.items():
            assert torch.equal(value, after[1][index][key])


def test_a_skipped_step_leaves_buffers_as_they_were():
    """The forward pass that overflowed has put NaN into BatchNorm's running statistics."""
    recipe = Recipe(amp="fp16", accumulate=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = build_optimizer(model, partial(make_optimizer, "sgd", lr=0.1), recipe)
    scaler = make_scaler(recipe, CPU)
    train_step(model, samples(8), mean_loss, optimizer, recipe, scaler)
    before = copy.deepcopy(model.state_dict())
    assert before["1.num_batches_tracked"] == 2
    x, labels = samples(8)
    x[0] = 1e30
    assert not train_step(model, (x, labels), mean_loss, optimizer, recipe, scaler).stepped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_fp16_without_its_scaler_is_refused():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="make_scaler"):
        train_step(model, samples(4), mean_loss, optimizer, Recipe(amp="fp16"))


def test_only_fp16_has_a_working_scaler():
    for amp, enabled in [("off", False), ("bf16", False), ("fp16", True)]:
        assert make_scaler(Recipe(amp=amp), CPU).is_enabled() is enabled


def test_autocast_covers_forward_and_loss_only():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", torch.is_autocast_enabled("cpu")))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(("backward", torch.is_autocast_enabled("cpu")))
            return grad

    one_step(Recipe(amp="bf16"), samples(4), loss_fn=lambda m, b: Spy.apply(mean_loss(m, b)))
    assert seen == [("forward", True), ("backward", False)]


def test_half_parameters_and_a_final_sigmoid_are_refused_under_amp():
    with pytest.raises(ValueError, match="0.weight is torch.float16"):
        check_recipe(Recipe(amp="fp16"), small_net(torch.float16))
    with pytest.raises(ValueError, match="return logits"):
        check_recipe(Recipe(amp="bf16"), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()))
    check_recipe(Recipe(), nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()))


@pytest.mark.parametrize(
    "capability, expected", [((6, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16")]
)
def test_bf16_only_where_the_card_computes_it(monkeypatch, capsys, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    assert choose_amp(torch.device("cuda")) == expected
    assert expected in capsys.readouterr().out


def test_a_large_wrong_logit_keeps_its_gradient_in_bfloat16():
    logits = torch.tensor([40.0, -40.0], dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        COMMENTS.criterion(logits, torch.tensor([0.0, 1.0])).backward()
    assert (logits.grad.abs() > 0.4).all()


# --- Recipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"amp": "float16"}, "off, fp16, bf16"),
        ({"accumulate": 0}, "1 or more"),
        ({"accumulate": 2.0}, "whole number"),
        ({"accumulate": True}, "whole number"),
        ({"clip_norm": 0}, "above 0"),
        ({"clip_norm": float("nan")}, "above 0"),
        ({"optimizer_in_backward": True, "accumulate": 2}, "accumulate=2 exclude"),
        ({"optimizer_in_backward": True, "clip_norm": 1.0}, "clip_norm=1.0 exclude"),
        ({"optimizer_in_backward": True, "amp": "fp16"}, "amp='fp16' exclude"),
    ],
)
def test_recipes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**arguments)


def test_recipes_have_names():
    assert Recipe().name == "plain"
    assert (
        Recipe(amp="bf16", accumulate=4, checkpoint="pools").name
        == "bf16 + accumulate 4 + checkpoint pools"
    )


def test_everything_frozen_is_refused():
    model = small_net().requires_grad_(False)
    with pytest.raises(ValueError, match="unfreeze"):
        check_recipe(Recipe(), model)


def test_a_loss_without_gradients_is_explained():
    for loss_fn in (
        lambda m, b: mean_loss(m, b).detach(),
        lambda m, b: torch.zeros((), requires_grad=True) * 1,
    ):
        with pytest.raises(RuntimeError, match="no gradients reached the optimizer"):
            one_step(Recipe(), samples(4), loss_fn=loss_fn)


def test_a_changed_recomputation_is_explained():
    class Moody(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            Moody.calls += 1
            return self.linear(x).exp().sin() if Moody.calls == 1 else self.linear(x)

    model = nn.Sequential(Moody(), nn.Linear(6, 3))
    with pytest.raises(RuntimeError, match="did not repeat its forward pass"):
        one_step(Recipe(checkpoint=((0, 1),)), samples(4), model=model)


# --- Optimizers ------------------------------------------------------------------------------


def train_some_steps(recipe, optimizer_name, model=None, steps=4, schedule=False):
    model = model or small_net(dropout=0.3)
    optimizer = build_optimizer(model, partial(make_optimizer, optimizer_name, lr=0.05), recipe)
    scheduler = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) if schedule else None
    )
    torch.manual_seed(3)
    for step in range(steps):
        train_step(model, samples(8, seed=step), mean_loss, optimizer, recipe)
        if scheduler:
            scheduler.step()
    return model, optimizer


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "adamw-8bit"])  # needs a GPU
@pytest.mark.parametrize("schedule", [False, True])
def test_the_optimizer_in_the_backward_pass_makes_the_same_updates(name, schedule):
    plain, _ = train_some_steps(Recipe(), name, schedule=schedule)
    fused, _ = train_some_steps(Recipe(optimizer_in_backward=True), name, schedule=schedule)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(parameter.grad is None for parameter in fused.parameters())


def test_8_bit_adam_says_what_it_lacks(monkeypatch):
    here = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="CUDA GPUs only, and the model is on .*cpu.*adafactor"):
        make_optimizer("adamw-8bit", here, lr=0.1)

    class Elsewhere:
        device = torch.device("cuda")

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match="needs the package bitsandbytes"):
        make_optimizer("adamw-8bit", [Elsewhere()], lr=0.1)


def test_the_optimizer_in_the_backward_pass_goes_on_from_its_state():
    recipe = Recipe(optimizer_in_backward=True)
    model, optimizer = train_some_steps(recipe, "adamw", steps=2)
    loaded = small_net(dropout=0.3)
    loaded.load_state_dict(model.state_dict())
    fresh = build_optimizer(loaded, partial(make_optimizer, "adamw", lr=0.05), recipe)
    assert isinstance(fresh, OptimizerInBackward)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, its_optimizer in ((model, optimizer), (loaded, fresh)):
        torch.manual_seed(7)
        train_step(net, samples(8), mean_loss, its_optimizer, recipe)
    for a, b in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_unknown_optimizers_are_refused_with_the_list():
    with pytest.raises(ValueError, match="adamw-fused"):
        make_optimizer("lion", small_net().parameters(), lr=0.1)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(offload=True),
        Recipe(set_to_none=False),
        Recipe(checkpoint=2),
        Recipe(checkpoint="layers"),
    ],
    ids=lambda recipe: recipe.name,
)
def test_levers_that_change_memory_only(recipe):
    plain, _ = train_some_steps(Recipe(), "momentum")
    other, _ = train_some_steps(recipe, "momentum")
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_autocast_cache_changes_memory_only():
    plain, _ = train_some_steps(Recipe(amp="bf16"), "momentum")
    other, _ = train_some_steps(Recipe(amp="bf16", amp_cache=False), "momentum")
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


# --- Evaluation and training -----------------------------------------------------------------


def loader(count=20, size=8, shuffle=False):
    return DataLoader(TensorDataset(*samples(count)), batch_size=size, shuffle=shuffle)


def test_evaluate_is_the_mean_over_samples_and_restores_the_mode():
    model = small_net(dropout=0.5).train()
    result = evaluate(model, loader(21), CATS_DOGS)
    assert model.training
    x, labels = samples(21)
    with torch.no_grad():
        logits = model.eval()(x)
    assert math.isclose(result.loss, F.cross_entropy(logits, labels).item(), rel_tol=1e-5)
    assert result.score == (logits.argmax(1) == labels).double().mean().item()
    assert result.logits.grad_fn is None


def test_evaluate_and_train_refuse_an_empty_loader():
    with pytest.raises(ValueError, match="no batch"):
        evaluate(small_net(), [], CATS_DOGS)
    model = small_net()
    with pytest.raises(ValueError, match="no batch"):
        train(model, [], None, CATS_DOGS, torch.optim.SGD(model.parameters(), lr=0.1), epochs=1)


def test_logits_that_are_nan_have_no_score():
    """Their largest would be the first class: half right by chance, and wrong in silence."""
    model = small_net()
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    with pytest.raises(FloatingPointError, match="4 of 4 samples have a logit that is NaN"):
        evaluate(model, [samples(4)], CATS_DOGS)


def test_roc_auc_of_one_class_is_unknown():
    assert roc_auc(torch.tensor([0.1, 0.3]), torch.tensor([1.0, 1.0])) is None
    assert roc_auc(torch.tensor([0.1, 0.3]), torch.tensor([0.0, 1.0])) == 1.0


def scored_comments(count=300, seed=0):
    """Logits that tell something about the labels, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 0.3).float()
    return torch.round(4 * (torch.randn(count, generator=generator) + labels)) / 4, labels


def test_the_interval_of_roc_auc_is_that_of_a_plain_bootstrap():
    logits, labels = scored_comments()
    rng = np.random.default_rng(1)
    toxic, other = logits[labels > 0.5].numpy(), logits[labels < 0.5].numpy()
    truth = np.repeat([1, 0], [len(toxic), len(other)])
    areas = [
        roc_auc_score(truth, np.concatenate([rng.choice(toxic, len(toxic)),
                                             rng.choice(other, len(other))]))
        for _ in range(500)
    ]  # fmt: skip
    low, high = roc_auc_interval(logits, labels)
    assert [low, high] == pytest.approx(np.quantile(areas, [0.025, 0.975]), abs=0.01)
    narrow = roc_auc_interval(logits, labels, level=0.5)
    assert low < narrow[0] < roc_auc(logits, labels) < narrow[1] < high


def test_the_interval_of_roc_auc_is_fixed_by_its_seed_and_uses_no_other_random_numbers():
    logits, labels = scored_comments()
    state = torch.get_rng_state()
    assert roc_auc_interval(logits, labels, seed=3) == roc_auc_interval(logits, labels, seed=3)
    assert roc_auc_interval(logits, labels, seed=3) != roc_auc_interval(logits, labels, seed=4)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_interval_of_roc_auc_at_its_ends():
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert roc_auc_interval(torch.arange(4.0), labels) == (1.0, 1.0)
    assert roc_auc_interval(torch.zeros(4), labels) == (0.5, 0.5)
    assert roc_auc_interval(torch.arange(4.0), torch.ones(4)) is None


def test_roc_auc_by_language_names_the_language_that_has_one_class():
    logits, labels = scored_comments()
    languages = ["tr", "es", "it"] * 100
    labels[2::3] = 0
    everything, spanish, italian, turkish = roc_auc_by_group(logits, labels, languages)
    assert everything.group == "all" and everything.count == 300
    assert everything.score == roc_auc(logits, labels)
    assert spanish.score == roc_auc(logits[1::3], labels[1::3])
    assert spanish[3:] == roc_auc_interval(logits[1::3], labels[1::3])
    assert italian == ("it", 100, None, None, None)
    assert turkish.count == 100 and turkish.low < turkish.score < turkish.high
    with pytest.raises(ValueError, match="2 groups for 300 samples"):
        roc_auc_by_group(logits, labels, ["en", "fr"])


def test_training_is_the_shortest_hand_written_loop():
    model = small_net(dropout=0.2)
    judge = copy.deepcopy(model)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = train(
        model, loader(shuffle=True), None, CATS_DOGS, optimizer, epochs=3, evaluate_train=False
    )
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    for result in results:
        total = 0.0
        for x, labels in loader(shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(judge(x), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        assert math.isclose(result.train_loss, total / 20, rel_tol=1e-6)
    for a, b in zip(model.parameters(), judge.parameters(), strict=True):
        assert torch.equal(a, b)


def test_scoring_changes_nothing_of_the_training():
    """Neither the order of the pictures, nor how they are cropped, nor dropout."""
    ends = []
    for scored in (True, False):
        data = cats_vs_dogs(image_size=32, batch_size=8, train_limit=24, val_limit=8, seed=3)
        torch.manual_seed(5)
        model = vgg16(width=0.0625)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        val_loader = data.val if scored else None
        log = train(
            model, data.train, val_loader, CATS_DOGS, optimizer, epochs=3, evaluate_train=scored
        )
        ends.append(fingerprint(model, torch.tensor([epoch.train_loss for epoch in log])))
    assert ends[0] == ends[1]


def test_every_epoch_has_its_typed_result():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = train(model, loader(), loader(12), CATS_DOGS, optimizer, epochs=2)
    assert [result.epoch for result in results] == [1, 2]
    for result in results:
        assert all(
            isinstance(value, float)
            for value in (result.train_loss, result.val_loss, result.seconds)
        )
        assert 0 <= result.train_score <= 1 and 0 <= result.val_score <= 1
        assert result.steps == optimizer_steps_per_epoch(loader()) == 3
        assert result.peak_source == "cpu-live-tensors" and result.peak_mib > 0
        assert result.reserved_mib is None and result.device_used_mib is None


def test_the_reported_loss_does_not_depend_on_accumulation():
    def losses(recipe):
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [
            r.train_loss
            for r in train(model, loader(), None, CATS_DOGS, optimizer, epochs=2, recipe=recipe)
        ]

    for plain, accumulated in zip(losses(Recipe()), losses(Recipe(accumulate=3)), strict=True):
        assert math.isclose(plain, accumulated, rel_tol=1e-5)


def test_the_scheduler_moves_once_an_optimizer_step():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(
        model,
        loader(),
        None,
        CATS_DOGS,
        optimizer,
        epochs=2,
        recipe=Recipe(accumulate=4),
        scheduler=scheduler,
    )
    assert scheduler.last_epoch == 2 * optimizer_steps_per_epoch(loader()) == 6


def test_a_loss_that_stays_infinite_under_fp16_stops_with_advice():
    task = copy.copy(CATS_DOGS)
    object.__setattr__(
        task, "criterion", lambda logits, labels: F.cross_entropy(logits, labels) * float("nan")
    )
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(FloatingPointError, match="GTX 16xx"):
        train(
            model,
            loader(99, 1),
            None,
            task,
            optimizer,
            epochs=1,
            recipe=Recipe(amp="fp16"),
            scheduler=scheduler,
        )
    assert scheduler.last_epoch == 0
    with pytest.raises(FloatingPointError, match="became nan"):
        train(model, loader(), None, task, optimizer, epochs=1)


def test_weights_of_the_last_and_best_epoch_are_kept(tmp_path, monkeypatch):
    scores = itertools.cycle([0.5, 0.9, 0.7, 0.6])
    task = copy.copy(CATS_DOGS)
    object.__setattr__(task, "score", lambda logits, labels: next(scores))
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(
        model,
        loader(),
        loader(),
        task,
        optimizer,
        epochs=4,
        evaluate_train=False,
        save_dir=tmp_path,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch_2.pt",
        "epoch_4.pt",
        "snapshot.pt",
    ]
    weights = torch.load(tmp_path / "epoch_4.pt", weights_only=True)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    with pytest.raises(FileExistsError, match="epoch_2.pt"):
        train(model, loader(), None, task, optimizer, epochs=1, save_dir=tmp_path)


# --- The measured step -----------------------------------------------------------------------


def vgg_batch(count, pixels):
    return torch.randn(
        count, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)
    ), torch.arange(count) % 2


def test_a_measured_step_tells_memory_time_and_identity():
    arguments = (
        partial(vgg16, 2, 0.1),
        partial(vgg_batch, 48, 48),
        CATS_DOGS.loss,
    )
    optimizer_fn = partial(make_optimizer, "momentum", lr=0.01)
    plain = measure_step(*arguments, Recipe(), optimizer_fn, repeats=1)
    pools = measure_step(*arguments, Recipe(checkpoint="pools"), optimizer_fn, repeats=0)
    pieces = measure_step(*arguments, Recipe(accumulate=4), optimizer_fn, repeats=0)
    assert plain.peak_source == "cpu-live-tensors"
    assert plain.reserved_mib is None and "reserved_bytes" in plain.notes
    assert pools.fingerprint == plain.fingerprint != pieces.fingerprint
    assert pools.peak_mib < plain.peak_mib and pieces.peak_mib < plain.peak_mib
    assert len(plain.timing.samples) == 1 and pools.timing is None


def test_skipped_steps_are_not_measured_as_training():
    def steep(model, batch):
        return 1000 * mean_loss(model, batch)  # overflows at the scaler's first scale

    result = measure_step(
        small_net,
        partial(samples, 4),
        steep,
        Recipe(amp="fp16"),
        partial(make_optimizer, "momentum", lr=1e-9),
        steps=2,
        repeats=0,
    )
    assert result.split["optimizer"] > 0
    assert math.isfinite(result.loss)


def test_a_step_that_runs_out_of_memory_comes_back_with_the_reason():
    def full(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    result = measure_step(
        small_net, partial(samples, 4), full, Recipe(), partial(make_optimizer, "sgd", lr=0.1)
    )
    assert result.failed == "CUDA out of memory" and result.peak_mib is None

    def wrong(model, batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        measure_step(
            small_net, partial(samples, 4), wrong, Recipe(), partial(make_optimizer, "sgd", lr=0.1)
        )


# --- Two processes ---------------------------------------------------------------------------


def ddp_worker(rank, world, port_file, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=world)
    counts = []
    for recipe in (Recipe(), Recipe(accumulate=3), Recipe(accumulate=3, checkpoint=((0, 2),))):
        model = nn.parallel.DistributedDataParallel(small_net(torch.float64))
        calls = []

        def hook(state, bucket, calls=calls):
            calls.append(1)
            return (
                dist.all_reduce(bucket.buffer(), async_op=True)
                .get_future()
                .then(lambda f: f.value()[0] / world)
            )

        model.register_comm_hook(None, hook)
        optimizer = build_optimizer(model, partial(make_optimizer, "momentum", lr=0.1), recipe)
        x, labels = samples(13, torch.float64)
        mine = slice(0, 8) if rank == 0 else slice(8, 13)  # an uneven share each
        for _ in range(3):
            calls.clear()
            train_step(model, (x[mine], labels[mine]), mean_loss, optimizer, recipe)
        counts.append(len(calls))
        torch.save(model.module.state_dict(), f"{out}_{rank}_{len(counts)}.pt")
    torch.save(counts, f"{out}_{rank}_counts.pt")
    dist.destroy_process_group()


def test_two_processes_make_the_single_process_step(tmp_path):
    mp.spawn(ddp_worker, args=(2, tmp_path / "rendezvous", tmp_path / "rank"), nprocs=2)
    judge = small_net(torch.float64)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(judge, samples(13, torch.float64)).backward()
        optimizer.step()
    for variant, rank in itertools.product((1, 2, 3), (0, 1)):
        weights = torch.load(tmp_path / f"rank_{rank}_{variant}.pt", weights_only=True)
        for key, value in judge.state_dict().items():
            assert (weights[key] - value).abs().max() < 1e-12
    for rank in (0, 1):  # one bucket: one all-reduce a step, however many micro-batches
        assert torch.load(tmp_path / f"rank_{rank}_counts.pt", weights_only=True) == [1, 1, 1]
