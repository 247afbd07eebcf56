"""XLM-R: the real classifier with one logit, from a folder, the hub, or small and random."""

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoTokenizer,
    BertConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
)

from helpers.data import comment_texts
from helpers.models import XLMR_SIZES, train_tokenizer, xlmr, xlmr_config


@pytest.fixture(scope="module")
def texts():
    return comment_texts(limit=300)


@pytest.fixture
def no_hub(monkeypatch):
    """No network and nothing in the cache; calls are counted, and each takes an `answer`."""

    class Hub:
        calls = 0
        answer = ConnectionError("no network")

    def model_info(self, name, timeout):
        Hub.calls += 1
        raise Hub.answer

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return Hub


def state(parts):
    return {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def vocabulary(tokenizer):
    return tokenizer.backend_tokenizer.to_str()


# --- Model ---------------------------------------------------------------------------------


def test_published_sizes_have_their_published_number_of_parameters():
    with torch.device("meta"):
        base, large = xlmr("base"), xlmr("large")
    assert sum(p.numel() for p in large.model.parameters()) == 559_891_457
    assert sum(p.numel() for p in base.model.parameters()) == 278_044_417
    assert large.tokenizer is None and "559,891,457 parameters" in large.source


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_it_is_transformers_classifier_with_one_logit_and_its_loss(size, texts):
    model, tokenizer, source = xlmr(size, texts=texts, seed=1)
    assert type(model) is XLMRobertaForSequenceClassification
    batch = tokenizer(texts[:3], padding=True, return_tensors="pt")
    labels = torch.tensor([[0.0], [1.0], [1.0]])
    output = model.eval()(**batch, labels=labels)
    assert output.logits.shape == (3, 1)
    # Where transformers computes a loss itself, it is not its squared error for one label.
    expected = binary_cross_entropy_with_logits(output.logits, labels)
    assert output.loss.item() == pytest.approx(expected.item())
    assert f"{size} XLM-R, random weights" in source and "seed 1" in source


def test_padding_does_not_change_a_comments_logit(texts):
    model, tokenizer, _ = xlmr("tiny", texts=texts)
    model.eval()
    together = model(**tokenizer(texts[:4], padding=True, return_tensors="pt")).logits
    for text, logit in zip(texts, together, strict=False):
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(alone, logit, rtol=1e-4, atol=1e-5)


def test_the_seed_fixes_weights_and_tokenizer_and_leaves_the_callers_randomness(texts):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = xlmr("tiny", texts=texts, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    again, other = (xlmr("tiny", texts=texts, seed=seed) for seed in (3, 4))
    assert_same_weights(state(first), state(again))
    assert vocabulary(first.tokenizer) == vocabulary(again.tokenizer)
    name = "classifier.dense.weight"
    assert not torch.equal(state(first)[name], state(other)[name])


def test_a_configuration_is_taken_as_it_is_and_not_changed(texts):
    config = xlmr_config("tiny", num_hidden_layers=3, max_position_embeddings=66)
    config.num_labels = 5
    before = config.to_dict()
    model, tokenizer, source = xlmr(config, texts=texts)
    assert config.to_dict() == before
    assert model.config.num_labels == 1 and model.config.num_hidden_layers == 3
    assert "of the given configuration" in source
    # 66 positions, and the first two are never a token's.
    assert tokenizer.model_max_length == 64
    ids = tokenizer("word " * 1_000, truncation=True, return_tensors="pt")
    assert ids["input_ids"].shape == (1, 64)
    assert model(**ids).logits.isfinite().all()


def test_unknown_sizes_and_other_models_are_refused(texts):
    with pytest.raises(ValueError, match="no XLM-R size 'huge': expected one of tiny, small"):
        xlmr_config("huge")
    with pytest.raises(ValueError, match="type 'bert': expected 'xlm-roberta'"):
        xlmr(BertConfig(), texts=texts)
    assert set(XLMR_SIZES) == {"tiny", "small", "base", "large"}


# --- Tokenizer -----------------------------------------------------------------------------


def test_a_trained_tokenizer_behaves_like_xlm_rs(texts, tmp_path):
    tokenizer = train_tokenizer(texts)
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert tokenizer.mask_token_id == len(tokenizer) - 1
    ids = tokenizer("You are kind.", "Thank you.")["input_ids"]
    inner = [i for i in ids if i != 2]
    assert ids[0] == 0 and ids[-1] == 2 and ids.count(2) == 3 and 0 not in inner[1:]
    assert tokenizer("a\n\n b ")["input_ids"] == tokenizer("a b")["input_ids"]
    assert tokenizer("Kind")["input_ids"] != tokenizer("kind")["input_ids"]
    assert tokenizer("猫")["input_ids"].count(3) == 1
    assert (
        tokenizer.decode(tokenizer("Tu es poli, oui.")["input_ids"]) == "<s> Tu es poli, oui.</s>"
    )
    assert tokenizer.model_max_length == 512
    assert list(tokenizer("x")) == ["input_ids", "attention_mask"]

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert vocabulary(loaded) == vocabulary(tokenizer)
    for text in texts:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.model_max_length == 512 and loaded.pad_token_id == 1


def test_the_same_texts_give_the_same_tokenizer_every_time(texts):
    # The trainer's hash maps are seeded anew in each training, so a few are enough to see it.
    for size in (300, 4_000):
        assert len({vocabulary(train_tokenizer(texts, size)) for _ in range(4)}) == 1
        assert len(train_tokenizer(texts, size)) <= size


def test_texts_that_cannot_train_a_tokenizer_are_refused():
    with pytest.raises(TypeError, match="one string"):
        train_tokenizer("text")
    for texts in ([], ["", "  "]):
        with pytest.raises(ValueError, match="no texts to train a tokenizer on"):
            train_tokenizer(texts)


# --- Folders -------------------------------------------------------------------------------


@pytest.fixture
def saved(texts, tmp_path):
    parts = xlmr("tiny", texts=texts, seed=5)
    parts.model.save_pretrained(tmp_path / "model")
    parts.tokenizer.save_pretrained(tmp_path / "model")
    return parts, tmp_path / "model"


def test_a_saved_model_comes_back_without_a_word(saved, texts, capfd):
    parts, folder = saved
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = xlmr(folder)
    assert capfd.readouterr() == ("", "")
    assert_same_weights(state(parts), state(loaded))
    assert vocabulary(parts.tokenizer) == vocabulary(loaded.tokenizer)
    assert loaded.source == f"XLM-R from {folder}; all weights loaded"
    assert_same_weights(state(parts), state(xlmr(str(folder))))


@pytest.mark.parametrize("head", ["none", "two labels"])
def test_new_weights_are_named_and_depend_on_the_seed_alone(saved, tmp_path, capfd, head):
    parts, folder = saved
    config = parts.model.config
    if head == "none":
        XLMRobertaForMaskedLM(config).save_pretrained(folder)
    else:
        config.num_labels = 2
        XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    capfd.readouterr()
    torch.manual_seed(1)
    first = xlmr(folder, seed=2)
    torch.manual_seed(9)
    again, other = xlmr(folder, seed=2), xlmr(folder, seed=3)
    assert capfd.readouterr() == ("", "")
    assert first.model.config.num_labels == 1
    assert "new weights (seed 2): classifier." in first.source
    assert "classifier.out_proj.weight" in first.source and "roberta." not in first.source
    assert_same_weights(state(first), state(again))
    name = "classifier.out_proj.weight"
    assert state(first)[name].shape == (1, 32) and state(first)[name].abs().sum() > 0
    assert not torch.equal(state(first)[name], state(other)[name])


def test_half_precision_on_disk_becomes_float32(saved):
    parts, folder = saved
    parts.model.half().save_pretrained(folder)
    assert {p.dtype for p in xlmr(folder).model.parameters()} == {torch.float32}


def test_folders_that_hold_something_else_are_refused(saved, tmp_path, texts):
    parts, folder = saved
    for wanted in (tmp_path / "missing", str(tmp_path / "missing"), "./missing", "~/missing-xlmr"):
        with pytest.raises(FileNotFoundError, match="missing.*save_pretrained"):
            xlmr(wanted, texts=texts)
    train_tokenizer(comment_texts()).save_pretrained(folder)  # more pieces than 300 texts have
    with pytest.raises(ValueError, match="the tokenizer has .* pieces, the model .* 1,000"):
        xlmr(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match="has no model.safetensors or .*weights.safetens"):
        xlmr(folder)
    (folder / "weights.safetensors").rename(folder / "model.safetensors")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json or .*, found config.json"):
        xlmr(folder)
    parts.tokenizer.save_pretrained(folder)
    BertConfig().save_pretrained(folder)
    with pytest.raises(ValueError, match="type 'bert': expected 'xlm-roberta'"):
        xlmr(folder)


# --- The hub -------------------------------------------------------------------------------


def test_without_the_hub_a_small_model_takes_its_place_and_one_sentence_says_so(
    no_hub, texts, capfd
):
    parts = xlmr(texts=texts)
    assert no_hub.calls == 1
    assert parts.model.config.hidden_size == 128
    assert parts.source.startswith("xlm-roberta-base could not be loaded (the hub cannot be reac")
    assert "in its place: small XLM-R, random weights" in parts.source
    assert capfd.readouterr() == (parts.source + "\n", "")
    assert_same_weights(state(parts), state(xlmr("small", texts=texts)))
    with pytest.raises(ValueError, match="could not be loaded .* pass texts="):
        xlmr()


def test_the_hub_is_not_asked_when_it_is_switched_off(no_hub, texts, monkeypatch, capfd):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    parts = xlmr(texts=texts)
    assert no_hub.calls == 0 and "HF_HUB_OFFLINE is set" in parts.source


def test_a_hub_that_does_not_answer_is_not_waited_for(no_hub, texts, monkeypatch, capfd):
    released = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kw: released.wait(60))
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout: time.sleep(0.01))
    parts = xlmr(texts=texts)
    released.set()
    assert "no answer from the hub within 10 s" in parts.source


def test_a_name_that_the_hub_does_not_have_is_an_error_and_no_fallback(no_hub, texts):
    no_hub.answer = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(ValueError, match="the hub has no model 'xlm-robeta-base'"):
        xlmr("xlm-robeta-base", texts=texts)


def test_a_model_in_the_cache_is_loaded_without_the_hub(saved, tmp_path):
    _, folder = saved
    snapshot = tmp_path / "cache" / "models--some--xlmr" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    script = "from helpers.models import xlmr; print(xlmr('some/xlmr').source)"
    # In a process of its own, because the cache's place is read from the environment at import.
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache")}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody answers there
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout == "some/xlmr from the local cache; all weights loaded\n", done.stderr


def test_what_cannot_be_a_name_is_refused_before_anyone_is_asked(texts):
    with pytest.raises(ValueError, match="'not/a/name' is neither a folder nor a model name"):
        xlmr("not/a/name", texts=texts)
