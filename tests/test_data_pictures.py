"""Cats and dogs: the drawn sample as an exam, loaders, odd files, folders and their scan."""

import hashlib
import io
import os
import pickle
import random
import struct
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from helpers import data
from helpers.data import (
    DrawnPets,
    PictureFiles,
    cats_vs_dogs,
    default_workers,
    draw_pet,
    load_picture,
    scan_images,
    to_rgb,
)
from helpers.models import vgg16


def picture(number: int = 0, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """A small picture that no other number gives."""
    noise = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def fill(folder: Path, names: list[str], first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, start=first):
        picture(number).save(folder / name)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """train/ and test/ with six and three pictures of cats and dogs each."""
    for start, (split, count) in enumerate([("train", 6), ("test", 3)]):
        for offset, name in enumerate(["cats", "dogs"]):
            names = [f"{i}.jpg" for i in range(count)]
            fill(tmp_path / "pets" / split / name, names, first=100 * start + 50 * offset)
    return tmp_path / "pets"


# --- The drawn sample ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> tuple[DrawnPets, DrawnPets]:
    loaders = cats_vs_dogs(image_size=32)
    return loaders.train.dataset, loaders.val.dataset


def test_sample_is_balanced_and_shares_no_picture(drawn):
    train, val = drawn
    assert (len(train), sum(train.labels)) == (400, 200)
    assert (len(val), sum(val.labels)) == (200, 100)
    hashes = [
        hashlib.sha256(image.tobytes()).hexdigest() for image in train.drawings + val.drawings
    ]
    assert len(set(hashes)) == 600


def test_sample_is_always_the_same_and_draws_no_global_random_numbers(drawn):
    random.seed(1)
    torch.manual_seed(1)
    again = DrawnPets(range(400, 410))
    assert random.random() == random.Random(1).random()
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))
    for ours, theirs in zip(again.drawings, drawn[1].drawings, strict=False):
        assert ours.tobytes() == theirs.tobytes()


def test_drawing_has_the_size_asked_for():
    small, large = (draw_pet("cat", random.Random(3), size) for size in (32, 96))
    assert small.size == (32, 32) and large.size == (96, 96) and small.mode == "RGB"
    # The same animal at another scale: their 8 x 8 versions agree but for sampling.
    small, large = (
        np.asarray(i.resize((8, 8), Image.Resampling.BOX), float) for i in (small, large)
    )
    assert np.abs(small - large).mean() < 12


@pytest.mark.parametrize("pixels", [32, 64])
def test_logistic_regression_on_pixels_does_not_solve_the_sample(drawn, pixels):
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, val = (
        np.stack([np.asarray(i.resize((pixels, pixels))).ravel() / 255 for i in part.drawings])
        for part in drawn
    )
    for strength in (1e-3, 1e-1):
        judge = linear_model.LogisticRegression(C=strength, max_iter=1000).fit(
            train, drawn[0].labels
        )
        assert judge.score(val, drawn[1].labels) <= 0.72


def test_mean_colour_does_not_tell_cats_from_dogs(drawn):
    colours = np.array([np.asarray(i).mean((0, 1)) for part in drawn for i in part.drawings])
    labels = np.array(drawn[0].labels + drawn[1].labels)
    gap = np.abs(colours[labels == 0].mean(0) - colours[labels == 1].mean(0))
    assert (gap < 0.1 * colours.std(0)).all()


def vgg16_accuracy(loaders: data.ImageLoaders, epochs: int) -> float:
    """Validation accuracy of the narrow VGG16 of notebook 1, trained by the plainest loop."""
    torch.manual_seed(1)
    model = vgg16(num_classes=2, width=0.125)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4)
    for _ in range(epochs):
        model.train()
        for images, labels in loaders.train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in loaders.val]
    return torch.cat(right).mean().item()


def test_a_small_vgg16_learns_the_sample():
    """Half of notebook 1's epochs are enough to tell it from chance and from the pixel judge."""
    loaders = cats_vs_dogs(image_size=64, batch_size=32, seed=1)
    assert vgg16_accuracy(loaders, epochs=15) >= 0.8


def test_with_shuffled_labels_a_small_vgg16_stays_at_chance():
    loaders = cats_vs_dogs(image_size=64, batch_size=32, seed=1)
    for dataset in (loaders.train.dataset, loaders.val.dataset):
        random.Random(0).shuffle(dataset.labels)
    assert 0.4 <= vgg16_accuracy(loaders, epochs=15) <= 0.6


# --- Loaders -------------------------------------------------------------------------------


def batches(loader: DataLoader) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images, labels) for images, labels in loader]


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def small(seed: int = 0, **options) -> data.ImageLoaders:
    sizes = dict(image_size=32, batch_size=8, train_limit=20, val_limit=10)
    return cats_vs_dogs(seed=seed, **{**sizes, **options})


def test_batches_have_the_stated_types_and_scale():
    loaders = small()
    images, labels = batches(loaders.val)[0]
    assert images.dtype == torch.float32 and images.shape == (8, 3, 32, 32)
    assert labels.dtype == torch.int64 and labels.shape == (8,)
    assert loaders.classes == ("cat", "dog")
    white = (1 - torch.tensor(data.IMAGENET_MEAN)) / torch.tensor(data.IMAGENET_STD)
    assert torch.allclose(data.val_transform(8)(Image.new("RGB", (9, 5), "white"))[:, 0, 0], white)


def test_order_and_augmentation_come_from_the_seed_alone():
    torch.manual_seed(5)
    first = small()
    state = torch.get_rng_state()
    epochs = [batches(first.train), batches(first.train)]
    batches(first.val)
    assert torch.equal(torch.get_rng_state(), state), "iterating must leave torch's state alone"
    torch.manual_seed(6)
    second = small()
    torch.rand(17)
    assert same(batches(second.train), epochs[0]) and same(batches(second.train), epochs[1])
    assert not same(epochs[0], epochs[1])
    assert not same(batches(small(seed=1).train), epochs[0])
    assert same(batches(small(seed=1).val), batches(second.val))


def test_augmentation_changes_a_picture_from_epoch_to_epoch():
    dataset = small().train.dataset
    assert torch.equal(dataset[0, 7][0], dataset[0, 7][0])
    assert not torch.equal(dataset[0, 7][0], dataset[0, 8][0])


def test_worker_processes_change_nothing():
    assert same(batches(small(workers=2).train), batches(small().train))


def test_each_picture_comes_once_an_epoch():
    order = [index for index, _ in small().train.sampler]
    assert sorted(order) == list(range(20)) and order != sorted(order)


@pytest.mark.parametrize("of_files", [False, True])
def test_loaders_pickle(tree, of_files):
    loaders = small(root=tree if of_files else None)
    assert same(batches(pickle.loads(pickle.dumps(loaders)).train), batches(loaders.train))


def test_loaders_work_in_a_spawned_process(tree):
    loaders = small(root=tree, train_limit=4)
    parts = dict(batch_size=2, sampler=small(root=tree, train_limit=4).train.sampler)
    spawned = DataLoader(
        loaders.train.dataset, num_workers=1, multiprocessing_context="spawn", **parts
    )
    seen = torch.cat([images for images, _ in spawned])
    assert torch.equal(seen, torch.cat([images for images, _ in loaders.train]))


def test_a_last_batch_of_one_picture_is_left_out_and_reported():
    loaders = small(train_limit=17)
    assert [len(labels) for _, labels in loaders.train] == [8, 8]
    assert "last batch of one picture" in str(loaders.report)
    assert [len(labels) for _, labels in small(train_limit=18).train] == [8, 8, 2]
    assert [len(labels) for _, labels in small(val_limit=9).val] == [8, 1]
    assert len(batches(small(train_limit=3, batch_size=1).train)) == 3


def test_limits_keep_the_classes_balanced(tree):
    for root in (None, tree):
        loaders = small(root=root, train_limit=4, val_limit=2)
        assert list(loaders.report.train.values()) == [2, 2]
        assert list(loaders.report.val.values()) == [1, 1]
    assert "4 of 12" in str(loaders.report)


@pytest.mark.parametrize("option", ["image_size", "batch_size", "train_limit", "val_limit"])
def test_sizes_must_be_whole_numbers(option):
    for value in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"{option}: expected a whole number of at least 1"):
            small(**{option: value})


def test_seed_and_workers_must_be_whole_numbers():
    for option in ("seed", "workers"):
        with pytest.raises(ValueError, match=f"{option}: expected a whole number of at least 0"):
            small(**{option: -1})


def test_default_workers(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(data.multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn"])
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: usage(0, 0, 2**30))
    monkeypatch.delitem(data.sys.modules, "ipykernel", raising=False)
    batch = 64 * 3 * 224**2 * 4
    assert default_workers(25_000, batch) == 4
    assert default_workers(400, batch) == 0
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda _: range(2), raising=False)
    assert default_workers(25_000, batch) == 1
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: usage(0, 0, 64 * 2**20))
    assert default_workers(25_000, batch) == 0, "Docker's 64 MiB of shared memory"
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: usage(0, 0, 2**30))
    monkeypatch.setitem(data.sys.modules, "ipykernel", object())
    assert default_workers(25_000, batch) == 0
    monkeypatch.delitem(data.sys.modules, "ipykernel")
    monkeypatch.setattr(data.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert default_workers(25_000, batch) == 0


# --- Reading files -------------------------------------------------------------------------

GREY = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(GREY),
        Image.fromarray(GREY.astype(np.uint16) * 257),
        Image.fromarray(GREY.astype(np.int32) * 1000 - 500),
        Image.fromarray(GREY.astype(np.float32) / 255),
        Image.fromarray(GREY).convert("P"),
        Image.fromarray(GREY).convert("RGB").convert("YCbCr"),
        Image.fromarray(GREY).convert("RGB").convert("HSV"),
        Image.merge("LA", [Image.fromarray(GREY), Image.new("L", (16, 16), 255)]),
        Image.fromarray(GREY).convert("RGBA"),
        Image.merge("CMYK", [Image.new("L", (16, 16))] * 3 + [Image.fromarray(255 - GREY)]),
    ],
    ids=lambda image: image.mode,
)
def test_every_mode_becomes_the_same_three_channels(image):
    rgb = to_rgb(image)
    assert rgb.mode == "RGB"
    assert np.abs(np.asarray(rgb, int) - GREY[..., None]).max() <= 2


def test_one_bit_pictures_and_odd_floats():
    black_and_white = to_rgb(Image.fromarray(GREY > 127))
    assert (np.asarray(black_and_white) == 255 * (GREY[..., None] > 127)).all()
    assert to_rgb(Image.fromarray(np.full((2, 2), np.nan, np.float32))).getpixel((0, 0)) == (
        0,
        0,
        0,
    )
    assert to_rgb(Image.new("I", (2, 2), 7)).mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_alpha_channels_become_white(mode):
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    assert to_rgb(clear).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("mode", "transparent"), [("P", 0), ("P", b"\0"), ("RGB", (0, 0, 0)), ("L", 0)]
)
def test_transparent_colours_become_white(mode, transparent, tmp_path):
    Image.new(mode, (4, 4)).save(tmp_path / "clear.png", transparency=transparent)
    assert load_picture(tmp_path / "clear.png").getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(tmp_path, orientation):
    """Each orientation, stored as cameras do, must give the upright picture back."""
    upright = Image.new("RGB", (24, 16), "white")
    upright.paste("red", (0, 0, 8, 8))
    upright.paste("blue", (16, 8, 24, 16))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "photo.png", exif=exif)
    assert load_picture(tmp_path / "photo.png").tobytes() == upright.tobytes()


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12",
    ],
)
def test_damaged_exif_does_not_stop_anything(tmp_path, block):
    """No crash, and no warning either (pytest turns warnings into errors)."""
    (tmp_path / "a").mkdir()
    picture().save(tmp_path / "a" / "photo.jpg", exif=block)
    assert len(scan_images(tmp_path)) == 1
    images, _ = PictureFiles([(tmp_path / "a" / "photo.jpg", 0)], data.val_transform(8))[0]
    assert images.shape == (3, 8, 8)


def test_a_file_that_vanishes_after_the_scan_is_named(tree):
    loaders = small(root=tree)
    (tree / "test" / "cats" / "0.jpg").unlink()
    with pytest.raises(RuntimeError, match=r"cats.0\.jpg was readable when"):
        batches(loaders.val)


# --- The scan ------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple]:
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path): (stat.st_size, stat.st_mtime_ns, stat.st_mode) for path, stat in stats.items()
    }


def jpeg(number: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(number, (120, 90)).save(buffer, "JPEG")
    return buffer.getvalue()


def huge_png(side: int) -> bytes:
    """A few bytes that promise a picture of `side` pixels square."""
    header = struct.pack(">II", side, side) + b"\x08\x02\0\0\0"
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, str]:
    """A folder of odd files: those that must be left out, each with a part of the reason."""
    folder = tmp_path / "odd"
    fill(
        folder,
        ["good.jpg", "UPPER.JPG", "котёнок 猫 ñ.png", "really_a_png.jpg", "p.webp", "p.tiff"],
    )
    picture(9).save(folder / "really_a_png.jpg", "PNG")
    frames = [picture(1), picture(2)]
    frames[0].save(folder / "moving.webp", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "moving.png", save_all=True, append_images=frames[1:])
    frames[0].save(folder / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    contents = {
        "empty.jpg": b"",
        "truncated.jpg": jpeg()[: len(jpeg()) * 6 // 10],
        "last_bytes_missing.jpg": jpeg()[:-200],
        "header.jpg": jpeg()[:200],
        "page.jpg": b"\n<!DOCTYPE html><title>404</title>",
        "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "._cat.jpg": b"\0\x05\x16\x07",
        "noise.jpg": bytes(range(256)),
        "photo.jfif": jpeg(),
        "photo.heic": b"\0\0\0\x18ftypheic",
        "noext": jpeg(),
        "Thumbs.db": b"\xd0\xcf",
        "bomb.png": huge_png(60_000),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jpg").mkdir()
    (folder / "dangling.jpg").symlink_to("nowhere.jpg")
    (folder / "link.jpg").symlink_to("good.jpg")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe.jpg")
    fill(folder / ".ipynb_checkpoints", ["good-checkpoint.jpg"])
    fill(folder / "deeper", ["fine.bmp"], first=50)
    return {
        "moving.webp": "animated",
        "moving.png": "animated",
        "empty.jpg": "empty",
        "truncated.jpg": "truncated",
        "last_bytes_missing.jpg": "truncated",
        "header.jpg": "damaged",
        "page.jpg": "HTML",
        "pointer.jpg": "Git LFS",
        "._cat.jpg": "resource fork",
        "noise.jpg": "not a picture",
        "photo.jfif": "extension .jfif",
        "photo.heic": "extension .heic",
        "noext": "extension (none)",
        "Thumbs.db": "extension .db",
        "bomb.png": "decompression bomb",
        "folder.jpg": "a folder",
        "dangling.jpg": "dangling",
        "loop": "read before",
        "pipe.jpg": "neither a file",
        ".ipynb_checkpoints": "hidden",
    }


def test_scan_names_every_file_that_is_left_out(tmp_path, odd):
    folder = tmp_path / "odd"
    before = snapshot(folder)
    scan = scan_images(folder)
    assert snapshot(folder) == before, "a scan touches nothing"
    reasons = {item.path.name: item.reason for item in scan.skipped}
    assert {name: part for name, part in odd.items() if part not in reasons.get(name, "")} == {}
    assert set(reasons) == set(odd)
    assert {path.name for path in scan.digests} == {
        *("good.jpg", "UPPER.JPG", "котёнок 猫 ñ.png", "really_a_png.jpg", "p.webp", "p.tiff"),
        *("link.jpg", "phone.jpg", "fine.bmp"),
    }
    assert list(scan.digests) == sorted(scan.digests) and len(scan) == 9
    assert "9 usable pictures" in str(scan) and "1 x extension .jfif" in str(scan)


def test_whatever_the_scan_keeps_loads_and_whatever_it_drops_does_not(tmp_path):
    """Damage at random: the scan's quick decoding must agree with full decoding."""
    rng = random.Random(0)
    for number in range(150):
        content = bytearray(jpeg(number % 5))
        if number % 3:
            for _ in range(rng.choice((1, 5))):
                content[rng.randrange(len(content))] = rng.randrange(256)
        else:
            del content[rng.randrange(len(content)) :]
        (tmp_path / f"{number:03}.jpg").write_bytes(content)
    scan = scan_images(tmp_path)
    with data._quiet_pillow():
        for path in scan.digests:
            load_picture(path)
        for item in scan.skipped:
            with pytest.raises((OSError, SyntaxError, ValueError)):
                load_picture(item.path)
    assert 20 < len(scan) < 130


def test_a_name_that_is_not_text_can_be_printed(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system takes only valid names")
    assert "caf" in str(scan_images(tmp_path)).encode("utf-8").decode("utf-8")


def test_damaged_files_are_left_out_of_training_and_logged(tree, caplog):
    (tree / "train" / "cats" / "0.jpg").write_bytes(jpeg()[:500])
    (tree / "train" / "notes.txt").write_text("not a class")
    loaders = small(root=tree, train_limit=None)
    assert loaders.report.train == {"cats": 5, "dogs": 6}
    assert len(loaders.train.dataset) == 11 == sum(len(labels) for _, labels in loaders.train)
    assert "1 files or folders left out" in caplog.text and "0.jpg" in caplog.text


def test_duplicates_across_the_splits_are_reported(tree):
    source = tree / "train" / "dogs" / "1.jpg"
    (tree / "test" / "dogs" / "copy.jpg").write_bytes(source.read_bytes())
    report = small(root=tree).report
    assert report.duplicates == [(source, tree / "test" / "dogs" / "copy.jpg")]
    assert "1 validation pictures are also training pictures" in str(report)


# --- Folder layouts ------------------------------------------------------------------------


def counts(root: Path) -> tuple[dict, dict]:
    report = cats_vs_dogs(root, image_size=32).report
    return report.train, report.val


@pytest.mark.parametrize("name", ["val", "validation", "valid", "test"])
def test_image_folder_trees(tree, name):
    (tree / "test").rename(tree / name)
    assert counts(tree) == ({"cats": 6, "dogs": 6}, {"cats": 3, "dogs": 3})


def test_validation_folder_goes_before_test(tree):
    fill(tree / "val" / "cats", ["a.jpg"], first=900)
    fill(tree / "val" / "dogs", ["a.jpg"], first=901)
    assert counts(tree)[1] == {"cats": 1, "dogs": 1}


def test_more_than_two_classes_named_as_they_come(tree):
    for split in ("train", "test"):
        fill(tree / split / "Axolotl", ["a.jpg", "b.jpg"], first=hash(split) % 1000 + 1000)
    loaders = cats_vs_dogs(tree, image_size=32)
    assert loaders.classes == ("Axolotl", "cats", "dogs")
    assert set(loaders.val.dataset.labels) == {0, 1, 2}


def test_labels_follow_the_folders(tree):
    dataset = cats_vs_dogs(str(tree), image_size=32).train.dataset
    assert [path.parent.name for path in dataset.paths[:4]] == ["cats", "dogs"] * 2
    assert dataset.labels[:4] == [0, 1] * 2


@pytest.mark.parametrize("below", ["", "train"])
def test_flat_names_of_kaggle_are_split_the_same_way_each_time(tmp_path, below):
    fill(tmp_path / below, [f"{kind}.{i}.jpg" for kind in ("cat", "dog") for i in range(10)])
    fill(tmp_path / "test", ["1.jpg", "2.jpg"], first=900)
    first, second = (cats_vs_dogs(tmp_path / below, image_size=32, seed=seed) for seed in (0, 1))
    assert first.report.train == {"cat": 8, "dog": 8} and first.report.val == {"cat": 2, "dog": 2}
    assert first.val.dataset.paths == second.val.dataset.paths
    assert not set(first.val.dataset.paths) & set(first.train.dataset.paths)
    assert "every 5th picture" in str(first.report)


def test_class_folders_alone_are_split(tmp_path):
    for first, name in [(0, "Cat"), (50, "Dog")]:
        fill(tmp_path / name, [f"{i}.jpg" for i in range(5)], first=first)
    assert counts(tmp_path) == ({"Cat": 4, "Dog": 4}, {"Cat": 1, "Dog": 1})


@pytest.mark.parametrize("below", ["", "oxford-iiit-pet"])
@pytest.mark.parametrize("listed", [True, False])
def test_oxford_pets(tmp_path, below, listed):
    root = tmp_path / below
    cats, dogs = ["Abyssinian_1.jpg", "Birman_12.jpg"], ["beagle_1.jpg", "great_pyrenees_3.jpg"]
    fill(root / "images", cats + dogs)
    (root / "images" / "pug_2.jpg").write_bytes(jpeg()[:400])
    (root / "images" / "Abyssinian_1.mat").write_bytes(b"MATLAB")
    if listed:
        (root / "annotations").mkdir()
        (root / "annotations" / "trainval.txt").write_text("Abyssinian_1 1 1 1\nbeagle_1 5 2 1\n")
        (root / "annotations" / "test.txt").write_text("Birman_12 2 1 2\ngreat_pyrenees_3 9 2 2\n")
    loaders = cats_vs_dogs(tmp_path, image_size=32)
    assert loaders.classes == ("cat", "dog")
    assert loaders.report.train == loaders.report.val == {"cat": 1, "dog": 1}
    for dataset in (loaders.train.dataset, loaders.val.dataset):
        for path, label in zip(dataset.paths, dataset.labels, strict=True):
            assert label == (path.name not in cats)
    assert {item.path.name for item in loaders.report.skipped} == {"pug_2.jpg", "Abyssinian_1.mat"}


def test_hidden_folders_are_no_classes(tree):
    fill(tree / "train" / ".ipynb_checkpoints", ["a.jpg"], first=900)
    fill(tree / "train" / "__MACOSX", ["a.jpg"], first=901)
    assert set(counts(tree)[0]) == {"cats", "dogs"}


def error_of(root: Path, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        cats_vs_dogs(root, image_size=32)
    assert "expected" in str(caught.value)
    return str(caught.value)


def test_missing_folder_empty_folder_and_a_file(tmp_path):
    assert "no folder" in error_of(tmp_path / "nowhere", FileNotFoundError)
    assert "is empty" in error_of(tmp_path, FileNotFoundError)
    (tmp_path / "file.jpg").write_bytes(jpeg())
    assert "not a folder" in error_of(tmp_path / "file.jpg")


def test_one_level_too_high_suggests_the_child(tmp_path, tree):
    for name in ("Cat", "Dog"):
        fill(tmp_path / "download" / "PetImages" / name, ["0.jpg", "1.jpg"])
    assert f"Did you mean {tmp_path / 'download' / 'PetImages'}?" in error_of(tmp_path / "download")
    assert f"Did you mean {tree}?" in error_of(tree.parent)
    fill(tmp_path / "kaggle" / "train" / "train", ["cat.0.jpg", "dog.0.jpg"])
    assert f"Did you mean {tmp_path / 'kaggle' / 'train' / 'train'}?" in error_of(
        tmp_path / "kaggle"
    )


def test_one_level_too_deep_suggests_the_parent(tree):
    message = error_of(tree / "train" / "cats")
    assert f"Did you mean {tree}?" in message and "Found 6 pictures" in message


def test_single_class(tmp_path):
    fill(tmp_path / "train" / "cats", ["0.jpg", "1.jpg"])
    message = error_of(tmp_path)
    assert "fewer than two classes" in message and "cats/ 2" in message


def test_empty_class_folder(tree):
    for file in (tree / "train" / "dogs").iterdir():
        file.write_bytes(b"")
    message = error_of(tree)
    assert (
        "class 'dogs' has 0 usable training and 3 validation" in message and "empty file" in message
    )


def test_validation_classes_must_match(tree):
    (tree / "test" / "dogs").rename(tree / "test" / "dog")
    message = error_of(tree)
    assert "['cats', 'dog']" in message and "['cats', 'dogs']" in message


def test_validation_folder_without_classes(tree):
    (tree / "test").rename(tree / "test_old")
    fill(tree / "test" / "more" / "cats", ["0.jpg"])
    assert "test: fewer than two classes" in error_of(tree)


# --- Real samples, where there are some ----------------------------------------------------

REAL = Path(os.environ.get("TEST_DATA", "/nonexistent"))


@pytest.mark.skipif(not (REAL / "cats_dogs").is_dir(), reason="TEST_DATA has no cats_dogs")
def test_real_photos():
    loaders = cats_vs_dogs(REAL / "cats_dogs", image_size=64, batch_size=50)
    assert (len(loaders.train.dataset), len(loaders.val.dataset)) == (400, 100)
    assert sum(len(labels) for _, labels in loaders.train) == 400
    assert loaders.report.skipped == []


@pytest.mark.skipif(not (REAL / "odd_images").is_dir(), reason="TEST_DATA has no odd_images")
def test_real_odd_files():
    scan = scan_images(REAL / "odd_images")
    dataset = PictureFiles([(path, 0) for path in scan.digests], data.train_transform(32))
    assert all(dataset[index, 0][0].shape == (3, 32, 32) for index in range(len(scan)))
    assert "котёнок 猫 ñ.jpg" in {path.name for path in scan.digests}
    assert {"truncated_60pct.jpg", "zero_bytes.jpg", "header_only.jpg", "html_error_page.jpg"} <= {
        item.path.name for item in scan.skipped
    }


def test_a_huge_file_with_a_pictures_name_is_not_read(tmp_path):
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(2**33)  # a hole: takes no room on the disk
    (skipped,) = scan_images(tmp_path).skipped
    assert skipped.reason.startswith("a file of 8,589,934,592 bytes")
