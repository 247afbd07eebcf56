"""Fetching the real data: downloads that go on where they broke off, verified, unpacked safely."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import ssl
import stat
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, NamedTuple

from filelock import FileLock, Timeout
from tqdm import tqdm

# --- What there is to fetch ----------------------------------------------------------------


@dataclass(frozen=True)
class WebArchive:
    """One archive, .zip or .tar.gz, and what is known of it beforehand.

    `size` is in bytes, `checksums` are "algorithm:hexadecimal". Its content goes to `folder` below
    the data's folder, without the first `strip` folders of the names in it.
    """

    url: str
    size: int | None = None
    checksums: tuple[str, ...] = ()
    folder: str = ""
    strip: int = 0

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSource:
    """Data of one name: where it comes from, and how it is told that it is there.

    It has either `archives` or a Kaggle `competition` with the names of the `files` to take.
    `holds` are paths below its folder that are there when it is complete. In `use`, the words for
    what comes next, {folder} stands for the data's folder.
    """

    title: str
    page: str
    licence: str
    use: str
    holds: tuple[str, ...]
    archives: tuple[WebArchive, ...] = ()
    competition: str = ""
    files: tuple[str, ...] = ()
    warning: str = ""


PETS_FOLDER = "oxford-iiit-pet"  # torchvision's OxfordIIITPet looks for the pets there

SOURCES = {
    "oxford-pets": DataSource(
        title="Oxford-IIIT Pet, photos of 37 breeds, read as cats and dogs",
        page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        licence="CC BY-SA 4.0; the rights in each photo stay with its owner",
        use="make run DATA={folder}",
        holds=tuple(
            f"{PETS_FOLDER}/{name}"
            for name in ("images", "annotations/trainval.txt", "annotations/test.txt")
        ),
        # Address and MD5 as in torchvision, whose own download neither resumes nor times out and
        # goes over to unencrypted HTTP when HTTPS fails. The sizes and SHA-256 of the same files
        # are those of TensorFlow Datasets.
        archives=(
            WebArchive(
                url="https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz",
                size=791_918_971,
                checksums=(
                    "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c",
                    "sha256:67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d",
                ),
                folder=PETS_FOLDER,
            ),
            WebArchive(
                url="https://www.robots.ox.ac.uk/~vgg/data/pets/data/annotations.tar.gz",
                size=19_173_078,
                checksums=(
                    "md5:95a8c909bbe2e81eed6a22bccdf3f68f",
                    "sha256:52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
                ),
                folder=PETS_FOLDER,
            ),
        ),
    ),
    "cats-dogs-article": DataSource(
        title="the photos of the VGG16 article, from its repository",
        page="https://github.com/laxmimerit/dog-cat-full-dataset",
        licence="none stated; the photos are those of Kaggle's Dogs vs. Cats, under its rules",
        use="make run DATA={folder}/data",
        holds=("data/train", "data/test"),
        # GitHub packs it when asked: no size, no checksum, no resumption. A zip archive checks
        # every file in it, though, and names the commit.
        archives=(
            WebArchive(
                url="https://github.com/laxmimerit/dog-cat-full-dataset/archive/HEAD.zip", strip=1
            ),
        ),
    ),
    "dogs-vs-cats": DataSource(
        title="Dogs vs. Cats, the labelled photos of the Kaggle competition of 2013",
        page="https://www.kaggle.com/c/dogs-vs-cats/data",
        licence="the rules of the competition, which you accept on Kaggle",
        use="make run DATA={folder}",
        holds=("train",),
        competition="dogs-vs-cats",
        files=("train.zip",),
    ),
    "jigsaw": DataSource(
        title="Jigsaw Multilingual Toxic Comment Classification, the Kaggle competition of 2020",
        page="https://www.kaggle.com/c/jigsaw-multilingual-toxic-comment-classification/data",
        licence="the rules of the competition, which you accept on Kaggle",
        use="make run COMMENTS={folder}",
        holds=("jigsaw-toxic-comment-train.csv", "validation.csv", "test.csv"),
        competition="jigsaw-multilingual-toxic-comment-classification",
        files=("jigsaw-toxic-comment-train.csv", "validation.csv", "test.csv"),
        warning="these comments were written by real people and hold insults, threats, obscenity "
        "and hatred of groups",
    ),
}


STAGING_MARK, LOCK = "what-this-is.txt", "lock"


class FetchError(OSError):
    """Data that cannot be had; the message says why and what to do."""


def fetch(name: str, folder: str | os.PathLike | None = None) -> Path:
    """Bring the data `name` of SOURCES into `folder`, by default downloads/NAME; return the folder.

    Everything is prepared in the folder's neighbour FOLDER.part and appears in `folder` at the end
    at once, complete and verified. Whatever ends it before, the same call goes on from there.
    A folder that holds the data already is left as it is, one that holds anything else is refused.

    Raises FetchError with the reason.
    """
    source = SOURCES[name]
    folder = Path(folder or Path("downloads", name)).expanduser().resolve()
    staging = folder.with_name(f"{folder.name}.part")
    if _is_there(folder, source):
        _say(f"{folder} holds this data already: nothing was downloaded.")
    else:
        _say(f"{source.title}, from {source.page}")
        _say(f"Licence: {source.licence}.")
        if source.warning:
            _say(f"Warning: {source.warning}.")
        _make_staging(staging)
        with _alone_in(staging):
            try:
                _prepare(source, staging, folder)
            except BaseException:
                if not _worth_keeping(staging):
                    shutil.rmtree(staging, ignore_errors=True)
                raise
        shutil.rmtree(staging, ignore_errors=True)
        _say(f"{folder} holds the data; {staging.name} with the archives is removed.")
    _say(f"To use it: {source.use.format(folder=shlex.quote(str(folder)))}")
    return folder


def _is_there(folder: Path, source: DataSource) -> bool:
    """Whether the data is in its folder. Raises FetchError where anything else is in it."""
    with _disk_errors(folder):
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        missing = [path for path in source.holds if not (folder / path).exists()]
    if found and missing:
        raise FetchError(
            f"{folder} is not empty (it holds {', '.join(found[:5])}) and has no {missing[0]}: "
            "nothing was changed; name another folder, or move this one away"
        )
    return bool(found)


def _prepare(source: DataSource, staging: Path, folder: Path) -> None:
    """Get all archives of a source, unpack them into one tree, and put it in the folder's place."""
    tree = staging / "unpacked"
    if tree.exists():
        _say("What an interrupted command had unpacked is removed.")
        shutil.rmtree(tree)
    if source.competition:
        files = [(path, "", 0) for path in _download_from_kaggle(source, staging, folder)]
    else:
        files = [(download(web, staging), web.folder, web.strip) for web in source.archives]
    try:
        for path, place, strip in files:
            _say(f"unpacking {path.name}")
            if path.suffix in MAGIC:
                unpack(path, tree / place, strip)
            else:
                with _disk_errors(tree, path.stat().st_size):
                    tree.mkdir(exist_ok=True)
                    shutil.copyfile(path, tree / path.name)
        missing = [path for path in source.holds if not (tree / path).exists()]
        if missing:
            raise FetchError(
                f"{', '.join(path.name for path, _, _ in files)}: expected {missing[0]} in it, so "
                f"this is other data. Look at {source.page}; remove {staging} to download it anew"
            )
        with _disk_errors(folder):
            # Succeeds where the folder is missing or empty, and only there.
            if folder.exists():
                folder.rmdir()
            tree.rename(folder)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


@contextlib.contextmanager
def _alone_in(staging: Path) -> Iterator[None]:
    """Keep a second command out of the folder; the lock ends with the process, however it ends."""
    lock = FileLock(staging / LOCK, timeout=0)
    with _disk_errors(staging):
        try:
            lock.acquire()
        except Timeout:
            raise FetchError(f"another command is at work in {staging}: wait for it") from None
        except NotImplementedError:
            _say(
                "This disk knows no locks, so see to it that the command runs only once at a time."
            )
    try:
        yield
    finally:
        lock.release()


def _make_staging(staging: Path) -> None:
    """The folder that everything is prepared in: new, or one that an earlier command made.

    Raises FetchError for any other folder of that name, since it is removed in the end, and for
    links in it: nothing is ever written through a link put where our own files belong.
    """
    with _disk_errors(staging):
        staging.mkdir(parents=True, exist_ok=True)
        for path in (staging, *staging.glob("*"), *staging.glob("kaggle/*")):
            if path.is_symlink():
                raise FetchError(f"{path} is a link, expected a file or folder of ours: remove it")
        mark = staging / STAGING_MARK
        if any(staging.iterdir()) and not mark.exists():
            raise FetchError(
                f"{staging}, where the data would be prepared, is there and is not from this "
                "command: nothing was changed; move it away, or name another folder"
            )
        mark.write_text("python -m helpers data keeps unfinished downloads here.\n")


def _worth_keeping(staging: Path) -> list[Path]:
    """What has come so far: files worth keeping for the next command."""
    own = (STAGING_MARK, LOCK)
    return [path for path in staging.rglob("*") if path.is_file() and path.name not in own]


def _say(text: str) -> None:
    print(text, flush=True)


def _in_mib(size: int) -> str:
    return f"{size / 1024**2:,.1f} MiB"


# --- Disk space ----------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def _disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Errors of the file system as one sentence, with needed and free bytes where it is full."""
    try:
        yield
    except FetchError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise FetchError(f"{error.filename or path}: {error.strerror or error}") from error
        need = "" if needed is None else f"needed {needed:,} bytes, "
        raise FetchError(
            f"no room to write {path}: {need}{_free_bytes(path):,} bytes are free. Make room, or "
            "name a folder on another disk, and run the same command again"
        ) from error


def _free_bytes(path: Path) -> int:
    """Free bytes on the disk where `path` is or would be."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def _require_space(path: Path, needed: int) -> None:
    free = _free_bytes(path)
    if free < needed:
        raise FetchError(
            f"no room for {path}: needed {needed:,} bytes, {free:,} bytes are free. Make room, or "
            "name a folder on another disk"
        )


# --- Downloads -----------------------------------------------------------------------------

CHUNK = 1 << 16  # bytes read and written at a time
HTTP_TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
TRIES = 5  # for one file and command
PAUSE = 1.0  # seconds before the second try; each pause is twice the one before
LARGEST_DOWNLOAD = 16 * 1024**3  # bytes, where nobody says how long the file is
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)  # answers that another try may change
MAGIC = {".zip": b"PK", ".gz": b"\x1f\x8b"}  # how an archive begins


class _BrokenOff(Exception):
    """A try that failed for a reason that may pass; what has come stays."""


class _Unusable(Exception):
    """What has come is not the file; it is thrown away."""


@dataclass(frozen=True)
class _Remote:
    """A file as a server announced it: enough to tell later whether it is still the same."""

    url: str
    size: int | None
    etag: str | None
    modified: str | None

    def validator(self) -> str | None:
        """What If-Range takes: a strong ETag, else the time of the last change."""
        weak = self.etag is None or self.etag.startswith("W/")
        return self.modified if weak else self.etag

    def is_still(self, other: _Remote) -> bool:
        """Whether nothing that both know of the file differs."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return all(mine == theirs for mine, theirs in pairs if None not in (mine, theirs))


def download(archive: WebArchive, folder: Path) -> Path:
    """Download an archive into `folder` and return it, verified by all that is known of it.

    It is written to NAME.part and renamed when verified; NAME.part.json beside it remembers which
    version of the file it is. A later try asks the server for the rest of the same version (Range
    with If-Range) and begins anew where the file has changed or the server cannot do that.

    Raises FetchError where the server refuses, sends a web page or another file than is known, or
    breaks off TRIES times, and where the disk is full.
    """
    done, part = folder / archive.name, folder / f"{archive.name}.part"
    if done.exists():
        problem = _problem_with(done, archive)
        if problem is None:
            return done
        _say(f"{done.name} from an earlier command {problem}: downloading it again.")
        done.unlink()
    reason = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        resumed = _size(part) > 0
        try:
            _transfer(archive, part)
            problem = _problem_with(part, archive)
            if problem is not None:
                raise _Unusable(problem)
        except _BrokenOff as broken:
            reason = str(broken)
            _say(f"{archive.name}: {reason} (try {attempt + 1} of {TRIES})")
        except _Unusable as unusable:
            part.unlink()
            if not resumed:
                raise FetchError(f"{archive.url}: what came {unusable}; it was removed") from None
            reason = f"what came {unusable}"
            _say(f"{archive.name}: after going on, {reason}; it is removed, from the beginning")
        else:
            part.replace(done)
            _say(f"{archive.name}: {_in_mib(_size(done))}{_commit_of(done)}, {_checks_of(archive)}")
            return done
    kept = f"{_size(part):,} bytes are kept, and the same command goes on from there"
    by_hand = "Is this machine online? data/README.md says how to get it by hand"
    raise FetchError(
        f"{archive.url}: gave up after {TRIES} tries, the last time because {reason}. "
        f"{kept if part.exists() else by_hand}"
    )


def _checks_of(archive: WebArchive) -> str:
    known = ["size"] if archive.size is not None else []
    known += [checksum.partition(":")[0] for checksum in archive.checksums]
    if known:
        return f"verified by {', '.join(known)}"
    return "no checksum is published; the files in it have their own, checked while unpacking"


def _commit_of(path: Path) -> str:
    """The commit that GitHub packed, which stands in the archive's comment."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as zipped:
            if re.fullmatch(rb"[0-9a-f]{40}", zipped.comment):
                return f" of commit {zipped.comment.decode()}"
    return ""


def _transfer(archive: WebArchive, part: Path) -> None:
    """One try: whatever is still missing of the file, to the end of `part`."""
    have, known = _resumable(part, archive.url)
    if known is not None and have == known.size:
        return
    request = urllib.request.Request(archive.url, headers={"User-Agent": "larger-models"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known.validator())
    with _open(request, part) as response:
        start, remote = _announced(response, archive.url)
        if response.status == 206 and (start != have or not remote.is_still(known or remote)):
            part.unlink(missing_ok=True)
            raise _BrokenOff("the file has changed on the server, so what had come is removed")
        chunk = _read(response)
        _refuse_other_file(archive, response, remote, chunk if start == 0 else b"")
        expected = archive.size if remote.size is None else remote.size
        if expected is not None:
            # The unpacked pictures take about as much room again as their archive.
            _require_space(part, 2 * expected - start)
        length = "unknown length" if expected is None else _in_mib(expected)
        answer = f"going on after {_in_mib(start)} of" if start else "downloading"
        if have and not start:
            answer = f"not going on after {_in_mib(have)}, the server begins anew:"
        _say(f"{archive.name}: {answer} {length}")
        with (
            _disk_errors(part, expected and expected - start),
            open(part, "ab" if start else "wb") as file,
            _bar(archive.name, expected, start) as bar,
        ):
            if start == 0:  # the file is empty now: no bytes can be taken for another version's
                _note_of(part).write_text(json.dumps(asdict(remote)), encoding="utf-8")
            size = start
            while chunk:
                size += len(chunk)
                if size > (LARGEST_DOWNLOAD if expected is None else expected):
                    raise _Unusable(f"is longer than the {size - len(chunk):,} bytes expected")
                file.write(chunk)
                bar.update(len(chunk))
                chunk = _read(response)
            file.flush()
            os.fsync(file.fileno())
    if expected is not None and size < expected:
        raise _BrokenOff(f"the connection ended after {size:,} of {expected:,} bytes")


def _resumable(part: Path, url: str) -> tuple[int, _Remote | None]:
    """How many bytes of which file are there already; (0, None) where that is not known."""
    have = _size(part)
    try:
        known = _Remote(**json.loads(_note_of(part).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none, or not as we write it
        return 0, None
    if have == 0 or known.url != url or known.validator() is None:
        return 0, None
    return have, known


def _note_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from HTTPS to anything else."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if req.type == "https" and not newurl.startswith("https:"):
            raise FetchError(f"{req.full_url} leads to {newurl}, which is not encrypted: refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(request: urllib.request.Request, part: Path) -> http.client.HTTPResponse:
    """The server's answer, where it is a file or a part of one."""
    url = request.full_url
    try:
        response = urllib.request.build_opener(_SecureRedirects).open(request, timeout=HTTP_TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # there is nothing after what we have
                part.unlink(missing_ok=True)
                raise _BrokenOff("the file got shorter on the server, from the beginning") from None
            if error.code in PASSING_STATUS:
                raise _BrokenOff(f"the server answered {error.code} {error.reason}") from None
            raise FetchError(
                f"{url}: the server answered {error.code} {error.reason}. It may have moved: "
                "data/README.md says how to get it by hand"
            ) from None
    except FetchError:
        raise
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise FetchError(f"{url}: not the server it claims to be ({cause})") from error
        raise _BrokenOff(f"there was no answer ({str(cause) or type(cause).__name__})") from error
    if response.status not in (200, 206):
        with response:
            raise FetchError(f"{url}: the server answered {response.status}, expected a file")
    return response


def _announced(response: http.client.HTTPResponse, url: str) -> tuple[int, _Remote]:
    """Where the answer begins in the file, in bytes, and what the server says of the file."""
    headers = response.headers
    start, size = 0, headers.get("Content-Length", "")
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
        if span is None:
            raise FetchError(
                f"{url}: the server sent a part of the file without saying which "
                f"(Content-Range: {headers.get('Content-Range', 'none')})"
            )
        start, size = int(span[1]), span[2]
    return start, _Remote(
        url=url,
        size=int(size) if size.isdecimal() else None,
        etag=_one_line(headers.get("ETag")),
        modified=_one_line(headers.get("Last-Modified")),
    )


def _one_line(header: str | None) -> str | None:
    """A header that can be sent back, or None."""
    return header if header and header.isprintable() else None


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenOff(f"the connection broke ({str(error) or type(error).__name__})") from error


def _refuse_other_file(
    archive: WebArchive, response: http.client.HTTPResponse, remote: _Remote, head: bytes
) -> None:
    """Raise FetchError where the answer is a web page, no archive, or of another size than known.

    head: the first bytes of the file, or none where the answer does not begin with them.
    """
    page = response.headers.get_content_type() in ("text/html", "application/xhtml+xml")
    if page or _is_page(head):
        title = re.search(rb"<title[^>]*>(.*?)</title", head, re.IGNORECASE | re.DOTALL)
        words = " ".join(title[1].decode("utf-8", "replace").split())[:80] if title else "no title"
        raise FetchError(
            f"{archive.url}: the server sent a web page ({words!r}) instead of {archive.name}. "
            "Does this network ask for a login? data/README.md says how to get it by hand"
        )
    if head and not head.startswith(MAGIC[Path(archive.name).suffix]):
        raise FetchError(
            f"{archive.url}: what the server sends begins with {head[:8]!r}, "
            f"so it is no {Path(archive.name).suffix} file"
        )
    if None not in (archive.size, remote.size) and archive.size != remote.size:
        raise FetchError(
            f"{archive.url}: the server announces {remote.size:,} bytes, and the file has "
            f"{archive.size:,}: it was replaced, or something on the way changes it"
        )


def _is_page(head: bytes) -> bool:
    return head[:200].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html"))


def _bar(name: str, total: int | None, start: int) -> tqdm:
    """A progress bar in bytes; none where nobody looks at the output."""
    sizes = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(desc=name, total=total, initial=start, leave=False, disable=None, **sizes)


def _problem_with(path: Path, archive: WebArchive) -> str | None:
    """Why a complete download is not the file that it should be, or None."""
    if archive.size is not None and _size(path) != archive.size:
        return f"has {_size(path):,} bytes, expected {archive.size:,}"
    # FIPS builds of OpenSSL refuse MD5 unless told that nothing secret depends on it.
    algorithms = [checksum.partition(":")[0] for checksum in archive.checksums]
    digests = [hashlib.new(algorithm, usedforsecurity=False) for algorithm in algorithms]
    if digests:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                for digest in digests:
                    digest.update(chunk)
    for checksum, digest in zip(archive.checksums, digests, strict=True):
        if checksum != f"{digest.name}:{digest.hexdigest()}":
            return f"has {digest.name} {digest.hexdigest()}, expected {checksum.partition(':')[2]}"
    if archive.name.endswith(".zip") and not zipfile.is_zipfile(path):
        return f"is no complete zip archive ({_size(path):,} bytes)"
    return None


# --- Kaggle --------------------------------------------------------------------------------


def _download_from_kaggle(source: DataSource, staging: Path, folder: Path) -> list[Path]:
    """The files of a competition by Kaggle's own client, which has the token and resumes."""
    by_hand = (
        f"By hand: accept the rules on {source.page}, download {', '.join(source.files)} there, "
        f"and unpack into {folder}. With the client: `pip install kaggle`, `kaggle auth login`, "
        "accept the rules, and run this command again"
    )
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    client = shutil.which("kaggle", path=os.pathsep.join(places))
    if client is None:
        raise FetchError(f"Kaggle's client is not installed. {by_hand}")
    box = staging / "kaggle"
    box.mkdir(exist_ok=True)
    files = []
    for name in source.files:
        _say(f"{name}, by {client}")
        command = [client, "competitions", "download", source.competition, "-f", name]
        # Without input it cannot wait for a password.
        done = subprocess.run([*command, "-p", str(box)], stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise FetchError(
                f"Kaggle's client ended with status {done.returncode} on {name}; what it said is "
                f"above. Status 1 is mostly a missing token, or rules not accepted. {by_hand}"
            )
        # It sends some files packed one by one.
        found = [path for path in (box / name, box / f"{name}.zip") if path.is_file()]
        if not found:
            raise FetchError(f"Kaggle's client left no {name} in {box}. {by_hand}")
        with open(found[0], "rb") as file:
            if _is_page(file.read(200)):
                raise FetchError(f"{found[0]} is a web page, not the file: remove it. {by_hand}")
        files.append(found[0])
    return files


# --- Unpacking -----------------------------------------------------------------------------

MOST_UNPACKED = 16 * 1024**3  # bytes of all files of one archive together
MOST_TIMES_LARGER = 100  # than the archive itself; pictures are 1 and text is below 10
MOST_ENTRIES = 200_000
DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # zipfile: encrypted, or packed by an unknown method
)


class _Entry(NamedTuple):
    """A file or folder in an archive; `plain` is false for links, devices and the like."""

    name: str
    size: int
    folder: bool
    plain: bool
    open: Callable[[], IO[bytes]]


def unpack(archive: Path, folder: Path, strip: int = 0) -> None:
    """Unpack a .zip or .tar.gz below `folder`, without the first `strip` folders of its names.

    Everything is looked at before anything is written. Refused are names that lead outside, links,
    devices, more than MOST_ENTRIES entries, and contents larger than MOST_UNPACKED bytes or
    MOST_TIMES_LARGER times the archive. Nothing is overwritten. What an error leaves half unpacked
    is the caller's to remove.

    Raises FetchError with the reason.
    """
    try:
        with _entries_of(archive) as entries:
            targets = _checked(archive, entries, folder, strip)
            needed = sum(entry.size for entry, _ in targets)
            _require_space(folder, needed)
            with _disk_errors(folder, needed):
                for entry, target in targets:
                    _write(archive, entry, target)
    except DAMAGE as error:
        raise FetchError(
            f"{archive} cannot be unpacked ({str(error) or type(error).__name__}): remove it and "
            "run the same command again to download it anew"
        ) from error


@contextlib.contextmanager
def _entries_of(archive: Path) -> Iterator[Iterator[_Entry]]:
    with contextlib.ExitStack() as stack:
        if archive.suffix == ".zip":
            zipped = stack.enter_context(zipfile.ZipFile(archive))
            yield (
                _Entry(
                    info.filename,
                    info.file_size,
                    info.is_dir(),
                    stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG, stat.S_IFDIR),
                    partial(zipped.open, info),
                )
                for info in zipped.infolist()
            )
        else:
            unzipped = _SmallReads(stack.enter_context(gzip.open(archive)))
            tar = stack.enter_context(tarfile.open(fileobj=unzipped, mode="r:"))
            yield (
                _Entry(
                    info.name,
                    info.size,
                    info.isdir(),
                    info.isreg() or info.isdir(),
                    partial(tar.extractfile, info),
                )
                for info in tar
            )


class _SmallReads:
    """A tar file whose headers cannot fill the memory: tarfile reads each as a whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= 1 << 20:
            raise tarfile.ReadError(f"it has a header of {size:,} bytes")
        return self.file.read(size)


def _checked(
    archive: Path, entries: Iterator[_Entry], folder: Path, strip: int
) -> Sequence[tuple[_Entry, Path]]:
    """All entries with the paths that they go to; FetchError where one must not be unpacked."""
    most = min(MOST_UNPACKED, MOST_TIMES_LARGER * archive.stat().st_size)
    targets, size = [], 0
    for entry in entries:
        size += entry.size
        # Windows' rules are the stricter ones: both slashes separate, and C: leads elsewhere.
        path = PureWindowsPath(entry.name)
        problem = None
        if path.anchor or ".." in path.parts or ":" in entry.name or "\0" in entry.name:
            problem = "leads outside the folder"
        elif not entry.plain:
            problem = "is a link or a device"
        elif not entry.folder and len(path.parts) <= strip:
            problem = "lies outside the archive's own folder"
        elif len(targets) == MOST_ENTRIES:
            problem = f"is one more than {MOST_ENTRIES:,} entries"
        elif size > most:
            problem = f"brings the content to {size:,} bytes, more than {most:,}"
        if problem is not None:
            raise FetchError(f"{archive} is refused, nothing unpacked: {entry.name!r} {problem}")
        targets.append((entry, folder.joinpath(*path.parts[strip:])))
    return targets


def _write(archive: Path, entry: _Entry, target: Path) -> None:
    if entry.folder:
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(target, "xb") as file, entry.open() as packed:
            shutil.copyfileobj(packed, file, CHUNK)
    except FileExistsError:
        raise FetchError(f"{archive} is refused: {entry.name!r} is in it twice") from None
