"""Runs that are stopped, killed or starved of disk, and files that are not what they seem."""

import io
import itertools
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from helpers.snapshot import (
    bytes_of,
    read_snapshot,
    rng_state,
    set_rng_state,
    temporary_path,
    write_atomically,
)
from helpers.train import CATS_DOGS, Recipe, build_optimizer, fingerprint, make_optimizer, train


class Noise(nn.Module):
    """Draws from every generator there is, so that none may be forgotten."""

    def forward(self, x):
        if self.training:
            x = x + 0.01 * (random.random() + float(np.random.rand())) + 0.01 * torch.randn_like(x)
        return x


def parts(recipe=Recipe(), workers=0, optimizer="adamw", width=8):
    """A small run with dropout, BatchNorm, a scheduler and shuffled batches."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), Noise(), nn.Dropout(0.3),
        nn.Linear(width, 3),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    )
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator, num_workers=workers)
    optimizer = build_optimizer(model, partial(make_optimizer, optimizer, lr=0.05), recipe)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    return model, loader, optimizer, scheduler


def decay(step):
    return 0.97**step


def run(folder, recipe=Recipe(), epochs=3, resume=False, every=2, stop_after=None, **options):
    """Train, raising KeyboardInterrupt after `stop_after` steps; returns where it ended."""
    model, loader, optimizer, scheduler = parts(recipe, **options)
    if stop_after is not None:
        steps = iter(range(stop_after))

        def count(*_):
            if next(steps, None) is None:
                raise KeyboardInterrupt

        optimizer.register_step_pre_hook(count)
    results = train(
        model, loader, loader, CATS_DOGS, optimizer, epochs=epochs, recipe=recipe,
        scheduler=scheduler, save_dir=folder, resume=resume, snapshot_steps=every,
    )  # fmt: skip
    last = results[-1]
    ended = fingerprint(model, torch.tensor([last.train_loss, last.val_loss, last.val_score]))
    return ended, rng_fingerprint(), results


def rng_fingerprint():
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


RECIPES = [
    Recipe(),
    Recipe(amp="fp16", accumulate=3, clip_norm=1.0),
    Recipe(checkpoint=((0, 2),)),
    Recipe(optimizer_in_backward=True),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("stop_after", [1, 4, 5, 12])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, recipe, stop_after):
    if recipe.optimizer_in_backward:  # its own step has no hooks of the usual kind: stop by epochs
        run(tmp_path / "b", recipe, epochs=1 + stop_after // 5)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "b", recipe, stop_after=stop_after)
    straight = run(tmp_path / "a", recipe)
    resumed = run(tmp_path / "b", recipe, resume=True)
    assert straight[:2] == resumed[:2]
    losses = [(r.train_loss, r.train_score, r.val_loss, r.steps) for r in straight[2]]
    assert losses == [(r.train_loss, r.train_score, r.val_loss, r.steps) for r in resumed[2]]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(
        p.name for p in (tmp_path / "b").iterdir()
    )


def test_a_stopped_run_with_loader_workers_goes_on_to_the_same_bits(tmp_path):
    straight = run(tmp_path / "a", epochs=2, workers=2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", epochs=2, workers=2, stop_after=3)
    assert straight[:2] == run(tmp_path / "b", epochs=2, workers=2, resume=True)[:2]


def test_a_finished_run_returns_its_results_and_its_weights(tmp_path):
    ended, _, results = run(tmp_path)
    again, _, results_again = run(tmp_path, resume=True)
    assert results == results_again
    with pytest.raises(ValueError, match="finished 3 epochs"):
        run(tmp_path, epochs=2, resume=True)


def test_resuming_without_a_snapshot_is_announced(tmp_path, capsys):
    run(tmp_path, epochs=1, resume=True)
    assert "No snapshot" in capsys.readouterr().out
    with pytest.raises(ValueError, match="need a save_dir"):
        run(None, resume=True)


def test_another_runs_files_are_never_replaced(tmp_path):
    run(tmp_path, epochs=1)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match="resume=True"):
        run(tmp_path, epochs=1)
    (tmp_path / "snapshot.pt").unlink()
    with pytest.raises(FileExistsError, match="epoch_1.pt"):
        run(tmp_path, epochs=1, resume=True)
    before.pop(tmp_path / "snapshot.pt")
    assert before == {p: p.read_bytes() for p in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "changes, difference",
    [
        ({"recipe": Recipe(amp="bf16")}, "recipe.amp is 'off' there and 'bf16' here"),
        ({"width": 9}, r"model.0.weight is 'torch.float32 \[8, 6\]' there"),
        ({"optimizer": "sgd"}, "optimizer"),
    ],
)
def test_a_snapshot_of_another_run_is_refused_with_the_difference(tmp_path, changes, difference):
    run(tmp_path, epochs=1)
    before = (tmp_path / "snapshot.pt").read_bytes()
    with pytest.raises(ValueError, match=difference):
        run(tmp_path, epochs=2, resume=True, **changes)
    assert (tmp_path / "snapshot.pt").read_bytes() == before


# --- Files -----------------------------------------------------------------------------------


def test_random_number_generators_come_back_from_a_file(tmp_path):
    write_atomically(rng_state(), tmp_path / "rng.pt")
    first = rng_fingerprint()
    set_rng_state(read_snapshot(tmp_path / "rng.pt"))
    assert rng_fingerprint() == first


@pytest.mark.parametrize("value", [np.float64(1), Path("a"), {1, 2}, len, object()])
def test_what_could_not_be_loaded_safely_is_not_saved(tmp_path, value):
    with pytest.raises(TypeError, match=r"a.pt\['deep'\]\[0\] is a "):
        write_atomically({"deep": [value]}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['BOMB']}",)


def test_a_pickle_bomb_is_refused_and_does_not_go_off(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "went_off"))
    torch.save({"model": Bomb()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match="cannot be loaded safely|can be loaded safely"):
            read_snapshot(tmp_path / name)
    assert not (tmp_path / "went_off").exists()


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\x03\x04 cut off"])
def test_a_damaged_snapshot_is_named(tmp_path, content):
    (tmp_path / "snapshot.pt").write_bytes(content)
    with pytest.raises(ValueError, match="snapshot.pt is no snapshot"):
        run(tmp_path, resume=True)


def test_a_snapshot_of_another_program_is_named(tmp_path):
    write_atomically({"weights": torch.ones(2)}, tmp_path / "snapshot.pt")
    with pytest.raises(ValueError, match="no snapshot of this program"):
        run(tmp_path, resume=True)


def test_a_full_disk_leaves_the_last_snapshot_and_says_how_much_is_needed(tmp_path):
    """RLIMIT_FSIZE stands for the disk: writing beyond it fails as on a full one."""
    path = tmp_path / "snapshot.pt"
    write_atomically({"a": torch.ones(2)}, path)
    big = {"a": torch.ones(1_000_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=f"about {bytes_of(big):,} bytes are needed, .* free"):
            write_atomically(big, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(read_snapshot(path)["a"], torch.ones(2))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_torchs_own_report_of_a_full_disk_becomes_the_same_sentence(tmp_path, monkeypatch):
    path = tmp_path / "snapshot.pt"
    write_atomically({"a": torch.ones(2)}, path)
    monkeypatch.setattr("helpers.snapshot.temporary_path", lambda path: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    with pytest.raises(OSError, match="bytes are needed"):
        write_atomically({"a": torch.ones(1_000_000)}, path)
    assert torch.equal(read_snapshot(path)["a"], torch.ones(2))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        write_atomically({"a": 1}, tmp_path / "file" / "snapshot.pt")


def test_a_link_in_the_folder_does_not_lead_outside(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "snapshot.pt"
    temporary = temporary_path(path)
    # The link is replaced, not what it names; a pipe would wait for a reader for ever.
    makers = (Path.symlink_to, Path.hardlink_to, lambda place, _: os.mkfifo(place))
    for place, make in itertools.product((temporary, path), makers):
        place.unlink(missing_ok=True)
        make(place, outside)
        write_atomically({"a": 1}, path)
        assert outside.read_text() == "precious"
        assert read_snapshot(path) == {"a": 1}
        assert list(folder.iterdir()) == [path] and not path.is_symlink()


def test_a_run_that_could_not_be_saved_does_not_begin(tmp_path, monkeypatch):
    """An epoch's work would be lost if that came out at its end."""
    (tmp_path / "file").write_text("")
    model, loader, optimizer, _ = parts()
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    start = partial(train, model, loader, None, CATS_DOGS, optimizer, epochs=1)
    with pytest.raises(OSError, match="could not be written"):
        start(save_dir=tmp_path / "file" / "below")
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(TypeError, match=r"\['lr'\] is a float64"):
        start(save_dir=tmp_path / "run")
    optimizer.param_groups[0]["lr"] = 0.1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="too little space.* 100 are free"):
        start(save_dir=tmp_path / "run")
    assert steps == [] and list((tmp_path / "run").iterdir()) == []


def test_spoilt_weights_never_replace_a_snapshot(tmp_path):
    """The loss is read before each snapshot: the last good one is what people go back to."""
    model, loader, optimizer, _ = parts()
    hits = iter(range(100))

    def spoil(*_):
        if next(hits) == 2:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)

    optimizer.register_step_post_hook(spoil)
    with pytest.raises(FloatingPointError, match="the last snapshot is kept"):
        train(
            model, loader, None, CATS_DOGS, optimizer, epochs=1, save_dir=tmp_path, snapshot_steps=2
        )
    kept = read_snapshot(tmp_path / "snapshot.pt")
    assert len(kept["progress"]["losses"]) == 2
    assert all(torch.isfinite(value).all() for value in kept["model"].values())


@pytest.mark.parametrize(
    "make",
    [
        partial(schedulers.MultiStepLR, milestones=[2, 8]),
        partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=40),
        partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
        partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], [3]
        ),
    ],
    ids=["multi-step", "one-cycle", "restarts", "cyclic", "sequence"],
)
def test_every_scheduler_goes_on_where_it_stood(tmp_path, make):
    def trained(folder, **options):
        model, loader, optimizer, _ = parts()
        train(
            model, loader, None, CATS_DOGS, optimizer, scheduler=make(optimizer), save_dir=folder,
            evaluate_train=False, **options,
        )  # fmt: skip
        return optimizer.param_groups[0]["lr"], fingerprint(model, torch.zeros(()))

    straight = trained(tmp_path / "a", epochs=2)
    trained(tmp_path / "b", epochs=1)
    assert trained(tmp_path / "b", epochs=2, resume=True) == straight


def test_a_scheduler_that_waits_for_a_score_is_refused():
    model, loader, optimizer, _ = parts()
    scheduler = schedulers.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        train(model, loader, None, CATS_DOGS, optimizer, epochs=1, scheduler=scheduler)


# --- Kills -----------------------------------------------------------------------------------

VICTIM = """
import json, sys, torch
sys.path.insert(0, sys.argv[2])
from test_snapshot import run
torch.set_num_threads(1)
ended, rng, _ = run(sys.argv[1], epochs=6, every=1, resume=True, workers=int(sys.argv[3]))
print("ENDED", json.dumps([ended, rng]), flush=True)
"""


def start_victim(folder, workers=0):
    return subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(folder), str(Path(__file__).parent), str(workers)],
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(output):
    return json.loads(output.split("ENDED ")[1])


def kill_forked_run(folder, delay):
    """Run in a forked child of this process; kill it `delay` seconds after its first snapshot.

    Returns whether the kill hit a running process.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            run(folder, epochs=6, every=1, resume=True)
        finally:
            os._exit(0)
    while not (folder / "snapshot.pt").exists():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def resumes_after_kills(tmp_path, kills, seed=0):
    """Kill runs at random moments; returns how many of the kills hit a running process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        straight = run(tmp_path / "straight", epochs=6, every=1)[:2]
        chance = random.Random(seed)
        hits = 0
        for number in range(kills):
            folder = tmp_path / f"killed_{number}"
            hits += kill_forked_run(folder, chance.uniform(0, 0.15))
            assert len(list(folder.glob(".*.tmp"))) <= 1
            assert run(folder, epochs=6, every=1, resume=True)[:2] == straight
            assert not list(folder.glob(".*.tmp"))
        return hits
    finally:
        torch.set_num_threads(threads)


def write_in_place(value, path):
    """What a plain `torch.save` does, on a disk that takes its time."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with open(path, "wb") as file:
        file.write(buffer.getvalue()[:500])
        file.flush()
        time.sleep(0.05)
        file.write(buffer.getvalue()[500:])


KILLS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import helpers.train
import test_snapshot
if sys.argv[4] == "in place":
    helpers.train.write_atomically = test_snapshot.write_in_place
print("HITS", test_snapshot.resumes_after_kills(Path(sys.argv[2]), kills=int(sys.argv[3])))
"""


def kill_many(folder, kills, writer="atomic"):
    """`resumes_after_kills` in a fresh process: autograd cannot be used in a fork of one that has
    its threads."""
    arguments = [str(Path(__file__).parent), str(folder), str(kills), writer]
    return subprocess.run(
        [sys.executable, "-c", KILLS, *arguments],
        capture_output=True,
        text=True,
        timeout=100 + 40 * kills,
    )


def test_killed_runs_go_on_to_the_same_bits(tmp_path):
    """Five kills; `make soak` has fifty."""
    done = kill_many(tmp_path, 5)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("HITS")[1]) >= 3


def test_kills_tell_a_writer_that_is_not_atomic(tmp_path):
    """The test above can fail: written in place, a killed run leaves half a snapshot."""
    done = kill_many(tmp_path, 5, writer="in place")
    assert done.returncode != 0
    assert "snapshot.pt is no snapshot that can be loaded safely" in done.stderr


def test_a_run_killed_before_its_first_snapshot_starts_anew(tmp_path):
    victim = start_victim(tmp_path / "run")
    victim.kill()
    victim.communicate()
    first = run(tmp_path / "run", epochs=2, resume=True)[:2]
    assert first == run(tmp_path / "straight", epochs=2)[:2]
