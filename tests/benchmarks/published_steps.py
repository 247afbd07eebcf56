"""The training steps behind the published measurements, by the names used in published.csv.

Each is built twice: as it would run today, and as it ran on the software it was measured on. What
a row's source says is written here as it says it. What older libraries did otherwise has a name
below, with its versions and its source; which of them a row gets follows from the row's versions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torchvision
from published_models import (
    Adam8bit,
    PvtTiny,
    TeachingGpt2,
    TransformersAdafactor,
    TransformersAdamW,
    small_layers,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.models import blocks
from helpers.predict import Prediction
from helpers.train import Recipe

LONG = torch.long


def allocated(prediction: Prediction) -> int:
    return prediction.peak_allocated


def reserved(prediction: Prediction) -> int:
    return prediction.peak_reserved


@dataclass(frozen=True)
class Step:
    """The arguments of `predict`, and what of its result was measured (bytes)."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    recipe: Recipe = Recipe()
    optimizer_fn: Callable | None = None
    reading: Callable[[Prediction], int] = allocated
    ddp: bool = False


# --- What older libraries did otherwise ----------------------------------------------------


def zeroed_gradients(recipe: Recipe, then: bool) -> Recipe:
    """Before torch 2.0 `zero_grad` filled gradients with zeros (pytorch/pytorch PR 92731)."""
    return replace(recipe, set_to_none=not then)


def bert_mask(batch: int, tokens: int, then: bool, given: bool) -> torch.Tensor | None:
    """The attention mask that reaches BERT's layers.

    Before transformers 4.48 BERT made a mask of ones where none was given, and turned it into
    float32 numbers [batch, 1, 1, tokens] that are added to the scores, also under autocast
    (huggingface/transformers, modeling_bert.py, get_extended_attention_mask). Today a mask of
    ones is dropped.
    """
    return torch.zeros(batch, 1, 1, tokens) if then or given else None


def cut_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy on logits cut by the last token of each sequence, which copies them.

    transformers up to 4.48 (loss/loss_utils.py of v4.48.1); since 4.49 the labels are padded.
    """
    cut, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(cut.view(-1, cut.shape[-1]), labels.view(-1))


def loss_beside_model(model, batch):
    """4.48: a function converts to float32 while the model still holds its own logits (Mistral)."""
    logits = model(input_ids=batch["input_ids"]).logits
    return cut_loss(logits.float(), batch["labels"])


def loss_inside_model(model, batch):
    """4.48: the model replaces its logits by float32 ones (Granite)."""
    logits = model(input_ids=batch["input_ids"]).logits
    logits = logits.float()
    return cut_loss(logits, batch["labels"])


def loss_in_half(model, batch):
    """4.48: the model's logits keep their type (GPTBigCode)."""
    logits = model(input_ids=batch["input_ids"]).logits
    return cut_loss(logits, batch["labels"])


def loss_of_model(model, batch):
    """Today: what the installed transformers computes."""
    return model(**batch).loss


def checkpointed(step: Step, then: bool, how="layers") -> Step:
    """The step with every layer recomputed; then by reentrant checkpointing.

    It was torch's only kind before 1.11, and the one that transformers chose before version 5. It
    recomputes a layer to its end and holds the result during the layer's backward pass.
    """
    if then:
        return replace(step, model_fn=partial(reentrant, step.model_fn))
    return replace(step, recipe=replace(step.recipe, checkpoint=how))


def reentrant(model_fn: Callable[[], nn.Module]) -> nn.Module:
    model = model_fn()
    for block in blocks(model):
        block.forward = partial(reentrant_forward, block.forward)
    return model


def reentrant_forward(forward, *args, **kwargs):
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)


# --- Loops that do something else between backward passes ----------------------------------


class LateZeroing:
    """Loss and optimizer of a loop that zeroes gradients between forward and backward pass.

    The loop's variables hold batch, logits and loss until they are assigned again: a loader that
    brings its batches to the GPU (`loader_moves`) makes the next batch before that.
    """

    def __init__(self, loader_moves: bool):
        self.loader_moves = loader_moves
        self.variables = None

    def loss(self, model, batch) -> torch.Tensor:
        pictures, labels = batch
        dtype = next(model.parameters()).dtype
        logits = model(pictures.to(dtype)).float()
        loss = F.cross_entropy(logits, labels)
        for parameter in model.parameters():
            parameter.grad = None
        self.variables = batch, logits, loss
        return loss

    def optimizer(self, params) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(params, lr=5e-5)
        optimizer.zero_grad = self._next_batch  # it is called before the batch is moved
        return optimizer

    def _next_batch(self, set_to_none: bool = True) -> None:
        if not self.loader_moves:
            self.variables = None


class KeptGradients(torch.optim.SGD):
    """A loop that never updates and never zeroes gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients add up."""

    def step(self, closure=None) -> None:
        """Nothing."""


# --- BERT Large ----------------------------------------------------------------------------


def bert_large(kind: str) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30_522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return getattr(transformers, kind)._from_config(config, attn_implementation="eager")


def classification_batch(batch: int, tokens: int):
    return {
        "input_ids": torch.zeros(batch, tokens, dtype=LONG),
        "labels": torch.zeros(batch, dtype=LONG),
    }


def bert_classification_loss(model, batch, then: bool):
    mask = bert_mask(*batch["input_ids"].shape, then, given=False)
    return model(**batch, attention_mask=mask).loss


def bert_trainer(then, *, micro_batch, accumulate=1, amp="off", optimizer=None):
    """Trainer of transformers on sequences of 512 tokens, NVML read after 512 of them."""
    if optimizer is None:
        optimizer = TransformersAdamW if then else torch.optim.AdamW
    recipe = Recipe(amp=amp, accumulate=accumulate, clip_norm=1.0)
    return Step(
        partial(bert_large, "BertForSequenceClassification"),
        partial(classification_batch, micro_batch * accumulate, 512),
        partial(bert_classification_loss, then=then),
        zeroed_gradients(recipe, then),
        partial(optimizer, lr=5e-5),
        reserved,
    )


def bert_trainer_checkpointed(then, **options):
    return checkpointed(bert_trainer(then, **options), then)


def squad_batch(batch: int, tokens: int):
    return {
        "input_ids": torch.zeros(batch, tokens, dtype=LONG),
        "token_type_ids": torch.zeros(batch, tokens, dtype=LONG),
        "start_positions": torch.zeros(batch, dtype=LONG),
        "end_positions": torch.zeros(batch, dtype=LONG),
        "attention_mask": torch.ones(batch, tokens, dtype=LONG),
    }


def squad_loss(model, batch, then: bool):
    mask = bert_mask(*batch["input_ids"].shape, then, given=True)
    return model(**{**batch, "attention_mask": mask}).loss


def bert_squad(then):
    """The question answering example of transformers, padded to the full length."""
    return Step(
        partial(bert_large, "BertForQuestionAnswering"),
        partial(squad_batch, 12, 384),
        partial(squad_loss, then=then),
        zeroed_gradients(Recipe(clip_norm=1.0), then),
        partial(TransformersAdamW if then else torch.optim.AdamW, lr=3e-5),
    )


# --- Vision transformers -------------------------------------------------------------------


def vit_large(dtype: torch.dtype) -> nn.Module:
    model = torchvision.models.vit_l_16()
    model.heads.head = nn.Linear(1024, 10)
    return model.to(dtype)


def images(batch: int, size: int = 224):
    return torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=LONG)


def vit_large_on_cifar(then, *, batch=64, amp="off", dtype=torch.float32, fabric=True):
    """A loop that zeroes gradients after the forward pass; Fabric moves and converts the images."""
    loop = LateZeroing(loader_moves=fabric)
    return Step(
        partial(vit_large, dtype),
        partial(images, batch),
        loop.loss,
        Recipe(amp=amp),
        loop.optimizer,
        reserved,
    )


def timm_model(name: str, drop_path: float) -> nn.Module:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)  # the sources' attention keeps its scores
    return timm.create_model(name, drop_path_rate=drop_path)


def mixed_images(batch: int):
    """Images, and the soft labels that mixup makes of two samples."""
    return torch.zeros(batch, 3, 224, 224), torch.zeros(batch, 1000)


def soft_label_loss(model, batch):
    pictures, labels = batch
    return torch.sum(-labels * F.log_softmax(model(pictures), dim=-1), dim=-1).mean()


def deit_recipe(then, *, model_fn):
    """ImageNet with the training recipe of DeiT under autocast, batch 128, one process of DDP.

    The model is built for real: timm reads numbers from tensors, which fake ones do not have.
    """
    model = model_fn()
    return Step(
        lambda: model,
        partial(mixed_images, 128),
        soft_label_loss,
        zeroed_gradients(Recipe(amp="fp16"), then),
        partial(torch.optim.AdamW, lr=5e-4),
        ddp=True,
    )


# --- Convolutional networks ----------------------------------------------------------------


def summed_output(model, batch):
    pictures, _ = batch
    return model(pictures.requires_grad_()).sum()


def beyond_weights_and_gradients(prediction: Prediction) -> int:
    return (
        prediction.peak_allocated - prediction.split["parameters"] - prediction.split["gradients"]
    )


def forward_and_backward(then, *, name, batch):
    """Gradients add up over passes, nothing is updated; weights and gradients are taken off."""
    return Step(
        getattr(torchvision.models, name),
        partial(images, batch),
        summed_output,
        Recipe(),
        partial(KeptGradients, lr=0.0),
        beyond_weights_and_gradients,
    )


# --- GPT-2 ---------------------------------------------------------------------------------


def gpt2_batch(batch: int):
    ids = torch.zeros(batch, 1024, dtype=LONG)
    return ids, ids.clone()


def gpt2_loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def gpt2_model(dtype: torch.dtype, **options) -> nn.Module:
    return TeachingGpt2(**options).to(dtype)


def gpt2_teaching(then, *, dtype=torch.float32, fused=True, **options):
    """Batch 8 of 1,024 tokens; reserved memory after an epoch."""
    return Step(
        partial(gpt2_model, dtype, **options),
        partial(gpt2_batch, 8),
        gpt2_loss,
        Recipe(),
        partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.1, fused=True if fused else None),
        reserved,
    )


# --- Large language models -----------------------------------------------------------------


def language_model(name: str, lora: bool) -> nn.Module:
    import transformers

    config = {
        "PowerLM-3b": partial(
            transformers.GraniteConfig,
            vocab_size=49_152,
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=40,
            num_attention_heads=36,
            num_key_value_heads=36,
            tie_word_embeddings=True,
        ),
        "Mistral-7B": partial(
            transformers.MistralConfig,
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            sliding_window=None,
        ),
        "santacoder": partial(
            transformers.GPTBigCodeConfig,
            vocab_size=49_280,
            n_positions=2048,
            n_embd=2048,
            n_layer=24,
            n_head=16,
            n_inner=8192,
            multi_query=True,
            bos_token_id=49_152,
            eos_token_id=49_152,
        ),
    }[name](use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        options = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
        model = get_peft_model(model, options)
    return model


def token_batch(batch: int, tokens: int):
    ids = torch.zeros(batch, tokens, dtype=LONG)
    return {"input_ids": ids, "labels": ids.clone()}


LOSSES_OF_4_48 = {
    "PowerLM-3b": loss_inside_model,
    "Mistral-7B": loss_beside_model,
    "santacoder": loss_in_half,
}


def fine_tuning(then, *, name, batch, tokens=4096, lora=False):
    """Packed sequences, bfloat16 weights, every layer checkpointed, torch's AdamW."""
    step = Step(
        partial(language_model, name, lora),
        partial(token_batch, batch, tokens),
        LOSSES_OF_4_48[name] if then else loss_of_model,
        Recipe(clip_norm=1.0),
        partial(torch.optim.AdamW, lr=2e-5),
    )
    return checkpointed(step, then)


# --- Small layers --------------------------------------------------------------------------


def small_batch():
    return (torch.zeros(60, 24, 4),)


def small_loss(model, batch):
    return model(batch[0].requires_grad_()).sum()


def small_offload_test(then):
    """No update; the test looks at the first pass, where gradients begin as None."""
    return Step(small_layers, small_batch, small_loss)


def small_offload_test_checkpointed(then):
    return checkpointed(small_offload_test(then), then, how=((0, 1), (1, 2), (2, 3)))


# --- The rows ------------------------------------------------------------------------------

STEPS: dict[str, Callable[[bool], Step]] = {
    "hf_bl_vanilla": partial(bert_trainer, micro_batch=4),
    "hf_bl_accum4": partial(bert_trainer, micro_batch=1, accumulate=4),
    "hf_bl_accum4_ckpt": partial(bert_trainer_checkpointed, micro_batch=1, accumulate=4),
    "hf_bl_fp16": partial(bert_trainer, micro_batch=4, amp="fp16"),
    "hf_bl_adafactor": partial(bert_trainer, micro_batch=4, optimizer=TransformersAdafactor),
    "hf_bl_adam8bit": partial(bert_trainer, micro_batch=4, optimizer=Adam8bit),
    "rasbt_vitl_01_fp32": partial(vit_large_on_cifar, fabric=False),
    "rasbt_vitl_01-2_fabric": vit_large_on_cifar,
    "rasbt_vitl_02_amp16": partial(vit_large_on_cifar, amp="fp16"),
    "rasbt_vitl_03_bf16true": partial(vit_large_on_cifar, dtype=torch.bfloat16),
    "rasbt_vitl_04_b16": partial(vit_large_on_cifar, dtype=torch.bfloat16, batch=16),
    "lfs_00_orig": partial(gpt2_teaching, fused=False),
    "lfs_01_mask": partial(gpt2_teaching, fused=False, stored_mask=False),
    "lfs_02_tf32": partial(gpt2_teaching, fused=False, stored_mask=False),
    "lfs_03_fused": partial(gpt2_teaching, stored_mask=False),
    "lfs_05_bf16": partial(gpt2_teaching, stored_mask=False, dtype=torch.bfloat16),
    "lfs_07_sdpa": partial(gpt2_teaching, dtype=torch.bfloat16, torch_layers=True, flash=True),
    "fms_powerlm3b_full_b4": partial(fine_tuning, name="PowerLM-3b", batch=4),
    "fms_powerlm3b_lora_b4": partial(fine_tuning, name="PowerLM-3b", batch=4, lora=True),
    "fms_powerlm3b_lora_b8": partial(fine_tuning, name="PowerLM-3b", batch=8, lora=True),
    "fms_mistral7b_full_b4": partial(fine_tuning, name="Mistral-7B", batch=4),
    "fms_mistral7b_full_b8": partial(fine_tuning, name="Mistral-7B", batch=8),
    "fms_mistral7b_lora_b4": partial(fine_tuning, name="Mistral-7B", batch=4, lora=True),
    "fms_santacoder_full_b4": partial(fine_tuning, name="santacoder", batch=4, tokens=2048),
    "fms_santacoder_full_b8": partial(fine_tuning, name="santacoder", batch=8, tokens=2048),
    "madlag_bl_squad_b12": bert_squad,
    "ogc_resnet50_b64": partial(forward_and_backward, name="resnet50", batch=64),
    "ogc_densenet121_b32": partial(forward_and_backward, name="densenet121", batch=32),
    "mesa_deit-ti": partial(
        deit_recipe, model_fn=partial(timm_model, "deit_tiny_patch16_224", 0.1)
    ),
    "mesa_deit-s": partial(
        deit_recipe, model_fn=partial(timm_model, "deit_small_patch16_224", 0.1)
    ),
    "mesa_swin-ti": partial(
        deit_recipe, model_fn=partial(timm_model, "swin_tiny_patch4_window7_224", 0.2)
    ),
    "mesa_pvt-ti": partial(deit_recipe, model_fn=PvtTiny),
    "fairscale_offload_base": small_offload_test,
    "fairscale_offload_ckpt": small_offload_test_checkpointed,
}
