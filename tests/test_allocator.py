"""The allocator's rules, each on a case worked out by hand, and invariants on random traffic."""

import random

import pytest

from helpers.allocator import CachingAllocator, OutOfMemory, replay, settled_reserved
from helpers.memory import MIB


def reserved_after(*sizes, **options):
    allocator = CachingAllocator(**options)
    for size in sizes:
        allocator.malloc(size)
    return allocator.reserved / MIB


@pytest.mark.parametrize(
    "sizes, reserved",
    [
        ([1], 2),  # small requests come out of 2 MiB
        ([MIB], 2),
        ([MIB, MIB], 2),
        ([MIB, MIB, 1], 4),
        ([MIB + 1], 20),  # up to 10 MiB out of 20 MiB
        ([9 * MIB, 9 * MIB], 20),
        ([10 * MIB], 10),  # larger ones rounded up to 2 MiB
        ([11 * MIB], 12),
        ([11 * MIB, 11 * MIB], 24),
        ([2**30 + 1], 1026),
    ],
)
def test_segment_sizes(sizes, reserved):
    assert reserved_after(*sizes) == reserved


def test_requests_are_rounded_up_to_512_bytes():
    allocator = CachingAllocator()
    allocator.malloc(1)
    allocator.malloc(513)
    assert allocator.allocated == 512 + 1024


def test_best_fit_takes_the_smallest_free_block_that_is_large_enough():
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(25 * MIB).address == small.address
    assert allocator.malloc(35 * MIB).address == large.address
    assert allocator.reserved == 70 * MIB


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB)
    allocator.free(block)
    assert allocator.malloc(19 * MIB).size == 20 * MIB  # and counts as allocated in full
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    assert allocator.malloc(19 * MIB - 512).size == 19 * MIB - 512


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator()
    first = allocator.malloc(MIB - 512)
    second = allocator.malloc(512)
    assert second.address == first.address + first.size


def test_free_neighbours_merge():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.malloc(15 * MIB).address == blocks[0].address
    assert allocator.reserved == 20 * MIB


def test_nothing_goes_back_to_the_driver_before_it_must():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(200 * MIB)
    assert allocator.reserved == 300 * MIB
    allocator = CachingAllocator(capacity=250 * MIB)
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(200 * MIB)
    assert allocator.reserved == 200 * MIB


def test_a_segment_in_use_cannot_go_back_and_the_card_is_full():
    allocator = CachingAllocator(capacity=30 * MIB)
    kept, freed = allocator.malloc(9 * MIB), allocator.malloc(9 * MIB)
    allocator.free(freed)
    with pytest.raises(OutOfMemory, match="12 MiB more do not fit: 20 of 30 MiB"):
        allocator.malloc(12 * MIB)
    assert kept.in_use


def test_fragments_do_not_stop_expandable_segments():
    def traffic(allocator):
        blocks = [allocator.malloc(20 * MIB) for _ in range(6)]
        for block in blocks[::2]:
            allocator.free(block)
        allocator.malloc(60 * MIB)
        return allocator.peak_reserved / MIB

    assert traffic(CachingAllocator()) == 180
    assert traffic(CachingAllocator(expandable_segments=True)) == 180
    assert traffic(CachingAllocator(130 * MIB, expandable_segments=True)) == 120
    with pytest.raises(OutOfMemory):
        traffic(CachingAllocator(110 * MIB, expandable_segments=True))


def test_an_expandable_segment_grows_at_its_end():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)  # the free 40 MiB are part of it
    assert allocator.reserved == 60 * MIB
    assert allocator.allocated == 50 * MIB


def test_replay_of_a_trace():
    trace = [(1, 12 * MIB), (2, 12 * MIB), (1, -1), (3, 12 * MIB)]
    result = replay(trace)
    assert (result.peak_allocated, result.peak_reserved) == (24 * MIB, 24 * MIB)
    assert result.failed_at is None
    assert replay(trace, capacity=12 * MIB).failed_at == 1


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [None, 700 * MIB])
def test_blocks_never_overlap_and_the_books_balance(expandable, capacity):
    dice = random.Random(0)
    allocator = CachingAllocator(capacity, expandable)
    live = []
    for _ in range(1000):
        if live and dice.random() < 0.5:
            allocator.free(live.pop(dice.randrange(len(live))))
        else:
            try:
                live.append(allocator.malloc(int(2 ** dice.uniform(0, 26))))
            except OutOfMemory:
                allocator.free(live.pop(0))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity
    live.sort(key=lambda block: block.address)
    for before, after in zip(live, live[1:], strict=False):
        assert before.address + before.size <= after.address
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated == 0
    assert allocator.reserved == 0


def random_step(generator):
    """A step's requests as (name, n_bytes); some blocks stay until the next step."""
    sizes = [generator.choice((1, 3, 11, 40)) * generator.randrange(1, 900_000) for _ in range(30)]
    stays = set(generator.sample(range(30), 5))
    requests, open_blocks, waiting = [], [], [("before", block) for block in sorted(stays)]
    for block, size in enumerate(sizes):
        requests.append((("now", block), size))
        if block not in stays:
            open_blocks.append(("now", block))
        for blocks in (open_blocks, waiting):
            if blocks and generator.random() < 0.5:
                requests.append((blocks.pop(generator.randrange(len(blocks))), -1))
    return requests + [(name, -1) for name in open_blocks + waiting]


@pytest.mark.parametrize("seed", range(20))
def test_settled_reserved_is_that_of_many_steps(seed):
    step = random_step(random.Random(seed))

    def steps(count):
        trace = []
        for number in range(count):
            for (when, block), n_bytes in step:
                of = number if when == "now" else number - 1
                if of >= 0:
                    trace.append((1000 * of + block, n_bytes))
        return trace

    two, last_step = steps(2), len(steps(1))
    assert settled_reserved(two, last_step) == replay(steps(40)).peak_reserved


def test_settled_reserved_grows_beyond_the_second_step():
    seeds = range(20)
    grown = 0
    for seed in seeds:
        step = random_step(random.Random(seed))
        first = [((0, block), size) for (when, block), size in step if when == "now"]
        second = [((when == "now", block), size) for (when, block), size in step]
        trace = first + second
        grown += settled_reserved(trace, len(first)) > replay(trace).peak_reserved
    assert grown


def test_a_repetition_takes_no_more_than_the_card_has():
    for seed in range(20):
        step = random_step(random.Random(seed))
        first = [((0, block), size) for (when, block), size in step if when == "now"]
        second = [((when == "now", block), size) for (when, block), size in step]
        trace, start = first + second, len(first)
        card = replay(trace).peak_reserved
        assert settled_reserved(trace, start, card) <= card <= settled_reserved(trace, start)


def test_a_step_that_leaves_other_blocks_behind_is_not_repeated():
    growing = [(1, 5 * MIB), (2, 30 * MIB), (1, -1)]
    assert settled_reserved(growing, 1) == replay(growing).peak_reserved
