"""Figures in hand-written text: results come from runs, so none of them is typed."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXTS = ["README.md", "CONTRIBUTING.md", "data/README.md"]
TEXTS += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("notebooks/*.ipynb"))

# A number with a unit or a per cent sign.
DIGITS = r"\d[\d,.]*(?:\s*[–-]\s*\d[\d,.]*)?"
WORDS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|hundred"
SIZES = r"[KMGT]i?B|kB|bytes?|%|per\s+cent|percent|s|ms|seconds?|minutes?|hours?|days?"
COUNTS = r"bits?|px|pixels?|tokens?|times|[KMGT]?FLOPs?"
FIGURE = re.compile(
    rf"\b(?:{DIGITS}[\s\u00a0\u202f-]?(?:{SIZES}|{COUNTS})|(?:{WORDS})[\s-](?:{SIZES}))(?!\w)",
    re.IGNORECASE,
)

# Constants of the world, which no run of ours could change: the phrases that may hold a figure
# (regular expressions), by the reason. A phrase that is no longer in any text has to go.
ALLOWED = {
    "cards as they are sold, and goals of exercises": [
        r"cards? of \d+ (GiB|GB)",
        r"larger card, of 24 GB",
        r"Below six GiB",
        r"Large under 6 GiB",
        r"(Fit this|Large|fit three models) in(to)? 8 GiB",
    ],
    "the width of a type of numbers": [
        r"(16|32) bits what",
        r"spend 16 bits",
        r"hardware for 16-bit arithmetic",
        r"64-bit integers",
        r"the last 13 bits",
        r"number takes four bytes",
        r"\(four bytes of value",
        r"keep eight bytes",
    ],
    "how torch's CUDA allocator rounds": [
        r"units of 512 bytes",
        r"multiples of two MiB",
        r"segments of 2 MiB, middle ones share 20 MiB",
    ],
    "the configuration of an article, or of one of our samples": [
        r"(width 1,|batch 64,|batch 64 at|pictures (at|of)|1,000 classes,) 224 pixels",
        r"16 comments of 192 tokens",
        r"128 pixels square",
        r"VGG16 of width 1/8, 64 px",
    ],
    "what the VGG16 article states": [
        r"rule of thumb is 20 per cent more time; its own times \(5 minutes, and 6 minutes 45 "
        r"seconds an epoch\)",
    ],
    "counted by a test in test_data_comments.py": [
        r"44 % of the training and 46 % of the validation",
        r"eight in each language, 23 % of its comments",
    ],
}


def hand_written(text):
    """Markdown without what is generated, quoted, code, or an address."""
    text = re.sub(r"<!-- ([\w-]+):start -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *>.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "`", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|<https?:[^>]*>", "]", text)
    text = re.sub(r'"[^"\n]*(?:\n[^"\n]+)*"|“[^”]*”', '"', text)
    return " ".join(text.replace("*", "").split())


def read_text(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".ipynb"):
        return hand_written(text)
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
    return " ".join(hand_written("".join(cell["source"])) for cell in cells)


def typed_figures(text, allowed):
    """Figures outside the phrases that may hold one, with what stands around them."""
    spans = [match.span() for phrase in allowed for match in re.finditer(phrase, text)]
    return [
        text[max(0, found.start() - 40) : found.end() + 20]
        for found in FIGURE.finditer(text)
        if not any(start <= found.start() and found.end() <= end for start, end in spans)
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_no_figure_is_typed(name):
    phrases = [phrase for group in ALLOWED.values() for phrase in group]
    assert typed_figures(read_text(name), phrases) == [], (
        "show it in a cell's output or in a generated block, say it without the figure, or add "
        "the phrase to ALLOWED with the reason why no run can change it"
    )


def test_every_allowance_is_used():
    everything = " ".join(map(read_text, TEXTS))
    phrases = [phrase for group in ALLOWED.values() for phrase in group]
    assert [phrase for phrase in phrases if not re.search(phrase, everything)] == []


@pytest.mark.parametrize(
    "text",
    ["saves 30 %", "saves 30%", "30 per\ncent", "peaks at 1,938 MiB", "in 0.065 s", "takes 2-3 s",
     "2.5 times smaller", "**12 GB**", "in about two minutes", "20 tokens", "1.5\u00a0GiB", "8GiB",
     "3 GFLOPs", "five per cent"],
)  # fmt: skip
def test_figures_are_found(text):
    assert len(typed_figures(hand_written(text), [])) == 1


@pytest.mark.parametrize(
    "text",
    ["`30 %`", "```\n30 %\n```", "> 30 %", 'he says "saves\n30 %"', "[x](a%20b 8 s)", "notebook 3",
     "<!-- t:start -->\n30 %\n<!-- t:end -->", "float16", "two segments", "1,000 classes", "R2 B"],
)  # fmt: skip
def test_what_is_no_typed_figure(text):
    assert typed_figures(hand_written(text), []) == []


def test_an_allowance_reaches_no_further_than_its_phrase():
    found = typed_figures("a card of 11 GB, and a peak of 11 GB", [r"cards? of \d+ (GiB|GB)"])
    assert len(found) == 1 and found[0].endswith("peak of 11 GB")
