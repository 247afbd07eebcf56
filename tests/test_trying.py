"""What fits, found by trying: errors raised by hand stand for a full card."""

import gc
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.catalogue import Workload, find_workload
from helpers.cuda import Gpu
from helpers.predict import largest_batch_here
from helpers.train import (
    Recipe,
    is_out_of_memory,
    largest_batch_by_trying,
    make_optimizer,
)

SGD = partial(make_optimizer, "sgd", lr=0.1)
ADAMW = partial(make_optimizer, "adamw", lr=0.1)
REAL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 11.00 GiB total ...)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously ..."),
]
OTHERS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("the sampler ran out of memory cells"),
    RuntimeError("expected scalar type Half but found Float"),
    MemoryError("CUDA out of memory"),
    ValueError("CUDA out of memory"),
]


class Card:
    """A loss function that is full above `room` samples, and remembers what it has seen."""

    def __init__(self, room, error=REAL[0]):
        self.room, self.error = room, error
        self.sizes, self.alive, self.handling = [], [], []

    def __call__(self, model, batch):
        # All of the tries before are gone by the time of this one.
        self.handling.append(sys.exc_info()[0])
        dead = [reference() is None for reference in self.alive if reference() is not model]
        assert all(dead), "something of an earlier try is alive"
        self.sizes.append(len(batch))
        big = torch.ones(len(batch), 100)
        self.alive += [weakref.ref(big), weakref.ref(model)]
        if len(batch) > self.room and type(batch) is torch.Tensor:  # predictions are no tries
            raise self.error
        return model(batch).square().mean() + 0 * big.mean()


def tried(card, wanted, recipe=Recipe(), optimizer_fn=ADAMW):
    return largest_batch_by_trying(
        partial(nn.Linear, 4, 2), lambda size: torch.ones(size, 4), card, recipe, optimizer_fn,
        wanted, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("error", REAL, ids=["new", "old", "driver"])
@pytest.mark.parametrize("room, wanted", [(0, 8), (1, 8), (7, 100), (8, 8), (37, 64), (100, 64)])
def test_the_largest_that_fits(room, wanted, error):
    card = Card(room, error)
    found = tried(card, wanted)
    assert found.largest == min(room, wanted)
    assert {size: reason is None for size, reason in found.tried.items()} == {
        size: size <= room for size in found.tried
    }
    assert len(found.tried) <= 2 + 2 * wanted.bit_length()
    gc.collect()
    assert [reference() for reference in card.alive] == [None] * len(card.alive)
    assert set(card.handling) == {None}  # never from inside an `except`


def test_every_size_gets_two_steps():
    """The first step of AdamW has no state yet: a size that fits once need not fit twice."""
    card = Card(3)
    tried(card, 3)
    assert card.sizes == [2, 2, 3, 3]


def test_micro_batches_are_what_counts():
    card = Card(5)
    assert tried(card, 8, Recipe(accumulate=3)).largest == 5
    assert max(card.sizes) <= 8


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: str(error)[:20])
def test_other_errors_are_raised_and_not_taken_for_a_full_card(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught:
        tried(Card(2, error), 8)
    assert caught.value is error


def test_random_numbers_go_on_as_if_nothing_had_been_tried():
    before = torch.get_rng_state()
    tried(Card(3), 8)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_impossible_wish_is_refused():
    with pytest.raises(ValueError, match="wanted=0"):
        tried(Card(1), 0)


def linear_workload(card):
    return Workload(
        "a linear layer", partial(nn.Linear, 4, 2), lambda size: torch.ones(size, 4), card
    )


def test_it_ends_with_advice_from_plan():
    workload = find_workload("resnet18", image_size=64)

    def full(model, batch):
        if len(batch[0]) > 2 and type(batch[0]) is torch.Tensor:
            raise REAL[0]
        return workload.loss_fn(model, batch)

    full_workload = Workload("ResNet-18", workload.model_fn, workload.batch_fn, full)
    found = largest_batch_here(
        full_workload, Recipe(), "sgd", 8, device="cpu", gpu=Gpu("small", 800)
    )
    assert found.largest == 2 and found.tried[3] == "CUDA out of memory"
    assert "ResNet-18 on small (800 MiB): predicted, not measured" in found.advice
    assert "micro-batch" in found.advice


def test_what_fits_needs_no_advice_and_without_a_gpu_it_says_what_to_do_instead():
    found = largest_batch_here(
        linear_workload(Card(9)), Recipe(), "sgd", 8, device="cpu", gpu=Gpu("small", 800)
    )
    assert found.largest == 8 and "fits as it is" in found.advice
    with pytest.raises(ValueError, match="no CUDA GPU to try on: .*largest_batch predicts"):
        largest_batch_here(linear_workload(Card(9)), Recipe(), "sgd", 8, device="cpu")


def test_everything_is_freed_between_tries_and_other_programs_are_left_their_memory(monkeypatch):
    """A stand-in for a card of 24 GiB, most of which somebody else has taken."""
    calls, mib = [], 1024**2
    properties = SimpleNamespace(name="big", total_memory=24576 * mib, major=8)
    monkeypatch.setattr("helpers.train._free_memory", lambda device: calls.append(device.type))
    monkeypatch.setattr("helpers.predict.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (300 * mib, 24576 * mib))
    found = largest_batch_here(linear_workload(Card(3)), Recipe(), "sgd", 8, device="cpu")
    assert found.largest == 3 and calls == ["cpu"] * len(found.tried)
    assert "a linear layer on big (800 MiB)" in found.advice
