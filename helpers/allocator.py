"""The rules of torch's CUDA caching allocator, followed without a GPU.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.x, one stream, default
settings or `expandable_segments:True`): requests are rounded up to 512 bytes; up to 1 MiB come out
of segments of 2 MiB, up to 10 MiB out of 20 MiB, larger ones out of a segment of their own rounded
up to 2 MiB; the best fitting free block is taken and split; neighbours merge when freed; nothing
goes back to the driver until a request cannot be met otherwise.
"""

import bisect
import contextlib
from dataclasses import dataclass

from helpers.memory import MIB

MIN_BLOCK = 512
SMALL_SIZE = MIB  # largest request that is served from small segments
SMALL_BUFFER = 2 * MIB
LARGE_BUFFER = 20 * MIB
MIN_LARGE_ALLOC = 10 * MIB
ROUND_LARGE = 2 * MIB


class OutOfMemory(Exception):
    """The card cannot hold the next request, not even after free segments have been given back."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a segment, in use or free, linked to its neighbours in address order."""

    address: int
    size: int
    pool: "Pool"
    in_use: bool = False
    mapped: bool = True  # expandable segments: whether there is memory behind the addresses
    previous: "Chunk | None" = None
    next: "Chunk | None" = None


class Pool:
    """Free chunks sorted by size, then address: the first that fits is the best fit."""

    def __init__(self, small: bool):
        self.small = small
        self.free: list[tuple[int, int]] = []
        self.chunks: dict[tuple[int, int], Chunk] = {}
        self.expandable: Chunk | None = None  # first chunk of the expandable segment

    def add(self, chunk: Chunk) -> None:
        key = (chunk.size, chunk.address)
        bisect.insort(self.free, key)
        self.chunks[key] = chunk

    def remove(self, chunk: Chunk) -> None:
        key = (chunk.size, chunk.address)
        del self.free[bisect.bisect_left(self.free, key)]
        del self.chunks[key]

    def best_fit(self, size: int) -> Chunk | None:
        index = bisect.bisect_left(self.free, (size, -1))
        return self.chunks[self.free[index]] if index < len(self.free) else None

    def is_worth_splitting(self, remaining: int, expandable: bool) -> bool:
        if self.small or expandable:
            return remaining >= MIN_BLOCK
        return remaining > SMALL_SIZE


class CachingAllocator:
    """Serve requests and releases as torch would on a card with `capacity` bytes (None: endless).

    expandable_segments: as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, one segment a
    pool, which grows and shrinks by pages.
    """

    def __init__(self, capacity: int | None = None, expandable_segments: bool = False):
        self.capacity = capacity
        self.expandable_segments = expandable_segments
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self._pools = {True: Pool(small=True), False: Pool(small=False)}
        self._next_address = 0

    def malloc(self, n_bytes: int) -> Chunk:
        """Take `n_bytes` (at least 1); raises OutOfMemory."""
        size = max(MIN_BLOCK, -(-n_bytes // MIN_BLOCK) * MIN_BLOCK)
        pool = self._pools[size <= SMALL_SIZE]
        chunk = pool.best_fit(size)
        if chunk is not None:
            pool.remove(chunk)
        elif self.expandable_segments:
            chunk = self._expand(pool, size)
        else:
            chunk = self._new_segment(pool, size)
        if pool.is_worth_splitting(chunk.size - size, self.expandable_segments):
            rest = self._split(chunk, size)
            pool.add(rest)
        chunk.in_use = True
        self.allocated += chunk.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back to its pool and merge it with free neighbours."""
        chunk.in_use = False
        self.allocated -= chunk.size
        for neighbour in (chunk.previous, chunk.next):
            if neighbour is not None and not neighbour.in_use and neighbour.mapped:
                chunk.pool.remove(neighbour)
                self._absorb(chunk, neighbour)
        chunk.pool.add(chunk)

    def empty_cache(self) -> None:
        """Give back to the driver what is wholly free."""
        for pool in self._pools.values():
            for chunk in [pool.chunks[key] for key in pool.free]:
                if self.expandable_segments:
                    self._unmap(chunk)
                elif chunk.previous is None and chunk.next is None:
                    pool.remove(chunk)
                    self.reserved -= chunk.size

    # Segments of fixed size

    def _new_segment(self, pool: Pool, size: int) -> Chunk:
        if pool.small:
            segment = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            segment = LARGE_BUFFER
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(segment)
        chunk = Chunk(self._next_address, segment, pool)
        self._next_address += segment
        return chunk

    def _reserve(self, n_bytes: int) -> None:
        if self.capacity is not None and self.reserved + n_bytes > self.capacity:
            self.empty_cache()
            if self.reserved + n_bytes > self.capacity:
                raise OutOfMemory(
                    f"{n_bytes / MIB:,.0f} MiB more do not fit: {self.reserved / MIB:,.0f} of "
                    f"{self.capacity / MIB:,.0f} MiB are reserved"
                )
        self.reserved += n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, chunk: Chunk, size: int) -> Chunk:
        rest = Chunk(
            chunk.address + size,
            chunk.size - size,
            chunk.pool,
            False,
            chunk.mapped,
            chunk,
            chunk.next,
        )
        if chunk.next is not None:
            chunk.next.previous = rest
        chunk.next, chunk.size = rest, size
        return rest

    def _absorb(self, chunk: Chunk, neighbour: Chunk) -> None:
        if neighbour is chunk.previous:
            chunk.address = neighbour.address
            chunk.previous = neighbour.previous
            if chunk.previous is not None:
                chunk.previous.next = chunk
            if chunk.pool.expandable is neighbour:
                chunk.pool.expandable = chunk
        else:
            chunk.next = neighbour.next
            if chunk.next is not None:
                chunk.next.previous = chunk
        chunk.size += neighbour.size

    # Expandable segments

    def _expand(self, pool: Pool, size: int) -> Chunk:
        """The lowest run of free and unmapped chunks that can hold `size`, mapped where needed."""
        if pool.expandable is None:
            endless = 2**60
            pool.expandable = Chunk(self._next_address, endless, pool, mapped=False)
            self._next_address += endless
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        start = self._find_run(pool, size)
        missing = self._missing(start, size, page)
        if self.capacity is not None and self.reserved + missing > self.capacity:
            self.empty_cache()
            start = self._find_run(pool, size)
            missing = self._missing(start, size, page)
        self._reserve(missing)
        if start.mapped:
            pool.remove(start)
        else:
            self._map(start, size, page)
        while start.size < size:
            follower = start.next
            if follower.mapped:
                pool.remove(follower)
            else:
                self._map(follower, size - start.size, page)
            self._absorb(start, follower)
        return start

    def _find_run(self, pool: Pool, size: int) -> Chunk:
        chunk = pool.expandable
        while True:
            if not chunk.in_use and not chunk.mapped:
                start = chunk
                before = chunk.previous
                if before is not None and not before.in_use:
                    start = before
                total, last = 0, start
                while last is not None and not last.in_use and total < size:
                    total += last.size
                    last = last.next
                if total >= size:
                    return start
            chunk = chunk.next

    def _missing(self, start: Chunk, size: int, page: int) -> int:
        """Bytes to map so that `size` bytes from `start` on have memory behind them."""
        missing, covered, chunk = 0, 0, start
        while covered < size:
            if chunk.mapped:
                covered += chunk.size
            else:
                mapped = min(-(-min(size - covered, chunk.size) // page) * page, chunk.size)
                missing += mapped
                covered += mapped
            chunk = chunk.next
        return missing

    def _map(self, chunk: Chunk, size: int, page: int) -> None:
        mapped = min(-(-min(size, chunk.size) // page) * page, chunk.size)
        if mapped < chunk.size:
            self._split(chunk, mapped)
        chunk.mapped = True

    def _unmap(self, chunk: Chunk) -> None:
        """Take the memory from behind the whole pages of a free chunk."""
        pool = chunk.pool
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        origin = pool.expandable.address
        first = -(-(chunk.address - origin) // page) * page + origin
        last = (chunk.address + chunk.size - origin) // page * page + origin
        if last <= first:
            return
        pool.remove(chunk)
        if first > chunk.address:
            middle = self._split(chunk, first - chunk.address)
            pool.add(chunk)
            chunk = middle
        if last < chunk.address + chunk.size:
            pool.add(self._split(chunk, last - chunk.address))
        chunk.mapped = False
        self.reserved -= chunk.size
        for neighbour in (chunk.previous, chunk.next):
            if neighbour is not None and not neighbour.mapped:
                self._absorb(chunk, neighbour)


@dataclass(frozen=True)
class Replay:
    """What a trace of requests took: peaks in bytes, or where it ran out of memory."""

    peak_allocated: int
    peak_reserved: int
    failed_at: int | None = None


def replay(
    trace: list[tuple[int, int]], capacity: int | None = None, expandable_segments: bool = False
) -> Replay:
    """Run a trace through the allocator: (key, n_bytes) takes memory, (key, -1) gives it back."""
    allocator = CachingAllocator(capacity, expandable_segments)
    chunks: dict[int, Chunk] = {}
    for index, (key, n_bytes) in enumerate(trace):
        if n_bytes < 0:
            allocator.free(chunks.pop(key))
            continue
        try:
            chunks[key] = allocator.malloc(n_bytes)
        except OutOfMemory:
            return Replay(allocator.peak_allocated, allocator.peak_reserved, index)
    return Replay(allocator.peak_allocated, allocator.peak_reserved)


MOST_REPETITIONS = 32


def settled_reserved(
    trace: list[tuple[int, int]],
    last_step: int,
    capacity: int | None = None,
    expandable_segments: bool = False,
) -> int:
    """Peak reserved bytes of a run that goes on like the last step of a trace.

    Free memory is cut up a little differently after each step, so a run may go on reserving for
    some steps after its live memory has become steady. The last step, which begins at `last_step`
    in the trace, is repeated until it gets the addresses that it got the time before, at most
    MOST_REPETITIONS times; not at all if it leaves other blocks behind than it found. Raises
    OutOfMemory where the trace itself does not fit `capacity`; what a repetition cannot have, it
    does not reserve.
    """
    allocator = CachingAllocator(capacity, expandable_segments)
    chunks: dict[int, Chunk] = {}
    for key, n_bytes in trace:
        if n_bytes < 0:
            allocator.free(chunks.pop(key))
        else:
            chunks[key] = allocator.malloc(n_bytes)
    successors = _successors(trace, last_step)
    if successors is not None:
        held = {old: chunks[new] for old, new in successors.items()}
        with contextlib.suppress(OutOfMemory):
            _repeat(allocator, trace[last_step:], held, successors)
    return allocator.peak_reserved


def _repeat(
    allocator: CachingAllocator,
    step: list[tuple[int, int]],
    held: dict[int, Chunk],
    successors: dict[int, int],
) -> None:
    addresses: list[int] = []
    for _ in range(MOST_REPETITIONS):
        new: dict[int, Chunk] = {}
        addresses, addresses_before = [], addresses
        for key, n_bytes in step:
            if n_bytes >= 0:
                new[key] = allocator.malloc(n_bytes)
                addresses.append(new[key].address)
            else:
                allocator.free(new.pop(key) if key in new else held.pop(key))
        held = {old: new[key] for old, key in successors.items()}
        if addresses == addresses_before:
            break


def _successors(trace: list[tuple[int, int]], last_step: int) -> dict[int, int] | None:
    """For each older block that the last step gives back, the one it leaves in its place.

    Paired in the order in which they were made; None where their sizes differ.
    """
    sizes = {key: n_bytes for key, n_bytes in trace if n_bytes >= 0}
    made = {key for key, n_bytes in trace[last_step:] if n_bytes >= 0}
    given_back = {key for key, n_bytes in trace[last_step:] if n_bytes < 0}
    found = [key for key in sizes if key in given_back and key not in made]
    left = [key for key in sizes if key in made and key not in given_back]
    if [sizes[key] for key in found] != [sizes[key] for key in left]:
        return None
    return dict(zip(found, left, strict=True))
