"""Data of the two tasks: pictures of cats and dogs, and toxic comments in several languages."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# --- Cats and dogs -------------------------------------------------------------------------


# --- Toxic comments ------------------------------------------------------------------------

# The files of the competition "Jigsaw Multilingual Toxic Comment Classification" (Kaggle, 2020).
TOXIC_COMMENT_FILE = "jigsaw-toxic-comment-train.csv"
UNINTENDED_BIAS_FILE = "jigsaw-unintended-bias-train.csv"
VALIDATION_FILE = "validation.csv"
TEST_FILE = "test.csv"

# XLM-R has 514 position embeddings, and the first two are never a token's.
XLMR_MAX_TOKENS = 512

# So many comments are tokenised at a time: a million of them are never in memory as texts.
COMMENTS_AT_ONCE = 1_000


class Comment(NamedTuple):
    """One comment as its file has it; `language` is "" where the file does not say."""

    id: str
    text: str
    language: str


class CommentFile(NamedTuple):
    """A CSV file of comments: where its text, language and label stand."""

    path: Path
    text: str
    language: str | None = None
    label: str | None = None
    # The share of annotators from which on a comment is toxic; None where labels are 0 or 1.
    threshold: float | None = None

    def columns(self) -> list[str]:
        return [name for name in ("id", self.text, self.language, self.label) if name]


@dataclass
class Comments(Dataset):
    """Tokenised comments of one or more files; `comments[i]` is (token ids, label or None).

    In memory are token ids, labels, languages and each comment's place in its file, from where
    `comments.read(i)` reads the comment itself.
    """

    files: list[CommentFile]
    places: torch.Tensor  # int64 [comments, 2]: number of the file, byte offset in it
    tokens: torch.Tensor  # int32, the token ids of all comments, one after the other
    ends: torch.Tensor  # int64 [comments + 1]: comment i is tokens[ends[i] : ends[i + 1]]
    labels: torch.Tensor | None  # float32 [comments], 1 is toxic
    languages: list[str]  # [comments], "" where the file does not say
    truncated: int  # how many comments were longer than max_length

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = self.tokens[self.ends[index] : self.ends[index + 1]]
        return tokens, None if self.labels is None else self.labels[index]

    def read(self, index: int) -> Comment:
        """Comment `index` as it stands in its file: nothing trimmed, nothing cut."""
        number, offset = self.places[index].tolist()
        return next(_scan(self.files[number], start=offset))[1]


@dataclass(frozen=True)
class PadComments:
    """Collate function: one batch as a dict of tensors, padded to its longest comment.

    input_ids and attention_mask are int64 [batch, tokens], labels float32 [batch] where there are
    any. The number of tokens is rounded up to a multiple of 8, which Tensor Cores need.
    """

    pad_id: int
    multiple_of: int = 8

    def __call__(self, items: list[tuple[torch.Tensor, torch.Tensor | None]]) -> dict:
        longest = max(len(tokens) for tokens, _ in items)
        width = -(-longest // self.multiple_of) * self.multiple_of
        input_ids = torch.full((len(items), width), self.pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, (tokens, _) in enumerate(items):
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if items[0][1] is not None:
            batch["labels"] = torch.stack([label for _, label in items])
        return batch


@dataclass(frozen=True)
class CommentLoaders:
    """Loaders of batches as `PadComments` makes them; the `dataset` of each is a `Comments`."""

    train: DataLoader
    val: DataLoader  # in the file's order
    test: DataLoader | None  # in the file's order, without labels
    languages: list[str]  # of the validation comments, in the loader's order
    truncated: dict[str, float]  # share of comments longer than max_length, by split
    source: str
    report: str


def jigsaw(
    root: str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 192,
    batch_size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    train_files: Sequence[str] = (TOXIC_COMMENT_FILE,),
    threshold: float = 0.5,
    train_limit: int | None = None,
    val_limit: int | None = None,
) -> CommentLoaders:
    """Toxic comments in several languages, tokenised, as loaders for training and validation.

    `root` is a folder with the files of the Jigsaw multilingual competition: the `train_files`,
    `validation.csv` and, if there is one, `test.csv`. None takes this project's own sample. Of
    `jigsaw-unintended-bias-train.csv`, whose labels are shares of annotators, a comment is toxic
    from `threshold` on. `train_limit` takes the first so many comments of each training file,
    `val_limit` those of the validation file.

    Comments longer than `max_length` tokens are cut; `truncated` and `report` say how many. `seed`
    fixes the order of the training comments, another one in each epoch. `workers` defaults to 0:
    comments are tokenised here, before any worker starts, and padding a batch is no work.

    Raises FileNotFoundError for a missing folder or file, ValueError for a file that is not UTF-8,
    lacks a column, has broken quoting or a label that is none (with file and line), and for a
    `max_length` above the model's limit. Nothing is skipped.
    """
    _check_comment_options(tokenizer, max_length, batch_size, workers, threshold)
    # Set before the tokenizer's first use: its threads must not be alive when workers are forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = _sample_comments() if root is None else Path(root).expanduser()
    train = _tokenise(
        _train_files(folder, train_files, threshold), tokenizer, max_length, train_limit
    )
    val_file = CommentFile(_find_file(folder, VALIDATION_FILE), "comment_text", "lang", "toxic")
    val = _tokenise([val_file], tokenizer, max_length, val_limit)
    splits = {"train": train, "val": val}
    if (folder / TEST_FILE).is_file():
        test_file = CommentFile(folder / TEST_FILE, "content", "lang")
        splits["test"] = _tokenise([test_file], tokenizer, max_length)

    options = {
        "batch_size": batch_size,
        "num_workers": workers or 0,
        "collate_fn": PadComments(tokenizer.pad_token_id),
    }
    shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    name = "the embedded sample" if root is None else str(folder)
    return CommentLoaders(
        train=DataLoader(train, **options, **shuffled),
        val=DataLoader(val, **options),
        test=DataLoader(splits["test"], **options) if "test" in splits else None,
        languages=val.languages,
        truncated={split: comments.truncated / len(comments) for split, comments in splits.items()},
        source=f"{name}: {len(train):,} training and {len(val):,} validation comments",
        report="\n".join(
            _describe(split, comments, max_length) for split, comments in splits.items()
        ),
    )


def comment_texts(
    root: str | Path | None = None,
    *,
    train_files: Sequence[str] = (TOXIC_COMMENT_FILE,),
    limit: int | None = 20_000,
) -> list[str]:
    """Texts of the training comments, the first `limit` of each file: to train a tokenizer on."""
    folder = _sample_comments() if root is None else Path(root).expanduser()
    files = _train_files(folder, train_files, threshold=0.5)
    return [comment.text for file in files for _, comment, _ in islice(_scan(file), limit)]


def write_submission(path: str | Path, comments: Comments, probabilities: Iterable[float]) -> None:
    """Write the competition's submission, `id,toxic`, one line for each of `comments` in order."""
    probabilities = [float(value) for value in probabilities]
    if len(probabilities) != len(comments):
        raise ValueError(f"{len(probabilities)} probabilities for {len(comments)} comments")
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "toxic"])
        writer.writerows(
            (comments.read(index).id, f"{value:.6f}") for index, value in enumerate(probabilities)
        )


def _check_comment_options(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    batch_size: int,
    workers: int | None,
    threshold: float,
) -> None:
    # A tokenizer that knows no limit says so with a huge number.
    known = tokenizer.model_max_length < 1_000_000
    limit = tokenizer.model_max_length if known else XLMR_MAX_TOKENS
    if not 3 <= max_length <= limit:
        raise ValueError(
            f"max_length={max_length}: expected 3 to {limit} tokens, the longest text the model takes"
        )
    if batch_size < 1 or (workers or 0) < 0:
        raise ValueError(
            f"batch_size={batch_size}, workers={workers}: expected at least 1 and at least 0"
        )
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: expected a share of annotators above 0, up to 1")
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token, and batches need one")


def _sample_comments() -> Path:
    """The folder of the embedded sample: beside the package, or in or above the working directory."""
    package = importlib.util.find_spec("helpers") if "helpers" in sys.modules else None
    places = [Path(place).parent for place in getattr(package, "submodule_search_locations", [])]
    for place in [*places, Path.cwd(), *Path.cwd().parents]:
        folder = place / "data" / "comments"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "the sample of comments, data/comments, is neither beside the helpers package nor in or "
        f"above {Path.cwd()}: clone the whole repository, or pass the folder of the competition's files"
    )


def _train_files(folder: Path, names: Sequence[str], threshold: float) -> list[CommentFile]:
    if isinstance(names, str) or not names:
        raise ValueError(f"train_files={names!r}: expected a list of file names")
    return [
        CommentFile(
            _find_file(folder, name),
            "comment_text",
            label="toxic",
            threshold=threshold if name == UNINTENDED_BIAS_FILE else None,
        )
        for name in names
    ]


def _find_file(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: expected one that holds {name}")
    below = next(folder.glob(f"*/{name}"), None)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
    hint = f"; it is in {below.parent}, pass that folder" if below else ""
    if (folder / f"{name}.zip").is_file():
        hint = f"; unzip {name}.zip first"
    raise FileNotFoundError(f"{folder} has no {name}, found {found}{hint}")


def _tokenise(
    files: list[CommentFile],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    limit: int | None = None,
) -> Comments:
    tokens, ends, places, labels, languages = (
        array("i"),
        array("q", [0]),
        array("q"),
        array("f"),
        [],
    )
    truncated = 0
    for number, file in enumerate(files):
        records = islice(_scan(file), limit)
        count = len(languages)
        while chunk := list(islice(records, COMMENTS_AT_ONCE)):
            encoded = tokenizer(
                [comment.text for _, comment, _ in chunk],
                truncation=True,
                max_length=max_length,
                # What is cut off comes back as further pieces: so we know who was cut.
                return_overflowing_tokens=True,
                return_attention_mask=False,
            )
            first_pieces: list[list[int]] = []
            comment_of_piece = encoded["overflow_to_sample_mapping"]
            for index, ids in zip(comment_of_piece, encoded["input_ids"], strict=True):
                if index == len(first_pieces):
                    first_pieces.append(ids)
            truncated += sum(pieces > 1 for pieces in Counter(comment_of_piece).values())
            for (offset, comment, label), ids in zip(chunk, first_pieces, strict=True):
                tokens.extend(ids)
                ends.append(len(tokens))
                places.extend((number, offset))
                languages.append(sys.intern(comment.language))
                if label is not None:
                    labels.append(label)
        if len(languages) == count:
            raise ValueError(f"{file.path} has no comments below its header")
    return Comments(
        files=files,
        places=torch.frombuffer(places, dtype=torch.int64).view(-1, 2),
        tokens=torch.frombuffer(tokens, dtype=torch.int32),
        ends=torch.frombuffer(ends, dtype=torch.int64),
        labels=torch.frombuffer(labels, dtype=torch.float32) if labels else None,
        languages=languages,
        truncated=truncated,
    )


def _scan(file: CommentFile, start: int = 0) -> Iterator[tuple[int, Comment, float | None]]:
    """Byte offset, comment and label of every record from byte `start` on, one record at a time.

    Values are as the file has them: nothing trimmed, no type guessed ("NA" is a text, 0012 an id),
    line breaks inside quotes kept. A record that cannot be read for certain raises ValueError.
    """
    # Longer than any comment; Python's own limit is 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), 2**24))
    with file.path.open("rb") as binary:
        lines = _Utf8Lines(binary, file.path)
        records = csv.reader(lines, strict=True)
        header = _next_record(records, lines)
        if header is None:
            raise ValueError(f"{file.path} is empty: expected {', '.join(file.columns())}")
        if not set(file.columns()) <= set(header) or len(set(header)) < len(header):
            raise ValueError(
                f"{file.path} has the columns {', '.join(header)}: "
                f"expected {', '.join(file.columns())}, each once"
            )
        columns = {name: header.index(name) for name in file.columns()}
        if start:
            binary.seek(start)
            lines.offset = start
        while True:
            offset, line = lines.offset, lines.number + 1
            record = _next_record(records, lines)
            if record is None:
                return
            if not record:  # an empty line
                continue
            if len(record) != len(header):
                raise ValueError(
                    f"{file.path}, line {line}: {len(record)} fields, but {len(header)} columns. "
                    + QUOTING_HINT
                )
            values = {name: record[column] for name, column in columns.items()}
            comment = Comment(
                values["id"], values[file.text], values[file.language] if file.language else ""
            )
            label = _label(values[file.label], file, line) if file.label else None
            yield offset, comment, label


QUOTING_HINT = (
    "A text with a comma, a quote or a line break stands in double quotes, and its own quotes are "
    "doubled: mend that record, nothing is skipped."
)


def _next_record(records: Iterator[list[str]], lines: _Utf8Lines) -> list[str] | None:
    line = lines.number + 1
    try:
        return next(records, None)
    except csv.Error as error:
        # Python's message goes on with advice about open(), which is not the reader's matter.
        reason = str(error).split(" - ")[0]
        raise ValueError(
            f"{lines.path}, line {lines.number}: {reason}, in the record that begins in line "
            f"{line}. {QUOTING_HINT}"
        ) from None


class _Utf8Lines:
    """The lines of a UTF-8 file (with or without byte order mark), their numbers and offsets.

    Only "\\n" ends a line here, so that a stray carriage return reaches the CSV reader, which
    refuses it outside quotes and keeps it inside.
    """

    def __init__(self, binary: BinaryIO, path: Path) -> None:
        self.binary, self.path = binary, path
        self.number = 0  # of the last line read, from 1
        self.offset = 0  # bytes read so far

    def __iter__(self) -> _Utf8Lines:
        return self

    def __next__(self) -> str:
        raw = self.binary.readline()
        if not raw:
            raise StopIteration
        encoding = "utf-8" if self.offset else "utf-8-sig"
        self.number += 1
        self.offset += len(raw)
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            guess = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
            raise ValueError(
                f"{self.path}, line {self.number}: not UTF-8 (byte 0x{raw[error.start]:02x}). "
                f"Convert the file from the encoding it was saved in, e.g. iconv -f {guess} -t UTF-8 "
                f"{self.path.name} > converted.csv"
            ) from None


def _label(value: str, file: CommentFile, line: int) -> float:
    """1.0 or 0.0; raises ValueError for anything that is not a label (empty, NaN, -1, 2 …)."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if file.threshold is None and number in (0, 1):
        return number
    if file.threshold is not None and 0 <= number <= 1:
        return float(number >= file.threshold)
    expected = "0 or 1" if file.threshold is None else "a number from 0 to 1"
    raise ValueError(
        f"{file.path}, line {line}: {file.label} is {value!r}, expected {expected}. "
        "Mend or remove that record, nothing is skipped."
    )


def _describe(split: str, comments: Comments, max_length: int) -> str:
    lengths = comments.ends.diff().float()
    names = ", ".join(file.path.name for file in comments.files)
    toxic = "" if comments.labels is None else f", {comments.labels.mean():.1%} toxic"
    return (
        f"{split}: {len(comments):,} comments{toxic}; median {int(lengths.median())} tokens, "
        f"{comments.truncated / len(comments):.1%} cut at {max_length} ({names})"
    )
