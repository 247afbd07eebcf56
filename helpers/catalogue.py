"""Models by name, for predictions: how to build one, a batch for it, and its training loss.

Nothing is downloaded: torchvision's models need no files, the configurations of well-known
Hugging Face models are written down here, and any other model comes from a folder, a
`config.json` or a function of yours. Everything that is returned works under fake tensors.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from helpers.models import ATTENTIONS, Checkpoint, freeze, vgg16

# transformers and torchvision are imported where they are used: they take seconds.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """What is trained: a model, a batch of `batch_size` samples and the loss of one on the other.

    The three functions are the first arguments of `helpers.predict.predict`.
    """

    title: str
    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    name: str = ""  # as the command line knows it
    options: dict[str, Any] = field(default_factory=dict)  # of the command line


# --- Hugging Face models -------------------------------------------------------------------

BERT_LARGE = dict(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
ROBERTA = dict(
    vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)
XLM_ROBERTA = ROBERTA | dict(vocab_size=250002)
VIT_LARGE = BERT_LARGE
CLASSIFIER, IMAGE_CLASSIFIER = (
    "AutoModelForSequenceClassification",
    "AutoModelForImageClassification",
)
CAUSAL, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"


def _gpt2(n_embd: int, n_layer: int, n_head: int) -> dict[str, int]:
    return dict(n_embd=n_embd, n_layer=n_layer, n_head=n_head)


def _t5(d_model: int, d_kv: int, d_ff: int, num_layers: int, num_heads: int) -> dict[str, int]:
    sizes = dict(d_model=d_model, d_kv=d_kv, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads)
    return sizes | dict(decoder_start_token_id=0)


# name: (model type, what differs from the type's default configuration, task). As published.
HUGGING_FACE: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert-base-uncased": ("bert", {}, CLASSIFIER),
    "bert-base-cased": ("bert", dict(vocab_size=28996), CLASSIFIER),
    "bert-base-multilingual-cased": ("bert", dict(vocab_size=119547), CLASSIFIER),
    "bert-large-uncased": ("bert", BERT_LARGE, CLASSIFIER),
    "bert-large-cased": ("bert", BERT_LARGE | dict(vocab_size=28996), CLASSIFIER),
    "distilbert-base-uncased": ("distilbert", {}, CLASSIFIER),
    "roberta-base": ("roberta", ROBERTA, CLASSIFIER),
    "roberta-large": ("roberta", ROBERTA | BERT_LARGE, CLASSIFIER),
    "xlm-roberta-base": ("xlm-roberta", XLM_ROBERTA, CLASSIFIER),
    "xlm-roberta-large": ("xlm-roberta", XLM_ROBERTA | BERT_LARGE, CLASSIFIER),
    "electra-base": ("electra", dict(embedding_size=768, hidden_size=768, num_attention_heads=12,
                                     intermediate_size=3072), CLASSIFIER),
    "electra-large": ("electra", dict(embedding_size=1024) | BERT_LARGE, CLASSIFIER),
    "gpt2": ("gpt2", {}, CAUSAL),
    "gpt2-medium": ("gpt2", _gpt2(1024, 24, 16), CAUSAL),
    "gpt2-large": ("gpt2", _gpt2(1280, 36, 20), CAUSAL),
    "gpt2-xl": ("gpt2", _gpt2(1600, 48, 25), CAUSAL),
    "t5-small": ("t5", _t5(512, 64, 2048, 6, 8), SEQ2SEQ),
    "t5-base": ("t5", _t5(768, 64, 3072, 12, 12), SEQ2SEQ),
    "t5-large": ("t5", _t5(1024, 64, 4096, 24, 16), SEQ2SEQ),
    "vit-base-patch16-224": ("vit", {}, IMAGE_CLASSIFIER),
    "vit-large-patch16-224": ("vit", VIT_LARGE, IMAGE_CLASSIFIER),
}  # fmt: skip

# Types whose positions are counted from behind the padding id, which takes two of them.
COUNTED_FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl")
DEFAULT_IMAGE_SIZE = 224
DEFAULT_SEQ_LEN = 512


def find_workload(
    name: str,
    *,
    num_labels: int | None = None,
    image_size: int | None = None,
    seq_len: int | None = None,
    attention: str | None = None,
    dtype: str | None = None,
    freeze: str | None = None,
    batch: str | None = None,
) -> Workload:
    """The model called `name`, with a batch and a loss that suit it.

    `name`: a torchvision classifier ("resnet50"; "vgg16" is the flat one of `helpers.models`), a
    name in HUGGING_FACE, a folder with a `config.json` or such a file, or "module:function", which
    returns the model and needs `batch` "module:function" for a function of the batch size.
    num_labels: outputs of the classifier; 1 is one logit with binary cross-entropy. Without it
    torchvision's 1,000, Hugging Face's 2, or a language model where the name stands for one.
    image_size, seq_len: pixels a side, tokens a text. attention: "sdpa" or "eager". dtype: weights
    and arithmetic in "bf16" or "fp16". freeze: the parameter or module of this name is not trained
    ("*" any text), see `helpers.models.freeze`.

    Raises ValueError for names that are not known and options that do not suit the model.
    """
    for option, value in (
        ("num_labels", num_labels),
        ("image_size", image_size),
        ("seq_len", seq_len),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{option}={value}: expected 1 or more")
    if attention not in (None, *ATTENTIONS):
        raise ValueError(f"attention={attention!r}: expected one of {', '.join(ATTENTIONS)}")
    is_path = name.endswith(".json") or "/" in name or Path(name).is_dir()
    if ":" in name:
        for option, value in (
            ("num_labels", num_labels),
            ("image_size", image_size),
            ("seq_len", seq_len),
            ("attention", attention),
        ):
            if value is not None:
                raise ValueError(f"{option} has no effect on {name}: its functions decide that")
        workload = _own_workload(name, batch)
    elif batch is not None:
        raise ValueError("a batch function goes with a model function only: MODEL module:function")
    elif name.split("/")[-1] in HUGGING_FACE and not Path(name).exists():
        config, task = _built_in_config(name.split("/")[-1])
        workload = _transformers_workload(
            name, config, task, num_labels, image_size, seq_len, attention
        )
    elif is_path:
        config, task = _config_from_path(Path(name).expanduser())
        workload = _transformers_workload(
            name, config, task, num_labels, image_size, seq_len, attention
        )
    else:
        for option, value in (("seq_len", seq_len), ("attention", attention)):
            if value is not None:
                raise ValueError(f"{option} has no effect on {name}, a model of images")
        workload = _torchvision_workload(name, num_labels, image_size)
    return Workload(
        workload.title,
        partial(build_as, workload.model_fn, dtype, freeze),
        partial(_batch_as, workload.batch_fn, dtype),
        workload.loss_fn,
        name,
        {
            "--num-labels": num_labels,
            "--image-size": image_size,
            "--seq-len": seq_len,
            "--attention": attention,
            "--dtype": dtype,
            "--freeze": freeze,
            "--batch": batch,
        },
    )


def build_as(
    model_fn: Callable[[], nn.Module], dtype: str | None = None, frozen: str | None = None
) -> nn.Module:
    """A new model with weights of `dtype` (see DTYPES), its part called `frozen` not trained."""
    model = model_fn()
    if dtype is not None:
        model.to(DTYPES[dtype])
    if frozen is not None:
        freeze(model, frozen)
    return model


def _batch_as(batch_fn: Callable[[int], Any], dtype: str | None, batch_size: int) -> Any:
    batch = batch_fn(batch_size)
    if dtype is None:
        return batch

    def convert(key, tensor):
        is_input = tensor.is_floating_point() and key != "labels"
        return tensor.to(DTYPES[dtype]) if is_input else tensor

    if isinstance(batch, dict):
        return {key: convert(key, tensor) for key, tensor in batch.items()}
    return convert("inputs", batch[0]), batch[1]


# --- torchvision ---------------------------------------------------------------------------


def _torchvision_workload(name: str, num_labels: int | None, image_size: int | None) -> Workload:
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        known = [*names, *HUGGING_FACE]
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        raise ValueError(
            f"no model {name!r}"
            + (f"; the nearest names are {', '.join(near)}" if near else "")
            + ". Expected a torchvision classifier, one of "
            f"{', '.join(HUGGING_FACE)}, a folder or config.json of a transformers model, "
            "or module:function"
        )
    num_labels = num_labels or 1000
    size = image_size or (299 if name == "inception_v3" else DEFAULT_IMAGE_SIZE)
    if name == "vgg16":
        model_fn = partial(vgg16, num_labels)
    else:
        options: dict[str, Any] = {"num_classes": num_labels}
        if name.startswith("vit_") and image_size:
            options["image_size"] = image_size
        if name in ("inception_v3", "googlenet"):
            options["init_weights"] = True  # otherwise torchvision announces a change of default
        model_fn = partial(torchvision.models.get_model, name, weights=None, **options)
    return Workload(
        f"{name}, {num_labels:,} classes, {size} px",
        model_fn,
        partial(_images, size, num_labels),
        image_loss,
    )


def _images(size: int, num_labels: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch_size, 3, size, size), _class_labels(num_labels, batch_size)


def _class_labels(num_labels: int, batch_size: int) -> torch.Tensor:
    dtype = torch.float32 if num_labels == 1 else torch.long
    return torch.zeros(batch_size, dtype=dtype)


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the logits; with floating-point labels binary cross-entropy of one logit."""
    images, labels = batch
    output = model(images)
    losses = [classification_loss(logits, labels) for logits in _logits(output)]
    return sum(losses[1:], losses[0])


def _logits(output: Any) -> list[torch.Tensor]:
    """The logits of a model's output; those of auxiliary classifiers too, where it has them."""
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "logits") and not isinstance(output, tuple):
        return [output.logits]
    return [part for part in output if isinstance(part, torch.Tensor)]


def classification_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of logits [batch, classes]; computed in float32 if labels are floating-point."""
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1).float(), labels)
    return F.cross_entropy(logits, labels)


# --- transformers --------------------------------------------------------------------------


def _built_in_config(name: str):
    from transformers import AutoConfig

    model_type, changes, task = HUGGING_FACE[name]
    return AutoConfig.for_model(model_type, **changes), task


def _config_from_path(path: Path):
    """Configuration and class name of the model in a folder or `config.json`."""
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no file {file}: expected a folder with a config.json, or such a file")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        model_type = fields["model_type"]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    except (KeyError, TypeError):
        raise ValueError(
            f"{file} has no model_type: expected the config.json of a transformers model"
        ) from None
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError:
        raise ValueError(f"{file}: transformers knows no model type {model_type!r}") from None
    config = type(config).from_dict(fields)
    architectures = fields.get("architectures") or []
    return config, (architectures[0] if architectures else None)


def _transformers_workload(
    title, config, task, num_labels, image_size, seq_len, attention
) -> Workload:
    import transformers

    if num_labels is not None:
        has_pixels = hasattr(config, "image_size")
        task = IMAGE_CLASSIFIER if has_pixels else CLASSIFIER
        config.num_labels = num_labels
    if task is None or not hasattr(transformers, task):
        raise ValueError(
            f"{title}: its configuration names no model class that transformers has "
            f"(architectures: {task}); with --num-labels it becomes a classifier"
        )
    if attention is not None:
        config._attn_implementation = attention
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is for generating, not for training
    if getattr(config, "pad_token_id", None) is None and task == CLASSIFIER:
        config.pad_token_id = 0  # decoders look for the last token that is not padding
    if hasattr(config, "image_size") and hasattr(config, "num_channels"):
        if seq_len is not None:
            raise ValueError(f"seq_len has no effect on {title}, a model of images")
        size = image_size or config.image_size
        config.image_size = size
        batch_fn = partial(_pixel_values, config.num_channels, size, config.num_labels)
        extent = f"{size} px"
    else:
        if image_size is not None:
            raise ValueError(f"image_size has no effect on {title}, a model of texts")
        length = _text_length(title, config, seq_len)
        is_classifier = "Classification" in task
        batch_fn = partial(_texts, length, config.num_labels if is_classifier else None)
        extent = f"{length} tokens"
    return Workload(
        f"{title}, {extent}",
        partial(_from_config, task, config),
        batch_fn,
        partial(transformers_loss, config.num_labels == 1),
    )


def _from_config(task: str, config) -> nn.Module:
    import transformers

    model_class = getattr(transformers, task)
    try:
        build = model_class.from_config if task.startswith("Auto") else model_class
        model = build(config)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"transformers has no {task} for the model type {config.model_type!r}"
        ) from None
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers takes anyway, after a warning
    return model


def _text_length(title: str, config, seq_len: int | None) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in COUNTED_FROM_PADDING:
        longest -= 2
    if longest is None or longest < 1:  # relative positions: no limit
        return seq_len or DEFAULT_SEQ_LEN
    if seq_len is not None and seq_len > longest:
        raise ValueError(f"seq_len={seq_len}: {title} takes texts of at most {longest} tokens")
    return seq_len or min(longest, DEFAULT_SEQ_LEN)


def _texts(length: int, num_labels: int | None, batch_size: int) -> dict[str, torch.Tensor]:
    """Padded texts: with data to look at, transformers drops a mask without padding, here never."""
    tokens = torch.zeros(batch_size, length, dtype=torch.long)
    labels = tokens.clone() if num_labels is None else _class_labels(num_labels, batch_size)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _pixel_values(channels: int, size: int, num_labels: int, batch_size: int):
    return {
        "pixel_values": torch.zeros(batch_size, channels, size, size),
        "labels": _class_labels(num_labels, batch_size),
    }


def transformers_loss(one_logit: bool, model: nn.Module, batch: dict[str, torch.Tensor]):
    """The model's own loss; for one logit, where that would be squared, binary cross-entropy."""
    if not one_logit:
        return model(**batch).loss
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return classification_loss(model(**inputs).logits, batch["labels"])


# --- Recomputation as text -----------------------------------------------------------------


def parse_checkpoint(text: str | None) -> Checkpoint:
    """What `helpers.models.checkpointing` takes, from the command line.

    A number of segments, the name of a form ("pools", "layers", "layers/2", "selective"), or ranges
    of children such as "0-5,7-9", with "x4" behind a range for four chunks of the batch.
    """
    if text is None or text.isdigit():
        return None if text is None else int(text)
    if not text[:1].isdigit():
        return text
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+)(?:x(\d+))?", part)
        if match is None:
            raise ValueError(
                f"--checkpoint {text}: expected a number, pools, layers, selective or ranges "
                "such as 0-5,7-9 (with x4 behind one for four chunks of the batch)"
            )
        ranges.append(tuple(int(number) for number in match.groups() if number is not None))
    return tuple(ranges)


def format_checkpoint(how: Checkpoint) -> str | None:
    """The text that `parse_checkpoint` reads back."""
    if how is None or isinstance(how, (int, str)):
        return None if how is None else str(how)
    return ",".join(
        f"{start}-{stop}" + "".join(f"x{number}" for number in chunks)
        for start, stop, *chunks in how
    )


# --- Your own ------------------------------------------------------------------------------


def _own_workload(name: str, batch: str | None) -> Workload:
    if batch is None:
        raise ValueError(
            f"{name}: a model function needs --batch module:function too, which returns "
            "(inputs, labels) or a dict for a number of samples"
        )
    return Workload(name, load_function(name), load_function(batch), own_loss)


def load_function(name: str) -> Callable:
    """The function called "module:function", looked for in the current folder as well.

    Raises ValueError if there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: {error}; looked in {Path.cwd()} and the environment") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{name}: the module {module_name} has no function {function_name!r}")
    return function


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model returns for a dict, or `image_loss` for (inputs, labels)."""
    if not isinstance(batch, dict):
        return image_loss(model, batch)
    loss = getattr(model(**batch), "loss", None)
    if loss is None:
        raise ValueError(
            "the model returned no loss for a batch that is a dict: give it labels, or let the "
            "batch function return (inputs, labels)"
        )
    return loss
