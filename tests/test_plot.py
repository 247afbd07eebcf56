"""The figures: they hold the values given, and the peak is never thinned out."""

import io

import numpy as np
import pytest
from PIL import Image

from helpers.memory import MIB, PARTS, Timeline
from helpers.plot import PART_COLOURS, plot_bars, plot_sweep, plot_timeline, plot_training


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(picture.png())).convert("RGB"))


def example_timeline(events=20_000, peak=13_579):
    parts = {part: [0] * events for part in PARTS}
    parts["parameters"] = [10 * MIB] * events
    parts["activations"] = [MIB] * events
    parts["activations"][peak] = 90 * MIB  # one event only
    live = [sum(values) for values in zip(*parts.values(), strict=True)]
    phases = ["forward"] * (events // 2) + ["backward"] * (events - events // 2)
    return Timeline(live, phases, parts)


def test_timeline_keeps_a_peak_of_one_event():
    picture = plot_timeline(example_timeline(), "A step")
    assert repr(picture) == "A step: peak 100 MiB (parameters 10, activations 90)."
    ax = picture.figure.axes[0]
    top = max(path.vertices[:, 1].max() for area in ax.collections for path in area.get_paths())
    assert top == pytest.approx(100)
    assert len(ax.collections[0].get_paths()[0].vertices) < 10_000


def test_timeline_uses_the_colours_of_the_parts():
    image = pixels(plot_timeline(example_timeline()))
    colour = tuple(int(PART_COLOURS["parameters"][i : i + 2], 16) for i in (1, 3, 5))
    assert (image == colour).all(axis=2).mean() > 0.03


def test_an_empty_timeline_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        plot_timeline(Timeline([], [], {part: [] for part in PARTS}))


def test_bars_hold_the_values_and_say_what_is_unknown():
    picture = plot_bars(["plain", "pools", "large"], [6003, 4709, None], [1.5, 2, None], title="T")
    assert (
        repr(picture) == "T. plain: 6,003 MiB, 1.5 s; pools: 4,709 MiB, 2 s; large: n/a MiB, n/a s."
    )
    memory, seconds = picture.figure.axes
    assert [bar.get_width() for bar in memory.patches] == [6003, 4709, 0]
    assert [bar.get_width() for bar in seconds.patches] == [1.5, 2, 0]
    assert "n/a" in {text.get_text() for text in memory.texts}


def test_bars_stack_the_split():
    split = [{part: (i + 1) * MIB for i, part in enumerate(PARTS)}, None]
    picture = plot_bars(["a", "b"], [15, 7], split=split)
    widths = [bar.get_width() for bar in picture.figure.axes[0].patches]
    assert sum(widths) == 22 and sorted(width for width in widths if width) == [1, 2, 3, 4, 5, 7]


def test_sweep_and_training_say_their_values():
    sweep = plot_sweep(["plain", "4"], [100, 60], [1.0, 1.3], title="Segments")
    assert repr(sweep) == "Segments. plain: 100 MiB, 1 s; 4: 60 MiB, 1.3 s."
    curves = plot_training({"loss": {"train": [0.7], "validation": [0.6]}, "AUC": {"train": [0.5]}})
    assert "train loss 0.7 to 0.7" in repr(curves)
    assert len(curves.figure.axes) == 2


def test_a_picture_is_small_and_has_a_text(tmp_path):
    picture = plot_timeline(example_timeline())
    data, metadata = picture._repr_mimebundle_()
    assert len(data["image/png"]) < 60_000
    assert data["text/plain"] == metadata["image/png"]["alt"] == picture.alt
    picture.save(tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as image:
        assert image.width == 750


def test_pictures_repeat_byte_for_byte():
    first, second = (plot_bars(["a"], [1.0], [2.0]).png() for _ in range(2))
    assert first == second
