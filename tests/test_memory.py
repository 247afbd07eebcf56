"""The tracker against torch's own, peaks known by hand, and NVML readings from a fake driver."""

import importlib.metadata
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from helpers import memory
from helpers.memory import (
    MIB,
    PARTS,
    Tracker,
    format_mib,
    measure,
    nvml_memory,
    storages,
    timed,
)


class Blocks(nn.Module):
    """A small network with what models have: convolution, BatchNorm, in-place, dropout, ties."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 16 * 16, 2))

    def forward(self, images):
        x = self.norm(self.stem(images))
        return self.head(self.shared(torch.relu(self.shared(x))))


def make_batch(size=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.tensor([0, 1] * size)[:size]


def make_optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), foreach=name == "foreach")


def training_step(model, optimizer, images, labels, checkpointed=False, amp=False):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        if checkpointed:
            output = checkpoint(model, images, use_reentrant=False)
        else:
            output = model(images)
        loss = F.cross_entropy(output, labels)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer_name", ["sgd", "forloop", "foreach"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_tracker_agrees_with_mem_tracker_to_the_byte(optimizer_name, checkpointed, amp):
    model = Blocks()
    optimizer = make_optimizer(optimizer_name, model)
    batch = make_batch()
    training_step(model, optimizer, *batch)
    tracker = Tracker(model, optimizer, batch)
    with tracker:
        training_step(model, optimizer, *batch, checkpointed, amp)
    judge = MemTracker()
    judge.track_external(model, optimizer, *batch)
    with judge:
        training_step(model, optimizer, *batch, checkpointed, amp)
    snapshot = judge.get_tracker_snapshot("peak")[torch.device("cpu")]
    peak = tracker.peak(rounding=1)
    assert peak.bytes == snapshot["Total"]
    assert sum(peak.split.values()) == peak.bytes
    buffers = sum(b.nbytes for b in model.buffers())
    assert peak.split["parameters"] == sum(p.nbytes for p in model.parameters()) + buffers


def test_first_step_creates_the_same_peak_as_mem_tracker_sees():
    for tracker_class in (Tracker, MemTracker):
        torch.manual_seed(0)
        model, batch = Blocks(), make_batch()
        optimizer = make_optimizer("forloop", model)
        if tracker_class is Tracker:
            tracker = Tracker(model, optimizer, batch)
        else:
            judge = MemTracker()
            judge.track_external(model, optimizer, *batch)
            tracker = judge
        with tracker:
            training_step(model, optimizer, *batch)
        if tracker_class is Tracker:
            ours = tracker.peak(rounding=1).bytes
    assert ours == judge.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_fake_tensors_give_the_same_peak_as_real_ones():
    def run():
        model = Blocks()
        optimizer = make_optimizer("forloop", model)
        batch = tuple(torch.empty_like(t) for t in make_batch())
        batch[1].zero_()
        tracker = Tracker(model, optimizer, batch)
        with tracker:
            for _ in range(2):
                training_step(model, optimizer, *batch, checkpointed=True)
        return tracker.peak(rounding=1)

    real = run()
    with FakeTensorMode():
        fake = run()
    assert (fake.bytes, fake.split, fake.phase) == (real.bytes, real.split, real.phase)


def test_split_of_a_linear_layer_is_what_paper_says():
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    inputs = torch.randn(100, 1000)
    training_step = lambda: (model(inputs).sum().backward(), optimizer.step())  # noqa: E731
    training_step()
    optimizer.zero_grad(set_to_none=False)
    with measure(model, optimizer, inputs=inputs) as usage:
        training_step()
    weights, matrix = 4_000_000, memory.round_up(4_000_000)
    assert usage.split["parameters"] == matrix
    assert usage.split["gradients"] == matrix
    # exp_avg, exp_avg_sq and the step counter, which takes 512 bytes as every block does
    assert usage.split["optimizer"] == 2 * matrix + 512
    assert usage.split["activations"] >= memory.round_up(400_000)
    assert usage.peak_bytes == sum(usage.split.values()) > 4 * weights
    assert usage.peak_source == "cpu-live-tensors"
    assert usage.peak_mib == usage.peak_bytes / MIB
    assert usage.seconds > 0


def test_measure_without_registering_anything_still_tells_parts_apart():
    model, batch = Blocks(), make_batch()
    optimizer = make_optimizer("sgd", model)
    training_step(model, optimizer, *batch)
    with measure(device="cpu") as usage:
        training_step(model, optimizer, *batch)
    parameters = sum(memory.round_up(p.nbytes) for p in model.parameters())
    buffers = sum(memory.round_up(b.nbytes) for b in model.buffers())
    assert usage.split["parameters"] == parameters
    with measure(model, optimizer, inputs=batch) as registered:
        training_step(model, optimizer, *batch)
    assert registered.split["parameters"] == parameters + buffers


def test_views_count_once_and_bring_in_their_whole_storage():
    whole = torch.zeros(1_000_000)
    with measure(device="cpu", inputs=whole[:10]) as usage:
        half = whole[:500_000]
        half.t(), whole[10:20].view(2, 5)
    assert usage.peak_bytes == memory.round_up(whole.nbytes)


def test_freed_storages_do_not_count_and_their_addresses_may_come_again():
    with measure(device="cpu") as usage:
        for _ in range(20):
            torch.zeros(250_000)
    assert usage.peak_bytes == memory.round_up(1_000_000)
    assert usage.timeline.live[-1] == 0
    assert max(usage.timeline.live) == usage.peak_bytes


def test_the_timeline_begins_with_all_that_exists():
    model, batch = nn.Linear(500, 500, bias=False), torch.zeros(10, 500)
    with measure(model, inputs=batch) as usage:
        model(batch)
    existing = memory.round_up(model.weight.nbytes) + memory.round_up(batch.nbytes)
    assert usage.timeline.live[0] == existing
    assert usage.timeline.live == [existing, existing + memory.round_up(10 * 500 * 4), existing]
    assert len(usage.timeline.phases) == len(usage.timeline.parts["activations"]) == 3


def test_resized_storages_are_followed():
    with measure(device="cpu") as usage:
        tensor = torch.zeros(1000)
        tensor.resize_(1_000_000)
    assert usage.peak_bytes == memory.round_up(4_000_000)


def test_sparse_gradients_count():
    table = nn.Embedding(1000, 64, sparse=True)
    assert len(storages(torch.eye(3).to_sparse())) == 2
    tokens = torch.arange(500)
    with measure(table, inputs=tokens) as usage:
        table(tokens).square().sum().backward()
    values, indices = table.weight.grad._values(), table.weight.grad._indices()
    gradients = memory.round_up(values.nbytes)
    if indices.untyped_storage().data_ptr() != tokens.untyped_storage().data_ptr():
        gradients += memory.round_up(indices.nbytes)
    assert usage.timeline.parts["gradients"][-1] in (gradients, gradients + tokens.nbytes)


def test_phase_and_module_of_the_peak():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Linear(4, 4)
            self.big = nn.Linear(4, 100_000)
            self.act = nn.Tanh()

        def forward(self, x):
            return self.act(self.big(self.small(x))).sum()

    model = Wide()
    x = torch.randn(64, 4)
    with measure(model, inputs=x) as usage:
        model(x).backward()
    assert (usage.peak_phase, usage.peak_module) == ("backward", "act")
    with torch.no_grad(), measure(model, inputs=x) as usage:
        model(x)
    assert (usage.peak_phase, usage.peak_module) == ("forward", "act")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with measure(model, optimizer, inputs=x[:1]) as usage:
        model(x[:1]).backward()
        optimizer.step()
    assert (usage.peak_phase, usage.peak_module) == ("optimizer", "AdamW")


def test_recomputed_values_are_activations_and_lie_in_the_recompute_phase():
    block = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 8))
    x = torch.randn(256, 8, requires_grad=True)
    tracker = Tracker(block, inputs=x)
    with tracker:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert "recompute" in tracker.phases
    assert tracker.peak().split["activations"] >= 256 * 4096 * 4


def test_clipping_between_backward_and_step_belongs_to_the_optimizer_phase():
    model, batch = Blocks(), make_batch()
    tracker = Tracker(model, inputs=batch)
    with tracker:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    order = [p for i, p in enumerate(tracker.phases) if i == 0 or tracker.phases[i - 1] != p]
    assert order.count("optimizer") >= 1
    assert order.index("optimizer") > order.index("backward")
    assert order[-1] == "backward"


def test_gradients_are_known_when_the_optimizer_steps_inside_the_backward_pass():
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)])
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_and_free(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(step_and_free) for p in model.parameters()]
    tracker = Tracker(model)
    with tracker:
        model(torch.randn(2, 300)).sum().backward()
    for handle in handles:
        handle.remove()
    gradients = sum(b.nbytes for b, created in tracker.events if created and b.part == "gradients")
    assert gradients == sum(p.nbytes for p in model.parameters())
    one_layer = memory.round_up(300 * 300 * 4) + memory.round_up(300 * 4)
    assert max(tracker.timeline().parts["gradients"]) <= one_layer


def test_memory_of_the_host_is_left_out():
    tracker = Tracker()
    with tracker:
        with tracker.on_host():
            host = torch.zeros(1_000_000)
        device = torch.zeros(1000)
    assert tracker.peak().bytes == memory.round_up(device.nbytes)
    assert sum(b.nbytes for b, _ in tracker.events if b.host) == host.nbytes


def test_measurements_nest():
    with measure(device="cpu") as outer:
        torch.zeros(1_000_000)
        with measure(device="cpu") as inner:
            torch.zeros(1000)
    assert outer.peak_bytes == memory.round_up(4_000_000)
    assert inner.peak_bytes == memory.round_up(4000)


def test_an_exception_leaves_no_hooks_behind_and_usage_filled():
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        with measure(device="cpu") as usage:
            torch.zeros(1000)
            1 / 0
    assert usage.peak_bytes == 4096
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_unknown_readings_are_none_with_a_reason():
    with measure(device="cpu") as usage:
        pass
    assert usage.reserved_bytes is usage.reserved_mib is usage.device_used_mib is None
    assert "allocator" in usage.notes["reserved_bytes"]
    assert "NVML" in usage.notes["device_used_bytes"]


def test_format_mib():
    assert format_mib(6003 * MIB) == "6,003 MiB"
    assert format_mib(1.5 * MIB) == "1.50 MiB"
    assert format_mib(None) == "n/a"


def test_timed_counts_only_after_the_warm_up():
    calls = []
    timing = timed(lambda: calls.append(1), repeats=5, warmup=2)
    assert len(calls) == 7
    assert len(timing.samples) == 5
    assert timing.median == sorted(timing.samples)[2]
    assert timing.spread == max(timing.samples) - min(timing.samples)
    with pytest.raises(ValueError, match="repeats=0"):
        timed(lambda: None, repeats=0)


# --- CUDA, from a fake torch.cuda ----------------------------------------------------------


class FakeCuda:
    """Stands in for torch.cuda's counters: remembers the order of calls and keeps peaks."""

    def __init__(self, monkeypatch):
        self.calls, self.now, self.peak = [], 0, 0
        for name, function in {
            "synchronize": lambda device=None: self.calls.append(("synchronize", device)),
            "reset_peak_memory_stats": self.reset,
            "max_memory_allocated": lambda device=None: self.read(device),
            "max_memory_reserved": lambda device=None: 2 * self.peak,
            "current_device": lambda: 0,
            "is_available": lambda: True,
            "device_count": lambda: 1,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self, device=None):
        self.calls.append(("reset", device))
        self.peak = self.now

    def read(self, device):
        self.calls.append(("read", device))
        return self.peak

    def use(self, n_bytes):
        self.calls.append(("use", n_bytes))
        self.peak = max(self.peak, self.now + n_bytes)


def test_cuda_peaks_are_reset_synchronised_and_read_on_the_right_device(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(
        memory, "nvml_memory", lambda device: memory.NvmlReading(reason="no driver here")
    )
    cuda.use(10_000)
    cuda.calls.clear()
    with measure(device="cuda:0") as usage:
        cuda.use(700)
    device = torch.device("cuda", 0)
    assert cuda.calls == [
        ("synchronize", device),
        ("reset", device),
        ("use", 700),
        ("synchronize", device),
        ("read", device),
    ]
    assert (usage.peak_bytes, usage.reserved_bytes) == (700, 1400)
    assert usage.peak_source == "cuda-allocated"
    assert usage.split is None and usage.timeline is None
    assert usage.notes["device_used_bytes"] == "no driver here"


def test_nested_cuda_measurements_keep_the_outer_peak(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(memory, "nvml_memory", lambda device: memory.NvmlReading(used=5))
    with measure(device="cuda") as outer:
        cuda.use(900)
        with measure(device="cuda") as first:
            cuda.use(300)
        with measure(device="cuda") as second:
            cuda.use(400)
    assert (outer.peak_bytes, first.peak_bytes, second.peak_bytes) == (900, 300, 400)
    assert outer.device_used_bytes == 5
    assert memory._open_cuda_measurements == []


# --- NVML, from a fake driver --------------------------------------------------------------


class FakeNvmlError(Exception):
    def __init__(self, value=999):
        self.value = value

    def __str__(self):
        return {3: "Not Supported", 4: "Insufficient Permissions", 9: "Driver Not Loaded"}.get(
            self.value, "Unknown Error"
        )


CARDS = {  # NVML's order: not torch's
    "GPU-aaa": dict(used=111, pci="00000000:01:00.0"),
    "GPU-bbb": dict(used=222, pci="00000000:02:00.0"),
    "MIG-ccc": dict(used=333, pci="none"),
}


def fake_pynvml(name=b"Tesla T4", v2=True, init_error=None, card_error=None):
    module = types.ModuleType("pynvml")
    module.NVMLError = FakeNvmlError
    module.NVML_ERROR_NO_PERMISSION = 4
    module.shut_down = 0

    def find(key):
        def look_up(wanted):
            wanted = wanted.decode() if isinstance(wanted, bytes) else wanted
            for uuid, card in CARDS.items():
                if wanted in (uuid if key == "uuid" else card[key],):
                    return card
            raise FakeNvmlError(card_error or 6)

        return look_up

    def init():
        if init_error:
            raise FakeNvmlError(init_error)

    def get_name(handle):
        if isinstance(name, Exception):
            raise name
        return name

    def memory_v1(handle):
        return types.SimpleNamespace(total=1000, used=handle["used"] + 50, free=100)

    def memory_v1_or_v2(handle, version=None):
        if version is None:
            return memory_v1(handle)
        return types.SimpleNamespace(total=1000, used=handle["used"], free=100, reserved=50)

    def shutdown():
        module.shut_down += 1

    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlDeviceGetHandleByUUID = find("uuid")
    module.nvmlDeviceGetHandleByPciBusId = find("pci")
    module.nvmlDeviceGetHandleByIndex = lambda index: list(CARDS.values())[index]
    module.nvmlDeviceGetCount = lambda: len(CARDS)
    module.nvmlDeviceGetName = get_name
    module.nvmlDeviceGetMemoryInfo = memory_v1_or_v2 if v2 else memory_v1
    if v2:
        module.nvmlMemory_v2 = 33554472
    return module


@pytest.fixture
def torch_sees(monkeypatch):
    """Make torch see the given cards, and `import pynvml` find the given module."""

    def install(module, *cards, visible=None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(**cards[i])
        )
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return module

    return install


def test_nvml_finds_the_card_by_uuid_however_it_is_numbered(torch_sees):
    module = torch_sees(fake_pynvml(), {"uuid": "bbb"}, {"uuid": "aaa"}, visible="1,0")
    assert nvml_memory().used == 222
    assert nvml_memory(1).used == 111
    assert nvml_memory("cuda:1").used == 111
    assert nvml_memory(torch.device("cuda:0")).used == 222
    assert module.shut_down == 4


def test_nvml_finds_mig_slices_and_named_cards(torch_sees):
    torch_sees(fake_pynvml(), {"uuid": "aaa"}, visible="MIG-ccc")
    assert nvml_memory().used == 333
    torch_sees(fake_pynvml(), {}, visible="GPU-bbb")
    assert nvml_memory().used == 222


def test_nvml_falls_back_to_the_pci_address(torch_sees):
    torch_sees(fake_pynvml(), {"pci_bus_id": 2, "pci_device_id": 0, "pci_domain_id": 0})
    assert nvml_memory().used == 222


def test_nvml_says_when_it_cannot_tell_which_card(torch_sees):
    torch_sees(fake_pynvml(), {})
    reading = nvml_memory()
    assert reading.used is None
    assert "which of the cards" in reading.reason


@pytest.mark.parametrize("v2", [True, False])
def test_nvml_memory_calls_of_both_bindings(torch_sees, v2):
    torch_sees(fake_pynvml(v2=v2), {"uuid": "aaa"})
    reading = nvml_memory()
    assert reading.total == 1000
    assert reading.used == (111 if v2 else 161)
    assert reading.reserved == (50 if v2 else None)
    assert ("apart" if v2 else "included") in reading.source
    assert reading.reason is None


def test_nvml_new_binding_on_an_old_driver(torch_sees):
    module = fake_pynvml()

    def only_v1(handle, version=None):
        if version is not None:
            raise FakeNvmlError(13)
        return types.SimpleNamespace(total=1000, used=handle["used"] + 50, free=100)

    module.nvmlDeviceGetMemoryInfo = only_v1
    torch_sees(module, {"uuid": "aaa"})
    assert nvml_memory().used == 161


@pytest.mark.parametrize(
    "name, read",
    [
        (b"Tesla T4", "Tesla T4"),
        ("Tesla T4", "Tesla T4"),
        (b"T\xff4", "T\ufffd4"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), None),
    ],
)
def test_nvml_names_as_bytes_text_or_undecodable(torch_sees, name, read):
    torch_sees(fake_pynvml(name=name), {"uuid": "aaa"})
    reading = nvml_memory()
    assert (reading.name, reading.used) == (read, 111)


def test_nvml_without_driver_permission_or_support(torch_sees):
    torch_sees(fake_pynvml(init_error=9), {"uuid": "aaa"})
    assert "Driver Not Loaded" in nvml_memory().reason
    torch_sees(fake_pynvml(card_error=4), {"uuid": "zzz"})
    assert "Insufficient Permissions" in nvml_memory().reason
    module = fake_pynvml(v2=False)

    def not_supported(handle):
        raise FakeNvmlError(3)

    module.nvmlDeviceGetMemoryInfo = not_supported
    torch_sees(module, {"uuid": "aaa"})
    assert "Not Supported" in nvml_memory().reason


def test_nvml_unknown_numbers_are_none_not_zero(torch_sees):
    module = fake_pynvml(v2=False)
    module.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=1, used=None)
    torch_sees(module, {"uuid": "aaa"})
    reading = nvml_memory()
    assert reading.used is None and reading.free is None and reading.reason


def test_nvml_without_a_cuda_device(torch_sees):
    torch_sees(fake_pynvml())
    assert "no CUDA device" in nvml_memory().reason
    assert "'cpu'" in nvml_memory("cpu").reason
    torch_sees(fake_pynvml(), {"uuid": "aaa"})
    assert "cuda:3" in nvml_memory(3).reason


def test_nvml_package_missing_or_broken(torch_sees, monkeypatch):
    installed = {}

    def version(package):
        try:
            return installed[package]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(importlib.metadata, "version", version)
    torch_sees(None, {"uuid": "aaa"})  # None in sys.modules: the import fails
    assert "pip install nvidia-ml-py3" in nvml_memory().reason
    installed["nvidia-ml-py"] = "13.0"  # removing nvidia-ml-py3 took its file away
    assert "pip install --force-reinstall nvidia-ml-py" in nvml_memory().reason
    module = fake_pynvml()
    del module.nvmlDeviceGetHandleByUUID
    installed = {"nvidia-ml-py3": "7.352.0"}
    torch_sees(module, {"uuid": "aaa"})
    reason = nvml_memory().reason
    assert "nvidia-ml-py3 7.352.0 is broken" in reason and "ByUUID" in reason
    assert "pip install --force-reinstall nvidia-ml-py3" in reason


def test_parts_are_the_ones_documented():
    assert PARTS == ("parameters", "gradients", "optimizer", "activations", "temporaries")


@pytest.mark.parametrize("error", [OSError("no such function"), TypeError("bytes expected")])
def test_nvml_never_raises_whatever_its_package_does(torch_sees, monkeypatch, error):
    def broken(*_):
        raise error

    monkeypatch.setattr("helpers.memory._cuda_index", lambda device: 0)
    monkeypatch.setattr(
        "helpers.memory._import_pynvml", lambda: types.SimpleNamespace(nvmlInit=broken)
    )
    reading = nvml_memory()
    assert reading.used is None and "pynvml" in reading.reason
