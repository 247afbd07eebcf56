"""What notebooks use: settings, seeds, tables, exercises, recorded results."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter

from helpers.memory import measure
from helpers.notebook import (
    RESULT_MIME,
    Table,
    check,
    claim,
    data_root,
    describe_machine,
    format_value,
    output_folder,
    record,
    resolve_profile,
    result_row,
    set_seed,
    settings,
    show_source,
    table,
    torchrun,
)

SIZES = {
    "tiny": {"epochs": 1, "lr": 0.1, "limit": 8},
    "small": {"epochs": 2, "lr": 0.1, "limit": None},
    "full": {"epochs": 9, "lr": 0.001, "limit": None},
}
USAGE = SimpleNamespace(
    peak_mib=1.23456, peak_source="cpu-live-tensors", reserved_mib=None, device_used_mib=None
)


def test_settings_come_from_the_profile_unless_given():
    chosen = settings("tiny", SIZES, epochs=None, lr=None)
    assert (chosen.profile, chosen.epochs, chosen.lr, chosen.limit) == ("tiny", 1, 0.1, 8)
    assert settings("tiny", SIZES, epochs=5).epochs == 5
    assert settings("full", SIZES, lr=1).lr == 1
    assert settings("small", SIZES, limit=3).limit == 3
    assert "epochs" in repr(chosen) and "<td" in chosen._repr_html_()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epoch": 1}, "epoch is no size of the profiles, which have epochs, lr, limit"),
        ({"epochs": "3"}, "EPOCHS is '3': expected a value like 1"),
        ({"epochs": True}, "EPOCHS is True"),
    ],
)
def test_settings_refuse_what_they_do_not_know(given, message):
    with pytest.raises(ValueError, match=message):
        settings("tiny", SIZES, **given)


def test_every_profile_has_all_sizes():
    with pytest.raises(ValueError, match="'full' lacks epochs"):
        settings("tiny", {**SIZES, "full": {"lr": 0.1, "limit": None}})


def test_profile(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_profile() == "small"
    monkeypatch.setenv("TUTORIAL_PROFILE", "tiny")
    assert resolve_profile("auto") == "tiny"
    assert resolve_profile("full") == "full"
    monkeypatch.setenv("TUTORIAL_PROFILE", "big")
    with pytest.raises(ValueError, match="unknown profile 'big'.*auto, tiny, small, full"):
        resolve_profile()


@pytest.mark.parametrize(("gib", "expected"), [(4, "small"), (11, "full"), (139, "full")])
def test_a_gpu_chooses_full_only_if_it_fits(monkeypatch, gib, expected):
    properties = SimpleNamespace(total_memory=gib * 1024**3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert resolve_profile() == expected
    assert describe_machine().startswith(f"GPU: Some GPU, {gib}.0 GiB; torch ")


def test_machine_is_one_line_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = describe_machine()
    assert text.startswith("CPU: ") and "thread" in text and "\n" not in text
    assert torch.__version__.split("+")[0] in text


def test_data_root(tmp_path):
    assert data_root(None) is None and data_root("") is None
    assert data_root(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match="there is no folder /.*nowhere"):
        data_root("nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file: give the folder"):
        data_root(tmp_path / "file")


def test_files_go_into_the_working_directory_unless_a_run_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("TUTORIAL_RUNS", raising=False)
    assert output_folder() == Path(".")
    monkeypatch.setenv("TUTORIAL_RUNS", str(tmp_path))
    assert output_folder() == tmp_path


def test_set_seed_starts_all_three():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_seed(3)
    first = draw()
    assert first != draw()
    set_seed(3)
    assert first == draw()


def test_show_source():
    code = show_source(set_seed, Table)
    assert "def set_seed" in code.text and "class Table" in code.text
    data, _ = DisplayFormatter().format(code)
    assert data["text/plain"] in data["text/markdown"] and "def set_seed" in data["text/plain"]
    assert data["text/markdown"].startswith("````python\n")


def test_table():
    rows = [
        {"name": "a<b", "MiB": 6003.4, "same": True},
        {"name": "b|c", "MiB": None, "same": None},
    ]
    shown = table(rows)
    assert repr(shown) == "name    MiB  same\na<b   6,003  true\nb|c     n/a  n/a"
    assert "a&lt;b" in shown._repr_html_()
    assert shown.markdown().splitlines()[1:] == [
        "| --- | ---: | --- |",
        "| a<b | 6,003 | true |",
        "| b\\|c | n/a | n/a |",
    ]
    assert table(rows, ["MiB"]).columns == ["MiB"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (12345, "12,345"), (0.693147, "0.6931"), (0.0, "0"), (1e-9, "1e-09"),
     (999.95, "1000"), (2074.4, "2,074"), (False, "false"), (float("inf"), "inf"), ("x", "x")],
)  # fmt: skip
def test_format_value(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(None, "Not answered"), (4, "Right."), (5, "Wrong. Count again."), ("4", "Wrong: ")],
)
def test_check(answer, expected, capsys):
    check(answer, lambda number: number - 4 == 0, "Count again.")
    assert capsys.readouterr().out.startswith(expected)


def test_result_row_takes_a_measurement():
    with measure() as usage:
        torch.zeros(1024, 1024)
    row = result_row("net", "plain", 2, usage, identical_to_baseline="baseline")
    assert row["peak_mib"] == 4 and row["peak_source"] == "cpu-live-tensors"
    assert row["device_used_mib"] is None
    failed = SimpleNamespace(**{**vars(USAGE), "peak_mib": None, "failed": "out of memory"})
    row = result_row("net", "plain", 2, failed)
    assert row["peak_source"] is None and row["note"] == "out of memory"


def test_record_shows_a_table_and_carries_the_values(monkeypatch):
    shown = []
    monkeypatch.setattr("helpers.notebook.display", shown.append)
    row = result_row(
        "net", "plain", 2, USAGE, final_loss=torch.tensor(0.5), val_metric=np.float64(1)
    )
    record([row], [claim("c", "1", "holds if", "the batch is large")])
    (results,) = shown
    data = results._repr_mimebundle_()
    carried = json.loads(json.dumps(data[RESULT_MIME], allow_nan=False))
    assert carried["rows"][0]["final_loss"] == 0.5 and carried["rows"][0]["peak_mib"] == 1.23
    assert carried["claims"][0]["verdict"] == "holds if the batch is large"
    assert "plain" in data["text/plain"] and "reserved_mib" not in data["text/plain"]
    assert "<table>" in data["text/html"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_loss": float("nan")}, "final_loss is nan"),
        ({"peak_source": "guess"}, "peak_source is 'guess'"),
        ({"peak_mib": None}, "needs a note"),
        ({"identical_to_baseline": "yes"}, "identical_to_baseline is 'yes'"),
        ({"identical_to_baseline": 1}, "identical_to_baseline is 1"),
        ({"peak_source": "predicted", "identical_to_baseline": True}, "prediction"),
        ({"batch_size": "4"}, "batch_size is '4'"),
        ({"loss": 1.0}, "columns differ in loss"),
    ],
)
def test_record_refuses_what_cannot_be(change, message):
    row = {**result_row("net", "plain", 2, USAGE), **change}
    with pytest.raises(ValueError, match=message):
        record([row])


def test_record_needs_a_row():
    with pytest.raises(ValueError, match="no result"):
        record([])


def test_claim_refuses_other_verdicts():
    with pytest.raises(ValueError, match="holds, holds if, does not hold"):
        claim("c", "1", "maybe")


def script_file(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_torchrun_gives_each_process_its_number(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = "import os, sys\nsys.stdout.write(os.environ['RANK'] + sys.argv[1] + '\\n')"
    output = torchrun(script_file(tmp_path, text), "!", processes=2)
    assert sorted(output.split()) == ["0!", "1!"]
    assert capfd.readouterr() == ("", "")  # no notice of threads, ports or host names
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_torchrun_tells_what_failed(tmp_path):
    text = "import os, time\nassert os.environ['RANK'] == '0', 'no good'\ntime.sleep(600)"
    with pytest.raises(RuntimeError, match="script.py failed:(.|\n)*AssertionError: no good"):
        torchrun(script_file(tmp_path, text))


def test_torchrun_leaves_nothing_running(tmp_path):
    text = (
        "import os, sys, time\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    with pytest.raises(TimeoutError, match="script.py did not end within 12 seconds"):
        torchrun(script_file(tmp_path, text), str(tmp_path), timeout=12)
    for started in (tmp_path / rank for rank in "01"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)
