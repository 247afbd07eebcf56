"""Models by name: what they are, what they are fed, and what is refused."""

import json
import sys
import warnings

import pytest
import torch
import torchvision
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.catalogue import (
    HUGGING_FACE,
    find_workload,
    format_checkpoint,
    load_function,
    parse_checkpoint,
)

# As published with the models; the head's share for the default number of labels is included.
PARAMETERS = {
    "bert-base-uncased": 109_483_778,
    "bert-large-uncased": 335_143_938,
    "distilbert-base-uncased": 66_955_010,
    "roberta-base": 124_647_170,
    "roberta-large": 355_361_794,
    "xlm-roberta-base": 278_045_186,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "vit-base-patch16-224": 85_800_194,
}


@pytest.fixture(autouse=True)
def no_rejection_sampling(monkeypatch):
    """trunc_normal_ looks at the numbers it draws, which fake tensors do not have."""
    monkeypatch.setattr(
        torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor
    )


def count_parameters(name, **options):
    with FakeTensorMode():
        model = find_workload(name, **options).model_fn()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_hugging_face_models_have_the_published_size(name):
    assert count_parameters(name) == PARAMETERS[name]


def test_xlm_roberta_large_with_one_logit():
    assert count_parameters("xlm-roberta-large", num_labels=1) == 559_891_457


def test_every_built_in_configuration_is_valid():
    for model_type, changes, task in HUGGING_FACE.values():
        config = transformers.AutoConfig.for_model(model_type, **changes)
        assert hasattr(transformers, task)
        if hasattr(config, "num_attention_heads") and hasattr(config, "hidden_size"):
            assert config.hidden_size % config.num_attention_heads == 0


def loss_of(workload, n=2):
    torch.manual_seed(0)
    return workload.loss_fn(workload.model_fn().eval(), workload.batch_fn(n))


def test_torchvision_models():
    workload = find_workload("resnet18", num_labels=7, image_size=64)
    images, labels = workload.batch_fn(3)
    assert images.shape == (3, 3, 64, 64) and labels.shape == (3,)
    assert loss_of(workload).ndim == 0
    assert find_workload("vit_b_16", image_size=32).batch_fn(1)[0].shape[-1] == 32
    assert find_workload("inception_v3").batch_fn(1)[0].shape[-1] == 299
    assert "1,000 classes" in find_workload("resnet18").title


def test_vgg16_is_the_flat_sequence():
    with FakeTensorMode():
        model = find_workload("vgg16", num_labels=2).model_fn()
        judge = torchvision.models.vgg16(num_classes=2)
    assert len(model) == 40
    shapes = [parameter.shape for parameter in model.parameters()]
    assert shapes == [parameter.shape for parameter in judge.parameters()]


def test_auxiliary_classifiers_are_part_of_the_loss():
    workload = find_workload("googlenet", num_labels=2, image_size=64)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = workload.model_fn().train()
        loss = workload.loss_fn(model, workload.batch_fn(2))
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def tiny_bert(tmp_path):
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=40,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_or_its_configuration_file(tiny_bert):
    for path in (tiny_bert, tiny_bert / "config.json"):
        workload = find_workload(str(path))
        assert isinstance(workload.model_fn(), transformers.BertForMaskedLM)
        assert workload.batch_fn(2)["labels"].shape == (2, 40)  # no longer than it can be
        assert loss_of(workload).ndim == 0
    classifier = find_workload(str(tiny_bert), num_labels=3, seq_len=8)
    assert isinstance(classifier.model_fn(), transformers.BertForSequenceClassification)
    assert classifier.batch_fn(2)["labels"].shape == (2,)
    one_logit = find_workload(str(tiny_bert), num_labels=1)
    assert one_logit.batch_fn(2)["labels"].dtype == torch.float32
    assert loss_of(one_logit).item() == pytest.approx(0.693, abs=0.1)  # of a logit near 0


def test_half_precision_and_frozen_parameters(tiny_bert):
    workload = find_workload(
        str(tiny_bert), num_labels=1, dtype="bf16", freeze="*embeddings*", attention="eager"
    )
    model = workload.model_fn()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != ("embeddings" in name)
    assert model.config._attn_implementation == "eager"
    images, labels = find_workload("resnet18", num_labels=1, dtype="fp16").batch_fn(1)
    assert (images.dtype, labels.dtype) == (torch.float16, torch.float32)


def test_functions_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(4, 3)\n"
        "def batch(n): return torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)\n"
        "def bare(n): return {'input': torch.zeros(n, 4)}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    workload = find_workload("my_models:model", batch="my_models:batch")
    assert loss_of(workload).ndim == 0
    with pytest.raises(ValueError, match="returned no loss"):
        loss_of(find_workload("my_models:model", batch="my_models:bare"))
    with pytest.raises(ValueError, match="no function 'modell'"):
        load_function("my_models:modell")
    with pytest.raises(ValueError, match="No module named 'my_model'"):
        load_function("my_model:model")
    with pytest.raises(ValueError, match="needs --batch"):
        find_workload("my_models:model")
    with pytest.raises(ValueError, match="num_labels has no effect"):
        find_workload("my_models:model", batch="my_models:batch", num_labels=2)
    del sys.modules["my_models"]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("resnet5", {}, "nearest names are .*resnet50"),
        ("xlm-roberta-larg", {}, "nearest names are xlm-roberta-large"),
        ("qwertyuiop", {}, "Expected a torchvision classifier"),
        ("xlm-roberta-large", {"seq_len": 513}, "at most 512 tokens"),
        ("bert-base-uncased", {"seq_len": 513}, "at most 512 tokens"),
        ("gpt2", {"image_size": 32}, "a model of texts"),
        ("vit-base-patch16-224", {"seq_len": 32}, "a model of images"),
        ("resnet50", {"seq_len": 32}, "a model of images"),
        ("resnet50", {"attention": "eager"}, "attention has no effect"),
        ("resnet50", {"num_labels": 0}, "num_labels=0: expected 1 or more"),
        ("resnet50", {"batch": "a:b"}, "goes with a model function only"),
        ("no/such/folder", {}, "no file no/such/folder"),
        ("t5-small", {"num_labels": 2, "image_size": 3}, "a model of texts"),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        find_workload(name, **options)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ("{}", "has no model_type"),
        ('{"model_type": "brt"}', "knows no model type 'brt'"),
        ('{"model_type": "bert"}', "names no model class"),
        ('{"model_type": "bert", "architectures": ["BertForNothing"]}', "names no model class"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        find_workload(str(tmp_path))


def test_freezing_nothing_is_an_error(tiny_bert):
    workload = find_workload(str(tiny_bert), freeze="*nothing*")
    with pytest.raises(ValueError, match="matches no parameter; there are bert.embeddings"):
        workload.model_fn()


@pytest.mark.parametrize(
    "text, how",
    [
        (None, None),
        ("4", 4),
        ("pools", "pools"),
        ("layers/2", "layers/2"),
        ("0-5,7-9", ((0, 5), (7, 9))),
        ("0-5x4,7-9", ((0, 5, 4), (7, 9))),
    ],
)
def test_recomputation_as_text_and_back(text, how):
    assert parse_checkpoint(text) == how
    assert format_checkpoint(how) == text


def test_recomputation_that_cannot_be_read():
    with pytest.raises(ValueError, match="expected a number, pools, layers"):
        parse_checkpoint("0-5-7")


def test_options_come_back_for_the_command_line(tiny_bert):
    workload = find_workload("bert-base-uncased", num_labels=3, seq_len=20)
    given = {key: value for key, value in workload.options.items() if value is not None}
    assert (workload.name, given) == ("bert-base-uncased", {"--num-labels": 3, "--seq-len": 20})
    assert json.dumps(given)
