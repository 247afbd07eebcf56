"""The two models, and how a model's forward pass is cut into segments for checkpointing."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

# transformers is imported where it is used: it takes seconds, and VGG16 does not need it.
if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, XLMRobertaConfig

# --- VGG16 ---------------------------------------------------------------------------------

# Output channels of the 13 convolutions; "M" is a max-pool that halves height and width.
# Configuration D of Simonyan and Zisserman (2014), arXiv:1409.1556.
# fmt: off
VGG16_LAYERS = (
    64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M",
)
# fmt: on


def vgg16(num_classes: int = 2, width: float = 1.0) -> nn.Sequential:
    """VGG16 as one flat sequence of 40 modules in execution order, so that it can be cut anywhere.

    At width 1 the first 31 modules are those of `torchvision.models.vgg16().features`, followed by
    the average pool and the three linear layers with dropout; `width` scales every layer's
    channels. Input: float images [batch, 3, height, width], at least 32 pixels a side.
    Output: logits [batch, num_classes]. Weights: He initialisation (arXiv:1502.01852), without
    which the narrow network does not leave its starting loss.
    """
    if num_classes < 1 or width <= 0:
        raise ValueError(
            f"vgg16 needs num_classes >= 1 and width > 0, got num_classes={num_classes}, "
            f"width={width}"
        )
    modules: list[nn.Module] = []
    channels = 3
    for layer in VGG16_LAYERS:
        if layer == "M":
            modules.append(nn.MaxPool2d(kernel_size=2, stride=2))
        else:
            out_channels = max(1, round(layer * width))
            modules += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out_channels
    hidden = max(1, round(4096 * width))
    modules += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    modules += [nn.Linear(channels * 7 * 7, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    modules += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)]
    modules += [nn.Linear(hidden, num_classes)]
    for module in modules:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return nn.Sequential(*modules)


class ArticleVgg16(nn.Sequential):
    """`vgg16` as the VGG16 article has it: ten children, of which all convolutions are the first.

    The modules and their order are those of `vgg16`, so the same seed gives the same weights. With
    `segments` the forward pass is torch's own `checkpoint_sequential` over the ten children.
    """

    def __init__(self, num_classes: int = 2, width: float = 1.0, segments: int | None = None):
        flat = vgg16(num_classes, width)
        super().__init__(flat[:31], *flat[31:])
        self.segments = segments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.segments is None:
            return super().forward(x)
        return checkpoint_sequential(self, self.segments, x, use_reentrant=False)


# --- Segments ------------------------------------------------------------------------------

# What is recomputed: nothing (None), a number of segments, "pools", "layers", "layers/2" (every
# second layer), "selective", or ranges of children (start, stop) or (start, stop, batch chunks).
Checkpoint = int | str | tuple[tuple[int, ...], ...] | None


def starts_in_place(module: nn.Module) -> bool:
    """Whether the first operation of `module` overwrites its input, e.g. `nn.ReLU(inplace=True)`.

    A checkpointed segment may not start there: its saved input would be overwritten, and torch
    stops in the backward pass with "modified by an inplace operation".
    """
    first = next((leaf for leaf in module.modules() if not list(leaf.children())), module)
    return bool(getattr(first, "inplace", False))


def legal_cuts(model: nn.Sequential) -> list[int]:
    """Positions where `model` can be cut: before child i, unless child i works in place."""
    return [i for i in range(1, len(model)) if not starts_in_place(model[i])]


def segments(
    model: nn.Sequential, how: int | str | Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The ranges [start, stop) of children that are recomputed, each as one piece.

    `how` is one of
    - a number of segments: equally many legal cuts apart; like torch's `checkpoint_sequential`, the
      last one is not recomputed, because its backward pass begins as soon as it has been computed;
    - "pools": cut behind every max-pool, the rest (the classifier) is not recomputed;
    - "layers": every child on its own, an in-place activation together with the layer before it;
    - ranges such as [(0, 5), (7, 9)]: these are recomputed, everything between them is kept; a
      third number, as in (0, 5, 4), runs the range in that many chunks of the batch, each a
      segment of its own.

    Raises ValueError for a number of segments or a range that the model cannot have.
    """
    cuts = legal_cuts(model)
    if isinstance(how, bool) or how is None:
        raise ValueError(
            f"checkpoint={how!r}: expected a number of segments, 'pools', 'layers' or ranges"
        )
    if how == "layers":
        bounds = [0, *cuts, len(model)]
        return list(zip(bounds[:-1], bounds[1:], strict=True))[:-1]
    if how == "pools":
        pools = [i + 1 for i, child in enumerate(model) if isinstance(child, nn.MaxPool2d)]
        if not pools:
            raise ValueError("checkpoint='pools': the model has no nn.MaxPool2d among its children")
        # An in-place activation behind a pool belongs to the pool's segment.
        ends = [next(cut for cut in (*cuts, len(model)) if cut >= pool) for pool in pools]
        ends = list(dict.fromkeys(ends))
        return list(zip([0, *ends[:-1]], ends, strict=True))
    if isinstance(how, int):
        if not 2 <= how <= len(cuts) + 1:
            raise ValueError(
                f"checkpoint={how} segments: this model of {len(model)} children can have 2 to "
                f"{len(cuts) + 1} (1 would recompute nothing: the last segment never is)"
            )
        inner = [cuts[round(i * (len(cuts) + 1) / how) - 1] for i in range(1, how)]
        return list(zip([0, *inner[:-1]], inner, strict=True))
    if isinstance(how, str):
        raise ValueError(
            f"checkpoint={how!r} is not known for an nn.Sequential: expected a number, "
            "'pools', 'layers' or ranges"
        )
    ranges = [tuple(int(number) for number in given) for given in how]
    position = 0
    for start, stop, *chunks in ranges:
        if chunks:
            _refuse_chunks(model[start:stop], chunks)
        if not position <= start < stop <= len(model):
            raise ValueError(
                f"checkpoint range ({start}, {stop}): ranges must ascend without overlap within "
                f"0 and {len(model)}"
            )
        if start and start not in cuts:
            raise ValueError(
                f"checkpoint range ({start}, {stop}) starts at an in-place "
                f"{type(model[start]).__name__}, which would overwrite the saved input: start at "
                f"{start - 1} or {start + 1}, or build the module with inplace=False"
            )
        position = stop
    return ranges


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model that is no sequence: a ResNet's bottlenecks, a BERT's layers.

    A block is a composite child of an `nn.Sequential` or `nn.ModuleList`, unless it is such a
    container of composite children itself; blocks do not nest.
    """

    def is_composite(module: nn.Module) -> bool:
        return any(True for _ in module.children())

    def is_container(module: nn.Module) -> bool:
        return isinstance(module, (nn.Sequential, nn.ModuleList)) and any(
            is_composite(child) for child in module.children()
        )

    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if is_container(module) and is_composite(child) and not is_container(child):
                found.append(child)
            else:
                walk(child)

    walk(model)
    return found


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """The parts of `model` whose weights should come and go together when it is sharded.

    The repeated `blocks`, or the layers of an `nn.Sequential`; each has parameters.
    """
    parts = list(model) if isinstance(model, nn.Sequential) else blocks(model)
    return [part for part in parts if any(True for _ in part.parameters())]


def replay_buffers(
    modules: Sequence[nn.Module],
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Contexts for `checkpoint(context_fn=...)` in which recomputing leaves every buffer alone.

    A layer that updates a buffer while it computes (BatchNorm its running statistics, spectral
    norm its vectors) would do so twice when it is recomputed. So the recomputation works on copies
    of the buffers as they were before the forward pass.
    """
    before: list[tuple[nn.Module, str, torch.Tensor]] = []

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        owners = [
            (module, name, buffer)
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]
        copies = [(buffer._version, buffer.detach().clone()) for _, _, buffer in owners]
        yield
        for (module, name, buffer), (version, old) in zip(owners, copies, strict=True):
            # BatchNorm's kernels update the statistics without counting it as a new version.
            is_statistic = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            if is_statistic or module._buffers[name] is not buffer or buffer._version != version:
                before.append((module, name, old))

    @contextlib.contextmanager
    def recompute() -> Iterator[None]:
        kept = [(module, name, module._buffers[name]) for module, name, _ in before]
        for module, name, old in before:
            module._buffers[name] = old.clone()
        try:
            yield
        finally:
            for module, name, buffer in kept:
                module._buffers[name] = buffer

    return forward(), recompute()


def _run(children: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for child in children:
        x = child(x)
    return x


def run_in_chunks(segment: Callable, chunks: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([segment(part) for part in x.tensor_split(min(chunks, len(x)))])


def _refuse_chunks(segment: nn.Sequential, chunks: Sequence[int]) -> None:
    """Stop where a segment in chunks of the batch would not give the whole batch's result."""
    if len(chunks) != 1 or chunks[0] < 1:
        raise ValueError(
            f"a checkpoint range is (start, stop) or (start, stop, chunks); found chunks={chunks}"
        )
    for module in segment.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                "a range with BatchNorm cannot run in chunks of the batch: it would normalise each "
                "chunk by itself. Leave the number of chunks out"
            )
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                "a range with dropout cannot run in chunks of the batch: each chunk would draw its "
                "mask in another order than the whole batch. Leave the number of chunks out"
            )


# Kept under "selective": products of matrices and convolutions, which cost most to recompute. Not
# attention: with dropout it draws random numbers, and kept it would not draw them again.
KEPT_OPERATIONS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _replay_selectively(
    modules: Sequence[nn.Module],
) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """`replay_buffers`, and the results of `KEPT_OPERATIONS` are kept instead of recomputed."""

    @contextlib.contextmanager
    def both(buffers, selection):
        with buffers, selection:
            yield

    selective = create_selective_checkpoint_contexts(_keep_products)
    # With offloading, what is kept goes to the host like everything else. Newer versions of torch
    # take this choice from `checkpoint`, but not through the context that we put around theirs, and
    # warn until it is made; older ones have no choice and leave it on the device.
    if hasattr(selective[0], "respect_saved_tensors_hooks"):
        selective[0].respect_saved_tensors_hooks = True
    pairs = zip(replay_buffers(modules), selective, strict=True)
    forward, recompute = (both(*pair) for pair in pairs)
    return forward, recompute


def _checkpointed(
    function: Callable, modules: Sequence[nn.Module], contexts: Callable = replay_buffers
) -> Callable:
    """`function`, recomputed in the backward pass; `modules`: those whose buffers it may update."""
    inner = [inner for module in modules for inner in module.modules()]
    return partial(checkpoint, function, use_reentrant=False, context_fn=partial(contexts, inner))


def _noting(segment: Callable, modules: Sequence[nn.Module], trained: list[bool]) -> Callable:
    """`segment`, which notes each time whether anything in or before it is trained."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            inside = (p.requires_grad for module in modules for p in module.parameters())
            inputs = (getattr(value, "requires_grad", False) for value in (*args, *kwargs.values()))
            trained.append(any(inputs) or any(inside))
        return segment(*args, **kwargs)

    return run


def _refuse_in_place(block: nn.Module) -> None:
    if starts_in_place(block):
        raise ValueError(
            f"{type(block).__name__} starts with an in-place activation, which would overwrite the "
            "input that checkpointing keeps: build it with inplace=False, or checkpoint a larger "
            "piece"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without a DistributedDataParallel around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextlib.contextmanager
def checkpointing(model: nn.Module, how: Checkpoint) -> Iterator[None]:
    """Within this context the forward pass of `model` keeps segment inputs and recomputes the rest.

    `how`: None for off; for an `nn.Sequential` everything that `segments` knows; for any other
    model "layers": each of its `blocks` is recomputed as one piece, or "layers/2": every second
    one, or "selective": each, but products of matrices are kept. The backward pass may run after
    the context has been left. Dropout, the random number generator and buffers end as without
    checkpointing. The model itself is not changed. Method: Chen et al. (2016), arXiv:1604.06174,
    in torch's non-reentrant form.
    """
    if how is None:
        yield
        return
    model = unwrap(model)
    trained: list[bool] = []
    if isinstance(model, nn.Sequential):
        children = list(model)
        ranges = segments(model, how)
        pieces: list[Callable] = []
        position = 0
        for start, stop, *chunks in ranges:
            pieces += children[position:start]
            piece = children[start:stop]
            segment = _noting(_checkpointed(partial(_run, piece), piece), piece, trained)
            pieces.append(partial(run_in_chunks, segment, *chunks) if chunks else segment)
            position = stop
        pieces += children[position:]
        replaced = {model: partial(_run, pieces)}
    elif isinstance(how, str) and (how == "selective" or how.split("/")[0] == "layers"):
        recomputed = blocks(model)[:: _every_nth(how)]
        if not recomputed:
            raise ValueError(
                f"checkpoint={how!r}: {type(model).__name__} has no repeated blocks in an "
                "nn.Sequential or nn.ModuleList"
            )
        for block in recomputed:
            _refuse_in_place(block)
        contexts = _replay_selectively if how == "selective" else replay_buffers
        replaced = {
            block: _noting(_checkpointed(block.forward, [block], contexts), [block], trained)
            for block in recomputed
        }
    else:
        raise ValueError(
            f"checkpoint={how!r}: {type(model).__name__} is not an nn.Sequential, expected "
            "'layers', 'layers/N' for every Nth, 'selective' or None"
        )
    _announce_unequal_bits(model)
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward
    if trained and not any(trained):
        warnings.warn(
            "checkpointing saves nothing here: no parameter in or before the recomputed segments "
            "is trained, so the backward pass needs nothing of them. Leave it out.",
            stacklevel=3,
        )


def _announce_unequal_bits(model: nn.Module) -> None:
    """Say where dropout may be drawn anew: torch does not bring back MPS's random numbers."""
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "mps":
        return
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            warnings.warn(
                "checkpointing with dropout on an MPS device: torch may draw another mask when it "
                "recomputes, so gradients need not equal those of plain training. Set dropout to "
                "0, or train on another device.",
                stacklevel=4,
            )
            return


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within this context a transformers decoder keeps no cache, which training does not read.

    A recomputed layer would fill it twice; and with it the arithmetic runs in another order, so
    that plain and checkpointed steps would differ in their last bits.
    """
    config = getattr(unwrap(model), "config", None)
    use_cache = getattr(config, "use_cache", False)
    if use_cache:
        config.use_cache = False
    try:
        yield
    finally:
        if use_cache:
            config.use_cache = use_cache


def _every_nth(how: str) -> int:
    """2 of "layers/2"; 1 where nothing is said."""
    _, slash, number = how.partition("/")
    if slash and not (number.isdigit() and int(number) >= 1):
        raise ValueError(f"checkpoint={how!r}: expected 'layers/N' with N = 1, 2, 3, ...")
    return int(number) if slash else 1


def hugging_face_checkpointing(model: nn.Module, enable: bool = True) -> None:
    """Switch a transformers model's own checkpointing on or off, whatever its version calls it.

    Raises ValueError for a model that has no such switch; `Recipe(checkpoint="layers")` then does
    the same from outside.
    """
    state = "enable" if enable else "disable"
    names = [f"activation_checkpointing_{state}", f"gradient_checkpointing_{state}"]
    name = next((name for name in names if hasattr(model, name)), None)
    if name is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ValueError(
            f"{type(model).__name__} does not support Hugging Face's checkpointing: "
            "use Recipe(checkpoint='layers'), which recomputes its blocks from outside"
        )
    switch = getattr(model, name)
    kwargs_name = name.replace("_enable", "_kwargs")
    if enable and kwargs_name in inspect.signature(switch).parameters:
        switch(**{kwargs_name: {"use_reentrant": False}})
    else:
        switch()


# --- Frozen parts --------------------------------------------------------------------------


def freeze(model: nn.Module, *names: str) -> int:
    """Stop training the parameters called `names`; gives how many numbers that are.

    A name is that of a parameter or of a module, which stands for everything in it, such as
    "roberta.embeddings.word_embeddings"; "*" stands for any text. A frozen parameter has neither
    gradient nor optimizer state, so build the optimizer afterwards, with
    `helpers.train.build_optimizer`, which leaves it out.

    Raises ValueError for a name that matches nothing, and where nothing would be left to train.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("freeze the model before DistributedDataParallel wraps it, not after")
    parameters = dict(model.named_parameters())
    chosen: set[str] = set()
    for name in names:
        matching = {
            known
            for known in parameters
            if fnmatch.fnmatchcase(known, name) or fnmatch.fnmatchcase(known, f"{name}.*")
        }
        if not matching:
            near = difflib.get_close_matches(name, _parts_of(parameters), n=3, cutoff=0.4)
            first, last = next(iter(parameters), "none"), next(reversed(parameters), "none")
            raise ValueError(
                f"freeze={name!r} matches no parameter; there are {first}, ..., {last}"
                + (f"; the nearest names are {', '.join(near)}" if near else "")
                + " ('*' stands for any text)"
            )
        chosen |= matching
    if all(name in chosen for name, value in parameters.items() if value.requires_grad):
        raise ValueError(
            f"freeze={', '.join(names)}: no parameter of the model requires a gradient then; "
            "leave at least one layer to train"
        )
    for name in chosen:
        parameters[name].requires_grad_(False)
    return sum(parameters[name].numel() for name in chosen)


def _parts_of(names: Iterable[str]) -> list[str]:
    """The names themselves, and those of the modules that hold them."""
    parts = (name.split(".")[:end] for name in names for end in range(1, name.count(".") + 2))
    return list(dict.fromkeys(".".join(part) for part in parts))


# --- XLM-R ---------------------------------------------------------------------------------

# How transformers computes attention: torch's fused function, which never stores the scores
# [batch, heads, tokens, tokens], or step by step, which does.
ATTENTIONS = ("sdpa", "eager")

# Conneau et al. (2020), arXiv:1911.02116. Base and Large as published; the two small ones are for
# machines without a GPU: same classes, same code path, fewer and narrower layers.
XLMR_SIZES = {
    size: {
        "vocab_size": pieces,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    for size, pieces, width, layers, heads in [
        ("tiny", 1_000, 32, 2, 2),
        ("small", 4_000, 128, 4, 4),
        ("base", 250_002, 768, 12, 12),
        ("large", 250_002, 1024, 24, 16),
    ]
}

# A tokenizer trained here is for a small corpus: more pieces than this are words seen once or
# twice.
MAX_TRAINED_PIECES = 4_000


class XlmrParts(NamedTuple):
    """A classifier with one logit, its tokenizer, and a sentence on where they come from."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    source: str


def xlmr_config(size: str = "small", **changes) -> XLMRobertaConfig:
    """The configuration of an XLM-R classifier with one logit: "tiny", "small", "base" or "large".

    `changes` are fields of `XLMRobertaConfig`, e.g. `hidden_dropout_prob=0.0`. The longest text has
    `max_position_embeddings` − 2 = 512 tokens, because positions count from behind the pad id.
    """
    from transformers import XLMRobertaConfig

    if size not in XLMR_SIZES:
        raise ValueError(f"no XLM-R size {size!r}: expected one of {', '.join(XLMR_SIZES)}")
    published = dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
    return XLMRobertaConfig(**ONE_LOGIT, **(published | XLMR_SIZES[size] | changes))


# With one label transformers would compute a mean squared error when it is given labels; this names
# the binary cross-entropy. (The loop never gives it labels: it takes the logits.)
ONE_LOGIT = {"num_labels": 1, "id2label": {0: "toxic"}, "label2id": {"toxic": 0},
             "problem_type": "multi_label_classification"}  # fmt: skip


def xlmr(
    name_or_path_or_config: str | Path | PretrainedConfig = "xlm-roberta-base",
    *,
    texts: Iterable[str] | None = None,
    seed: int = 0,
    attention: str | None = None,
) -> XlmrParts:
    """`transformers.XLMRobertaForSequenceClassification` with one logit, in float32.

    `name_or_path_or_config` is one of
    - a folder written by `save_pretrained` of model and tokenizer;
    - a model name on the Hugging Face hub, taken from the local cache or downloaded. Where the hub
      cannot be reached, or HF_HUB_OFFLINE is set, it becomes the "small" size below, and one
      printed sentence says so;
    - a size ("tiny", "small", "base", "large") or an `XLMRobertaConfig`: random weights, and a
      tokenizer trained on `texts`, or None without texts.

    The model maps input_ids and attention_mask [batch, tokens] to `.logits` [batch, 1]; the loss on
    them is `binary_cross_entropy_with_logits`. New weights depend on `seed` alone, and the caller's
    random state is left as it was. `source` names what was loaded and which weights are new.
    `attention` is one of ATTENTIONS; None leaves the choice to transformers.

    Raises FileNotFoundError for a folder or a file in it that is missing, ValueError for a model
    that is not XLM-R, a name that the hub does not have, or a fallback without texts.
    """
    from transformers import PretrainedConfig

    wanted = name_or_path_or_config
    if attention not in (None, *ATTENTIONS):
        raise ValueError(f"attention={attention!r}: expected one of {', '.join(ATTENTIONS)}")
    if isinstance(wanted, PretrainedConfig):
        return _random_xlmr(wanted, "XLM-R of the given configuration", texts, seed, attention)
    if wanted in XLMR_SIZES:
        config = xlmr_config(str(wanted))
        return _random_xlmr(config, f"{wanted} XLM-R", texts, seed, attention)
    how = {} if attention is None else {"attn_implementation": attention}
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        return _xlmr_from_folder(folder, seed, **how)
    if isinstance(wanted, Path) or folder.is_absolute() or str(wanted).startswith((".", "~")):
        raise FileNotFoundError(f"no folder {wanted}: expected one written by save_pretrained")
    if _is_cached(wanted):
        # Without asking the hub for news, which takes minutes where it cannot be reached.
        origin = f"{wanted} from the local cache"
        return _load_xlmr(wanted, origin, seed, how, local_files_only=True)
    unreachable = _why_not_on_hub(wanted)
    if unreachable is None:
        return _load_xlmr(wanted, f"{wanted} from the Hugging Face hub", seed, how)
    if texts is None:
        raise ValueError(
            f"{wanted} could not be loaded ({unreachable}), and a small XLM-R in its place needs "
            "texts to train its tokenizer on: pass texts=..., or the folder of a downloaded model"
        )
    parts = _random_xlmr(
        xlmr_config("small"),
        f"{wanted} could not be loaded ({unreachable}); in its place: small XLM-R",
        texts,
        seed,
        attention,
    )
    print(parts.source)
    return parts


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = MAX_TRAINED_PIECES
) -> PreTrainedTokenizerBase:
    """A Unigram tokenizer that behaves like XLM-R's, trained on `texts`.

    Ids 0 to 3 are <s>, <pad>, </s>, <unk> and the last one is <mask>, a text becomes `<s> … </s>`,
    case is kept, runs of white space are one. At most `vocab_size` pieces, fewer for few texts; the
    same texts always give the same tokenizer. Method: Kudo (2018), arXiv:1804.10959.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    if isinstance(texts, str):
        raise TypeError("texts is one string: expected an iterable of texts")
    special = ["<s>", "<pad>", "</s>", "<unk>"]

    def build(model: Unigram) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        return tokenizer

    trained = build(Unigram())
    trained.train_from_iterator(
        texts,
        trainers.UnigramTrainer(
            vocab_size=vocab_size - 1,
            special_tokens=special,
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    pieces = [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]
    if len(pieces) <= len(special):
        raise ValueError("no texts to train a tokenizer on: every text is empty")
    tokenizer = build(Unigram([*_in_fixed_order(pieces, special), ("<mask>", 0.0)], unk_id=3))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def _in_fixed_order(pieces: list[tuple[str, float]], special: list[str]) -> list[tuple[str, float]]:
    """`pieces` with scores and order that are the same after every training.

    The trainer walks through hash maps whose order changes from run to run. That changes the last
    digits of a score, and which of the rare single characters gets which score: those that are not
    pieces of their own are appended 0.0001 apart, counted from the lowest score.
    """
    scores = {piece: score for piece, score in pieces if piece not in special}
    lowest = min(scores.values())
    rare = lowest + 1e-4 * sum(len(piece) == 1 for piece in scores)
    fixed = {
        piece: round(lowest if len(piece) == 1 and score <= rare else score, 6)
        for piece, score in scores.items()
    }
    ordered = sorted(fixed.items(), key=lambda item: (-item[1], item[0]))
    return [(token, 0.0) for token in special] + ordered


def _random_xlmr(
    config: PretrainedConfig,
    name: str,
    texts: Iterable[str] | None,
    seed: int,
    attention: str | None,
) -> XlmrParts:
    from transformers import XLMRobertaForSequenceClassification

    _require_xlmr(config, name)
    config = copy.deepcopy(config)
    config.update(ONE_LOGIT)
    if attention is not None:
        config._attn_implementation = attention
    tokenizer, said = None, "no tokenizer"
    if texts is not None:
        tokenizer = train_tokenizer(texts, min(config.vocab_size, MAX_TRAINED_PIECES))
        said = f"a tokenizer of {len(tokenizer):,} pieces trained on the given texts"
    with _seeded(seed):
        model = XLMRobertaForSequenceClassification(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    source = f"{name}, random weights ({count:,} parameters, seed {seed}), {said}"
    return XlmrParts(model, _limit_length(tokenizer, config), source)


def _xlmr_from_folder(folder: Path, seed: int, **how: str) -> XlmrParts:
    found = sorted(path.name for path in folder.iterdir())
    # Without a vocabulary transformers would build a tokenizer of five pieces and say nothing.
    for needed in XLMR_FILES:
        if not set(needed) & set(found):
            raise FileNotFoundError(
                f"{folder} has no {' or '.join(needed)}, found {', '.join(found) or 'nothing'}: "
                "expected a folder into which model and tokenizer were saved with save_pretrained"
            )
    return _load_xlmr(str(folder), f"XLM-R from {folder}", seed, how)


def _load_xlmr(name: str, origin: str, seed: int, how: dict[str, str], **where: bool) -> XlmrParts:
    from transformers import AutoConfig, AutoTokenizer, XLMRobertaForSequenceClassification

    where["trust_remote_code"] = False  # a folder may name code of its own: it is never run
    with _quiet_transformers(), _seeded(seed):
        _require_xlmr(AutoConfig.from_pretrained(name, **where), origin)
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
        model, loading = XLMRobertaForSequenceClassification.from_pretrained(
            name,
            **ONE_LOGIT,
            **how,
            **where,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"{origin}: the tokenizer has {len(tokenizer):,} pieces, the model embeddings for "
            f"{model.config.vocab_size:,}: they do not belong together"
        )
    new = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    said = f"new weights (seed {seed}): {', '.join(new)}" if new else "all weights loaded"
    # Half-precision weights on disk would stay so, and AMP needs float32 ones.
    return XlmrParts(model.float(), _limit_length(tokenizer, model.config), f"{origin}; {said}")


def _require_xlmr(config: PretrainedConfig, origin: str) -> None:
    if config.model_type != "xlm-roberta":
        raise ValueError(
            f"{origin} is a model of type {config.model_type!r}: expected 'xlm-roberta'"
        )


def _limit_length(tokenizer, config: PretrainedConfig):
    """Let the tokenizer know the longest text that the model has positions for."""
    if tokenizer is not None:
        longest = config.max_position_embeddings - config.pad_token_id - 1
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    return tokenizer


# What a model and its tokenizer consist of: of each line one file.
XLMR_FILES = (
    ("config.json",),
    ("tokenizer.json", "sentencepiece.bpe.model"),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
)


def _is_cached(name: str) -> bool:
    """Whether an earlier download left all of model and tokenizer in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return all(
            any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
            for files in XLMR_FILES
        )
    except HFValidationError:
        sizes = ", ".join(XLMR_SIZES)
        raise ValueError(f"{name!r} is neither a folder nor a model name nor {sizes}") from None


def _why_not_on_hub(name: str, timeout: float = 5.0) -> str | None:
    """Why `name` cannot be had from the hub, found within seconds; None if it can."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    offline = huggingface_hub.constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "0") in (
        "1",
        "true",
    )
    answer: list[BaseException | None] = []

    def ask() -> None:
        try:
            huggingface_hub.HfApi().model_info(name, timeout=timeout)
            answer.append(None)
        except Exception as error:  # handed to the caller's thread below
            answer.append(error)

    if offline:
        return "HF_HUB_OFFLINE is set and the model is not in the cache"
    # In a thread, because looking up a host name has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * timeout)
    if not answer:
        return f"no answer from the hub within {2 * timeout:.0f} s"
    if isinstance(answer[0], RepositoryNotFoundError):
        raise ValueError(
            f"the hub has no model {name!r} (or it is private): check the name"
        ) from answer[0]
    return None if answer[0] is None else "the hub cannot be reached"


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave the caller's random state (the CPU's) as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without progress bar and report on new weights: `XlmrParts.source` says it in a sentence."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# --- torch.compile's planner ---------------------------------------------------------------


class SplitByCompiler(nn.Module):
    """`model`, its step split into a forward and a backward graph as torch.compile splits it.

    `budget` is the share of the activations that the forward graph may keep for the backward graph,
    from 1 (what torch's planner keeps of its own accord) to 0 (inputs only); the rest is computed
    again. The graphs run operation by operation, so they can be measured and predicted; compiled
    ones keep the same, and need fewer temporaries where a compiler fuses operations. `example`: an
    input of the shape that all inputs have. Method: torch's activation memory budget, in
    `torch._functorch.config`.
    """

    def __init__(self, model: nn.Module, budget: float, example: torch.Tensor):
        # Takes a second to import, and nothing else needs it.
        from functorch.compile import aot_function, min_cut_rematerialization_partition
        from torch._functorch import config
        from torch._inductor.compile_fx import select_decomp_table

        if not 0 <= budget <= 1:
            raise ValueError(f"budget={budget}: expected a share of the activations, 0 to 1")
        super().__init__()
        self.model = model
        names = list(self._tensors())

        def run(x, *tensors):
            return torch.func.functional_call(model, dict(zip(names, tensors, strict=True)), x)

        self._split = aot_function(
            run,
            _run_graph,
            _run_graph,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
        )
        with config.patch(activation_memory_budget=budget):
            self(example)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters()) | dict(self.model.named_buffers())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._split(x, *self._tensors().values())


def _run_graph(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """A graph as a function, run operation by operation; values go when nothing needs them."""

    def run(values: list) -> Any:
        return torch.fx.Interpreter(graph).boxed_run(values)

    run._boxed_call = True  # tells torch to hand the values over, and to keep none
    return run
