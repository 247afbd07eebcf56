"""Kills by the dozen: every resumed run ends with the bits of the one that was left alone.

`make soak` runs them; `make test` has five (tests/test_snapshot.py).
"""

import random
import time

import pytest
from test_snapshot import ended, kill_many, start_victim


def test_fifty_kills(tmp_path):
    done = kill_many(tmp_path, 50)
    assert done.returncode == 0, done.stderr
    hits = int(done.stdout.split("HITS")[1])
    print(f"{hits} of 50 kills hit a running process")
    assert hits >= 40


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Where a run of a fresh process with two loader workers ends."""
    output, _ = start_victim(tmp_path_factory.mktemp("straight"), workers=2).communicate()
    return ended(output)


@pytest.mark.parametrize("number", range(3))
def test_fresh_processes_with_two_loader_workers(tmp_path, straight, number):
    victim = start_victim(tmp_path, workers=2)
    while not (tmp_path / "snapshot.pt").exists():
        assert victim.poll() is None
        time.sleep(0.001)
    time.sleep(random.Random(number).uniform(0, 0.3))
    victim.kill()
    assert "ENDED" not in victim.communicate()[0], "it had ended before the kill"
    assert len(list(tmp_path.glob(".*.tmp"))) <= 1
    output, _ = start_victim(tmp_path, workers=2).communicate()
    assert "Going on from" in output
    assert ended(output) == straight
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("seconds", [0, 1])
def test_before_the_first_snapshot(tmp_path, straight, seconds):
    """While it still imports torch; nothing is there yet, so it starts anew."""
    victim = start_victim(tmp_path, workers=2)
    time.sleep(seconds)
    victim.kill()
    victim.communicate()
    assert not (tmp_path / "snapshot.pt").exists()
    output, _ = start_victim(tmp_path, workers=2).communicate()
    assert ended(output) == straight
