"""Faults that people reported of such code elsewhere, and that no other test here holds.

tests/README.md lists every report with its test.
"""

import ast
import gc
import json
import re
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.nn import functional as F

from helpers.models import checkpointing, hugging_face_checkpointing, vgg16
from helpers.train import (
    CATS_DOGS,
    Recipe,
    build_optimizer,
    choose_amp,
    evaluate,
    make_optimizer,
    make_scaler,
    measure_step,
    train_step,
)

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
SGD = partial(make_optimizer, "sgd", lr=0.1)


def tiny_bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).train()


def tiny_gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def tokens():
    ids = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def classify(model, batch):
    return F.cross_entropy(
        model(**batch).logits, torch.tensor([0, 1, 0, 1])[: len(batch["input_ids"])]
    )


def next_token(model, batch):
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@pytest.mark.parametrize(
    "model_fn, loss_fn", [(tiny_bert, classify), (tiny_gpt2, next_token)], ids=["bert", "gpt2"]
)
def test_transformers_are_checkpointed_to_the_same_bits_without_a_word(model_fn, loss_fn, capsys):
    """No warning on use_reentrant or use_cache, nothing left switched off, masks as keywords."""

    def gradients(how):
        model = model_fn()
        use_cache = model.config.use_cache
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_step(
                model,
                tokens(),
                loss_fn,
                build_optimizer(model, SGD, Recipe()),
                Recipe(checkpoint=how),
            )
        assert model.config.use_cache == use_cache
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, layers = gradients(None), gradients("layers")
    assert len(plain) == len(layers)
    assert all(torch.equal(a, b) for a, b in zip(plain, layers, strict=True))
    assert capsys.readouterr().err == ""


def test_hugging_faces_switch_counts_layers_and_the_articles_attribute_does_nothing():
    """Setting the attribute on the configuration is what the XLM-R article does."""

    def layer_calls(prepare):
        model, calls = tiny_bert(), []
        prepare(model)
        for layer in model.bert.encoder.layer:
            layer.attention.register_forward_hook(lambda *_: calls.append(1))
        classify(model, tokens()).backward()
        return len(calls)

    def article(model):
        model.config.gradient_checkpointing = True

    assert layer_calls(article) == layer_calls(lambda model: None) == 3
    assert layer_calls(hugging_face_checkpointing) == 6


class TakesAnything(nn.Module):
    """A block with a tuple, a dictionary and a keyword argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair, options, *, mask=None):
        hidden, extra = pair
        return self.linear(hidden + extra) * options["scale"] * mask


def test_tuples_dictionaries_and_keywords_reach_the_recomputation():
    def gradients(how):
        torch.manual_seed(0)
        model = nn.ModuleDict({"blocks": nn.ModuleList([TakesAnything(), TakesAnything()])})
        x, scale = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        with checkpointing(model, how):
            for block in model["blocks"]:
                y = block((x, x), {"scale": scale}, mask=torch.tensor(2.0))
        y.sum().backward()
        return [x.grad, scale.grad, *(p.grad for p in model["blocks"][1].parameters())]

    for a, b in zip(gradients(None), gradients("layers"), strict=True):
        assert torch.equal(a, b)


def ddp_worker(rank, rendezvous, out):
    """A block used twice in one forward pass, and parameters that get no gradient."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
            self.unused = nn.Linear(4, 4)

        def forward(self, x):
            return self.blocks[0](self.blocks[0](x))

    done = []
    for unused in (False, True):
        torch.manual_seed(0)
        model = Twice()
        if not unused:
            model.unused.requires_grad_(False)
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            train_step(
                model, x, lambda m, b: m(b).square().mean(), build_optimizer(model, SGD, Recipe()),
                Recipe(checkpoint="layers", accumulate=2),
            )  # fmt: skip
        done.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.save(done, f"{out}_{rank}.pt")
    dist.destroy_process_group()


def test_ddp_with_a_checkpointed_block_used_twice(tmp_path):
    """Reentrant checkpointing stops here with "marked as ready twice"; ours does not."""
    mp.spawn(ddp_worker, args=(tmp_path / "rendezvous", tmp_path / "rank"), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank_{r}.pt", weights_only=True) for r in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_embeddings_leave_every_trained_parameter_its_gradient():
    model = tiny_bert()
    model.bert.embeddings.requires_grad_(False)
    recipe = Recipe(checkpoint="layers")
    train_step(model, tokens(), classify, build_optimizer(model, SGD, recipe), recipe)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
        else:
            assert parameter.grad is None, name


def test_a_fully_frozen_trunk_is_announced():
    model = tiny_bert()
    model.bert.requires_grad_(False)
    recipe = Recipe(checkpoint="layers")
    with pytest.warns(UserWarning, match="saves nothing here"):
        train_step(model, tokens(), classify, build_optimizer(model, SGD, recipe), recipe)


def test_gradients_in_eval_mode_are_checkpointed_too():
    """Our segments ask whether gradients are wanted, not whether the model is in training mode."""
    model, calls = tiny_bert().eval(), []
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: calls.append(1))
    with checkpointing(model, "layers"):
        loss = classify(model, tokens())
    loss.backward()
    assert len(calls) == 2


def test_validation_between_training_steps_changes_nothing():
    """Older versions of autocast's weight cache lost gradients after a pass under no_grad."""
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = (images, torch.tensor([0, 1, 0, 1]))

    def gradients(validate, recipe):
        torch.manual_seed(0)
        model = vgg16(width=0.1)
        optimizer = build_optimizer(model, SGD, recipe)
        for _ in range(2):
            if validate:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    evaluate(model, [batch], CATS_DOGS, recipe)
            train_step(model, batch, CATS_DOGS.loss, optimizer, recipe)
        return [p.grad for p in model.parameters()]

    for recipe in (
        Recipe(amp="bf16"),
        Recipe(amp="bf16", checkpoint="pools"),
        Recipe(checkpoint=3),
    ):
        for a, b in zip(gradients(False, recipe), gradients(True, recipe), strict=True):
            assert torch.equal(a, b)


def calls_of_checkpoint(code):
    """Calls of torch's two functions, also as the first argument of `partial`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            is_partial = getattr(node.func, "id", None) == "partial"
            called = node.args[0] if is_partial else node.func
            name = getattr(called, "id", getattr(called, "attr", None))
            if name in ("checkpoint", "checkpoint_sequential"):
                yield node


def test_every_call_of_checkpoint_says_which_form():
    """torch only warns where `use_reentrant` is left out, and means to change its default."""
    sources = {path.name: path.read_text() for path in (ROOT / "helpers").glob("*.py")}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources[path.name] = "\n".join(code)
    found = [(name, call) for name, code in sources.items() for call in calls_of_checkpoint(code)]
    assert {name for name, _ in found} >= {"models.py"}
    for name, call in found:
        words = {keyword.arg for keyword in call.keywords}
        assert "use_reentrant" in words, f"{name}, line {call.lineno}"


def test_on_mps_equal_bits_are_not_promised(monkeypatch):
    """torch does not restore the random numbers of that device when it recomputes."""
    model = vgg16(width=0.1)
    on_mps = SimpleNamespace(device=torch.device("mps"), requires_grad=True)
    monkeypatch.setattr(nn.Module, "parameters", lambda self, recurse=True: iter([on_mps]))
    with pytest.warns(UserWarning, match="another mask when it recomputes"):
        with checkpointing(model, "pools"):
            pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with checkpointing(model.eval(), "pools"):
            pass


@pytest.mark.parametrize("cause", ["mode", "random"])
def test_causes_of_a_changed_recomputation_are_named(cause):
    """The mode switched in between; Python's random numbers inside a block."""
    numbers = iter((0.9, 0.1))

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            x = self.linear(x)
            if cause == "mode":
                return self.dropout(x).square()
            return x.exp().sin() if next(numbers) > 0.5 else x.square()

    model = nn.ModuleDict({"blocks": nn.ModuleList([Moody()])})

    def loss_fn(model, batch):
        loss = model["blocks"][0](batch).sum()
        if cause == "mode":
            model.eval()
        return loss

    recipe = Recipe(checkpoint="layers")
    with pytest.raises(RuntimeError, match="model.eval.*Python's or NumPy's random numbers"):
        train_step(
            model, torch.ones(2, 4), loss_fn, build_optimizer(model, SGD, recipe), recipe
        )  # fmt: skip


def test_autocast_is_real_on_a_cpu_and_takes_any_name_of_a_device(capsys):
    """ "cuda" autocast switches itself off here with a warning: the row would be float32's."""
    seen = []
    model = nn.Linear(4, 2)

    def loss_fn(model, batch):
        seen.append(model(batch).dtype)
        return model(batch).float().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for amp in ("bf16", "fp16", choose_amp(torch.device("cpu"))):
            recipe = Recipe(amp=amp)
            optimizer, scaler = build_optimizer(model, SGD, recipe), make_scaler(recipe, CPU)
            train_step(model, torch.ones(2, 4), loss_fn, optimizer, recipe, scaler)
    assert seen == [torch.bfloat16, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("accumulate, samples", [(1, 1), (4, 5), (9, 5)])
def test_a_micro_batch_too_small_for_batchnorm_is_explained(accumulate, samples):
    """Pieces of an uneven last batch can be of one sample even where the others are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    recipe = Recipe(accumulate=accumulate)
    with pytest.raises(ValueError, match="fewer micro-batches or a larger batch"):
        train_step(
            model, torch.ones(samples, 4), lambda m, b: m(b).sum(),
            build_optimizer(model, SGD, recipe), recipe,
        )  # fmt: skip


def test_no_deprecated_amp_names():
    """`torch.cuda.amp` warns in every cell; the names that replace it came with torch 2.3."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = make_scaler(Recipe(amp="fp16"), CPU)
        with torch.autocast("cpu", torch.bfloat16):
            pass
    assert isinstance(scaler, torch.amp.GradScaler)


@pytest.mark.parametrize("accumulate, samples", [(4, 3), (4, 6), (3, 7)])
def test_one_unscale_and_one_update_a_batch(accumulate, samples, monkeypatch):
    """Also in a batch that has fewer samples than micro-batches, or that does not divide evenly."""
    calls = []
    for name in ("unscale_", "step", "update"):
        method = getattr(torch.amp.GradScaler, name)

        def counted(self, *args, name=name, method=method, **kwargs):
            calls.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(torch.amp.GradScaler, name, counted)
    recipe = Recipe(amp="fp16", accumulate=accumulate, clip_norm=1.0)
    model = nn.Linear(4, 2)
    batch = (torch.randn(samples, 4), torch.zeros(samples, dtype=torch.long))
    train_step(
        model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        build_optimizer(model, SGD, recipe), recipe, make_scaler(recipe, CPU),
    )  # fmt: skip
    assert calls == ["unscale_", "step", "update"]


def test_batchnorm_is_not_accumulated_and_group_norm_is():
    """Why the text says "except for layers such as BatchNorm"."""
    batch = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)

    def gradients(norm, accumulate):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2)).double()
        recipe = Recipe(accumulate=accumulate)
        train_step(
            model, (batch[0].double(), batch[1]), lambda m, b: F.cross_entropy(m(b[0]), b[1]),
            build_optimizer(model, SGD, recipe), recipe,
        )  # fmt: skip
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    def difference(make_norm):
        return (gradients(make_norm(), 1) - gradients(make_norm(), 4)).abs().max()

    assert difference(lambda: nn.BatchNorm1d(4)) > 1e-3
    assert difference(lambda: nn.GroupNorm(2, 4)) < 1e-12


def test_nothing_survives_a_step_that_runs_out_of_memory():
    """A kept exception keeps its frames, and they keep the tensors: later tries would fail too."""
    alive = []

    def full(model, batch):
        big = torch.ones(1000)
        alive.extend([weakref.ref(big), weakref.ref(model)])
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    result = measure_step(
        partial(nn.Linear, 4, 2), partial(torch.ones, 2, 4), full, Recipe(), SGD, repeats=0
    )
    assert result.failed == "CUDA out of memory"
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_stored_losses_hold_no_graph():
    model = nn.Linear(4, 2)
    batch = (torch.randn(4, 4), torch.zeros(4, dtype=torch.long))
    result = train_step(
        model,
        batch,
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        build_optimizer(model, SGD, Recipe()),
    )
    assert result.loss.grad_fn is None and not result.loss.requires_grad


def test_the_table_names_tests_that_exist():
    """tests/README.md: 45 kinds of fault, each with its public threads and its tests."""
    text = (ROOT / "tests" / "README.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 45
    known = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        functions = [node for node in ast.parse(path.read_text()).body]
        known[path.name] = {getattr(node, "name", None) for node in functions}
    for threads, fault, tests in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named and len(fault) > 10
        assert re.search(r"#\d+", threads) or "no single thread" in threads
        for file, name in named:
            assert name in known.get(file, ()), f"{file}::{name}"
