"""The published measurements: the list is whole, and its smallest rows are met to the byte."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
bench = importlib.import_module("bench_published")
FACTS = {row["id"]: row for row in bench.read_facts()}


def test_every_row_is_scored_or_says_why_not():
    assert len(FACTS) == 39
    assert set(bench.STEPS) | set(bench.NOT_SCORED) == set(FACTS)
    could_be_scored = set(bench.STEPS) & set(bench.NOT_SCORED)
    assert len(could_be_scored) <= 5


def test_facts_have_a_source_and_a_size():
    for row in FACTS.values():
        assert row["source"].startswith("https://") and float(row["value"]) > 0
        assert row["model"] and row["configuration"] and row["reading"]


def test_units_and_the_context_that_is_taken_off():
    assert FACTS["lfs_00_orig"]["bytes"] == round(26.2617 * 1024**3)
    assert FACTS["rasbt_vitl_01_fp32"]["bytes"] == 26_790_000_000
    assert FACTS["hf_bl_vanilla"]["bytes"] == (14_949 - 1_343) * 1024**2


@pytest.mark.parametrize("name", ["fairscale_offload_base", "fairscale_offload_ckpt"])
def test_what_a_gpu_allocated_to_the_byte(name):
    """These two were asserted by a test suite on GPUs, so they are exact."""
    predicted = bench.predicted_bytes(name, bench.UNSTATED_TORCH, then=True)
    assert predicted == FACTS[name]["bytes"]


def test_summaries_by_reading_and_age_and_without_the_excused():
    resnet, gpt2, (missed,) = FACTS["ogc_resnet50_b64"], FACTS["lfs_00_orig"], bench.MISSES
    old = bench.score(resnet, resnet["bytes"] * 2, resnet["bytes"])
    new = bench.score(gpt2, 1, gpt2["bytes"])
    miss = bench.score(FACTS[missed], 1, 1)
    groups = {group["group"]: group for group in bench.summaries([old, new, miss])}
    assert groups["all readings, older than torch 2.0"]["worst_today"] == pytest.approx(1)
    assert groups["peak reserved, torch 2.0 or newer"]["rows"] == 1
    assert groups["all"]["rows"] == 3 and groups["all"]["worst_then"] > 0.99
    excused = groups[f"all, without {missed}"]
    assert excused["rows"] == 2 and excused["worst_then"] == 0
