"""The two models, and how a model's forward pass is cut into segments for checkpointing."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# --- VGG16 ---------------------------------------------------------------------------------

# Output channels of the 13 convolutions; "M" is a max-pool that halves height and width.
# Configuration D of Simonyan and Zisserman (2014), arXiv:1409.1556.
VGG16_LAYERS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


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
            f"vgg16 needs num_classes >= 1 and width > 0, got num_classes={num_classes}, width={width}"
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


# --- Segments ------------------------------------------------------------------------------

# What is recomputed: nothing (None), a number of segments, "pools", "layers", or ranges of children.
Checkpoint = int | str | tuple[tuple[int, int], ...] | None


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


def segments(model: nn.Sequential, how: int | str | Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The ranges [start, stop) of children that are recomputed, each as one piece.

    `how` is one of
    - a number of segments: equally many legal cuts apart; like torch's `checkpoint_sequential`, the
      last one is not recomputed, because its backward pass begins as soon as it has been computed;
    - "pools": cut behind every max-pool, the rest (the classifier) is not recomputed;
    - "layers": every child on its own, an in-place activation together with the layer before it;
    - ranges such as [(0, 5), (7, 9)]: these are recomputed, everything between them is kept.

    Raises ValueError for a number of segments or a range that the model cannot have.
    """
    cuts = legal_cuts(model)
    if isinstance(how, bool) or how is None:
        raise ValueError(f"checkpoint={how!r}: expected a number of segments, 'pools', 'layers' or ranges")
    if how == "layers":
        bounds = [0, *cuts, len(model)]
        return list(zip(bounds[:-1], bounds[1:], strict=True))[:-1]
    if how == "pools":
        pools = [i + 1 for i, child in enumerate(model) if isinstance(child, nn.MaxPool2d)]
        if not pools:
            raise ValueError("checkpoint='pools': the model has no nn.MaxPool2d among its children")
        return list(zip([0, *pools[:-1]], pools, strict=True))
    if isinstance(how, int):
        if not 2 <= how <= len(cuts) + 1:
            raise ValueError(
                f"checkpoint={how} segments: this model of {len(model)} children can have 2 to "
                f"{len(cuts) + 1} (1 would recompute nothing: the last segment never is)"
            )
        inner = [cuts[round(i * (len(cuts) + 1) / how) - 1] for i in range(1, how)]
        return list(zip([0, *inner[:-1]], inner, strict=True))
    if isinstance(how, str):
        raise ValueError(f"checkpoint={how!r} is not known for an nn.Sequential: expected a number, "
                         "'pools', 'layers' or ranges")
    ranges = [(int(start), int(stop)) for start, stop in how]
    position = 0
    for start, stop in ranges:
        if not position <= start < stop <= len(model):
            raise ValueError(
                f"checkpoint range ({start}, {stop}): ranges must ascend without overlap within 0 and {len(model)}"
            )
        if start and start not in cuts:
            raise ValueError(
                f"checkpoint range ({start}, {stop}) starts at an in-place {type(model[start]).__name__}, "
                f"which would overwrite the saved input: start at {start - 1} or {start + 1}, "
                "or build the module with inplace=False"
            )
        position = stop
    return ranges


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model that is not a flat sequence: ResNet's bottlenecks, a transformer's layers.

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


def replay_buffers(modules: Sequence[nn.Module]) -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Contexts for `checkpoint(context_fn=...)`: recomputing leaves every buffer as one forward pass left it.

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
        for (module, name, buffer), (version, copy) in zip(owners, copies, strict=True):
            # BatchNorm's kernels update the statistics without counting it as a new version.
            is_statistic = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            if is_statistic or module._buffers[name] is not buffer or buffer._version != version:
                before.append((module, name, copy))

    @contextlib.contextmanager
    def recompute() -> Iterator[None]:
        kept = [(module, name, module._buffers[name]) for module, name, _ in before]
        for module, name, copy in before:
            module._buffers[name] = copy.clone()
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


def _checkpointed(function: Callable, modules: Sequence[nn.Module]) -> Callable:
    """`function`, recomputed in the backward pass; `modules` are those whose buffers it may update."""
    inner = [inner for module in modules for inner in module.modules()]
    return partial(
        checkpoint, function, use_reentrant=False, context_fn=partial(replay_buffers, inner)
    )


def _refuse_in_place(block: nn.Module) -> None:
    if starts_in_place(block):
        raise ValueError(
            f"{type(block).__name__} starts with an in-place activation, which would overwrite the input that "
            "checkpointing keeps: build it with inplace=False, or checkpoint a larger piece"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model itself, without a DistributedDataParallel around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextlib.contextmanager
def checkpointing(model: nn.Module, how: Checkpoint) -> Iterator[None]:
    """Within this context the forward pass of `model` keeps segment inputs only and recomputes the rest.

    `how`: None for off; for an `nn.Sequential` everything that `segments` knows; for any other
    model "layers": each of its `blocks` is recomputed as one piece. The backward pass may run after
    the context has been left. Dropout, the random number generator and buffers end as without
    checkpointing. The model itself is not changed. Method: Chen et al. (2016), arXiv:1604.06174, in torch's
    non-reentrant form.
    """
    if how is None:
        yield
        return
    model = unwrap(model)
    if isinstance(model, nn.Sequential):
        children = list(model)
        ranges = segments(model, how)
        pieces: list[Callable] = []
        position = 0
        for start, stop in ranges:
            pieces += children[position:start]
            piece = children[start:stop]
            pieces.append(_checkpointed(partial(_run, piece), piece))
            position = stop
        pieces += children[position:]
        recomputed = children[: ranges[-1][1]] if ranges else []
        replaced = {model: partial(_run, pieces)}
    elif how == "layers":
        recomputed = blocks(model)
        if not recomputed:
            raise ValueError(
                f"checkpoint='layers': {type(model).__name__} has no repeated blocks in an nn.Sequential or nn.ModuleList"
            )
        for block in recomputed:
            _refuse_in_place(block)
        replaced = {block: _checkpointed(block.forward, [block]) for block in recomputed}
        first = next(recomputed[0].parameters(), None)
        recomputed = [*recomputed, *_modules_before(model, recomputed[0])] if first is not None else recomputed
    else:
        raise ValueError(
            f"checkpoint={how!r}: {type(model).__name__} is not an nn.Sequential, expected 'layers' or None"
        )
    if not any(parameter.requires_grad for module in recomputed for parameter in module.parameters()):
        warnings.warn(
            "checkpointing saves nothing here: no parameter in or before the recomputed segments is trained. "
            "Run the frozen part under torch.no_grad() instead.",
            stacklevel=3,
        )
    # A decoder's key-value cache would be filled twice by a recomputed layer.
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    if use_cache:
        config.use_cache = False
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in replaced:
            del module.forward
        if use_cache:
            config.use_cache = use_cache


def _modules_before(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """Leaf modules registered before `block`, such as the embeddings of a transformer."""
    before = []
    for module in model.modules():
        if module is block:
            break
        if not any(True for _ in module.children()):
            before.append(module)
    return before


def hugging_face_checkpointing(model: nn.Module, enable: bool = True) -> None:
    """Switch a transformers model's own layer checkpointing on or off, whatever its version calls it.

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
