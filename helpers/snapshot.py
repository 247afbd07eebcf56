"""Snapshots of a training run: a kill cannot spoil them, and reading one runs none of its code."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

PLAIN_TYPES = (str, bool, int, float, type(None))


def require_plain(value: Any, where: str = "snapshot") -> None:
    """Raise TypeError unless `value` is made of tensors, text, numbers, None, lists and dicts.

    Subclasses such as NumPy's numbers and enums do not count: only plain values load again with
    `torch.load(weights_only=True)`, which runs no code of the file.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            require_plain(item, f"{where}[{index}]")
    elif not isinstance(value, torch.Tensor) and type(value) not in PLAIN_TYPES:
        raise TypeError(
            f"{where} is a {type(value).__name__}, which a snapshot cannot hold: expected tensors, "
            "text, numbers, None, or lists and dicts of them"
        )


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in nested lists, tuples and dicts: about what the file will take."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(bytes_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    return 0


def temporary_path(path: Path) -> Path:
    """Where a file is written before it takes its name; a killed run may leave it behind."""
    return path.with_name(f".{path.name}.tmp")


def write_atomically(value: Any, path: Path) -> None:
    """`torch.save` that leaves either the whole new file or the one that was there before.

    The value is written beside the file and on the disk before it takes the file's name. Raises
    OSError with the needed and the free bytes when the folder or the disk does not take it, and
    TypeError for what could not be read again safely.
    """
    require_plain(value, path.name)
    temporary = temporary_path(path)
    created = False
    try:
        with _new_file(temporary) as file:
            created = True
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        if created:
            temporary.unlink(missing_ok=True)
        raise OSError(_why_not_written(value, path, error)) from error
    except BaseException:
        if created:
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _new_file(path: Path) -> BinaryIO:
    """A file that is new: a link or a pipe of that name is removed, never written through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def check_writable(value: Any, path: Path) -> None:
    """Raise what `write_atomically` would raise for `value`, as far as that can be known before."""
    require_plain(value, path.name)
    temporary = temporary_path(path)
    try:
        with _new_file(temporary):
            pass
        temporary.unlink()
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise OSError(_why_not_written(value, path, error)) from error
    if free < bytes_of(value):
        raise OSError(_why_not_written(value, path, OSError(errno.ENOSPC, "too little space")))


def _why_not_written(value: Any, path: Path, error: Exception) -> str:
    folder = path.parent
    try:
        free = f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        free = "n/a"
    old = "the one before is intact" if path.exists() else "there was none before"
    reason = (error.strerror if isinstance(error, OSError) else None) or "no space or a quota"
    return (
        f"{path} could not be written ({reason}): about {bytes_of(value):,} bytes are needed, "
        f"{free} are free in {folder}; {old}. Free some space or choose another save_dir"
    )


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system allows it (Windows does not)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_snapshot(path: Path) -> dict[str, Any]:
    """Load a snapshot onto the CPU without running any code that the file may hold.

    Raises ValueError for a file that is damaged or holds more than plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged or a hostile file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is no snapshot that can be loaded safely ({type(error).__name__}: "
            f"{reason[:200]}): it is damaged, or holds more than tensors and plain values. "
            "Restore it from a copy, or start anew in another folder"
        ) from error


# --- Random number generators --------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (CPU and GPUs), as plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator where `rng_state` found it. GPUs that are not here now are left out."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, index)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers draw from, each once."""
    found: list[torch.Generator] = []
    owners = [loader]
    for owner in owners:
        inner = (getattr(owner, name, None) for name in ("sampler", "batch_sampler", "batches"))
        owners += [part for part in inner if part is not None and part not in owners]
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is g for g in found):
            found.append(generator)
    return found
