"""Every lever on the small XLM-R: it leaves the result as it is, or as far as is stated; it really
trains on the CPU with less memory, as much as predicted; or it lowers what a GPU would need."""

import copy
import warnings
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from transformers import XLMRobertaForSequenceClassification

from helpers.catalogue import find_workload
from helpers.data import ByLength, PadComments, comment_texts, jigsaw
from helpers.distributed import ShardedBatches
from helpers.memory import MIB, measure
from helpers.models import SplitByCompiler, freeze, train_tokenizer, vgg16, xlmr, xlmr_config
from helpers.predict import predict, predict_workload
from helpers.train import (
    CATS_DOGS,
    COMMENTS,
    Recipe,
    build_optimizer,
    fingerprint,
    idle_switches,
    make_optimizer,
    make_scaler,
    measure_step,
    train,
    train_step,
)

CPU = torch.device("cpu")
WORD_EMBEDDINGS = "roberta.embeddings.word_embeddings"


def small_xlmr(frozen=None, dtype=None, attention=None, dropout=0.1):
    off = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    config = xlmr_config("small", **off)
    if attention:
        config._attn_implementation = attention
    model = XLMRobertaForSequenceClassification(config)
    if dtype:
        model.to(dtype)
    if frozen:
        freeze(model, frozen)
    return model


def comments(count, longest, padded_to=None):
    """Random comments, each a few tokens shorter than the one before."""
    dice = torch.Generator().manual_seed(1)
    lengths = [max(3, longest - row * longest // (2 * count)) for row in range(count)]
    items = [
        (torch.randint(5, 4_000, (length,), generator=dice), torch.tensor(float(row % 2)))
        for row, length in enumerate(lengths)
    ]
    return PadComments(1, multiple_of=padded_to or 8)(items)


# Where activations are most of the peak, and where weights, gradients and state are.
MANY_TOKENS = partial(comments, 8, 64)
FEW_TOKENS = partial(comments, 2, 8)


@dataclass(frozen=True)
class Case:
    """A recipe for the small XLM-R; `less` names the case whose peak is higher."""

    recipe: Recipe = Recipe()
    optimizer: str = "adamw"
    batch_fn: partial = MANY_TOKENS
    model_fn: partial = small_xlmr
    less: str | None = None
    same_bits: bool = False  # as that case, random numbers and gradients included

    def arguments(self):
        optimizer_fn = partial(make_optimizer, self.optimizer, lr=1e-3)
        return self.model_fn, self.batch_fn, COMMENTS.loss, self.recipe, optimizer_fn


LAYERS = Recipe(checkpoint="layers")
FROZEN = partial(small_xlmr, WORD_EMBEDDINGS)
CASES = {
    "plain": Case(),
    "layers": Case(LAYERS, less="plain", same_bits=True),
    "every second layer": Case(Recipe(checkpoint="layers/2"), less="plain", same_bits=True),
    "selective": Case(Recipe(checkpoint="selective"), less="plain", same_bits=True),
    "accumulation": Case(Recipe(accumulate=4), less="plain"),
    "bf16": Case(Recipe(amp="bf16"), less="plain"),
    "fp16": Case(Recipe(amp="fp16"), less="plain"),
    "bf16, layers": Case(replace(LAYERS, amp="bf16"), less="layers"),
    "bf16, layers, no cache": Case(replace(LAYERS, amp="bf16", amp_cache=False), less="layers"),
    "padded to the limit": Case(batch_fn=partial(comments, 8, 64, 96)),
    "dynamic padding": Case(less="padded to the limit"),
    "few tokens": Case(batch_fn=FEW_TOKENS),
    "fused": Case(optimizer="adamw-fused", batch_fn=FEW_TOKENS),
    "frozen": Case(model_fn=FROZEN, batch_fn=FEW_TOKENS, less="few tokens"),
    "adafactor": Case(optimizer="adafactor", batch_fn=FEW_TOKENS, less="few tokens"),
    "sgd": Case(optimizer="sgd", batch_fn=FEW_TOKENS, less="adafactor"),
    "in backward": Case(Recipe(optimizer_in_backward=True), batch_fn=FEW_TOKENS, less="few tokens"),
    "adafactor in backward": Case(
        Recipe(optimizer_in_backward=True), "adafactor", FEW_TOKENS, less="adafactor"
    ),
    "pure bf16": Case(
        model_fn=partial(small_xlmr, dtype=torch.bfloat16), batch_fn=FEW_TOKENS, less="few tokens"
    ),
    "all that is exact": Case(
        replace(LAYERS, optimizer_in_backward=True), "adafactor", model_fn=FROZEN, less="layers"
    ),
    "eager attention": Case(model_fn=partial(small_xlmr, attention="eager")),
    "offload": Case(Recipe(offload=True)),
}


@cache
def measured(name):
    return measure_step(*CASES[name].arguments(), steps=2, repeats=0, device="cpu")


@pytest.mark.parametrize("name", CASES)
def test_it_trains_for_real_and_takes_what_was_predicted(name):
    predicted = predict(*CASES[name].arguments(), device="cpu")
    assert measured(name).peak_mib == predicted.peak_mib
    assert measured(name).split == predicted.split
    assert measured(name).loss == pytest.approx(0.69, abs=0.2)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.less])
def test_it_takes_less_than_without(name):
    without = measured(CASES[name].less)
    assert measured(name).peak_mib < 0.97 * without.peak_mib
    if CASES[name].same_bits:
        assert measured(name).fingerprint == without.fingerprint


def test_what_only_a_gpu_can_show_keeps_the_bits_on_a_cpu():
    assert measured("offload").fingerprint == measured("plain").fingerprint
    with_cache, without = measured("bf16, layers"), measured("bf16, layers, no cache")
    assert with_cache.fingerprint == without.fingerprint


# --- Results: gradients and updates ----------------------------------------------------------


def gradients_of(batch, recipe=Recipe(), seed=0, **model_options):
    """Gradients of one step without dropout, by name."""
    torch.manual_seed(seed)
    model = small_xlmr(dropout=0.0, **model_options).train()
    optimizer = build_optimizer(model, partial(make_optimizer, "sgd", lr=0.0), recipe)
    train_step(model, batch, COMMENTS.loss, optimizer, recipe, make_scaler(recipe, CPU))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(ours, theirs):
    """Norm of the difference over the norm of the second, all gradients together."""
    assert ours.keys() == theirs.keys()
    both = [torch.cat([g[name].float().flatten() for name in theirs]) for g in (ours, theirs)]
    return float((both[0] - both[1]).norm() / both[1].norm())


@pytest.mark.parametrize(
    "lever, bound",
    [
        (dict(recipe=Recipe(accumulate=3)), 1e-6),
        (dict(attention="eager"), 1e-5),
        (dict(recipe=Recipe(amp="fp16")), 0.01),
        (dict(recipe=Recipe(amp="bf16")), 0.05),
        (dict(dtype=torch.bfloat16), 0.05),
    ],
    ids=str,
)
def test_gradients_differ_by_no_more_than_rounding(lever, bound):
    plain = gradients_of(MANY_TOKENS())
    assert 0 < distance(gradients_of(MANY_TOKENS(), **lever), plain) < bound


def test_padding_does_not_reach_the_gradients():
    shorter, longer = MANY_TOKENS(), MANY_TOKENS(96)
    assert longer["input_ids"].numel() > shorter["input_ids"].numel()
    assert distance(gradients_of(longer), gradients_of(shorter)) < 1e-6


def test_frozen_embeddings_leave_all_other_gradients_as_they_are():
    plain, frozen = gradients_of(MANY_TOKENS()), gradients_of(MANY_TOKENS(), frozen=WORD_EMBEDDINGS)
    assert set(plain) - set(frozen) == {f"{WORD_EMBEDDINGS}.weight"}
    assert all(torch.equal(plain[name], gradient) for name, gradient in frozen.items())


def weights_after(optimizer_name, recipe=Recipe(), steps=3):
    """All weights after some steps of training with dropout, by name."""
    torch.manual_seed(0)
    model = small_xlmr().train()
    optimizer_fn = partial(make_optimizer, optimizer_name, lr=1e-3)
    optimizer = build_optimizer(model, optimizer_fn, recipe)
    for _ in range(steps):
        train_step(model, FEW_TOKENS(), COMMENTS.loss, optimizer, recipe)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kernel", [dict(foreach=False), dict(foreach=True), dict(fused=True)])
def test_adamws_kernels_make_the_same_updates_from_the_same_gradients(kernel):
    """Given to each alike: where a gradient is nothing but rounding, AdamW would enlarge it."""
    torch.manual_seed(0)
    plain = small_xlmr()
    other = copy.deepcopy(plain)
    optimizers = [
        make_optimizer("adamw", plain.parameters(), lr=1e-3),
        make_optimizer("adamw", other.parameters(), lr=1e-3, **kernel),
    ]
    for _ in range(3):
        for ours, theirs in zip(plain.parameters(), other.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(plain.parameters(), other.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_the_step_in_the_backward_pass_makes_the_same_updates(optimizer):
    plain = weights_after(optimizer)
    early = weights_after(optimizer, Recipe(optimizer_in_backward=True))
    assert all(torch.equal(plain[name], weight) for name, weight in early.items())


def root_mean_square(tensor):
    return tensor.detach().square().mean().sqrt().item()


def test_adafactor_moves_no_weight_matrix_by_more_than_its_share():
    """It is another optimizer: its update is no AdamW's, but is bounded by the weight's own size
    (Shazeer and Stern, 2018, sections 6 and 8), and its state is a row and a column a matrix."""
    torch.manual_seed(0)
    model = small_xlmr()
    optimizer = make_optimizer("adafactor", model.parameters(), lr=0.01)
    for _ in range(3):
        before = copy.deepcopy(model)
        train_step(model, FEW_TOKENS(), COMMENTS.loss, optimizer)
        for old, new in zip(before.parameters(), model.parameters(), strict=True):
            bound = 0.01 * max(1e-3, root_mean_square(old))
            assert root_mean_square(new - old) <= 1.001 * bound + 1e-9
    for weight, state in optimizer.state.items():
        size = sum(value.numel() for value in state.values())
        assert size <= (sum(weight.shape) if weight.dim() > 1 else weight.numel()) + 1


def test_sgd_moves_along_the_gradient_and_remembers_nothing():
    torch.manual_seed(0)
    model = small_xlmr()
    before = copy.deepcopy(model)
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.1)
    train_step(model, FEW_TOKENS(), COMMENTS.loss, optimizer)
    assert not optimizer.state_dict()["state"]
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.1 * new.grad)


def test_pure_bf16_loses_every_update_below_half_a_step_of_its_numbers():
    """bfloat16 has 8 bits of precision: between 1 and 2 its numbers are 2**-7 apart."""
    torch.manual_seed(0)
    model = small_xlmr(dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    optimizer = make_optimizer("sgd", model.parameters(), lr=1e-3)
    train_step(model, FEW_TOKENS(), COMMENTS.loss, optimizer)
    lost = 0
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        # Below a power of two the numbers are twice as dense: 2**-9 is safe for all of them.
        too_small = (1e-3 * new.grad.float()).abs() < 0.99 * 2**-9 * old.float().abs()
        assert torch.equal(new[too_small], old[too_small])
        lost += int((too_small & (new.grad != 0)).sum())
    assert lost > 100_000


def test_chunks_of_the_batch_make_the_same_updates_with_less():
    """For a model without dropout and BatchNorm in the range, such as VGG16's convolutions."""
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 64, 64), torch.arange(8) % 2
    batch_fn = lambda: (images, labels)  # noqa: E731
    model_fn, sgd = partial(vgg16, width=0.125), partial(make_optimizer, "sgd", lr=0.01)
    cut, in_chunks = (Recipe(checkpoint=(piece,)) for piece in ((0, 10), (0, 10, 4)))
    peaks, gradients = {}, {}
    for recipe in (Recipe(), cut, in_chunks):
        arguments = (model_fn, batch_fn, CATS_DOGS.loss, recipe, sgd)
        peaks[recipe] = measure_step(*arguments, steps=2, repeats=0, device="cpu").peak_mib
        assert predict(*arguments, device="cpu").peak_mib == peaks[recipe]
        torch.manual_seed(3)
        model = model_fn()
        train_step(model, batch_fn(), CATS_DOGS.loss, sgd(model.parameters()), recipe)
        gradients[recipe] = {name: p.grad for name, p in model.named_parameters()}
    assert peaks[in_chunks] < 0.9 * peaks[cut] < 0.9 * peaks[Recipe()]
    assert distance(gradients[in_chunks], gradients[Recipe()]) < 1e-6


# --- What a GPU would need -------------------------------------------------------------------


IN_BACKWARD = replace(LAYERS, optimizer_in_backward=True)


@cache
def large(recipe, optimizer, count=32, attention=None, freeze=None):
    """XLM-R Large on 192 tokens, predicted for CUDA."""
    workload = find_workload(
        "xlm-roberta-large", num_labels=1, seq_len=192, attention=attention, freeze=freeze
    )
    return predict_workload(workload, count, recipe, optimizer)


def test_kernels_lower_the_predicted_peak_of_xlm_r_large():
    foreach, forloop, fused = (
        large(LAYERS, name).peak_mib for name in ("adamw", "adamw-forloop", "adamw-fused")
    )
    assert fused < 0.85 * forloop < 0.85 * foreach


def test_frozen_embeddings_and_adafactor_in_backward_lower_it():
    everything = large(IN_BACKWARD, "adafactor")
    frozen = large(IN_BACKWARD, "adafactor", freeze=WORD_EMBEDDINGS)
    assert everything.reserved_mib <= 5_400 and frozen.reserved_mib <= 3_450
    assert frozen.peak_mib < everything.peak_mib


def test_offload_lowers_it_and_says_what_the_host_holds():
    here, away = large(Recipe(), "sgd", 16), large(Recipe(offload=True), "sgd", 16)
    assert here.host == 0 and away.host > 1000 * MIB
    assert away.peak_mib < 0.8 * here.peak_mib


def test_eager_attention_raises_it():
    fused, eager = large(Recipe(), "sgd", 16), large(Recipe(), "sgd", 16, attention="eager")
    scores = 24 * 16 * 16 * 192 * 192 * 4  # layers, comments, heads, tokens, tokens, bytes
    assert eager.peak_allocated - fused.peak_allocated > scores


def test_expandable_segments_lower_what_is_reserved():
    prediction = large(IN_BACKWARD, "adafactor")
    expanded = prediction.replay(expandable_segments=True)
    assert prediction.peak_allocated <= expanded.peak_reserved < 0.9 * prediction.peak_reserved


@pytest.mark.parametrize("how", [None, "layers"])
def test_both_half_precisions_take_the_same_memory(how):
    """So a table may give them one line; fp16's scaler holds a few single numbers."""
    fp16, bf16 = (
        predict(*Case(Recipe(amp=amp, checkpoint=how)).arguments()) for amp in ("fp16", "bf16")
    )
    assert 0 <= fp16.peak_allocated - bf16.peak_allocated <= 8 * 512
    assert fp16.peak_reserved == bf16.peak_reserved


# --- Freezing --------------------------------------------------------------------------------


def test_what_is_frozen_by_name():
    model = small_xlmr()
    table = model.roberta.embeddings.word_embeddings.weight
    assert freeze(model, WORD_EMBEDDINGS) == table.numel()
    assert [p is table for p in model.parameters() if not p.requires_grad] == [True]
    assert freeze(model, "roberta.encoder.layer.*", f"{WORD_EMBEDDINGS}.weight") > table.numel()
    assert not any(p.requires_grad for p in model.roberta.encoder.parameters())
    assert all(p.requires_grad for p in model.classifier.parameters())
    optimizer = build_optimizer(model, partial(make_optimizer, "adamw", lr=1e-3), Recipe())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }


@pytest.mark.parametrize(
    "names, message",
    [
        (["embeddings.word_embeddings"], "matches no parameter.*roberta.embeddings.word_embeddi"),
        (["roberta.embedding"], "matches no parameter"),  # no part of a name
        ([""], "matches no parameter"),
        (["*"], "no parameter of the model requires a gradient then; leave"),
        (["roberta", "classifier"], "no parameter of the model requires a gradient then"),
    ],
)
def test_names_that_freeze_nothing_or_everything_are_refused(names, message):
    model = small_xlmr()
    with pytest.raises(ValueError, match=message):
        freeze(model, *names)
    assert all(p.requires_grad for p in model.parameters())


def test_a_workload_and_a_model_are_frozen_by_the_same_name():
    workload = find_workload("xlm-roberta-base", num_labels=1, freeze=WORD_EMBEDDINGS)
    with torch.device("meta"):
        model = workload.model_fn()
        ours = XLMRobertaForSequenceClassification(xlmr_config("base"))
    freeze(ours, WORD_EMBEDDINGS)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        n for n, p in ours.named_parameters() if not p.requires_grad
    }


# --- Attention -------------------------------------------------------------------------------


def test_attention_is_chosen_by_name():
    assert xlmr("tiny").model.config._attn_implementation == "sdpa"  # what transformers takes
    for attention in ("sdpa", "eager"):
        model = xlmr("tiny", attention=attention).model
        assert model.config._attn_implementation == attention
    for call in (partial(xlmr, "tiny"), partial(find_workload, "xlm-roberta-base")):
        with pytest.raises(ValueError, match="attention='flash': expected one of sdpa, eager"):
            call(attention="flash")


def test_a_saved_model_takes_the_attention_that_is_asked_for(tmp_path):
    parts = xlmr("tiny", texts=["some words", "and other words"])
    parts.model.save_pretrained(tmp_path)
    parts.tokenizer.save_pretrained(tmp_path)
    loaded = xlmr(tmp_path, attention="eager").model
    assert loaded.config._attn_implementation == "eager"
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([[0, 5, 6, 2]])}
        torch.testing.assert_close(
            loaded.eval()(**inputs).logits, parts.model.eval()(**inputs).logits
        )


# --- Batches of one length -------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1_000])
def test_every_comment_comes_once_an_epoch_and_the_short_batch_last(count):
    lengths = torch.randint(3, 200, (count,), generator=torch.Generator().manual_seed(0))
    order = ByLength(lengths, 32, torch.Generator().manual_seed(5))
    first, second = list(order), list(order)
    assert len(order) == count
    assert sorted(first) == sorted(second) == list(range(count))
    assert count in (1, 32) or first != second  # one sorted batch is always the same
    again = ByLength(lengths, 32, torch.Generator().manual_seed(5))
    assert list(again) == first and list(again) == second


def test_batches_of_one_length_waste_less_and_come_in_any_order():
    lengths = torch.randint(3, 200, (2_000,), generator=torch.Generator().manual_seed(0))

    def longest(order):
        return [int(lengths[batch].max()) for batch in torch.tensor(order).split(32)]

    order = list(ByLength(lengths, 32, torch.Generator().manual_seed(5)))
    shuffled = torch.randperm(2_000, generator=torch.Generator().manual_seed(5)).tolist()
    assert sum(longest(order)) < 0.7 * sum(longest(shuffled))
    assert max(longest(order)) == max(longest(shuffled))  # the longest comment needs its width
    widths = longest(order)[:-1]
    steps = [b - a for a, b in zip(widths, widths[1:], strict=False)]
    assert min(steps) < 0 < max(steps)  # neither ascending nor descending


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(comment_texts(limit=400))


def by_length(tokenizer, limit=90, **options):
    options = dict(batch_size=16, seed=2, train_limit=limit, val_limit=1) | options
    return jigsaw(tokenizer=tokenizer, **options)


def test_the_samples_batches_need_fewer_tokens_and_hold_the_same_comments(tokenizer):
    tokens, widest, held = {}, {}, {}
    for sort in (False, True):
        batches = list(by_length(tokenizer, 600, by_length=sort).train)
        tokens[sort] = sum(batch["input_ids"].numel() for batch in batches)
        widest[sort] = max(batch["input_ids"].shape[1] for batch in batches)
        held[sort] = sorted(
            (row[kept.bool()].tolist(), label.item())
            for batch in batches
            for row, kept, label in zip(*batch.values(), strict=True)
        )
        assert [len(batch["labels"]) for batch in batches] == 37 * [16] + [8]
    assert tokens[True] < 0.75 * tokens[False]
    assert widest[True] == widest[False]
    assert held[True] == held[False] and len(held[True]) == 600


def test_processes_share_the_batches_of_one_length(tokenizer):
    whole = list(by_length(tokenizer, by_length=True).train.batch_sampler)
    shares = [
        list(ShardedBatches(by_length(tokenizer, by_length=True).train.batch_sampler, rank, 2))
        for rank in range(2)
    ]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(b) for b in whole]


def test_a_stopped_run_goes_on_with_the_same_batches_of_one_length(tokenizer, tmp_path):
    def run(folder, stop_after=None, resume=False):
        model = xlmr("small", seed=1).model
        loader = by_length(tokenizer, by_length=True).train
        torch.manual_seed(4)
        optimizer = make_optimizer("adamw", model.parameters(), lr=1e-3)
        steps = iter(range(stop_after or 1_000))

        def count(*_):
            if next(steps, None) is None:
                raise KeyboardInterrupt

        optimizer.register_step_pre_hook(count)
        results = train(
            model, loader, None, COMMENTS, optimizer,
            epochs=2, save_dir=folder, resume=resume, snapshot_steps=2, evaluate_train=False,
        )  # fmt: skip
        return fingerprint(model, torch.tensor(results[-1].train_loss))

    straight = run(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", stop_after=9)  # six steps an epoch: in the second one
    assert run(tmp_path / "b", resume=True) == straight


# --- Levers that exclude each other, or do nothing -------------------------------------------


def train_small(recipe, frozen=None):
    model = small_xlmr(frozen)
    optimizer = build_optimizer(model, partial(make_optimizer, "sgd", lr=0.0), recipe)
    return train(
        model, [FEW_TOKENS()], None, COMMENTS, optimizer,
        epochs=1, recipe=recipe, evaluate_train=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "recipe, frozen, said",
    [
        (Recipe(offload=True), None, "offload saves nothing on a CPU"),
        (Recipe(amp_cache=False), None, "amp_cache=False saves nothing with amp='off'"),
        (
            Recipe(set_to_none=False, optimizer_in_backward=True),
            None,
            "set_to_none=False has no effect with optimizer_in_backward",
        ),
        (LAYERS, "roberta", "checkpointing saves nothing here: no parameter in or before"),
        (LAYERS, "roberta.e*", "checkpointing saves nothing here"),
    ],
)
def test_what_saves_nothing_is_announced(recipe, frozen, said):
    with pytest.warns(UserWarning, match=said):
        train_small(recipe, frozen)


def test_what_saves_something_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_small(replace(LAYERS, amp="bf16", amp_cache=False), WORD_EMBEDDINGS)
        train_small(LAYERS, "roberta.encoder")  # the embeddings before it are trained
    assert idle_switches(Recipe(offload=True), torch.device("cuda")) == []


def test_chunks_need_a_sequence():
    with pytest.raises(ValueError, match="not an nn.Sequential"):
        train_small(Recipe(checkpoint=((0, 2, 4),)))


def test_levers_that_train_nothing_are_refused():
    model = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    with pytest.raises(ValueError, match="unfreeze at least one layer"):
        train(model, [], None, COMMENTS, make_optimizer("sgd", model.parameters(), 0.1), epochs=1)


# --- The compiler's budget ------------------------------------------------------------------


def split_vgg(budget):
    """VGG16 without dropout: compiled code draws other random numbers."""
    torch.manual_seed(0)
    model = vgg16(width=0.0625).eval()
    return model if budget is None else SplitByCompiler(model, budget, torch.zeros(4, 3, 64, 64))


def small_pictures():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 64, 64, generator=generator), torch.arange(4) % 2


def test_the_compilers_budget_changes_memory_only():
    gradients = {}
    for budget in (None, 1.0, 0.3):
        model = split_vgg(budget)
        CATS_DOGS.loss(model, small_pictures()).backward()
        gradients[budget] = [parameter.grad for parameter in model.parameters()]
    for budget in (1.0, 0.3):
        for ours, plain in zip(gradients[budget], gradients[None], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


def test_a_smaller_budget_keeps_less_as_measured_and_as_predicted():
    def compiled(budget):
        """Bytes that torch.compile itself keeps for the backward pass, and the gradients."""
        torch._dynamo.reset()
        model, seen = split_vgg(None), {}
        if budget is not None:
            model.compile(backend="aot_eager_decomp_partition")

        def note(tensor):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with functorch_config.patch(activation_memory_budget=budget or 0.0):
            CATS_DOGS.loss(model, small_pictures()).backward()  # compiles
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = CATS_DOGS.loss(model, small_pictures())
        loss.backward()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = sum(size for key, size in seen.items() if key not in own)
        return kept, [parameter.grad for parameter in model.parameters()]

    def after_forward(budget):
        """Bytes alive beside the parameters when the backward pass begins."""
        model = split_vgg(budget)
        with measure(model) as usage:
            loss = CATS_DOGS.loss(model, small_pictures())
        del loss
        return usage.timeline.live[-1] - sum(p.nbytes for p in model.parameters())

    budgets = (None, 1.0, 0.3, 0.1)
    kept, gradients = zip(*map(compiled, budgets), strict=True)
    assert kept[3] < kept[2] < kept[1] < kept[0]
    for of_compiled in gradients[1:]:
        for theirs, plain in zip(of_compiled, gradients[0], strict=True):
            torch.testing.assert_close(theirs, plain, rtol=1e-3, atol=1e-5)
    for budget, theirs in zip(budgets[1:], kept[1:], strict=True):
        # the input, the loss, rounding to 512
        assert abs(after_forward(budget) - theirs) < 0.02 * kept[1]

    arguments = small_pictures, CATS_DOGS.loss, Recipe(), partial(make_optimizer, "sgd", lr=0.1)
    for budget in (1.0, 0.3):
        model_fn = partial(split_vgg, budget)
        measured = measure_step(model_fn, *arguments, steps=2, repeats=0)
        predicted = predict(model_fn, *arguments, device="cpu")
        assert predicted.peak_mib == measured.peak_mib


def test_the_compilers_budget_lowers_the_predicted_peak():
    def model_fn(budget):
        model = vgg16().eval()
        return model if budget is None else SplitByCompiler(model, budget, pictures()[0])

    def pictures():
        return torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)

    step = CATS_DOGS.loss, Recipe(), partial(make_optimizer, "sgd", lr=0.1)
    found = {b: predict(partial(model_fn, b), pictures, *step) for b in (None, 1.0, 0.5, 0.2)}
    forward = [p.phase_peaks["forward"] for p in found.values()]
    assert forward == sorted(forward, reverse=True) and len(set(forward)) == len(forward)
    assert all(found[b].peak_mib < 0.95 * found[None].peak_mib for b in (1.0, 0.5, 0.2))
    flops = [p.flops for p in found.values()]
    assert flops[0] == flops[1] < flops[2] < flops[3]


def test_a_budget_is_a_share():
    with pytest.raises(ValueError, match="budget=7000: expected a share"):
        split_vgg(7000)
