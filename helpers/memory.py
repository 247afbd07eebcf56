"""How much memory a block of code takes, and how long it takes.

On a CUDA device the peaks are those of torch's caching allocator, with NVML's view of the whole
card beside them. On a CPU torch counts nothing, so a `Tracker` does: it sees every storage as it
is created and freed, which gives the exact peak of the bytes held by live tensors and says what
they were for. The same tracker works on fake tensors, which have shapes but no data.
"""

import bisect
import contextlib
import functools
import importlib
import importlib.metadata
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

MIB = 1024**2
ROUNDING = 512  # bytes: the unit in which torch's CUDA allocator hands out memory
IN_BACKWARD = ("backward", "recompute")  # phases
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def format_mib(n_bytes: float | None) -> str:
    """Write a number of bytes in MiB (1024**2 bytes), as every table here does: "6,003 MiB"."""
    if n_bytes is None:
        return "n/a"
    mib = n_bytes / MIB
    return f"{mib:,.0f} MiB" if abs(mib) >= 10 else f"{mib:.2f} MiB"


def round_up(n_bytes: int, unit: int = ROUNDING) -> int:
    """The smallest multiple of `unit` that holds `n_bytes`."""
    return -(-n_bytes // unit) * unit


# --- Live tensors --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Block:
    """One storage: its size, when it came, and what it was for.

    phase: "forward", "backward", "recompute" (a forward pass repeated inside the backward pass)
    or "optimizer" (unscaling, clipping, update). role: set where it is known for certain,
    otherwise the phase decides, see `part`. host: memory of the CPU that a CUDA run would not
    hold on the device.
    """

    nbytes: int
    phase: str
    where: str | int
    role: str | None = None
    host: bool = False

    @property
    def part(self) -> str:
        """One of PARTS. Input batches and recomputed values count as activations."""
        if self.role is not None:
            return "activations" if self.role == "inputs" else self.role
        return "activations" if self.phase in ("forward", "recompute") else "temporaries"


class _StorageRef(weakref.ref):
    __slots__ = ("key", "block")


@dataclass(frozen=True)
class Timeline:
    """Live bytes after every allocation and free, in order; `parts` has the same by part."""

    live: list[int]
    phases: list[str]
    parts: dict[str, list[int]]


@dataclass(frozen=True)
class Peak:
    """The moment of most live bytes: how many, what for, in which phase and module."""

    bytes: int
    split: dict[str, int]
    phase: str
    module: str
    event: int


_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of its parts if it is sparse or a wrapper."""
    if _is_wrapper(type(tensor)):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [s for part in parts if isinstance(part, torch.Tensor) for s in storages(part)]
    try:
        return [tensor.untyped_storage()]
    except NotImplementedError:  # sparse tensors have none of their own
        parts: tuple[torch.Tensor, ...] = ()
        if tensor.layout is torch.sparse_coo:
            parts = tensor._indices(), tensor._values()
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return [s for part in parts for s in storages(part)]


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


class Tracker(TorchDispatchMode):
    """Record when storages come and go while the block runs.

    Every storage counts once, however many tensors view it. What is registered counts from the
    start; anything else from the moment an operation inside the block creates or first uses it.
    Works on real and on fake tensors. Memory that a kernel takes and returns inside one operation
    is not seen.

    model, optimizer: their parameters, buffers, gradients and state exist from the start.
    inputs: tensors (in any nesting of lists, tuples and dicts) that exist from the start; a view
    brings in its whole storage. device_type: the only kind of device that counts.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs=(),
        device_type: str = "cpu",
    ):
        super().__init__()
        self.events: list[tuple[Block, bool]] = []  # (block, True: created or False: freed)
        self.phases: list[str] = []  # of each event
        self.phase = "forward"  # of the operation that is running or ran last
        self.device_type = device_type
        self._refs: dict[int, _StorageRef] = {}
        self._names: dict[int, str] = {}
        self._parameters: list[weakref.ref] = []
        self._stack: list[str] = []  # names of the modules whose forward is running
        self._spans: tuple[list[int], list[str]] = ([], [])
        self._optimizers: list[str] = []  # names of the optimizers whose step is running
        self._recording = False
        self._registered: int | None = None  # events before the block was entered
        self._host = False
        self._handles: list = []
        self._resize_before = torch.UntypedStorage.resize_
        if model is not None:
            self.register_model(model)
        if optimizer is not None:
            self._scan_optimizer(optimizer)
        for tensor in _tensors((inputs,)):
            self._see(tensor, "inputs")

    # What is registered

    def register_model(self, model: nn.Module) -> None:
        """Count the model's parameters, buffers and gradients from now on, and learn its names."""
        for name, module in model.named_modules():
            kind = type(module).__name__
            self._names[id(module)] = f"{name} ({kind})" if name.isdigit() else name or kind
        for parameter in model.parameters():
            self._parameters.append(weakref.ref(parameter))
            self._see(parameter, "parameters")
        for buffer in model.buffers():
            self._see(buffer, "parameters")
        self._scan_gradients()

    @contextlib.contextmanager
    def on_host(self):
        """Storages created inside are host memory: a CUDA run would keep them off the device."""
        before, self._host = self._host, True
        try:
            yield
        finally:
            self._host = before

    # Recording

    def __enter__(self):
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._module_begins),
            # always_call: checkpointing leaves a recomputed module by an exception
            hooks.register_module_forward_hook(self._module_ends, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        self._resize_before = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._watched_resize()
        self._recording = True
        if self._registered is None:
            self._registered = len(self.events)
        return super().__enter__()

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        torch.UntypedStorage.resize_ = self._resize_before
        for handle in self._handles:
            handle.remove()
        self._scan_gradients()
        self._recording = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._record(func, args, kwargs or {})

    def _record(self, func, args: tuple, kwargs: dict):
        """Call an operation and count what it makes."""
        before, self.phase = self.phase, self._find_phase(func, args)
        if before in IN_BACKWARD and self.phase not in IN_BACKWARD:
            self._scan_gradients()
        for tensor in _tensors(args):
            self._see(tensor, "inputs")
        for tensor in _tensors(kwargs.values()):
            self._see(tensor, "inputs")
        if func.namespace == "c10d":
            self._see_exchange(args)
        result = self._call(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, (list, tuple)):
            for tensor in _tensors(result):
                self._see(tensor)
        return result

    def _call(self, func, args: tuple, kwargs: dict):
        return func(*args, **kwargs)

    def _see(self, tensor: torch.Tensor, role: str | None = None) -> None:
        """Count the tensor's storages if they are new; `role` says what a new one is."""
        for storage in storages(tensor):
            ref = self._refs.get(storage._cdata)
            if ref is not None:
                if ref.block.nbytes != storage.nbytes():
                    self._resize(ref, storage.nbytes())
                continue
            if tensor.device.type != self.device_type:
                continue
            if role == "inputs" and isinstance(tensor, nn.Parameter):
                role = "parameters"
            self._add_storage(storage, role)

    def _add_storage(self, storage: torch.UntypedStorage, role: str | None) -> None:
        block = Block(storage.nbytes(), self.phase, self._where(), role, self._host)
        ref = _StorageRef(storage, self._freed)
        ref.key, ref.block = storage._cdata, block
        self._refs[ref.key] = ref
        self._add_event(block, True)

    def _resize(self, ref: _StorageRef, nbytes: int) -> None:
        old = ref.block
        self._add_event(old, False)
        ref.block = Block(nbytes, old.phase, old.where, old.role, old.host)
        self._add_event(ref.block, True)

    def _see_exchange(self, args) -> None:
        """Buffers of an exchange between processes are temporaries, unless known as gradients."""
        for storage in (s for tensor in _tensors(args) for s in storages(tensor)):
            ref = self._refs.get(storage._cdata)
            if ref is not None:
                ref.block.role = ref.block.role or "temporaries"

    def _watched_resize(self) -> Callable:
        """`UntypedStorage.resize_` that tells this tracker: FSDP so frees and refills the memory of
        gathered weights, which count as temporaries."""
        resize = self._resize_before

        def watched(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resize(storage, nbytes)
            ref = self._refs.get(storage._cdata)
            if ref is not None:
                ref.block.role = ref.block.role or "temporaries"
                self._resize(ref, nbytes)
            elif storage.device.type == self.device_type:
                self._add_storage(storage, "temporaries")
            return storage

        return watched

    def _freed(self, ref: _StorageRef) -> None:
        self._refs.pop(ref.key, None)
        if self._recording:
            self._add_event(ref.block, False)

    def _add_event(self, block: Block, created: bool) -> None:
        self.events.append((block, created))
        self.phases.append(self.phase)

    # Phase and module

    def _find_phase(self, func, args) -> str:
        """The part of the training step that an operation on `args` belongs to."""
        if self._optimizers:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            # The backward pass switches gradients off; recomputation switches them on again.
            return "recompute" if torch.is_grad_enabled() else "backward"
        if self._stack or self.phase == "forward":
            return "forward"
        if not torch.is_grad_enabled():
            return "optimizer"  # after a backward pass: unscaling and clipping
        # The next forward pass begins with a module or with a tensor that wants a gradient; what
        # comes before, such as adding up losses, belongs to what has just ended.
        starts = func is not torch.ops.aten.detach.default and any(
            tensor.requires_grad for tensor in _tensors(args)
        )
        return "forward" if starts else self.phase.replace("recompute", "backward")

    def _where(self) -> str | int:
        if self.phase == "optimizer":
            return self._optimizers[-1] if self._optimizers else "between backward and step"
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            return node._sequence_nr() if node is not None else ""
        return self._stack[-1] if self._stack else ""

    def _module_name(self, where: str | int) -> str:
        """Modules by name; a node of the backward pass by the module that made it."""
        if isinstance(where, str):
            return where
        starts, names = self._spans
        index = bisect.bisect_right(starts, where) - 1
        if index < 0 or where >= 2**63:  # nodes that accumulate gradients have no place
            return "gradient accumulation" if where >= 2**63 else ""
        return names[index]

    def _module_begins(self, module: nn.Module, args) -> None:
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._add_span()

    def _module_ends(self, module: nn.Module, args, output) -> None:
        if self._stack:
            self._stack.pop()
        self._add_span()

    def _add_span(self) -> None:
        # Autograd numbers its nodes in order, so a node's number tells the module it came from.
        self._spans[0].append(torch.autograd._get_sequence_nr())
        self._spans[1].append(self._stack[-1] if self._stack else "")

    # Gradients and optimizer state, recognised where they are known for certain

    def _scan_gradients(self) -> None:
        for reference in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._set_role(parameter.grad, "gradients")

    def _step_begins(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        self.phase = "optimizer"
        self._optimizers.append(type(optimizer).__name__)
        self._scan_optimizer(optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        self._optimizers.pop()
        self._scan_optimizer(optimizer)

    def _scan_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._set_role(parameter, "parameters")
                if parameter.grad is not None:
                    self._set_role(parameter.grad, "gradients")
                for tensor in _tensors(optimizer.state.get(parameter, {}).values()):
                    self._set_role(tensor, "optimizer")

    def _set_role(self, tensor: torch.Tensor, role: str) -> None:
        self._see(tensor, role)
        for storage in storages(tensor):
            ref = self._refs.get(storage._cdata)
            if ref is not None:
                ref.block.role = role

    # Reading the record

    def peak(self, rounding: int = ROUNDING) -> Peak:
        """The largest sum of live bytes, each storage rounded up to `rounding` bytes (1: raw)."""
        live = best = 0
        best_event = -1
        for index, (block, created) in enumerate(self.events):
            if block.host:
                continue
            size = round_up(block.nbytes, rounding)
            live += size if created else -size
            if live > best:
                best, best_event = live, index
        split = dict.fromkeys(PARTS, 0)
        for block, created in self.events[: best_event + 1]:
            if not block.host:
                size = round_up(block.nbytes, rounding)
                split[block.part] += size if created else -size
        if best_event < 0:
            return Peak(0, split, "forward", "", -1)
        return Peak(
            best,
            split,
            self.phases[best_event],
            self._module_name(self.events[best_event][0].where),
            best_event,
        )

    def timeline(self, rounding: int = ROUNDING) -> Timeline:
        """Live bytes after every event of the block, in total and by part."""
        totals = dict.fromkeys(PARTS, 0)
        live: list[int] = []
        parts: dict[str, list[int]] = {part: [] for part in PARTS}
        first = max(0, (self._registered or 0) - 1)
        for index, (block, created) in enumerate(self.events):
            if not block.host:
                size = round_up(block.nbytes, rounding)
                totals[block.part] += size if created else -size
            if index < first:
                continue
            for part in PARTS:
                parts[part].append(totals[part])
            live.append(sum(totals.values()))
        return Timeline(live, self.phases[first:], parts)


# --- Measuring a block ---------------------------------------------------------------------


@dataclass
class Usage:
    """What a measured block took; complete once the block has ended.

    peak_bytes and peak_source say how much and where it was read: "cuda-allocated" is the peak of
    torch's allocator, "cpu-live-tensors" the peak sum of storages alive, each rounded up to 512
    bytes. reserved_bytes is the allocator's peak of memory taken from the driver;
    device_used_bytes is what NVML says is in use on the whole card when the block ends, which is
    neither a peak nor this process alone. split gives the peak by part (see PARTS; buffers count
    with the parameters, input batches with the activations). What is unknown is None, and
    `notes` has the reason under the field's name.
    """

    peak_bytes: int = 0
    peak_source: str = ""
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    seconds: float = 0.0
    split: dict[str, int] | None = None
    peak_phase: str | None = None
    peak_module: str | None = None
    notes: dict[str, str] = field(default_factory=dict)
    tracker: "Tracker | None" = field(default=None, repr=False)

    @property
    def peak_mib(self) -> float:
        return self.peak_bytes / MIB

    @property
    def reserved_mib(self) -> float | None:
        return None if self.reserved_bytes is None else self.reserved_bytes / MIB

    @property
    def device_used_mib(self) -> float | None:
        return None if self.device_used_bytes is None else self.device_used_bytes / MIB

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        """Live bytes after every allocation and free; None on CUDA."""
        return None if self.tracker is None else self.tracker.timeline()


@contextlib.contextmanager
def measure(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    inputs=(),
) -> Iterator[Usage]:
    """Measure the peak memory and the time of a block: `with measure(model, optimizer) as usage:`.

    device: where to measure; by default the model's, without a model CUDA if there is one.
    On a CPU, `model`, `optimizer` and `inputs` are counted from the start of the block, other
    tensors from their first use inside it; counting slows every operation by some microseconds,
    so compare times with `timed`. Measurements may be nested: each keeps its own peak.
    """
    device = _resolve_device(model, device)
    usage = Usage()
    if device.type == "cuda":
        with _measure_cuda(device, usage):
            yield usage
    else:
        with _measure_live(device, usage, model, optimizer, inputs):
            yield usage


def _resolve_device(model, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def _measure_live(device, usage, model, optimizer, inputs):
    tracker = Tracker(model, optimizer, inputs, device_type=device.type)
    start = time.perf_counter()
    try:
        with tracker:
            yield
    finally:
        usage.seconds = time.perf_counter() - start
        peak = tracker.peak()
        usage.peak_bytes, usage.split = peak.bytes, peak.split
        usage.peak_phase, usage.peak_module = peak.phase, peak.module
        usage.peak_source = f"{device.type}-live-tensors"
        usage.tracker = tracker
        usage.notes = {
            "reserved_bytes": f"a {device.type} device has no caching allocator that reports it",
            "device_used_bytes": f"NVML reads NVIDIA cards only, and this ran on {device}",
        }


@dataclass(eq=False)
class _CudaPeaks:
    """Peaks of one open measurement; inner ones reset torch's counters, so they are kept here."""

    device: torch.device
    allocated: int = 0
    reserved: int = 0

    def update(self) -> None:
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated(self.device))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))


_open_cuda_measurements: list[_CudaPeaks] = []


def _update_open_measurements(device: torch.device) -> None:
    for peaks in _open_cuda_measurements:
        if peaks.device == device:
            peaks.update()


@contextlib.contextmanager
def _measure_cuda(device, usage):
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)
    _update_open_measurements(device)
    torch.cuda.reset_peak_memory_stats(device)
    peaks = _CudaPeaks(device)
    _open_cuda_measurements.append(peaks)
    start = time.perf_counter()
    try:
        yield
    finally:
        try:
            torch.cuda.synchronize(device)
            usage.seconds = time.perf_counter() - start
            _update_open_measurements(device)
        finally:
            _open_cuda_measurements.remove(peaks)
        usage.peak_bytes, usage.reserved_bytes = peaks.allocated, peaks.reserved
        usage.peak_source = "cuda-allocated"
        reading = nvml_memory(device)
        usage.device_used_bytes = reading.used
        no_parts = "torch's allocator reports one number for the device, not what it is for"
        usage.notes = dict.fromkeys(("split", "peak_phase", "peak_module", "timeline"), no_parts)
        if reading.used is None:
            usage.notes["device_used_bytes"] = reading.reason


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs: the median, the spread (slowest minus fastest), every sample."""

    median: float
    spread: float
    samples: tuple[float, ...]


def timed(fn: Callable[[], object], repeats: int = 5, warmup: int = 1) -> Timing:
    """Time `fn()` after `warmup` runs that do not count; waits for CUDA before and after each."""
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: expected repeats >= 1, warmup >= 0")
    samples = []
    for run in range(warmup + repeats):
        _synchronize()
        start = time.perf_counter()
        fn()
        _synchronize()
        if run >= warmup:
            samples.append(time.perf_counter() - start)
    return Timing(statistics.median(samples), max(samples) - min(samples), tuple(samples))


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# --- NVML ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class NvmlReading:
    """NVML's memory figures of one card, in bytes, for the whole card and all its processes.

    With `reserved` known, `used` leaves out what the driver keeps for itself; without it
    (bindings or drivers that only know the first version of the call) `used` includes it.
    Without a reading all numbers are None and `reason` says why.
    """

    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    name: str | None = None
    source: str = "NVML"
    reason: str | None = None


class _NoReading(Exception):
    """NVML cannot be read; the message is the reason given to the reader."""


def nvml_memory(device: torch.device | int | str | None = None) -> NvmlReading:
    """Read memory in use on the card that torch uses as `device` (default: its current one).

    The card is found by its UUID or PCI address, since NVML numbers cards without regard to
    CUDA_VISIBLE_DEVICES. Never raises for a missing driver, permission, card or package: the
    reading then holds the reason.
    """
    try:
        index = _cuda_index(device)
        nvml = _import_pynvml()
        return _read_nvml(nvml, index)
    except _NoReading as error:
        return NvmlReading(reason=str(error))
    except Exception as error:  # a reading is never worth a training run
        return NvmlReading(reason=f"pynvml failed: {type(error).__name__}: {_text(error)}")


def _cuda_index(device) -> int:
    if isinstance(device, int):
        device = torch.device("cuda", device)
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise _NoReading(f"NVML reads NVIDIA cards only, not the device {str(device)!r}")
    if not torch.cuda.is_available():
        raise _NoReading("torch sees no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise _NoReading(f"torch sees {torch.cuda.device_count()} CUDA devices, not cuda:{index}")
    return index


def _import_pynvml():
    try:
        return importlib.import_module("pynvml")
    except Exception as error:  # a half-removed or broken package may raise anything
        raise _NoReading(_mend_pynvml(f"{type(error).__name__}: {error}")) from None


def _mend_pynvml(found: str) -> str:
    """Say which package provides `pynvml`, what is wrong, and the one command that mends it.

    nvidia-ml-py and nvidia-ml-py3 own the same file: removing one of them breaks the other, which
    pip still lists. Nothing is ever to be installed over a pynvml that works.
    """
    for package in ("nvidia-ml-py", "nvidia-ml-py3", "pynvml"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return (
            f"the package {package} {version} is broken ({found}); mend it with: "
            f"pip install --force-reinstall {package}"
        )
    return f"pynvml is not installed ({found}); get it with: pip install nvidia-ml-py3"


def _read_nvml(nvml, index: int) -> NvmlReading:
    try:
        nvml.nvmlInit()
        try:
            handle = _find_card(nvml, index)
            info, source = _memory_info(nvml, handle)
            return NvmlReading(
                total=_known(info, "total"),
                used=_known(info, "used"),
                free=_known(info, "free"),
                reserved=_known(info, "reserved"),
                name=_card_name(nvml, handle),
                source=source,
                reason=None if _known(info, "used") is not None else "NVML gave no number",
            )
        finally:
            nvml.nvmlShutdown()
    except AttributeError as error:
        raise _NoReading(_mend_pynvml(str(error))) from None
    except nvml.NVMLError as error:
        raise _NoReading(f"NVML says: {_text(error)}") from None


def _known(info, name: str) -> int | None:
    value = getattr(info, name, None)
    return value if isinstance(value, int) else None


def _text(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # old bindings fail to describe some codes
        return type(error).__name__


def _card_name(nvml, handle) -> str | None:
    try:
        name = nvml.nvmlDeviceGetName(handle)
    except (UnicodeDecodeError, nvml.NVMLError):
        return None
    return name.decode("utf-8", errors="replace") if isinstance(name, bytes) else name


def _memory_info(nvml, handle):
    """Memory figures by the newest call that both the binding and the driver know."""
    if hasattr(nvml, "nvmlMemory_v2"):
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            return info, "NVML (memory kept by the driver apart)"
        except (TypeError, nvml.NVMLError):
            pass  # an older driver: the first version of the call is next
    return nvml.nvmlDeviceGetMemoryInfo(handle), "NVML (memory kept by the driver included)"


def _find_card(nvml, index: int):
    """NVML's handle of torch's card `index`."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    chosen = visible[index] if index < len(visible) else ""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", "") or "")
    names = [chosen] if chosen.startswith("MIG-") else []  # torch may know the whole card's UUID
    if uuid:
        names += [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    if chosen.startswith("GPU-"):
        names.append(chosen)
    for name in names:
        try:
            # bytes: the one form that both bindings take
            return nvml.nvmlDeviceGetHandleByUUID(name.encode())
        except nvml.NVMLError as error:
            if _is_fatal(nvml, error):
                raise
    if getattr(properties, "pci_bus_id", None) is not None:
        address = (
            f"{getattr(properties, 'pci_domain_id', 0):08X}:{properties.pci_bus_id:02X}:"
            f"{getattr(properties, 'pci_device_id', 0):02X}.0"
        )
        return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    if nvml.nvmlDeviceGetCount() == 1:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    raise _NoReading(
        f"cannot tell which of the cards is cuda:{index}: this torch names neither UUID nor PCI "
        "address (torch 2.6 or newer does)"
    )


def _is_fatal(nvml, error) -> bool:
    """A missing permission must not be taken for a card of another name."""
    code = getattr(error, "value", None)
    return code is not None and code == getattr(nvml, "NVML_ERROR_NO_PERMISSION", -1)
