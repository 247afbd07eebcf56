"""Data of the two tasks: pictures of cats and dogs, and toxic comments in several languages."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import io
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageDraw, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)

# --- Cats and dogs -------------------------------------------------------------------------

PET_CLASSES = ("cat", "dog")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN_FOLDER = "train"
VALIDATION_FOLDERS = ("val", "validation", "valid", "test")  # the first one found is used
PICTURE_SUFFIXES = IMG_EXTENSIONS  # the file names that torchvision's ImageFolder takes
LARGEST_PICTURE_FILE = 4 * Image.MAX_IMAGE_PIXELS  # bytes: as many pixels, not compressed at all
HOLD_OUT = 5  # where a folder has no validation part, every fifth picture of a class becomes it


@dataclass(frozen=True)
class ImageLoaders:
    """Cats and dogs, ready to train on.

    Batches are (images float32 [batch, 3, size, size], labels int64 [batch]); a label is an index
    into `classes`. `source` says in words where the pictures come from, `report` what was found.
    """

    train: DataLoader
    val: DataLoader
    classes: tuple[str, ...]
    source: str
    report: PictureReport


def cats_vs_dogs(
    root: str | os.PathLike | None = None,
    *,
    image_size: int = 224,
    batch_size: int = 64,
    seed: int = 0,
    workers: int | None = None,
    train_limit: int | None = None,
    val_limit: int | None = None,
) -> ImageLoaders:
    """Loaders of cats and dogs with the VGG16 article's transforms at `image_size` pixels.

    `root=None` draws the pictures (400 to train on, 200 to validate on, always the same ones).
    Otherwise `root` is a folder: `train/` with `val/`, `validation/` or `test/`, one folder per
    class in each; class folders alone; Kaggle's flat `train/cat.0.jpg`; or the Oxford-IIIT Pet
    tree. Where there is no validation part, every fifth picture of a class is held out.
    Every file is decoded once here, and what training would stumble over is left out and reported.
    The limits keep the first pictures, as many of each class.

    Order and augmentation depend on `seed` and on how often `train` has been iterated before, on
    nothing else: neither on torch's global random state nor on `workers`. Make new loaders to see
    the same batches again. `workers=None` chooses as `default_workers` says.

    Raises FileNotFoundError for a missing folder and ValueError for one that cannot be trained on.
    """
    _require_whole("image_size", image_size, least=1)
    _require_whole("batch_size", batch_size, least=1)
    _require_whole("seed", seed, least=0)
    for name, value, least in [
        ("workers", workers, 0),
        ("train_limit", train_limit, 1),
        ("val_limit", val_limit, 1),
    ]:
        if value is not None:
            _require_whole(name, value, least)
    training, validation = train_transform(image_size), val_transform(image_size)
    if root is None:
        classes, source, report = PET_CLASSES, "drawn sample", PictureReport()
        train_set = DrawnPets(range(min(400, train_limit or 400)), training)
        val_set = DrawnPets(range(400, 400 + min(200, val_limit or 200)), validation)
    else:
        folder = read_picture_folder(root)
        classes, source, report = folder.classes, f"folder {_printable(folder.root)}", folder.report
        train_set = PictureFiles(folder.train[:train_limit], training)
        val_set = PictureFiles(folder.val[:val_limit], validation)
        for split, used, found in [
            ("train", train_set, folder.train),
            ("val", val_set, folder.val),
        ]:
            if len(used) < len(found):
                report.notes.append(f"{split}_limit: {len(used):,} of {len(found):,} pictures used")
    report.train = _count_by_class(train_set.labels, classes)
    report.val = _count_by_class(val_set.labels, classes)

    if workers is None:
        workers = default_workers(len(train_set), batch_size * 3 * image_size**2 * 4)
    common = dict(
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
    sampler = SeededShuffle(len(train_set), seed, batch_size)
    report.notes += sampler.notes
    # The loaders draw a number at the start of every epoch: from a generator of their own, so that
    # iterating them leaves torch's global random state alone.
    own = [torch.Generator().manual_seed(seed) for _ in range(2)]
    train = DataLoader(train_set, sampler=sampler, generator=own[0], **common)
    val = DataLoader(val_set, shuffle=False, generator=own[1], **common)
    return ImageLoaders(train, val, tuple(classes), source, report)


def train_transform(size: int) -> transforms.Compose:
    """The VGG16 article's augmentation; its random choices come from torch's generator alone."""
    return transforms.Compose(
        [
            transforms.RandomRotation(30),
            transforms.RandomHorizontalFlip(),
            transforms.RandomResizedCrop(size, scale=(0.96, 1.0), ratio=(0.95, 1.05)),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def val_transform(size: int) -> transforms.Compose:
    """The VGG16 article's validation transform: the whole picture, squeezed to a square."""
    return transforms.Compose(
        [
            transforms.Resize([size, size]),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


class SeededShuffle(Sampler):
    """Every picture once an epoch, in a new order, each with a seed for its augmentation.

    Yields (index, augmentation seed). With the seed travelling beside the index, a picture is
    augmented alike in any worker process and whatever else has drawn random numbers meanwhile.
    A last batch of a single picture is not given out: BatchNorm cannot train on it. Dropping is
    preferred to merging because no batch, and so no peak of memory, exceeds the stated batch size.
    """

    def __init__(self, pictures: int, seed: int, batch_size: int) -> None:
        self.pictures = pictures
        self.generator = torch.Generator().manual_seed(seed)
        self.notes: list[str] = []
        self.length = pictures
        if batch_size > 1 and pictures % batch_size == 1 and pictures > 1:
            self.length = pictures - 1
            self.notes.append(
                f"{pictures} training pictures in batches of {batch_size} would leave a last batch "
                "of one picture, which BatchNorm cannot take: each epoch leaves out one picture, "
                "chosen at random"
            )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        order = torch.randperm(self.pictures, generator=self.generator)
        seeds = torch.randint(2**62, (self.pictures,), generator=self.generator)
        yield from zip(order.tolist()[: self.length], seeds.tolist()[: self.length], strict=True)


class Pictures(Dataset):
    """Pictures with labels. An index may bring a seed: `pictures[index, seed]` augments with it."""

    def __init__(self, labels: Sequence[int], transform: Callable | None) -> None:
        self.labels, self.transform = list(labels), transform

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Image.Image:
        """The picture as it is, before any transform: RGB, upright."""
        raise NotImplementedError

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[torch.Tensor, int]:
        index, seed = key if isinstance(key, tuple) else (key, None)
        picture, label = self.picture(index), self.labels[index]
        if self.transform is None:
            return picture, label
        if seed is None:
            return self.transform(picture), label
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        try:
            return self.transform(picture), label
        finally:
            torch.set_rng_state(before)


class PictureFiles(Pictures):
    """Pictures read from files, each time anew; `samples` are (path, label)."""

    def __init__(self, samples: Sequence[tuple[Path, int]], transform: Callable | None) -> None:
        super().__init__([label for _, label in samples], transform)
        self.paths = [path for path, _ in samples]

    def picture(self, index: int) -> Image.Image:
        try:
            with _quiet_pillow():
                return load_picture(self.paths[index])
        except Exception as error:
            raise RuntimeError(
                f"{_printable(self.paths[index])} was readable when the folder was scanned and is "
                f"no longer: {error}. Make the loaders again."
            ) from error


class DrawnPets(Pictures):
    """The embedded sample: even numbers are cats, odd ones dogs, drawn once and kept in memory.

    Picture `number` depends on its number alone, so ranges that do not overlap share no picture.
    """

    def __init__(self, numbers: Sequence[int], transform: Callable | None = None) -> None:
        super().__init__([number % 2 for number in numbers], transform)
        self.drawings = [
            draw_pet(PET_CLASSES[number % 2], random.Random(f"pet {number}")) for number in numbers
        ]

    def picture(self, index: int) -> Image.Image:
        return self.drawings[index]


def default_workers(pictures: int, batch_bytes: int) -> int:
    """Processes that read pictures beside the training process; 0 means none.

    None for small data; none in a notebook or where processes are spawned afresh (Windows, macOS),
    as there a script without `if __name__ == "__main__"` would start itself again. Otherwise
    one less than the cores, four at most, and no more than shared memory holds: a worker keeps two
    batches ready there and writes a third, and running out of it kills the process ("Bus error").
    """
    spawned = multiprocessing.get_all_start_methods()[0] != "fork"
    if pictures < 2000 or spawned or "ipykernel" in sys.modules:
        return 0
    try:
        shared_memory = shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0
    return max(0, min(4, len(os.sched_getaffinity(0)) - 1, shared_memory // (3 * batch_bytes)))


# The drawn sample

# Darker or lighter than any scenery, so that pixels alone, without edges, tell little.
DARK_FURS = [(35, 28, 25), (70, 60, 55), (85, 50, 30), (60, 62, 68)]
LIGHT_FURS = [(235, 235, 230), (240, 225, 200), (225, 160, 90), (200, 195, 190)]
Colour = tuple[int, ...]
Point = tuple[float, float]


def draw_pet(kind: str, rng: random.Random, size: int = 128) -> Image.Image:
    """One drawn "cat" or "dog", RGB, `size` pixels square; the same picture for the same `rng`.

    Cats have pointed ears, a flat face and a long thin tail; dogs have hanging ears, a long muzzle
    and a short thick tail. Everything else is drawn from the same distributions for both: colours,
    coat, pose, place, size, tilt, direction and scenery.
    """
    canvas = Image.new("RGB", (2 * size, 2 * size))  # halved at the end, which smooths the edges
    _draw_scenery(ImageDraw.Draw(canvas), rng, 2 * size)
    pen = Pen(canvas, rng)
    fur = _shade(rng.choice(DARK_FURS + LIGHT_FURS), rng.uniform(0.8, 1.15))
    coat = Coat(fur, _shade(fur, rng.uniform(0.5, 0.75)), _shade(fur, rng.uniform(1.15, 1.5)))
    draw_body = rng.choice((_draw_sitting, _draw_standing))
    head, turn = draw_body(pen, rng, coat, kind)
    _draw_head(pen, rng, coat, kind, head, turn)
    return canvas.resize((size, size), Image.Resampling.BILINEAR)


class Coat(NamedTuple):
    """An animal's colours."""

    fur: Colour
    dark: Colour
    light: Colour


class Pen:
    """Draws in the animal's own coordinates (about -0.5 to 0.5, y down), placed at random."""

    def __init__(self, canvas: Image.Image, rng: random.Random) -> None:
        self.draw = ImageDraw.Draw(canvas)
        self.scale = canvas.width * rng.uniform(0.78, 0.95)
        self.flip = rng.choice((-1, 1))
        self.tilt = rng.uniform(-0.15, 0.15)
        self.centre = [canvas.width * rng.uniform(0.43, 0.57) for _ in "xy"]

    def place(self, points: Iterable[Point]) -> list[Point]:
        """Where the animal's points lie on the canvas."""
        cos, sin = self.scale * math.cos(self.tilt), self.scale * math.sin(self.tilt)
        left, top = self.centre
        return [
            (left + self.flip * (x * cos - y * sin), top + x * sin + y * cos) for x, y in points
        ]

    def polygon(self, points: Iterable[Point], colour: Colour) -> None:
        self.draw.polygon(self.place(points), fill=colour)

    def oval(
        self, x: float, y: float, rx: float, ry: float, colour: Colour, tilt: float = 0
    ) -> None:
        cos, sin = math.cos(tilt), math.sin(tilt)
        angles = [i * math.pi / 14 for i in range(28)]
        rim = [(rx * math.cos(angle), ry * math.sin(angle)) for angle in angles]
        self.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in rim], colour)

    def line(self, points: Sequence[Point], width: float, colour: Colour) -> None:
        """A line with round ends."""
        self.draw.line(self.place(points), colour, round(width * self.scale), joint="curve")
        for x, y in (points[0], points[-1]):
            self.oval(x, y, width / 2, width / 2, colour)


def _shade(colour: Colour, factor: float) -> Colour:
    return tuple(min(255, round(channel * factor)) for channel in colour)


def _draw_scenery(draw: ImageDraw.ImageDraw, rng: random.Random, size: int) -> None:
    """A wall, a floor and a few things."""

    def colour() -> Colour:
        return tuple(rng.randint(80, 170) for _ in "rgb")

    draw.rectangle((0, 0, size, size), colour())
    draw.rectangle((0, size * rng.uniform(0.35, 0.85), size, size), colour())
    for _ in range(rng.randint(0, 2)):
        x, y = rng.uniform(0, size), rng.uniform(0, size)
        rx, ry = size * rng.uniform(0.03, 0.18), size * rng.uniform(0.03, 0.18)
        thing = rng.choice((draw.ellipse, draw.rectangle))
        thing((x - rx, y - ry, x + rx, y + ry), colour())


def _draw_sitting(pen: Pen, rng: random.Random, coat: Coat, kind: str) -> tuple[Point, float]:
    """A body seen from the front; returns where the head is and how far it looks sideways."""
    _draw_tail(pen, rng, coat, kind, (0.12, 0.38), 1)
    wide, high = rng.uniform(0.16, 0.22), rng.uniform(0.24, 0.28)
    pen.oval(0, 0.22, wide, high, coat.fur)
    for x in (-0.09, 0.09):
        foot = (x + rng.uniform(-0.03, 0.03), 0.25 + rng.uniform(0.2, 0.26))
        pen.line([(x, 0.25), foot], rng.uniform(0.055, 0.08), coat.light)
    _draw_markings(pen, rng, coat, 0, 0.22, wide, high)
    return (rng.uniform(-0.04, 0.04), -0.11), 0


def _draw_standing(pen: Pen, rng: random.Random, coat: Coat, kind: str) -> tuple[Point, float]:
    """A body seen from the side; returns where the head is and how far it looks sideways."""
    _draw_tail(pen, rng, coat, kind, (-0.34, -0.02), -1)
    head = (rng.uniform(0.12, 0.18), rng.uniform(-0.16, -0.08))
    pen.line([(0.1, 0.02), head], 0.15, coat.fur)
    wide, high = rng.uniform(0.27, 0.33), rng.uniform(0.12, 0.17)
    pen.oval(-0.1, 0.06, wide, high, coat.fur)
    length = rng.uniform(0.2, 0.26)
    for x, colour in zip((-0.32, -0.23, 0.04, 0.12), (coat.fur, coat.dark) * 2, strict=True):
        x, foot = x + rng.uniform(-0.03, 0.03), (x + rng.uniform(-0.05, 0.05), 0.1 + length)
        pen.line([(x, 0.1), foot], rng.uniform(0.055, 0.08), colour)
    _draw_markings(pen, rng, coat, -0.1, 0.06, wide, high)
    return head, 1


def _draw_tail(
    pen: Pen, rng: random.Random, coat: Coat, kind: str, root: Point, direction: int
) -> None:
    cat = kind == "cat"
    length = rng.uniform(0.3, 0.45) if cat else rng.uniform(0.14, 0.26)
    width = rng.uniform(0.03, 0.045) if cat else rng.uniform(0.055, 0.08)
    angle, curl = rng.uniform(-0.2, 1.3), rng.uniform(-2.5, 2.5) if cat else rng.uniform(-0.8, 0.8)
    points = [root]
    for _ in range(8):
        x, y = points[-1]
        points.append(
            (x + direction * length / 8 * math.cos(angle), y - length / 8 * math.sin(angle))
        )
        angle += curl / 8
    pen.line(points, width, rng.choice((coat.fur, coat.dark)))


def _draw_markings(
    pen: Pen, rng: random.Random, coat: Coat, x: float, y: float, wide: float, high: float
) -> None:
    """Nothing, stripes or patches on a body."""
    stripe = (0.015, 0.08, coat.dark)
    patch = (rng.uniform(0.04, 0.09), rng.uniform(0.03, 0.07), rng.choice((coat.dark, coat.light)))
    for shape in rng.choice(([], [stripe] * 5, [patch] * 3)):
        dx, dy = wide * rng.uniform(-0.6, 0.6), high * rng.uniform(-0.5, 0.3)
        pen.oval(x + dx, y + dy, *shape, tilt=rng.uniform(-0.3, 0.3))


def _draw_head(
    pen: Pen, rng: random.Random, coat: Coat, kind: str, centre: Point, turn: float
) -> None:
    """Ears, head, muzzle, nose and eyes; `turn` is 0 for a face seen from the front, 1 sideways."""
    x, y = centre
    r = rng.uniform(0.2, 0.25)
    ear = rng.choice((coat.fur, coat.dark))
    black = tuple(rng.randint(10, 60) for _ in "rgb")
    pen.oval(x, y, r, r * rng.uniform(0.88, 1), coat.fur)
    for side in (-1, 1):
        if kind == "cat":
            tip = (x + side * 0.95 * r, y - r * rng.uniform(1.6, 1.9))
            outer, inner = (x + side * 0.97 * r, y - 0.2 * r), (x + side * 0.1 * r, y - 0.9 * r)
            pen.polygon([outer, tip, inner], ear)
        else:
            wide, long = r * rng.uniform(0.34, 0.46), r * rng.uniform(0.95, 1.2)
            top, tilt = y + r * rng.uniform(0.1, 0.4), side * rng.uniform(-0.45, 0)
            pen.oval(x + side * r, top, wide, long, ear, tilt)
    if kind == "cat":
        muzzle = (x + 0.2 * turn * r, y + 0.4 * r, 0.36 * r, 0.26 * r)
        nose = (muzzle[0], muzzle[1] - 0.1 * r, 0.1 * r, 0.08 * r)
    else:
        long = r * rng.uniform(0.6, 0.85)
        front, side = (x, y + 0.65 * r, 0.42 * r, long), (x + r, y + 0.35 * r, 1.2 * long, 0.36 * r)
        muzzle = side if turn else front
        nose = (x + turn * (r + long), muzzle[1] - 0.15 * r, 0.17 * r, 0.13 * r)
    pen.oval(*muzzle, coat.light)
    pen.oval(*nose, black)
    for side in (-1, 1):
        pen.oval(x + (0.2 * turn + 0.4 * side) * r, y - 0.15 * r, 0.13 * r, 0.15 * r, black)


# Reading picture files


def load_picture(path: str | os.PathLike) -> Image.Image:
    """A picture as people see it: turned as its EXIF orientation says, three channels."""
    with Image.open(path) as image:
        return to_rgb(upright(image))


def upright(image: Image.Image) -> Image.Image:
    """The picture turned as its EXIF orientation says; damaged EXIF counts as none."""
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # damaged EXIF raises whatever its bytes provoke in the parser
        turn = None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Three channels from any of Pillow's modes: transparent parts become white, 16-bit grey keeps
    its upper byte, and grey of unknown range (32-bit integers, floats) is stretched to 0..255."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        grey = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0, neginf=0)
        span = grey.max() - grey.min()
        image = Image.fromarray(((grey - grey.min()) * (255 / (span or 1))).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@contextlib.contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Pillow's remarks on damaged metadata are left out: the scan decides what is usable, and each
    remark would come again every epoch. A picture of absurd size becomes an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


# Scanning picture folders


@dataclass(frozen=True)
class Skipped:
    """A file that is not trained on, and why."""

    path: Path
    reason: str


@dataclass
class Scan:
    """What a folder holds: the usable pictures in a fixed order, and the rest with reasons."""

    digests: dict[Path, str] = field(default_factory=dict)  # usable picture -> hash of its bytes
    skipped: list[Skipped] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.digests)

    def __add__(self, other: Scan) -> Scan:
        return Scan(self.digests | other.digests, self.skipped + other.skipped)

    def __str__(self) -> str:
        return "\n".join([f"{len(self)} usable pictures", *_skipped_lines(self.skipped)])


@dataclass
class PictureReport:
    """What `cats_vs_dogs` found: pictures per class, files left out, pictures in both splits."""

    train: dict[str, int] = field(default_factory=dict)
    val: dict[str, int] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    duplicates: list[tuple[Path, Path]] = field(default_factory=list)  # (training, validation)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        splits = [("training", self.train), ("validation", self.val)]
        lines = [
            f"{sum(counts.values())} {split} pictures ({_listed(counts)})"
            for split, counts in splits
        ]
        lines += _skipped_lines(self.skipped)
        if self.duplicates:
            pairs = [f"{_printable(val)} = {_printable(train)}" for train, val in self.duplicates]
            lines.append(f"{len(pairs):,} validation pictures are also training pictures:")
            lines.append(f"  {_first_three(pairs)}")
        return "\n".join(lines + self.notes)


def scan_images(folder: str | os.PathLike) -> Scan:
    """Decode every picture below `folder` once, so that training will not stumble over a file.

    Nothing is changed or deleted. JPEGs are decoded at an eighth of their size, which reads the
    same bytes and finds the same damage in half the time; several files are decoded at once.
    """
    scan = Scan()
    paths = list(_picture_paths(Path(folder), scan.skipped, set()))
    with _quiet_pillow(), ThreadPoolExecutor(os.cpu_count()) as pool:
        examined = pool.map(_examine, paths)
        # In a notebook's kernel tqdm itself does not heed the variable.
        quiet = True if os.environ.get("TQDM_DISABLE") else None
        progress = tqdm(examined, "scanning", len(paths), leave=False, disable=quiet)
        for path, (digest, reason) in zip(paths, progress, strict=True):
            if reason is None:
                scan.digests[path] = digest
            else:
                scan.skipped.append(Skipped(path, reason))
    return scan


def _picture_paths(folder: Path, skipped: list[Skipped], visited: set[Path]) -> Iterator[Path]:
    """Files below `folder` that their names call pictures, in a fixed order."""
    if folder.resolve() in visited:
        skipped.append(Skipped(folder, "a folder that was read before (symbolic link)"))
        return
    visited.add(folder.resolve())
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        skipped.append(Skipped(folder, f"folder cannot be read: {error.strerror}"))
        return
    for entry in entries:
        reason = _reason_against(entry)
        if reason is not None:
            skipped.append(Skipped(entry, reason))
        elif os.path.isdir(entry):
            yield from _picture_paths(entry, skipped, visited)
        else:
            yield entry


def _reason_against(entry: Path) -> str | None:
    """Why a file or folder is not even opened; None if it is."""
    if entry.name.startswith("._"):
        return "macOS resource fork (._ file), not a picture"
    if _is_hidden(entry):
        return "hidden file or folder"
    if entry.is_symlink() and not os.path.exists(entry):
        return f"dangling symbolic link to {_printable(os.readlink(entry))}"
    if os.path.isdir(entry):
        if _is_picture_name(entry):
            return "a folder with a picture's name"
    elif not os.path.isfile(entry):
        return "neither a file nor a folder, or not accessible"
    elif not _is_picture_name(entry):
        return f"extension {entry.suffix.lower() or '(none)'} is not read"
    return None


def _examine(path: Path) -> tuple[str, str | None]:
    """The hash of a file's bytes, and why it cannot be trained on; None if it can."""
    try:
        size = path.stat().st_size
        if size > LARGEST_PICTURE_FILE:
            return "", f"a file of {size:,} bytes, larger than any picture that is read"
        content = path.read_bytes()
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    digest = hashlib.sha256(content).hexdigest()
    if not content:
        return digest, "empty file (0 bytes)"
    if content.startswith(b"version https://git-lfs"):
        return digest, "Git LFS pointer, not the picture itself (fetch it with `git lfs pull`)"
    if content[:512].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return digest, "text such as HTML, not a picture (a failed download?)"
    try:
        with Image.open(io.BytesIO(content)) as image:
            # A phone's MPO holds several pictures too, but its first is the photo itself.
            if image.format in ("GIF", "PNG", "WEBP") and getattr(image, "n_frames", 1) > 1:
                return digest, "animated, not one picture"
            image.draft(None, (1, 1))
            to_rgb(upright(image))
    except UnidentifiedImageError:
        return digest, "not a picture that Pillow can read"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return digest, f"more than {Image.MAX_IMAGE_PIXELS:,} pixels (decompression bomb?)"
    except Exception as error:  # a decoder raises whatever the damaged bytes provoke
        return digest, f"damaged: {error}"
    return digest, None


def _is_picture_name(path: Path) -> bool:
    return path.suffix.lower() in PICTURE_SUFFIXES


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__MACOSX"


def _printable(path: str | os.PathLike) -> str:
    """A path that can be printed even where its bytes are not valid text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _skipped_lines(skipped: list[Skipped]) -> list[str]:
    """The files left out, by reason; of each reason the first three are named."""
    if not skipped:
        return ["no file left out"]
    by_reason: dict[str, list[str]] = {}
    for item in skipped:
        by_reason.setdefault(item.reason, []).append(_printable(item.path))
    lines = [f"{len(skipped):,} files or folders left out:"]
    for reason, paths in by_reason.items():
        lines.append(f"  {len(paths):,} x {reason}: {_first_three(paths)}")
    return lines


def _first_three(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# Which picture belongs to which class and split

EXPECTED_LAYOUT = (
    "expected train/<class>/*.jpg with val/, validation/ or test/ beside train/, "
    "or <class>/*.jpg, or train/cat.0.jpg, or images/ and annotations/ of the Oxford-IIIT Pets"
)


@dataclass
class PictureFolder:
    """A folder read: (path, label) pairs of both splits, the classes taking turns."""

    root: Path
    classes: tuple[str, ...]
    train: list[tuple[Path, int]]
    val: list[tuple[Path, int]]
    report: PictureReport


def read_picture_folder(root: str | os.PathLike) -> PictureFolder:
    """Find classes and splits below `root` by its layout and scan every picture (see cats_vs_dogs).

    Raises FileNotFoundError or ValueError, saying what was found, what is expected, what to do.
    """
    root = Path(root).expanduser()
    if not os.path.exists(root):
        raise FileNotFoundError(
            f"root: there is no folder {_printable(root.absolute())}; {EXPECTED_LAYOUT}. "
            "Check the path, or use root=None for the drawn sample"
        )
    if not os.path.isdir(root):
        raise ValueError(f"root: {_printable(root)} is a file, not a folder; {EXPECTED_LAYOUT}")
    report = PictureReport()
    pets = _oxford_pets(root)
    read = _read_class_folders(root, report) if pets is None else _read_oxford_pets(pets, report)
    train, val, scan = read
    report.skipped = scan.skipped
    unreadable = [item for item in scan.skipped if _is_picture_name(item.path)]
    if unreadable:
        LOG.warning("%s", "\n".join(_skipped_lines(unreadable)))
    if val is None:
        train, val = _hold_out(train)
        report.notes.append(f"validation: every {HOLD_OUT}th picture of each class, by name")
    _check_classes(root, train, val, scan.skipped)
    classes = tuple(sorted(train))
    trained_on = {scan.digests[path]: path for paths in train.values() for path in paths}
    report.duplicates = [
        (trained_on[scan.digests[path]], path)
        for name in classes
        for path in val[name]
        if scan.digests[path] in trained_on
    ]
    return PictureFolder(root, classes, _interleaved(train), _interleaved(val), report)


ByClass = dict[str, list[Path]]
# Training and validation pictures by class (validation None: to be held out), and their scan.
Splits = tuple[ByClass, ByClass | None, Scan]


def _read_class_folders(root: Path, report: PictureReport) -> Splits:
    """train/ and a validation folder, or one folder whose pictures are still to be split."""
    train_folder = root / TRAIN_FOLDER if (root / TRAIN_FOLDER).is_dir() else root
    if not _has_classes(train_folder):
        raise _wrong_level(train_folder)
    train, scan = _by_class(train_folder)
    val_folders = [root / name for name in VALIDATION_FOLDERS if (root / name).is_dir()]
    if train_folder == root or not val_folders:
        return train, None, scan
    if not any(_class_counts(val_folders[0])):
        if not _pictures_directly_in(val_folders[0]):
            raise _wrong_level(val_folders[0])
        report.notes.append(
            f"{val_folders[0].name}/ is not used: no class folders, no class in its files' names"
        )
        return train, None, scan
    val, val_scan = _by_class(val_folders[0])
    return train, val, scan + val_scan


def _by_class(folder: Path) -> tuple[ByClass, Scan]:
    """Usable pictures of each class: class folders if there are any, else names like cat.0.jpg."""
    in_folders, in_names = _class_counts(folder)
    if len(in_folders) > 1 or not in_names:
        scans = {child.name: scan_images(child) for child in _subfolders(folder)}
        loose = _pictures_directly_in(folder)
        outside = Scan(skipped=[Skipped(path, "beside the class folders") for path in loose])
        by_class = {name: list(scan.digests) for name, scan in scans.items()}
        return by_class, sum(scans.values(), outside)
    scan, by_class = scan_images(folder), {name: [] for name in sorted(in_names)}
    for path in scan.digests:
        by_class.setdefault(_class_in_name(path), []).append(path)
    nameless = by_class.pop(None, [])
    scan.skipped += [Skipped(path, "no class in its name (such as cat.0.jpg)") for path in nameless]
    return by_class, scan


def _oxford_pets(root: Path) -> Path | None:
    """The folder with the pets' images/, as it is or below torchvision's download folder."""
    for pets in (root, root / "oxford-iiit-pet"):
        if not (pets / TRAIN_FOLDER).is_dir() and (pets / "images").is_dir():
            names = [path.stem for path in _pictures_directly_in(pets / "images")]
            if any(re.fullmatch(r".+_\d+", name) for name in names):
                return pets
    return None


def _read_oxford_pets(pets: Path, report: PictureReport) -> Splits:
    """Breeds written with a capital are cats; annotations/ says which picture is in which split."""
    scan = scan_images(pets / "images")
    by_class: ByClass = {"cat": [], "dog": []}
    for path in scan.digests:
        by_class["cat" if path.name[0].isupper() else "dog"].append(path)
    lists = [pets / "annotations" / name for name in ("trainval.txt", "test.txt")]
    if not all(file.is_file() for file in lists):
        return by_class, None, scan
    lines = [file.read_text(encoding="utf-8").splitlines() for file in lists]
    train_names, val_names = ({line.split()[0] for line in part if line.strip()} for part in lines)
    unlisted = [path for path in scan.digests if path.stem not in train_names | val_names]
    if unlisted:
        report.notes.append(f"{len(unlisted):,} pictures in neither {lists[0]} nor {lists[1].name}")
    train = {name: [p for p in paths if p.stem in train_names] for name, paths in by_class.items()}
    val = {name: [p for p in paths if p.stem in val_names] for name, paths in by_class.items()}
    return train, val, scan


def _hold_out(by_class: ByClass) -> tuple[ByClass, ByClass]:
    val = {name: paths[HOLD_OUT - 1 :: HOLD_OUT] or paths[1:2] for name, paths in by_class.items()}
    kept = {name: set(paths) for name, paths in val.items()}
    train = {name: [p for p in paths if p not in kept[name]] for name, paths in by_class.items()}
    return train, val


def _check_classes(root: Path, train: ByClass, val: ByClass, skipped: list[Skipped]) -> None:
    shown = _printable(root)
    if set(train) != set(val):
        raise ValueError(
            f"{shown}: validation classes {sorted(val)} do not match the training classes "
            f"{sorted(train)}; the same class folders are expected in both. Rename or add them"
        )
    for name in sorted(train):
        if not train[name] or not val[name]:
            raise ValueError(
                f"{shown}: class {name!r} has {len(train[name])} usable training and "
                f"{len(val[name])} validation pictures; at least one of each is expected. "
                f"Add pictures, or remove the class. {_advice(root)} "
                + "; ".join(_skipped_lines(skipped)[:4])
            )


def _interleaved(by_class: ByClass) -> list[tuple[Path, int]]:
    """(path, label) pairs, the classes taking turns, so that a limit keeps them balanced."""
    labelled = enumerate(by_class[name] for name in sorted(by_class))
    ranked = [(rank, label, path) for label, paths in labelled for rank, path in enumerate(paths)]
    return [(path, label) for _, label, path in sorted(ranked)]


def _wrong_level(folder: Path) -> Exception:
    """The error for a folder without classes, with the folder that was probably meant."""
    if not _entries(folder):
        return FileNotFoundError(f"{_printable(folder)} is empty; {EXPECTED_LAYOUT}")
    folders = {f"{child.name}/": len(_pictures_directly_in(child)) for child in _subfolders(folder)}
    names = _class_counts(folder)[1]
    return ValueError(
        f"{_printable(folder)}: fewer than two classes. Found {len(_pictures_directly_in(folder))} "
        f"pictures directly in it (class by name: {_listed(names)}) and folders with so many "
        f"directly in them: {_listed(folders)}; {EXPECTED_LAYOUT}. {_advice(folder)}"
    )


def _advice(root: Path) -> str:
    """Which folder near `root` has the expected layout."""
    near = [child for folder in (root, *_subfolders(root)) for child in _subfolders(folder)]
    above = root.absolute().parents
    for folder in [*near, *above[1:2], *above[:1]]:
        if _has_classes(folder) or _has_classes(folder / TRAIN_FOLDER) or _oxford_pets(folder):
            return f"Did you mean {_printable(folder)}?"
    return "No folder near it is laid out like that."


def _has_classes(folder: Path) -> bool:
    return max(map(len, _class_counts(folder))) > 1


def _class_counts(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Pictures per class, where folders are the classes and where names such as cat.0.jpg tell."""
    in_folders = {child.name: len(_pictures_directly_in(child)) for child in _subfolders(folder)}
    in_names = Counter(map(_class_in_name, _pictures_directly_in(folder)))
    in_names.pop(None, None)
    return {name: count for name, count in in_folders.items() if count}, dict(in_names)


def _class_in_name(path: Path) -> str | None:
    match = re.fullmatch(r"(.+)\.\d+", path.stem)  # Kaggle's cat.0.jpg
    return match and match.group(1)


def _subfolders(folder: Path) -> list[Path]:
    return [
        entry for entry in _entries(folder) if not _is_picture_name(entry) and os.path.isdir(entry)
    ]


def _pictures_directly_in(folder: Path) -> list[Path]:
    return [
        entry for entry in _entries(folder) if _is_picture_name(entry) and not os.path.isdir(entry)
    ]


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, without hidden entries; nothing where it cannot be read."""
    try:
        return sorted(entry for entry in folder.iterdir() if not _is_hidden(entry))
    except OSError:
        return []


def _count_by_class(labels: list[int], classes: Sequence[str]) -> dict[str, int]:
    return {name: labels.count(label) for label, name in enumerate(classes)}


def _require_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")


# --- Toxic comments ------------------------------------------------------------------------

# The files of the competition "Jigsaw Multilingual Toxic Comment Classification" (Kaggle, 2020).
TOXIC_COMMENT_FILE = "jigsaw-toxic-comment-train.csv"
UNINTENDED_BIAS_FILE = "jigsaw-unintended-bias-train.csv"
VALIDATION_FILE = "validation.csv"
TEST_FILE = "test.csv"

# XLM-R has 514 position embeddings, and the first two are never a token's.
XLMR_MAX_TOKENS = 512

# So many comments are tokenised at a time: a million of them are never in memory as texts.
COMMENTS_AT_ONCE = 1_000
LONGEST_LINE = 2**24  # bytes


class Comment(NamedTuple):
    """One comment as its file has it; `language` is "" where the file does not say."""

    id: str
    text: str
    language: str


class CommentFile(NamedTuple):
    """A CSV file of comments: where its text, language and label stand."""

    path: Path
    text: str
    language: str | None = None
    label: str | None = None
    # The share of annotators from which on a comment is toxic; None where labels are 0 or 1.
    threshold: float | None = None

    def columns(self) -> list[str]:
        return [name for name in ("id", self.text, self.language, self.label) if name]


@dataclass
class Comments(Dataset):
    """Tokenised comments of one or more files; `comments[i]` is (token ids, label or None).

    In memory are token ids, labels, languages and each comment's place in its file, from where
    `comments.read(i)` reads the comment itself.
    """

    files: list[CommentFile]
    places: torch.Tensor  # int64 [comments, 2]: number of the file, byte offset in it
    tokens: torch.Tensor  # int32, the token ids of all comments, one after the other
    ends: torch.Tensor  # int64 [comments + 1]: comment i is tokens[ends[i] : ends[i + 1]]
    labels: torch.Tensor | None  # float32 [comments], 1 is toxic
    languages: list[str]  # [comments], "" where the file does not say
    truncated: int  # how many comments were longer than max_length

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens = self.tokens[self.ends[index] : self.ends[index + 1]]
        return tokens, None if self.labels is None else self.labels[index]

    def read(self, index: int) -> Comment:
        """Comment `index` as it stands in its file: nothing trimmed, nothing cut."""
        number, offset = self.places[index].tolist()
        return next(_scan(self.files[number], start=offset))[1]


@dataclass(frozen=True)
class PadComments:
    """Collate function: one batch as a dict of tensors, padded to its longest comment.

    input_ids and attention_mask are int64 [batch, tokens], labels float32 [batch] where there are
    any. The number of tokens is rounded up to a multiple of 8, which Tensor Cores need.
    """

    pad_id: int
    multiple_of: int = 8

    def __call__(self, items: list[tuple[torch.Tensor, torch.Tensor | None]]) -> dict:
        longest = max(len(tokens) for tokens, _ in items)
        width = -(-longest // self.multiple_of) * self.multiple_of
        input_ids = torch.full((len(items), width), self.pad_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, (tokens, _) in enumerate(items):
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if items[0][1] is not None:
            batch["labels"] = torch.stack([label for _, label in items])
        return batch


# So many batches are sorted together: few keep the order random, many waste less on padding.
BATCHES_SORTED_TOGETHER = 16


class ByLength(Sampler):
    """A random order in which the samples of a batch are about as long as each other.

    Less of each batch is padding then. Every sample comes once an epoch, in another order each
    time: shuffled as a whole, sorted by length within every `BATCHES_SORTED_TOGETHER` batches, cut
    into batches, and these shuffled; one that is not full comes last. `lengths` holds the tokens of
    each sample, `generator` draws the orders.
    """

    def __init__(self, lengths: torch.Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.lengths = lengths
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self), generator=self.generator)
        whole = len(order) - len(order) % self.batch_size
        pool = self.batch_size * BATCHES_SORTED_TOGETHER
        batches = [
            batch
            for part in order[:whole].split(pool)
            for batch in part[self.lengths[part].argsort(stable=True)].split(self.batch_size)
        ]
        for index in torch.randperm(len(batches), generator=self.generator).tolist():
            yield from batches[index].tolist()
        yield from order[whole:].tolist()


@dataclass(frozen=True)
class CommentLoaders:
    """Loaders of batches as `PadComments` makes them; the `dataset` of each is a `Comments`."""

    train: DataLoader
    val: DataLoader  # in the file's order
    test: DataLoader | None  # in the file's order, without labels
    languages: list[str]  # of the validation comments, in the loader's order
    truncated: dict[str, float]  # share of comments longer than max_length, by split
    source: str
    report: str


def jigsaw(
    root: str | Path | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 192,
    batch_size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    train_files: Sequence[str] = (TOXIC_COMMENT_FILE,),
    threshold: float = 0.5,
    train_limit: int | None = None,
    val_limit: int | None = None,
    by_length: bool = False,
) -> CommentLoaders:
    """Toxic comments in several languages, tokenised, as loaders for training and validation.

    `root` is a folder with the files of the Jigsaw multilingual competition: the `train_files`,
    `validation.csv` and, if there is one, `test.csv`. None takes this project's own sample. Of
    `jigsaw-unintended-bias-train.csv`, whose labels are shares of annotators, a comment is toxic
    from `threshold` on. `train_limit` takes the first so many comments of each training file,
    `val_limit` those of the validation file.

    Comments longer than `max_length` tokens are cut; `truncated` and `report` say how many. `seed`
    fixes the order of the training comments, another one in each epoch; with `by_length` comments
    of about the same length share a batch (see `ByLength`). `workers` defaults to 0:
    comments are tokenised here, before any worker starts, and padding a batch is no work. For files
    of a million comments set TOKENIZERS_PARALLELISM=true beforehand: then all cores tokenise.

    Raises FileNotFoundError for a missing folder or file, ValueError for a file that is not UTF-8,
    lacks a column, has broken quoting or a label that is none (with file and line), and for a
    `max_length` above the model's limit. Nothing is skipped.
    """
    _check_comment_options(tokenizer, max_length, batch_size, workers, threshold)
    # Set before the tokenizer's first use: its threads must not be alive when workers are forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = _sample_comments() if root is None else Path(root).expanduser()
    train = _tokenise(
        _train_files(folder, train_files, threshold), tokenizer, max_length, train_limit
    )
    val_file = CommentFile(_find_file(folder, VALIDATION_FILE), "comment_text", "lang", "toxic")
    val = _tokenise([val_file], tokenizer, max_length, val_limit)
    splits = {"train": train, "val": val}
    if (folder / TEST_FILE).is_file():
        test_file = CommentFile(folder / TEST_FILE, "content", "lang")
        splits["test"] = _tokenise([test_file], tokenizer, max_length)

    options = {
        "batch_size": batch_size,
        "num_workers": workers or 0,
        "collate_fn": PadComments(tokenizer.pad_token_id),
    }
    generator = torch.Generator().manual_seed(seed)
    sorted_order = ByLength(train.ends.diff(), batch_size, generator) if by_length else None
    name = "the embedded sample" if root is None else str(folder)
    return CommentLoaders(
        train=DataLoader(
            train, **options, shuffle=not by_length, sampler=sorted_order, generator=generator
        ),
        val=DataLoader(val, **options),
        test=DataLoader(splits["test"], **options) if "test" in splits else None,
        languages=val.languages,
        truncated={split: comments.truncated / len(comments) for split, comments in splits.items()},
        source=f"{name}: {len(train):,} training and {len(val):,} validation comments",
        report="\n".join(
            _describe(split, comments, max_length) for split, comments in splits.items()
        ),
    )


def comment_texts(
    root: str | Path | None = None,
    *,
    train_files: Sequence[str] = (TOXIC_COMMENT_FILE,),
    limit: int | None = 20_000,
) -> list[str]:
    """Texts of the training comments, the first `limit` of each file: to train a tokenizer on."""
    folder = _sample_comments() if root is None else Path(root).expanduser()
    files = _train_files(folder, train_files, threshold=0.5)
    return [comment.text for file in files for _, comment, _ in islice(_scan(file), limit)]


def write_submission(
    path: str | Path, comments: Comments, probabilities: Iterable[float]
) -> Path | None:
    """Write the competition's submission, `id,toxic`, one line for each of `comments` in order.

    An earlier file of that name is kept: it becomes `submission-1.csv`, or whichever number is
    free, and its new path is returned. Raises ValueError for another number of probabilities.
    """
    probabilities = [float(value) for value in probabilities]
    if len(probabilities) != len(comments):
        raise ValueError(f"{len(probabilities)} probabilities for {len(comments)} comments")
    path, kept = Path(path), None
    if path.exists():
        number = 1
        while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "toxic"])
        writer.writerows(
            (comments.read(index).id, f"{value:.6f}") for index, value in enumerate(probabilities)
        )
    return kept


def _check_comment_options(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    batch_size: int,
    workers: int | None,
    threshold: float,
) -> None:
    # A tokenizer that knows no limit says so with a huge number.
    known = tokenizer.model_max_length < 1_000_000
    limit = tokenizer.model_max_length if known else XLMR_MAX_TOKENS
    if not 3 <= max_length <= limit:
        raise ValueError(
            f"max_length={max_length}: expected 3 to {limit} tokens, the longest text that the "
            "model takes"
        )
    if batch_size < 1 or (workers or 0) < 0:
        raise ValueError(
            f"batch_size={batch_size}, workers={workers}: expected at least 1 and at least 0"
        )
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: expected a share of annotators above 0, up to 1")
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no padding token, and batches need one")


def _sample_comments() -> Path:
    """The folder of the embedded sample: beside the package, in or above the working directory."""
    package = importlib.util.find_spec("helpers") if "helpers" in sys.modules else None
    places = [Path(place).parent for place in getattr(package, "submodule_search_locations", [])]
    for place in [*places, Path.cwd(), *Path.cwd().parents]:
        folder = place / "data" / "comments"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        "the sample of comments, data/comments, is neither beside the helpers package nor in or "
        f"above {Path.cwd()}: clone the whole repository, or pass the folder of the competition's "
        "files"
    )


def _train_files(folder: Path, names: Sequence[str], threshold: float) -> list[CommentFile]:
    if isinstance(names, str) or not names:
        raise ValueError(f"train_files={names!r}: expected a list of file names")
    return [
        CommentFile(
            _find_file(folder, name),
            "comment_text",
            label="toxic",
            threshold=threshold if name == UNINTENDED_BIAS_FILE else None,
        )
        for name in names
    ]


def _find_file(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: expected one that holds {name}")
    below = next(folder.glob(f"*/{name}"), None)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:20]) or "nothing"
    hint = f"; it is in {below.parent}, pass that folder" if below else ""
    if (folder / f"{name}.zip").is_file():
        hint = f"; unzip {name}.zip first"
    raise FileNotFoundError(f"{folder} has no {name}, found {found}{hint}")


def _tokenise(
    files: list[CommentFile],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    limit: int | None = None,
) -> Comments:
    tokens, ends, places, labels, languages = (
        array("i"),
        array("q", [0]),
        array("q"),
        array("f"),
        [],
    )
    truncated = 0
    for number, file in enumerate(files):
        records = islice(_scan(file), limit)
        count = len(languages)
        while chunk := list(islice(records, COMMENTS_AT_ONCE)):
            encoded = tokenizer(
                [comment.text for _, comment, _ in chunk],
                truncation=True,
                max_length=max_length,
                # What is cut off comes back as further pieces: so we know who was cut.
                return_overflowing_tokens=True,
                return_attention_mask=False,
            )
            first_pieces: list[list[int]] = []
            comment_of_piece = encoded["overflow_to_sample_mapping"]
            for index, ids in zip(comment_of_piece, encoded["input_ids"], strict=True):
                if index == len(first_pieces):
                    first_pieces.append(ids)
            truncated += sum(pieces > 1 for pieces in Counter(comment_of_piece).values())
            for (offset, comment, label), ids in zip(chunk, first_pieces, strict=True):
                tokens.extend(ids)
                ends.append(len(tokens))
                places.extend((number, offset))
                languages.append(sys.intern(comment.language))
                if label is not None:
                    labels.append(label)
        if len(languages) == count:
            raise ValueError(f"{file.path} has no comments below its header")
    return Comments(
        files=files,
        places=torch.frombuffer(places, dtype=torch.int64).view(-1, 2),
        tokens=torch.frombuffer(tokens, dtype=torch.int32),
        ends=torch.frombuffer(ends, dtype=torch.int64),
        labels=torch.frombuffer(labels, dtype=torch.float32) if labels else None,
        languages=languages,
        truncated=truncated,
    )


def _scan(file: CommentFile, start: int = 0) -> Iterator[tuple[int, Comment, float | None]]:
    """Byte offset, comment and label of every record from byte `start` on, one record at a time.

    Values are as the file has them: nothing trimmed, no type guessed ("NA" is a text, 0012 an id),
    line breaks inside quotes kept. A record that cannot be read for certain raises ValueError.
    """
    # Longer than any comment; Python's own limit is 131,072 characters.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
    with file.path.open("rb") as binary:
        lines = _Utf8Lines(binary, file.path)
        records = csv.reader(lines, strict=True)
        header = _next_record(records, lines)
        if header is None:
            raise ValueError(f"{file.path} is empty: expected {', '.join(file.columns())}")
        if not set(file.columns()) <= set(header) or len(set(header)) < len(header):
            raise ValueError(
                f"{file.path} has the columns {', '.join(header)}: "
                f"expected {', '.join(file.columns())}, each once"
            )
        columns = {name: header.index(name) for name in file.columns()}
        if start:
            binary.seek(start)
            lines.offset = start
        while True:
            offset, line = lines.offset, lines.number + 1
            record = _next_record(records, lines)
            if record is None:
                return
            if not record:  # an empty line
                continue
            if len(record) != len(header):
                raise ValueError(
                    f"{file.path}, line {line}: {len(record)} fields, but {len(header)} columns. "
                    + QUOTING_HINT
                )
            values = {name: record[column] for name, column in columns.items()}
            comment = Comment(
                values["id"], values[file.text], values[file.language] if file.language else ""
            )
            label = _label(values[file.label], file, line) if file.label else None
            yield offset, comment, label


QUOTING_HINT = (
    "A text with a comma, a quote or a line break stands in double quotes, and its own quotes are "
    "doubled: mend that record, nothing is skipped."
)


def _next_record(records: Iterator[list[str]], lines: _Utf8Lines) -> list[str] | None:
    line = lines.number + 1
    try:
        return next(records, None)
    except csv.Error as error:
        # Python's message goes on with advice about open(), which is not the reader's matter.
        reason = str(error).split(" - ")[0]
        raise ValueError(
            f"{lines.path}, line {lines.number}: {reason}, in the record that begins in line "
            f"{line}. {QUOTING_HINT}"
        ) from None


class _Utf8Lines:
    """The lines of a UTF-8 file (with or without byte order mark), their numbers and offsets.

    Only "\\n" ends a line here, so that a stray carriage return reaches the CSV reader, which
    refuses it outside quotes and keeps it inside.
    """

    def __init__(self, binary: BinaryIO, path: Path) -> None:
        self.binary, self.path = binary, path
        self.number = 0  # of the last line read, from 1
        self.offset = 0  # bytes read so far

    def __iter__(self) -> _Utf8Lines:
        return self

    def __next__(self) -> str:
        raw = self.binary.readline(LONGEST_LINE + 1)
        if not raw:
            raise StopIteration
        if len(raw) > LONGEST_LINE:  # a file without line breaks must not fill the memory
            raise ValueError(
                f"{self.path}, line {self.number + 1}: longer than {LONGEST_LINE:,} bytes, which "
                "no comment is. Is this a CSV file?"
            )
        encoding = "utf-8" if self.offset else "utf-8-sig"
        self.number += 1
        self.offset += len(raw)
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            guess = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
            raise ValueError(
                f"{self.path}, line {self.number}: not UTF-8 (byte 0x{raw[error.start]:02x}). "
                "Convert the file from the encoding it was saved in, e.g. "
                f"iconv -f {guess} -t UTF-8 {self.path.name} > converted.csv"
            ) from None


def _label(value: str, file: CommentFile, line: int) -> float:
    """1.0 or 0.0; raises ValueError for anything that is not a label (empty, NaN, -1, 2 …)."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if file.threshold is None and number in (0, 1):
        return number
    if file.threshold is not None and 0 <= number <= 1:
        return float(number >= file.threshold)
    expected = "0 or 1" if file.threshold is None else "a number from 0 to 1"
    raise ValueError(
        f"{file.path}, line {line}: {file.label} is {value!r}, expected {expected}. "
        "Mend or remove that record, nothing is skipped."
    )


def _describe(split: str, comments: Comments, max_length: int) -> str:
    lengths = comments.ends.diff().float()
    names = ", ".join(file.path.name for file in comments.files)
    toxic = "" if comments.labels is None else f", {comments.labels.mean():.1%} toxic"
    return (
        f"{split}: {len(comments):,} comments{toxic}; median {int(lengths.median())} tokens, "
        f"{comments.truncated / len(comments):.1%} cut at {max_length} ({names})"
    )
