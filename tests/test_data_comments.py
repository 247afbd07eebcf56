"""Toxic comments: the sample is an honest exam, and the competition's files are read exactly."""

import csv
import importlib.util
import math
import os
import pickle
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from helpers.data import (
    TOXIC_COMMENT_FILE,
    UNINTENDED_BIAS_FILE,
    PadComments,
    comment_texts,
    jigsaw,
    write_submission,
)
from helpers.models import train_tokenizer, xlmr, xlmr_config

DATA = Path(__file__).parent.parent / "data"
LANGUAGES = ["en", "es", "fr", "it", "pt", "ru", "tr"]
TRAIN_COLUMNS = ["id", "comment_text", "toxic", "severe_toxic", "obscene", "threat", "insult"]
TRAIN_COLUMNS += ["identity_hate"]
VALIDATION_COLUMNS = ["id", "comment_text", "lang", "toxic"]


@pytest.fixture(scope="module")
def script():
    """data/write_comments.py as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("write_comments", DATA / "write_comments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name):
    """The records of a sample file, read by Python alone."""
    with (DATA / "comments" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def train_rows():
    return read(TOXIC_COMMENT_FILE)


@pytest.fixture(scope="module")
def val_rows():
    return read("validation.csv")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(comment_texts(limit=500), 800)


# --- The sample ----------------------------------------------------------------------------


def test_the_sample_is_what_its_script_writes(script, tmp_path):
    script.write(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [TOXIC_COMMENT_FILE, "test.csv", "validation.csv"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (DATA / "comments" / name).read_bytes(), name


def test_the_sample_has_the_size_languages_and_looks_of_the_real_files(
    script, train_rows, val_rows
):
    assert len(train_rows) >= 1_000 and len(val_rows) >= 300 and len(read("test.csv")) >= 100
    assert list(train_rows[0]) == TRAIN_COLUMNS and list(val_rows[0]) == VALIDATION_COLUMNS
    assert sorted({row["lang"] for row in val_rows}) == LANGUAGES
    in_training = [row.template.language for row in script.rows("train")]
    for language in LANGUAGES:
        assert in_training.count(language) >= 100
        labels = [row["toxic"] for row in val_rows if row["lang"] == language]
        assert len(labels) >= 40 and 0.3 < labels.count("1") / len(labels) < 0.7
    texts = [row["comment_text"] for row in train_rows]
    assert sum("\n" in text.strip() for text in texts) > 50
    assert sum(text.startswith('"') for text in texts) > 50
    assert sum(text != text.strip() for text in [row["comment_text"] for row in val_rows]) > 20
    assert len({row["id"] for row in train_rows}) == len(train_rows)
    assert [row["id"] for row in val_rows] == [str(i) for i in range(len(val_rows))]


def fillings(script, texts):
    """(language, template, slot, word) of every sentence of the sample that stands in `texts`.

    Found by matching the templates against the texts as written, whatever the script thinks it
    put where. A sentence ends where a template ends, so an aside is found as well.
    """
    found = set()
    everything = "\n".join(texts)
    templates = [*script.templates(), *(t for code in LANGUAGES for t in script.asides(code))]
    for template in templates:
        entries = script.LANGUAGES[template.language].words
        pattern, slots = "", []
        for literal, letter, form in re.findall(r"([^{]+)|\{(\w)(\d)\}", template.pattern):
            pattern += re.escape(literal)
            if letter:
                forms = [entry[int(form)] for entry in entries[letter]]
                # At the start of a sentence the first letter is a capital one.
                forms += [word[0].upper() + word[1:] for word in forms if not slots and not pattern]
                slots.append(letter)
                pattern += "(" + "|".join(map(re.escape, forms)) + ")"
        for match in re.finditer(pattern, everything):
            for slot, word in zip(slots, match.groups(), strict=True):
                found.add((template.language, template.pattern, slot, word.lower()))
    return found


def test_no_text_and_no_filling_of_a_template_is_in_two_splits(script, train_rows, val_rows):
    splits = {
        "train": [row["comment_text"] for row in train_rows],
        "val": [row["comment_text"] for row in val_rows],
        "test": [row["content"] for row in read("test.csv")],
    }
    sets = {name: {" ".join(text.split()) for text in texts} for name, texts in splits.items()}
    filled = {name: fillings(script, texts) for name, texts in splits.items()}
    assert len(filled["train"]) > 2_000 and len(filled["val"]) > 600
    for one, other in [("train", "val"), ("train", "test"), ("val", "test")]:
        assert not sets[one] & sets[other]
        assert not filled[one] & filled[other]
    # The templates kept for validation are not in the training comments in any filling.
    unseen = {template.pattern for template in script.templates() if template.unseen}
    assert len(unseen) == 8 * len(LANGUAGES)
    assert not unseen & {pattern for _, pattern, _, _ in filled["train"]}
    assert unseen <= {pattern for _, pattern, _, _ in filled["val"]}


def test_the_shares_are_those_that_the_readme_states(script, train_rows, val_rows):
    text = " ".join((DATA / "README.md").read_text().split())
    stated = re.search(r"(\d+) % of the training and (\d+) % of the validation comments", text)
    for rows, share in zip((train_rows, val_rows), stated.groups(), strict=True):
        assert round(100 * np.mean([row["toxic"] == "1" for row in rows])) == int(share)
    (share,) = re.search(r"only validation has, eight in each language, (\d+) %", text).groups()
    unseen = [row.template.unseen for row in script.rows("validation")]
    assert round(100 * np.mean(unseen)) == int(share)


def test_every_word_of_validation_and_test_is_in_the_training_comments(script):
    words = {split: {language: set() for language in LANGUAGES} for split in script.SPLITS}
    for split, by_language in words.items():
        for row in script.rows(split):
            by_language[row.template.language].update(re.findall(r"\w+", row.text.lower()))
    for language in LANGUAGES:
        assert words["validation"][language] <= words["train"][language]
        assert words["test"][language] <= words["train"][language]


def bag_of_words_auc(vectorizer, train_rows, val_rows, labels):
    features = vectorizer.fit_transform(row["comment_text"] for row in train_rows)
    judge = LogisticRegression(max_iter=1_000).fit(features, labels)
    scores = judge.decision_function(vectorizer.transform(row["comment_text"] for row in val_rows))
    return roc_auc_score([row["toxic"] for row in val_rows], scores, labels=["0", "1"])


@pytest.mark.parametrize(
    "vectorizer", [CountVectorizer(), TfidfVectorizer()], ids=["counts", "tf-idf"]
)
def test_a_bag_of_words_passes_the_exam_but_not_well(train_rows, val_rows, vectorizer):
    labels = np.array([row["toxic"] for row in train_rows])
    auc = bag_of_words_auc(vectorizer, train_rows, val_rows, labels)
    assert 0.70 <= auc <= 0.97
    name = "Words counted" if type(vectorizer) is CountVectorizer else "TF-IDF"
    stated = re.search(rf"\| {name}[^|]*\| (0\.\d+)", (DATA / "README.md").read_text())
    assert auc == pytest.approx(float(stated[1]), abs=0.01)
    draw = np.random.default_rng(0)
    chance = [
        bag_of_words_auc(vectorizer, train_rows, val_rows, draw.permutation(labels))
        for _ in range(5)
    ]
    assert 0.44 <= np.mean(chance) <= 0.56


@pytest.mark.parametrize("shuffled", [False, True], ids=["labels", "shuffled labels"])
def test_a_network_learns_from_the_labels_and_from_nothing_else(shuffled):
    config = xlmr_config("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, tokenizer, _ = xlmr(config, texts=comment_texts(), seed=0)
    loaders = jigsaw(tokenizer=tokenizer, seed=0)
    labels = loaders.train.dataset.labels
    if shuffled:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        loaders.train.dataset.labels = labels[order]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for batch in loaders.train:
            target = batch.pop("labels")
            loss = binary_cross_entropy_with_logits(model(**batch).logits.squeeze(-1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    scores, targets = [], []
    with torch.no_grad():
        for batch in loaders.val:
            targets.append(batch.pop("labels"))
            scores.append(model(**batch).logits.squeeze(-1))
    auc = roc_auc_score(torch.cat(targets), torch.cat(scores))
    assert 0.4 < auc < 0.6 if shuffled else auc > 0.8


# --- Reading -------------------------------------------------------------------------------


def write(folder, name, header, rows, encoding="utf-8", **options):
    with (folder / name).open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, **options)
        writer.writerow(header)
        writer.writerows(rows)


@pytest.fixture
def root(tmp_path):
    """A folder with the competition's files, small and awkward."""
    folder = tmp_path / "jigsaw"
    folder.mkdir()
    awkward = [
        ("0012", ' "Quoted" start\nand a second, line ', 1),
        ("NA", "NA", 0),
        ("0e3", "null", 0),
        ("nan", "nan", 0),
        ("abc", "one\r\ntwo\rthree\n\n", 1),
        ("é", "", 0),
        ("7", '"', 1),
        ("8", "'single', and a tab\t", 0),
        ("9", "\ufeffa mark inside, a line separator\u2028, and 🤖", 0),
    ]
    write(folder, TOXIC_COMMENT_FILE, TRAIN_COLUMNS, [(*row, 0, 0, 0, 0, 0) for row in awkward])
    rows = [(0, " İyi günler ", "tr", 0), (1, "Qué tonto\n", "es", 1), (2, "Ciao", "it", 0)]
    write(folder, "validation.csv", VALIDATION_COLUMNS, rows)
    write(folder, "test.csv", ["id", "content", "lang"], [(5, "hola", "es"), (3, "NA", "fr")])
    return folder


def recorded(comments):
    return [tuple(comments.read(i)) for i in range(len(comments))]


def expected(path, text, language=None):
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [
            (row["id"], row[text], row[language] if language else "")
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_no_comment_id_or_label_is_changed_or_lost(root, tokenizer, encoding, line_end):
    for path in root.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        write(root, path.name, header, rows, encoding, lineterminator=line_end)
    loaders = jigsaw(root, tokenizer=tokenizer)
    train, val, test = (part.dataset for part in (loaders.train, loaders.val, loaders.test))
    assert recorded(train) == expected(root / TOXIC_COMMENT_FILE, "comment_text")
    assert recorded(val) == expected(root / "validation.csv", "comment_text", "lang")
    assert recorded(test) == expected(root / "test.csv", "content", "lang")
    assert train.labels.tolist() == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    assert val.labels.tolist() == [0, 1, 0] and test.labels is None
    assert loaders.languages == ["tr", "es", "it"]
    assert comment_texts(root) == [text for _, text, _ in recorded(train)]
    # What the model sees is the whole text too, as this tokenizer has it.
    for i, (_, text, _) in enumerate(recorded(train)):
        assert train[i][0].tolist() == tokenizer(text)["input_ids"]


def test_the_samples_comments_are_read_as_python_reads_them(tokenizer, train_rows, val_rows):
    loaders = jigsaw(tokenizer=tokenizer)
    train, val = loaders.train.dataset, loaders.val.dataset
    assert [(c[0], c[1]) for c in recorded(train)] == [
        (row["id"], row["comment_text"]) for row in train_rows
    ]
    assert train.labels.tolist() == [float(row["toxic"]) for row in train_rows]
    assert recorded(val) == [(row["id"], row["comment_text"], row["lang"]) for row in val_rows]
    assert f"{len(train_rows):,} training" in loaders.source


def test_shares_of_annotators_become_labels_at_the_threshold(root, tokenizer):
    columns = ["id", "comment_text", "toxic", "severe_toxicity", "identity_attack"]
    shares = ["0.0", "0.49999", "0.5", "0.8333333333333334", "1.0"]
    rows = [(str(i), f"comment {i}", share, "0", "") for i, share in enumerate(shares)]
    write(root, UNINTENDED_BIAS_FILE, columns, rows)
    files = [TOXIC_COMMENT_FILE, UNINTENDED_BIAS_FILE]
    loaders = jigsaw(root, tokenizer=tokenizer, train_files=files)
    assert loaders.train.dataset.labels.tolist() == [1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert loaders.train.dataset.read(11).text == "comment 2"
    strict = jigsaw(root, tokenizer=tokenizer, train_files=files[1:], threshold=0.8)
    assert strict.train.dataset.labels.tolist() == [0, 0, 0, 1, 1]
    first = jigsaw(root, tokenizer=tokenizer, train_files=files, train_limit=2, val_limit=1)
    assert [c[0] for c in recorded(first.train.dataset)] == ["0012", "NA", "0", "1"]
    assert len(first.val.dataset) == 1 and len(first.test.dataset) == 2


def replace(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"it,0", b"it,", r"validation.csv, line 5: toxic is '', expected 0 or 1"),
        (b"it,0", b"it,nan", "line 5: toxic is 'nan'"),
        (b"it,0", b"it,-1", "line 5: toxic is '-1'"),
        (b"it,0", b"it,0.7", "line 5: toxic is '0.7'"),
        (b"it,0", b"it,yes", "line 5: toxic is 'yes'"),
        (b"it,0", b"it,0,extra", "line 5: 5 fields, but 4 columns"),
        (b"Ciao", b"Ciao, amico", "line 5: 5 fields, but 4 columns"),
        (b"Ciao", b"Ciao\namico", "line 5: 2 fields, but 4 columns"),
        (b"Ciao", b"Ciao\ramico", "line 5: new-line character seen in unquoted field"),
        (b"Ciao", b'"Ciao', "line 5: unexpected end of data, in the record that begins in line 5"),
        (b"Ciao", b'"Ciao" amico', "line 5: ',' expected after '\"'"),
        (b"Ciao", "è".encode("latin-1"), r"line 5: not UTF-8 \(byte 0xe8\).*iconv"),
        (
            b"lang",
            b"language",
            "id, comment_text, language, toxic.*expected id, comment_text, lang",
        ),
        (b"id,", b"id,id,", "expected id.*each once"),
        (b"id,comment_text", b"id;comment_text", "has the columns id;comment_text, lang"),
    ],
)
def test_a_file_that_cannot_be_read_for_certain_is_an_error_with_file_and_line(
    root, tokenizer, old, new, message
):
    replace(root / "validation.csv", old, new)
    with pytest.raises(ValueError, match="(?s)validation.csv.*") as caught:
        jigsaw(root, tokenizer=tokenizer)
    assert re.search(message, str(caught.value))
    assert "open the file" not in str(caught.value)  # Python's advice, not ours


@pytest.mark.parametrize("share", ["", "-0.1", "1.1", "NaN"])
def test_a_share_that_is_none_is_an_error(root, tokenizer, share):
    write(root, UNINTENDED_BIAS_FILE, TRAIN_COLUMNS[:3], [("1", "text", share)])
    with pytest.raises(ValueError, match="line 2: toxic is .* expected a number from 0 to 1"):
        jigsaw(root, tokenizer=tokenizer, train_files=[UNINTENDED_BIAS_FILE])


def test_other_encodings_and_empty_files_say_what_to_do(root, tokenizer):
    path = root / "validation.csv"
    text = path.read_text(encoding="utf-8")
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ValueError, match="line 1: not UTF-8.*iconv -f UTF-16 -t UTF-8 valid"):
        jigsaw(root, tokenizer=tokenizer)
    path.write_bytes(text.splitlines()[0].encode())
    with pytest.raises(ValueError, match="validation.csv has no comments below its header"):
        jigsaw(root, tokenizer=tokenizer)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="validation.csv is empty: expected id, comment_text"):
        jigsaw(root, tokenizer=tokenizer)


def test_missing_folders_and_files_say_what_was_found(root, tokenizer):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere"):
        jigsaw(root / "nowhere", tokenizer=tokenizer)
    (root / "validation.csv").rename(root / "validation.csv.zip")
    with pytest.raises(FileNotFoundError, match=r"has no validation.csv, found .*unzip"):
        jigsaw(root, tokenizer=tokenizer)
    with pytest.raises(FileNotFoundError, match=f"it is in {re.escape(str(root))}, pass"):
        jigsaw(root.parent, tokenizer=tokenizer)
    with pytest.raises(FileNotFoundError, match=f"has no {UNINTENDED_BIAS_FILE}, found jigsaw"):
        jigsaw(root, tokenizer=tokenizer, train_files=[UNINTENDED_BIAS_FILE])


def test_a_large_file_is_never_in_memory_as_text(tmp_path):
    comments = 6_000
    rows = [(i, "word " * 600, 0) for i in range(comments)]
    write(tmp_path, TOXIC_COMMENT_FILE, ["id", "comment_text", "toxic"], rows)
    write(tmp_path, "validation.csv", VALIDATION_COLUMNS, [(0, "text", "en", 0)])
    size = (tmp_path / TOXIC_COMMENT_FILE).stat().st_size

    class FirstTokens:
        """Stands for a tokenizer whose own memory is none of this test's business."""

        model_max_length, pad_token_id = 512, 1

        def __call__(self, texts, **options):
            ids = [[0, 5, 2] for _ in texts]
            return {"input_ids": ids, "overflow_to_sample_mapping": range(len(texts))}

    tracemalloc.start()
    loaders = jigsaw(tmp_path, tokenizer=FirstTokens())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaders.train.dataset) == comments
    assert loaders.train.dataset.read(comments - 1).id == str(comments - 1)
    assert peak < size / 2


# --- Batches -------------------------------------------------------------------------------


def test_batches_are_padded_to_their_longest_comment(tokenizer):
    loaders = jigsaw(tokenizer=tokenizer, batch_size=16)
    position = 0
    for batch in loaders.val:
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert list(batch) == ["input_ids", "attention_mask", "labels"]
        assert ids.dtype == mask.dtype == torch.int64 and labels.dtype == torch.float32
        assert labels.shape == (len(ids),)
        longest = max(len(loaders.val.dataset[position + i][0]) for i in range(len(ids)))
        assert ids.shape[1] == mask.shape[1] == math.ceil(longest / 8) * 8
        for row, kept in zip(ids, mask, strict=True):
            tokens, _ = loaders.val.dataset[position]
            assert torch.equal(row[kept.bool()], tokens.long())
            assert (row[~kept.bool()] == tokenizer.pad_token_id).all()
            assert kept.sum() == len(tokens) and kept[: len(tokens)].all()
            position += 1
    assert position == len(loaders.val.dataset) == len(loaders.languages)
    assert "labels" not in next(iter(loaders.test))


def test_long_comments_are_cut_and_counted(root, tokenizer):
    rows = [(0, "kind " * 50_000, "en", 0), (1, "kind", "en", 1)]
    write(root, "validation.csv", VALIDATION_COLUMNS, rows)
    loaders = jigsaw(root, tokenizer=tokenizer, max_length=20)
    long, short = loaders.val.dataset
    assert len(long[0]) == 20 and long[0][-1] == tokenizer.eos_token_id and len(short[0]) < 20
    assert loaders.truncated["val"] == 0.5
    assert "val: 2 comments, 50.0% toxic" in loaders.report and "50.0% cut at 20" in loaders.report
    assert loaders.val.dataset.read(0).text == "kind " * 50_000


def test_a_limit_above_the_models_is_refused(root, tokenizer):
    with pytest.raises(ValueError, match="max_length=513: expected 3 to 512 tokens"):
        jigsaw(root, tokenizer=tokenizer, max_length=513)
    boundless = pickle.loads(pickle.dumps(tokenizer))
    boundless.model_max_length = int(1e30)  # what a tokenizer that knows no limit says
    with pytest.raises(ValueError, match="max_length=1000: expected 3 to 512 tokens"):
        jigsaw(root, tokenizer=boundless, max_length=1000)
    assert jigsaw(root, tokenizer=boundless, max_length=512).truncated["val"] == 0


@pytest.mark.parametrize(
    "option", [{"batch_size": 0}, {"workers": -1}, {"threshold": 0}, {"threshold": 2},
               {"max_length": 2}, {"train_files": TOXIC_COMMENT_FILE}, {"train_files": []}]
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(root, tokenizer, option):
    (name,) = option
    with pytest.raises(ValueError, match=name):
        jigsaw(root, tokenizer=tokenizer, **option)


def order(loader):
    return torch.cat([batch["labels"] for batch in loader]).tolist()


def test_the_seed_fixes_the_order_and_each_epoch_has_its_own(tokenizer):
    first, again, other = (
        jigsaw(tokenizer=tokenizer, seed=seed, train_limit=200, val_limit=1).train
        for seed in (3, 3, 4)
    )
    epochs = [order(first), order(first)]
    assert epochs == [order(again), order(again)]
    assert epochs[0] != epochs[1] and epochs[0] != order(other)
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_loaders_pickle_and_work_in_a_spawned_worker(root, tokenizer):
    loaders = jigsaw(root, tokenizer=tokenizer, batch_size=2)
    copy = pickle.loads(pickle.dumps(loaders))
    assert order(copy.train) == order(loaders.train)
    spawned = DataLoader(
        loaders.val.dataset,
        batch_size=2,
        num_workers=1,
        collate_fn=PadComments(tokenizer.pad_token_id),
        multiprocessing_context="spawn",
    )
    for here, there in zip(loaders.val, spawned, strict=True):
        assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize("users_value", [None, "true"])
def test_the_users_setting_of_tokenizer_threads_is_kept(root, tokenizer, monkeypatch, users_value):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if users_value:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", users_value)
    jigsaw(root, tokenizer=tokenizer)
    assert os.environ["TOKENIZERS_PARALLELISM"] == users_value or "false"


def test_the_sample_is_found_from_any_working_directory(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(comment_texts(limit=3)) == 3


# --- Submission ----------------------------------------------------------------------------


def test_a_submission_has_the_ids_of_the_test_file_in_order(root, tokenizer, tmp_path):
    comments = jigsaw(root, tokenizer=tokenizer).test.dataset
    path = tmp_path / "submission.csv"
    assert write_submission(path, comments, torch.tensor([0.25, 1.0])) is None
    assert path.read_text() == "id,toxic\n5,0.250000\n3,1.000000\n"
    kept = write_submission(path, comments, [0, 0])
    assert kept.name == "submission-1.csv" and "0.250000" in kept.read_text()
    with pytest.raises(ValueError, match="3 probabilities for 2 comments"):
        write_submission(path, comments, [0, 0, 0])


# --- Real text -----------------------------------------------------------------------------


def test_real_text_and_the_real_tokenizer(tmp_path):
    """Set TEST_DATA to a folder with `hatecheck/*.csv` and `xlmr_tokenizer/` to run this."""
    folder = Path(os.environ.get("TEST_DATA", "nowhere"))
    if not (folder / "hatecheck").is_dir() or not (folder / "xlmr_tokenizer").is_dir():
        pytest.skip("TEST_DATA is unset or has no hatecheck/ and xlmr_tokenizer/")
    rows = []
    for path in sorted((folder / "hatecheck").glob("*.csv")):
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows += [
                (
                    row["mhc_case_id"],
                    row["test_case"],
                    path.stem[4:6],
                    int(row["label_gold"] == "hateful"),
                )
                for row in csv.DictReader(file)
            ]
    write(tmp_path, "validation.csv", VALIDATION_COLUMNS, rows)
    write(
        tmp_path, TOXIC_COMMENT_FILE, TRAIN_COLUMNS[:3], [(row[0], row[1], row[3]) for row in rows]
    )
    real = AutoTokenizer.from_pretrained(folder / "xlmr_tokenizer")
    loaders = jigsaw(tmp_path, tokenizer=real, max_length=16)
    val = loaders.val.dataset
    assert [tuple(val.read(i)) for i in range(len(val))] == [row[:3] for row in rows]
    lengths = [len(real(text)["input_ids"]) for _, text, _, _ in rows]
    assert loaders.truncated["val"] == np.mean([length > 16 for length in lengths])


def test_a_file_without_line_breaks_is_refused_in_bounded_memory(tmp_path):
    path = tmp_path / "jigsaw-toxic-comment-train.csv"
    with path.open("wb") as file:
        file.write(b"id,comment_text,toxic\n")
        file.truncate(2**31)  # a hole: takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"line 2: longer than 16,777,216 bytes"):
            comment_texts(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
