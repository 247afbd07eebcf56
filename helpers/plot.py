"""The few figures of the series: where memory goes, what it costs, how training went.

Every function returns a `Picture`, which shows itself as the last line of a cell. The colours are
those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from helpers.memory import MIB, PARTS, Timeline

PART_COLOURS = dict(
    zip(PARTS, ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00"), strict=True)
)
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7")
PHASE_SHADES = {
    "forward": "#ffffff",
    "backward": "#ececec",
    "recompute": "#c8c8c8",
    "optimizer": "#f4ecd0",
}

DOTS_PER_INCH = 100
MOST_POINTS = 2000  # of a timeline: more than the pixels of a figure cannot be seen


class Picture:
    """A figure that shows itself in a notebook as a PNG, with a text for those who cannot see it.

    `figure` is matplotlib's, to be changed further; `alt` is the text.
    """

    def __init__(self, figure: Figure, alt: str):
        self.figure, self.alt = figure, alt

    def png(self) -> bytes:
        """The picture as a PNG file's bytes."""
        FigureCanvasAgg(self.figure)
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
        # A palette of 256 colours is enough for these figures, and a third of the bytes.
        smaller = io.BytesIO()
        Image.open(buffer).convert("RGB").quantize().save(smaller, "png", optimize=True)
        return smaller.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the picture to a PNG file."""
        Path(path).write_bytes(self.png())

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"image/png": self.png(), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt}}


def _axes(
    width: float, height: float, panels: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of plain panels side by side, width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, panels, **options)))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_axisbelow(True)
    return figure, axes


_with_commas = FuncFormatter(lambda value, _: f"{value:,g}")


def plot_timeline(timeline: Timeline, title: str = "") -> Picture:
    """Live memory over one or more steps, stacked by what it is for, the peak marked.

    The horizontal axis counts allocations and frees, not seconds. The shades behind the curve
    are the phases.
    """
    figure, (ax,) = _axes(7.5, 3.4)
    live = np.asarray(timeline.live) / MIB
    if live.size == 0:
        raise ValueError("the timeline is empty: nothing was allocated in the measured block")
    peak = int(live.argmax())
    # Every n-th event and the peak itself, so that thinning cannot cut it off.
    kept = np.union1d(np.arange(0, live.size, max(1, live.size // MOST_POINTS)), [peak])
    parts = [part for part in PARTS if max(timeline.parts[part]) > 0]
    layers = [np.asarray(timeline.parts[part])[kept] / MIB for part in parts]
    colours = [PART_COLOURS[part] for part in parts]
    ax.stackplot(kept, layers, labels=parts, colors=colours, step="post", linewidth=0)

    start = 0
    for phase, group in itertools.groupby(timeline.phases):
        end = start + len(list(group))
        ax.axvspan(start, end, color=PHASE_SHADES[phase], zorder=0, linewidth=0)
        start = end

    ax.plot(peak, live[peak], "v", color="black", markersize=5)
    ax.annotate(
        f"peak {live[peak]:,.0f} MiB",
        (peak, live[peak]),
        xytext=(6, 2),
        textcoords="offset points",
        fontsize=9,
    )
    ax.set(
        xlim=(0, live.size),
        ylim=(0, 1.12 * live[peak]),
        ylabel="live memory (MiB)",
        xlabel="allocations and frees, in order",
    )
    ax.yaxis.set_major_formatter(_with_commas)
    ax.set_title(title, fontsize=11, loc="left")
    handles, labels = ax.get_legend_handles_labels()
    phases = [phase for phase in PHASE_SHADES if phase in timeline.phases]
    shades = [Patch(facecolor=PHASE_SHADES[phase], edgecolor="#999999") for phase in phases]
    figure.legend(
        handles[::-1] + shades,
        labels[::-1] + phases,
        loc="outside right center",
        frameon=False,
        fontsize=9,
    )
    split = ", ".join(f"{part} {timeline.parts[part][peak] / MIB:,.0f}" for part in parts)
    return Picture(
        figure, f"{title or 'Live memory over time'}: peak {live[peak]:,.0f} MiB ({split})."
    )


def plot_bars(
    labels: Sequence[str],
    mib: Sequence[float | None],
    seconds: Sequence[float | None] | None = None,
    *,
    split: Sequence[Mapping[str, int] | None] | None = None,
    title: str = "",
) -> Picture:
    """Peak memory of several configurations as bars, with the seconds of a step beside them.

    mib: peaks in MiB; None, unknown, is written n/a. split: for each bar its peak by part in
    bytes, as `Usage.split` has it, to stack the bar.
    """
    rows = np.arange(len(labels))
    figure, axes = _axes(7.5, 1.1 + 0.38 * len(labels), 1 if seconds is None else 2, sharey=True)
    _bar_panel(
        axes[0],
        mib,
        "{:,.0f}",
        "peak memory (MiB)",
        "#999999" if split else SERIES_COLOURS[0],
        split,
    )
    if seconds is not None:
        _bar_panel(axes[1], seconds, "{:.3g}", "seconds a step", "#999999")
    axes[0].set_yticks(rows, labels)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    if split is not None:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=8
        )
    times = [None] * len(labels) if seconds is None else seconds
    said = "; ".join(
        f"{label}: {_number(m, '{:,.0f}')} MiB" + (f", {_number(s, '{:.3g}')} s" if seconds else "")
        for label, m, s in zip(labels, mib, times, strict=True)
    )
    return Picture(figure, f"{title or 'Peak memory'}. {said}.")


def _bar_panel(ax, values, form, name, colour, split=None) -> None:
    known = [0 if value is None else value for value in values]
    rows = np.arange(len(known))
    if split is None:
        split = [None] * len(known)
    else:
        left = np.zeros(len(known))
        for part in PARTS:
            sizes = np.array([(one or {}).get(part, 0) / MIB for one in split])
            ax.barh(rows, sizes, left=left, height=0.62, color=PART_COLOURS[part], label=part)
            left += sizes
    whole = [size if one is None else 0 for size, one in zip(known, split, strict=True)]
    ax.barh(rows, whole, height=0.62, color=colour)
    for row, (value, width) in enumerate(zip(values, known, strict=True)):
        ax.annotate(
            _number(value, form),
            (width, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    ax.set_xlim(0, 1.2 * max(known, default=0) or 1)
    ax.set_xlabel(name)
    ax.xaxis.set_major_formatter(_with_commas)
    ax.xaxis.set_major_locator(MaxNLocator(5))


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else form.format(value)


def plot_sweep(
    labels: Sequence[str],
    mib: Sequence[float],
    seconds: Sequence[float],
    *,
    baseline: int = 0,
    title: str = "",
) -> Picture:
    """Memory against time for the settings of a sweep, in their order; best is bottom left.

    baseline: the index of the point that the dotted lines go through.
    """
    figure, (ax,) = _axes(6.4, 4.0)
    ax.plot(seconds, mib, "-", color="#bbbbbb", linewidth=1)
    ax.plot(seconds, mib, "o", color=SERIES_COLOURS[0])
    ax.plot(seconds[baseline], mib[baseline], "s", color=SERIES_COLOURS[1], markersize=8)
    ax.axhline(mib[baseline], color=SERIES_COLOURS[1], linewidth=0.8, linestyle=":")
    ax.axvline(seconds[baseline], color=SERIES_COLOURS[1], linewidth=0.8, linestyle=":")
    for label, x, y in zip(labels, seconds, mib, strict=True):
        ax.annotate(label, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9)
    ax.margins(x=0.18, y=0.15)
    ax.set(xlabel="seconds a step", ylabel="peak memory (MiB)")
    ax.yaxis.set_major_formatter(_with_commas)
    ax.set_title(title, fontsize=11, loc="left")
    said = "; ".join(
        f"{label}: {m:,.0f} MiB, {s:.3g} s"
        for label, m, s in zip(labels, mib, seconds, strict=True)
    )
    return Picture(figure, f"{title or 'Memory against time'}. {said}.")


def plot_training(curves: Mapping[str, Mapping[str, Sequence[float]]], title: str = "") -> Picture:
    """Training curves by epoch, one panel a quantity.

    curves: {"loss": {"train": [...], "validation": [...]}, "accuracy": {...}}, one value an epoch.
    """
    figure, axes = _axes(7.5, 3.0, len(curves))
    said = []
    for ax, (quantity, series) in zip(axes, curves.items(), strict=True):
        for (name, values), colour, style in zip(
            series.items(), itertools.cycle(SERIES_COLOURS), itertools.cycle(("-", "--", ":"))
        ):
            epochs = np.arange(1, len(values) + 1)
            marker = "o" if len(values) <= 12 else ""
            ax.plot(epochs, values, style, color=colour, label=name, marker=marker, markersize=4)
            said.append(f"{name} {quantity} {values[0]:.3g} to {values[-1]:.3g}")
        ax.set(xlabel="epoch", ylabel=quantity)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return Picture(figure, f"{title or 'Training'}: {'; '.join(said)}.")
