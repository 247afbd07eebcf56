"""Downloads from a server that misbehaves, archives that mean harm, disks that are full."""

import contextlib
import gzip
import hashlib
import io
import os
import random
import shutil
import socket
import stat
import struct
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from filelock import FileLock
from PIL import Image
from torchvision.datasets import OxfordIIITPet

from helpers import fetch as fetch_module
from helpers.__main__ import COMMANDS, main
from helpers.data import TEST_FILE, TOXIC_COMMENT_FILE, VALIDATION_FILE, cats_vs_dogs
from helpers.fetch import (
    SOURCES,
    STAGING_MARK,
    FetchError,
    WebArchive,
    _SecureRedirects,
    download,
    fetch,
    unpack,
)

# --- A server ------------------------------------------------------------------------------


class Site(ThreadingHTTPServer):
    """Serves `files` with ETags, whole or in part. `moods` are worn one a request, then it is good.

    A mood is called with the handler, and returns true when it has answered.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.moods, self.asked = {}, [], []

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.close_connection = True
        self.server.asked.append(dict(self.headers))
        mood = self.server.moods.pop(0) if self.server.moods else None
        # A client that has seen enough closes the connection.
        with contextlib.suppress(ConnectionError):
            if mood is None or not mood(self):
                self.answer()

    @property
    def content(self):
        return self.server.files[self.path.lstrip("/")]

    @property
    def etag(self):
        return f'"{hashlib.md5(self.content).hexdigest()}"'

    def head(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def answer(self, *, send=None, etag=None, heed_range=True, heed_if_range=True, **headers):
        """The file or the part asked for; `send` is how much of it really comes, in bytes."""
        content, etag, start = self.content, etag or self.etag, 0
        if heed_range and (not heed_if_range or self.headers.get("If-Range") == etag):
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            headers = {"Content_Range": span, **headers}
        if start >= len(content):
            self.head(416, Content_Length=0)
            return
        status = 206 if start else 200
        self.head(status, **{"ETag": etag, "Content_Length": len(content) - start, **headers})
        self.wfile.write(content[start:][:send])


def breaks_off(after):
    return lambda handler: handler.answer(send=after) or True


def behaves(**how):
    return lambda handler: handler.answer(**how) or True


def refuses(status):
    return lambda handler: handler.head(status, Content_Length=0) or True


def sends(body, content_type):
    def mood(handler):
        handler.head(200, Content_Type=content_type, Content_Length=len(body))
        handler.wfile.write(body)
        return True

    return mood


def sends_unannounced(body):
    """No length: the end of the connection is the end of the file."""
    return lambda handler: (handler.head(200), handler.wfile.write(body))


def sends_chunked(pieces, end=b"0\r\n\r\n"):
    def mood(handler):
        handler.head(200, Transfer_Encoding="chunked")
        for piece in pieces:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(end)
        return True

    return mood


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch_module, "PAUSE", 0.0)
    server = Site()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def zipped(files, comment=b""):
    """A zip archive; a file is (name or ZipInfo, content)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.comment = comment
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files):
    """A .tar.gz; a file is (name or TarInfo, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


NOISE = random.Random(0).randbytes(300_000)
GOOD = zipped([("top/data/train/cats/1.jpg", NOISE), ("top/data/test/cats/2.jpg", b"two")])


@pytest.fixture
def web(site):
    """An archive on the server, of which everything is known."""
    site.files["good.zip"] = GOOD
    checksums = (f"md5:{hashlib.md5(GOOD).hexdigest()}", sha256_of(GOOD))
    return WebArchive(site.url("good.zip"), len(GOOD), checksums)


@pytest.fixture
def unknown(web):
    """The same, nothing known."""
    return WebArchive(web.url)


def sha256_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


# --- Downloads -----------------------------------------------------------------------------


def test_a_download(site, web, tmp_path, capsys):
    path = download(web, tmp_path)
    assert path == tmp_path / "good.zip" and path.read_bytes() == GOOD
    assert len(site.asked) == 1 and "Range" not in site.asked[0]
    assert "verified by size, md5, sha256" in capsys.readouterr().out
    assert download(web, tmp_path) == path and len(site.asked) == 1


def test_it_goes_on_where_it_broke_off(site, web, tmp_path):
    site.moods = [breaks_off(n) for n in (0, 100_000, 1, 70_000)]
    assert download(web, tmp_path).read_bytes() == GOOD
    starts = [int(asked.get("Range", "bytes=0-")[6:-1]) for asked in site.asked]
    assert len(starts) == 5 and starts == sorted(starts) and starts[-1] > 165_000


def test_another_command_goes_on_too(site, unknown, tmp_path):
    site.moods = [breaks_off(100_000)] + [refuses(503)] * 4
    with pytest.raises(
        FetchError, match=r"gave up after 5 tries.* 503 .*[0-9,]{6,} bytes are kept"
    ):
        download(unknown, tmp_path)
    assert not (tmp_path / "good.zip").exists()
    assert download(unknown, tmp_path).read_bytes() == GOOD
    assert int(site.asked[-1]["Range"][6:-1]) > 65_000


def test_tries_are_bounded(site, web, tmp_path):
    site.moods = [breaks_off(10)] * 20
    with pytest.raises(FetchError, match="gave up"):
        download(web, tmp_path)
    assert len(site.asked) == 5


def test_a_silent_server_is_given_up(site, web, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "HTTP_TIMEOUT", 0.2)
    release = threading.Event()
    site.moods = [lambda handler: release.wait(10)] * 5
    try:
        with pytest.raises(FetchError, match="gave up after 5 tries.*timed out"):
            download(web, tmp_path)
    finally:
        release.set()


@pytest.mark.parametrize("end", ["silence", "reset"])
def test_a_connection_that_dies_in_the_middle(site, unknown, tmp_path, monkeypatch, end):
    monkeypatch.setattr(fetch_module, "HTTP_TIMEOUT", 0.2)
    release = threading.Event()

    def dies(handler):
        handler.answer(send=100_000)
        if end == "silence":
            release.wait(10)
        else:  # closing drops what was not sent yet and answers with a reset
            time.sleep(0.05)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0" * 2)
        return True

    site.moods = [dies]
    try:
        assert download(unknown, tmp_path).read_bytes() == GOOD
    finally:
        release.set()
    assert len(site.asked) == 2 and int(site.asked[-1]["Range"][6:-1]) > 65_000


def test_nobody_there(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetch_module, "PAUSE", 0.0)
    with socket.socket() as taken:  # bound and not listening: refused at once
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/good.zip"
        with pytest.raises(FetchError, match="gave up after 5 tries.*no answer"):
            download(WebArchive(url), tmp_path)


@pytest.mark.parametrize("mood", [{}, {"heed_if_range": False}], ids=["heeds", "ignores If-Range"])
@pytest.mark.parametrize("longer", [0, 50_000])
def test_versions_are_never_glued_together(site, unknown, tmp_path, mood, longer):
    other = zipped([("top/data/train/cats/1.jpg", NOISE[::-1] + b"x" * longer)])

    def changes(handler):
        site.files["good.zip"] = other
        return False

    def changes_and_behaves(handler):
        changes(handler)
        return behaves(**mood)(handler)

    site.moods = [breaks_off(100_000), changes_and_behaves]
    assert download(unknown, tmp_path).read_bytes() == other


def test_a_file_changed_under_the_same_etag_is_noticed(site, web, tmp_path, capsys):
    site.files["good.zip"] = b"PK" + GOOD[:1:-1]  # as long; nothing but the checksum tells

    def turns(handler):
        site.files["good.zip"] = GOOD
        return behaves(etag='"same"', heed_if_range=False)(handler)

    site.moods = [behaves(send=100_000, etag='"same"'), turns]
    assert download(web, tmp_path).read_bytes() == GOOD
    assert [("Range" in asked) for asked in site.asked] == [False, True, False]
    assert "after going on, what came has md5" in capsys.readouterr().out


def test_without_validators_or_ranges_it_begins_anew(site, unknown, tmp_path, capsys):
    site.moods = [breaks_off(100_000), behaves(heed_range=False)]
    assert download(unknown, tmp_path).read_bytes() == GOOD
    assert "the server begins anew" in capsys.readouterr().out
    (tmp_path / "good.zip").unlink()
    site.moods = [behaves(send=100_000, etag='W/"weak"')]
    assert download(unknown, tmp_path).read_bytes() == GOOD
    assert "Range" not in site.asked[-1]


def test_the_time_of_the_last_change_will_do(site, unknown, tmp_path):
    changed = "Wed, 21 Oct 2015 07:28:00 GMT"
    weak = {"etag": 'W/"weak"', "Last_Modified": changed}
    site.moods = [behaves(send=100_000, **weak), behaves(heed_if_range=False, **weak)]
    assert download(unknown, tmp_path).read_bytes() == GOOD
    assert site.asked[-1]["If-Range"] == changed and "Range" in site.asked[-1]


def test_all_there_already(site, unknown, tmp_path):
    """Killed between the last byte and the renaming."""
    site.moods = [behaves(send=100_000)] + [refuses(503)] * 4
    with pytest.raises(FetchError):
        download(unknown, tmp_path)
    (tmp_path / "good.zip.part").write_bytes(GOOD)
    before = len(site.asked)
    assert download(unknown, tmp_path).read_bytes() == GOOD and len(site.asked) == before


def test_the_file_got_shorter(site, unknown, tmp_path):
    short = zipped([("data/train/1.jpg", b"short")])

    def shrinks(handler):
        site.files["good.zip"] = short
        handler.answer(heed_if_range=False)
        return True

    site.moods = [breaks_off(100_000), shrinks]
    assert download(unknown, tmp_path).read_bytes() == short


PAGE = b"<!DOCTYPE html><html><head><title>Log in to\n Hotel WiFi</title></head></html>"


@pytest.mark.parametrize(
    ("body", "content_type", "title"),
    [
        (PAGE, "text/html; charset=utf-8", "Log in to Hotel WiFi"),
        (b"\n  " + PAGE, "application/zip", "Log in to Hotel WiFi"),
        (b"<p>Moved</p>", "text/html", "no title"),
    ],
)
def test_a_web_page_is_no_archive(site, web, tmp_path, body, content_type, title):
    site.moods = [sends(body, content_type)]
    with pytest.raises(FetchError, match=rf"web page \('{title}'\) instead of good.zip"):
        download(web, tmp_path)
    assert not list(tmp_path.iterdir()) and len(site.asked) == 1


def test_a_web_page_does_not_cost_what_has_come(site, web, tmp_path):
    site.moods = [breaks_off(100_000), sends(PAGE, "text/html")]
    with pytest.raises(FetchError, match="web page"):
        download(web, tmp_path)
    assert GOOD.startswith((tmp_path / "good.zip.part").read_bytes())
    assert download(web, tmp_path).read_bytes() == GOOD
    assert int(site.asked[-1]["Range"][6:-1]) > 65_000


@pytest.mark.parametrize("length", [len(GOOD) // 2, len(GOOD) * 2])
def test_a_false_length_is_noticed(site, web, unknown, tmp_path, length):
    lie = behaves(Content_Length=length)
    site.moods = [lie]
    with pytest.raises(FetchError, match=f"announces {length:,} bytes.*has {len(GOOD):,}"):
        download(web, tmp_path)
    site.moods = [lie] * 20
    with pytest.raises(FetchError, match="no complete zip archive|longer|gave up after 5 tries"):
        download(unknown, tmp_path)
    assert not (tmp_path / "good.zip").exists()


@pytest.mark.parametrize("body", [GOOD + b"x", b"PK" + GOOD[3:] + b"x"])
def test_another_file_is_refused(site, web, tmp_path, body):
    site.moods = [sends_unannounced(body)]
    with pytest.raises(FetchError, match="expected.*removed|longer than.*removed"):
        download(web, tmp_path)
    assert not (tmp_path / "good.zip").exists() and not (tmp_path / "good.zip.part").exists()


def test_no_archive_is_refused(site, unknown, tmp_path):
    site.moods = [sends(b'{"error": 1}', "application/json")]
    with pytest.raises(FetchError, match="so it is no .zip file"):
        download(unknown, tmp_path)


def test_an_endless_file_ends(site, unknown, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "LARGEST_DOWNLOAD", 150_000)
    site.moods = [sends_unannounced(GOOD)]
    with pytest.raises(FetchError, match="longer than"):
        download(unknown, tmp_path)


def test_a_file_packed_on_demand(site, unknown, tmp_path):
    """As GitHub sends it: after a redirect, in chunks, without length, ETag or resumption."""
    pieces = [GOOD[i : i + 50_000] for i in range(0, len(GOOD), 50_000)]

    def moves(handler):
        handler.head(302, Location=site.url("elsewhere"), Content_Length=0)
        return True

    site.files["elsewhere"] = b""
    site.moods = [moves, sends_chunked(pieces[:4], end=b""), moves, sends_chunked(pieces)]
    assert download(unknown, tmp_path).read_bytes() == GOOD


@pytest.mark.parametrize("status", [404, 403, 410])
def test_a_refusal_is_final(site, web, tmp_path, status):
    site.moods = [refuses(status)]
    with pytest.raises(FetchError, match=f"answered {status} "):
        download(web, tmp_path)
    assert len(site.asked) == 1


def test_https_stays_https():
    request = urllib.request.Request("https://example.org/a.zip")
    with pytest.raises(FetchError, match="not encrypted"):
        _SecureRedirects().redirect_request(request, None, 302, "", {}, "http://example.org/a.zip")


def test_an_unreadable_note_means_from_the_beginning(site, unknown, tmp_path):
    (tmp_path / "good.zip.part").write_bytes(b"PK half of something")
    for note in ("", "[1]", '{"url": 1}', "null"):
        (tmp_path / "good.zip.part.json").write_text(note)
        assert download(unknown, tmp_path).read_bytes() == GOOD
        (tmp_path / "good.zip").rename(tmp_path / "good.zip.part")


def test_a_finished_archive_that_was_damaged_is_fetched_again(site, web, tmp_path, capsys):
    (tmp_path / "good.zip").write_bytes(GOOD[:-1] + b"?")
    assert download(web, tmp_path).read_bytes() == GOOD
    assert "downloading it again" in capsys.readouterr().out


# --- Disk ----------------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size):
    """Writing beyond that many bytes fails, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_too_little_room_is_said_first(site, web, tmp_path, monkeypatch):
    free = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    needed = f"{2 * len(GOOD):,}"
    with pytest.raises(FetchError, match=f"needed {needed} bytes, 1,000 bytes are free"):
        download(web, tmp_path)
    assert not list(tmp_path.iterdir())


def test_too_little_room_to_unpack_is_said_first(tmp_path, monkeypatch):
    free = shutil._ntuple_diskusage(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(FetchError, match="needed 300,003 bytes, 1,000 bytes are free"):
        unpack(written(tmp_path, "good.zip", GOOD), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_keeps_what_has_come(site, web, tmp_path):
    with largest_file(100_000), pytest.raises(FetchError, match=r"no room.*needed .* are free"):
        download(web, tmp_path)
    assert GOOD.startswith((tmp_path / "good.zip.part").read_bytes())
    assert download(web, tmp_path).read_bytes() == GOOD
    assert int(site.asked[-1]["Range"][6:-1]) > 65_000


def test_a_disk_that_fills_up_while_unpacking(site, article, tmp_path):
    folder = tmp_path / "photos"
    download(SOURCES["cats-dogs-article"].archives[0], unfinished(tmp_path))
    with largest_file(100_000), pytest.raises(FetchError, match="no room to write.*needed"):
        fetch("cats-dogs-article", folder)
    assert not folder.exists() and not (tmp_path / "photos.part" / "unpacked").exists()
    assert fetch("cats-dogs-article", folder) == folder and len(site.asked) == 1


def make(folder):
    folder.mkdir()
    return folder


def unfinished(tmp_path):
    """The folder of an earlier command for tmp_path/photos."""
    staging = make(tmp_path / "photos.part")
    (staging / STAGING_MARK).touch()
    return staging


# --- From the name to the folder -----------------------------------------------------------


@pytest.fixture
def article(site, monkeypatch):
    site.files["HEAD.zip"] = zipped(
        [
            ("dog-cat-HEAD/README.md", b"words"),
            *(
                (f"dog-cat-HEAD/data/{split}/{kind}s/{kind}.{n}.jpg", jpeg(n) + NOISE * (n == 1))
                for split in ("train", "test")
                for kind in ("cat", "dog")
                for n in (1, 2, 3)
            ),
        ],
        comment=b"0123456789abcdef0123456789abcdef01234567",
    )
    source = SOURCES["cats-dogs-article"]
    (archive,) = source.archives
    here = replace(archive, url=site.url("HEAD.zip"))
    monkeypatch.setitem(SOURCES, "cats-dogs-article", replace(source, archives=(here,)))


def jpeg(number):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (number * 20, 100, 50)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture
def pets(site, monkeypatch):
    names = ["Abyssinian_1", "Abyssinian_2", "beagle_1", "beagle_2"]
    images = [(f"images/{name}.jpg", jpeg(n)) for n, name in enumerate(names)]
    site.files["images.tar.gz"] = tarred([*images, ("images/Abyssinian_1.mat", b"MATLAB")])
    lines = "{0}_{2} {1} {3} 1\n{4}_{2} {5} {6} 1\n"
    site.files["annotations.tar.gz"] = tarred(
        [
            (
                f"annotations/{split}.txt",
                lines.format("Abyssinian", 1, n, 1, "beagle", 2, 2).encode(),
            )
            for n, split in [(1, "trainval"), (2, "test")]
        ]
    )
    source = SOURCES["oxford-pets"]
    archives = []
    for archive in source.archives:
        content = site.files[archive.name]
        known = {"size": len(content), "checksums": (sha256_of(content),)}
        archives.append(replace(archive, url=site.url(archive.name), **known))
    monkeypatch.setitem(SOURCES, "oxford-pets", replace(source, archives=tuple(archives)))


def test_pets_as_torchvision_and_our_loader_take_them(pets, tmp_path, capsys):
    folder = tmp_path / "new" / "our pets"
    assert main(["data", "oxford-pets", str(folder)]) == 0
    output = capsys.readouterr().out
    assert f"make run DATA='{folder}'" in output and "CC BY-SA 4.0" in output
    assert [path.name for path in folder.parent.iterdir()] == ["our pets"]
    loaders = cats_vs_dogs(folder, image_size=8, batch_size=2)
    assert loaders.report.train == loaders.report.val == {"cat": 1, "dog": 1}
    for split, ours in [("trainval", loaders.train), ("test", loaders.val)]:
        theirs = OxfordIIITPet(folder, split, target_types="binary-category")
        assert [label for _, label in theirs] == ours.dataset.labels
        assert [path.name for path in theirs._images] == [p.name for p in ours.dataset.paths]


def test_photos_of_the_article(site, article, tmp_path, capsys):
    folder = fetch("cats-dogs-article", tmp_path / "photos")
    output = capsys.readouterr().out
    assert "commit 0123456789abcdef0123456789abcdef01234567" in output
    assert "no checksum is published" in output
    loaders = cats_vs_dogs(folder / "data", image_size=8, batch_size=2)
    assert loaders.report.train == loaders.report.val == {"cats": 3, "dogs": 3}
    before = len(site.asked)
    fetch("cats-dogs-article", folder)
    assert "nothing was downloaded" in capsys.readouterr().out and len(site.asked) == before


def test_downloads_is_the_default(article, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fetch("cats-dogs-article") == tmp_path / "downloads" / "cats-dogs-article"
    assert "downloads/" in Path(__file__).parent.parent.joinpath(".gitignore").read_text().split()


def test_what_is_there_stays(site, article, tmp_path, capsys):
    folder = make(tmp_path / "photos")
    (folder / "mine.txt").write_text("mine")
    assert main(["data", "cats-dogs-article", str(folder)]) == 2
    output = capsys.readouterr()
    assert "is not empty (it holds mine.txt) and has no data/train" in output.err
    assert output.err.count("\n") == 1 and "Traceback" not in output.err
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "mine.txt"] and not site.asked
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FetchError, match="Not a directory"):
        fetch("cats-dogs-article", tmp_path / "file")


def test_an_empty_folder_is_filled(site, article, tmp_path):
    folder = make(tmp_path / "photos")
    site.moods = [breaks_off(100_000)] + [refuses(503)] * 4
    with pytest.raises(FetchError, match="bytes are kept"):
        fetch("cats-dogs-article", folder)
    assert fetch("cats-dogs-article", folder).joinpath("data").is_dir()
    assert "Range" in site.asked[-1]


def test_a_folder_that_fills_meanwhile_stays(site, article, tmp_path):
    folder = tmp_path / "photos"

    def interferes(handler):
        make(folder).joinpath("mine.txt").write_text("mine")
        return False

    site.moods = [interferes]
    with pytest.raises(FetchError, match="not empty"):
        fetch("cats-dogs-article", folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert (tmp_path / "photos.part" / "HEAD.zip").exists()


def test_an_unwritable_place(article, tmp_path, capsys):
    place = tmp_path / "file"
    place.write_text("no folder")
    assert main(["data", "cats-dogs-article", str(place / "photos")]) == 2
    assert "ot a directory" in capsys.readouterr().err


def test_other_contents_are_refused(site, article, tmp_path):
    site.files["HEAD.zip"] = zipped([("top/other.txt", b"")])
    with pytest.raises(FetchError, match="HEAD.zip: expected data/train in it"):
        fetch("cats-dogs-article", tmp_path / "photos")
    assert not (tmp_path / "photos").exists()


def test_an_archive_that_means_harm_leaves_nothing(site, article, tmp_path, capsys):
    site.files["HEAD.zip"] = zipped([("top/data/train/1.jpg", b"1"), ("top/../../x", b"harm")])
    assert main(["data", "cats-dogs-article", str(tmp_path / "photos")]) == 2
    assert "'top/../../x' leads outside the folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*")} <= {
        "photos.part",
        "HEAD.zip",
        "HEAD.zip.part.json",
        STAGING_MARK,
        "lock",
    }


def test_leftovers_of_a_killed_command_are_removed(article, tmp_path):
    leftover = unfinished(tmp_path) / "unpacked" / "data" / "train" / "half.jpg"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    folder = fetch("cats-dogs-article", tmp_path / "photos")
    assert not list(folder.rglob("half.jpg"))


def test_two_commands_do_not_mix(article, tmp_path):
    with FileLock(unfinished(tmp_path) / "lock"):
        with pytest.raises(FetchError, match="another command is at work"):
            fetch("cats-dogs-article", tmp_path / "photos")
        assert (tmp_path / "photos.part").exists()
    fetch("cats-dogs-article", tmp_path / "photos")


def test_a_disk_without_locks(article, tmp_path, monkeypatch, capsys):
    def unknown_to_this_disk(*_):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", unknown_to_this_disk)
    fetch("cats-dogs-article", tmp_path / "photos")
    assert "knows no locks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["HEAD.zip.part", "HEAD.zip.part.json", "lock", "unpacked"])
def test_nothing_is_written_through_a_link(article, tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (unfinished(tmp_path) / name).symlink_to(outside)
    with pytest.raises(FetchError, match=f"{name} is a link"):
        fetch("cats-dogs-article", tmp_path / "photos")
    assert outside.read_text() == "mine"


def test_a_folder_of_the_same_name_stays(article, tmp_path):
    mine = make(tmp_path / "photos.part") / "unpacked"
    mine.write_text("mine")
    with pytest.raises(FetchError, match=r"photos.part, where .* is not from this command"):
        fetch("cats-dogs-article", tmp_path / "photos")
    assert [path.name for path in tmp_path.rglob("*")] == ["photos.part", "unpacked"]
    mine.rename(tmp_path / "elsewhere")
    (tmp_path / "photos.part").rmdir()
    (tmp_path / "photos.part").symlink_to(make(tmp_path / "other"))
    with pytest.raises(FetchError, match="photos.part is a link"):
        fetch("cats-dogs-article", tmp_path / "photos")
    assert not list((tmp_path / "other").iterdir())


def test_ctrl_c_keeps_what_has_come(site, article, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module, "unpack", interrupted)
        assert main(["data", "cats-dogs-article", str(tmp_path / "photos")]) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert fetch("cats-dogs-article", tmp_path / "photos") and len(site.asked) == 1


# --- Kaggle --------------------------------------------------------------------------------


@pytest.fixture
def kaggle(tmp_path, monkeypatch):
    """Where a Kaggle client is looked for; call it to put one there, a shell script."""
    places = make(tmp_path / "bin")
    monkeypatch.setattr(sys, "executable", str(places / "python"))
    monkeypatch.setenv("PATH", f"{places}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def install(script):
        client = places / "kaggle"
        client.write_text(f"#!/bin/sh\n{script}\n")
        client.chmod(0o755)

    return install


def test_without_the_client(kaggle, tmp_path, capsys):
    for name in ("dogs-vs-cats", "jigsaw"):
        assert main(["data", name, str(tmp_path / name)]) == 2
        message = capsys.readouterr().err
        assert "client is not installed. By hand: accept the rules on https://www.k" in message
        assert SOURCES[name].files[0] in message and str(tmp_path / name) in message
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}


@pytest.fixture
def typed_input():
    """Something to read on standard input, for children too."""
    reading, writing = os.pipe()
    os.write(writing, b"yes\n")
    before = os.dup(0)
    os.dup2(reading, 0)
    yield
    os.dup2(before, 0)
    for descriptor in (reading, writing, before):
        os.close(descriptor)


def test_without_a_token(kaggle, tmp_path, capfd, typed_input):
    kaggle('echo "Authentication required"; read line && exit 0; exit 1')
    assert main(["data", "jigsaw", str(tmp_path / "comments")]) == 2
    output = capfd.readouterr()
    assert "Authentication required" in output.out and "status 1" in output.err
    assert "By hand" in output.err and not (tmp_path / "comments").exists()


def test_photos_by_the_client(kaggle, tmp_path, capsys):
    photos = [(f"train/{kind}.{n}.jpg", jpeg(n)) for kind in ("cat", "dog") for n in range(6)]
    (tmp_path / "train.zip").write_bytes(zipped(photos))
    # kaggle competitions download COMPETITION -f FILE -p FOLDER
    kaggle(f'test "$1 $2 $3" = "competitions download dogs-vs-cats" && cp {tmp_path}/"$5" "$7"')
    folder = fetch("dogs-vs-cats", tmp_path / "photos")
    loaders = cats_vs_dogs(folder, image_size=8, batch_size=2)
    assert loaders.report.train == {"cat": 5, "dog": 5}
    assert "make run DATA=" in capsys.readouterr().out


def test_comments_by_the_client(kaggle, tmp_path, capsys):
    (tmp_path / f"{TOXIC_COMMENT_FILE}.zip").write_bytes(zipped([(TOXIC_COMMENT_FILE, b"id,a\n")]))
    for name in (VALIDATION_FILE, TEST_FILE):
        (tmp_path / name).write_bytes(b"id,b\n")
    kaggle(f'cp {tmp_path}/"$5" "$7" 2>/dev/null || cp {tmp_path}/"$5".zip "$7"')
    folder = fetch("jigsaw", tmp_path / "comments")
    assert (folder / TOXIC_COMMENT_FILE).read_bytes() == b"id,a\n"
    assert sorted(path.name for path in folder.iterdir()) == sorted(SOURCES["jigsaw"].files)
    output = capsys.readouterr().out
    assert "Warning: these comments" in output and "make run COMMENTS=" in output


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exit 0", "left no"), ('echo "<html>" > "$7/$5"', "web page"), ("exit 3", "status 3")],
)
def test_a_client_that_fails(kaggle, tmp_path, script, reason):
    kaggle(script)
    with pytest.raises(FetchError, match=f"{reason}.*By hand"):
        fetch("jigsaw", tmp_path / "comments")
    assert not (tmp_path / "comments").exists()


# --- Unpacking -----------------------------------------------------------------------------

OUTSIDE = ["../x", "a/../../x", "/x", "//host/x", "..\\x", "a\\..\\..\\x", "C:\\x", "C:x", "a/b:c"]


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize(("suffix", "pack"), [("zip", zipped), ("tar.gz", tarred)])
def test_names_that_lead_outside(tmp_path, name, suffix, pack):
    archive = written(tmp_path, f"a.{suffix}", pack([("good", b"1"), (name, b"harm")]))
    with pytest.raises(FetchError, match="leads outside the folder"):
        unpack(archive, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info


def tar_special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "content",
    [
        zipped([(zip_link("link"), b"/etc"), ("link/x", b"harm")]),
        tarred([(tar_special("link", tarfile.SYMTYPE, "/etc"), b""), ("link/x", b"harm")]),
        tarred([(tar_special("link", tarfile.SYMTYPE, "../.."), b"")]),
        tarred([(tar_special("link", tarfile.LNKTYPE, "/etc/passwd"), b"")]),
        tarred([(tar_special("device", tarfile.CHRTYPE), b"")]),
        tarred([(tar_special("pipe", tarfile.FIFOTYPE), b"")]),
    ],
    ids=["zip symlink", "symlink", "relative symlink", "hard link", "device", "pipe"],
)
def test_links_and_devices(tmp_path, content):
    suffix = "zip" if content.startswith(b"PK") else "tar.gz"
    archive = written(tmp_path, f"a.{suffix}", content)
    with pytest.raises(FetchError, match="is a link or a device"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def deflated(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(("suffix", "pack"), [("zip", deflated), ("tar.gz", None)])
def test_bombs(tmp_path, monkeypatch, suffix, pack):
    zeros = b"\0" * 3_000_000
    content = deflated("zeros", zeros) if pack else tarred([("zeros", zeros)])
    archive = written(tmp_path, f"a.{suffix}", content)
    with pytest.raises(FetchError, match="brings the content to 3,000,000 bytes, more than"):
        unpack(archive, tmp_path / "out")
    monkeypatch.setattr(fetch_module, "MOST_TIMES_LARGER", 10_000)
    unpack(archive, tmp_path / "out")
    monkeypatch.setattr(fetch_module, "MOST_UNPACKED", 2_999_999)
    with pytest.raises(FetchError, match="more than 2,999,999"):
        unpack(archive, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_size_that_is_a_lie(tmp_path):
    content = bytearray(deflated("zeros", b"\0" * 3_000_000))
    for offset, place in [(0, 22), (content.index(b"PK\x01\x02"), 24)]:
        assert struct.unpack_from("<I", content, offset + place) == (3_000_000,)
        struct.pack_into("<I", content, offset + place, 10)
    archive = written(tmp_path, "a.zip", content)
    with pytest.raises(FetchError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "out")
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*")) <= 10


def test_a_header_that_would_fill_the_memory(tmp_path):
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "x" * (1 << 21)}
    with pytest.raises(FetchError, match="a header of 2,0"):
        unpack(written(tmp_path, "a.tar.gz", tarred([(info, b"")])), tmp_path / "out")


def test_too_many_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_module, "MOST_ENTRIES", 3)
    archive = written(tmp_path, "a.zip", zipped([(str(n), b"") for n in range(4)]))
    with pytest.raises(FetchError, match="'3' is one more than 3 entries"):
        unpack(archive, tmp_path / "out")


def test_a_name_given_twice(tmp_path):
    archive = written(tmp_path, "a.tar.gz", tarred([("a", b"1"), ("./a", b"2")]))
    with pytest.raises(FetchError, match="'./a' is in it twice"):
        unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"1"


def test_existing_files_stay(tmp_path):
    written(make(tmp_path / "out"), "a", b"mine")
    with pytest.raises(FetchError, match="twice"):
        unpack(written(tmp_path, "a.zip", zipped([("a", b"other")])), tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"mine"


def encrypted():
    content = bytearray(zipped([("a", b"secret")]))
    for offset, place in [(0, 6), (content.index(b"PK\x01\x02"), 8)]:
        content[offset + place] |= 1
    return content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", zipped([("a", b"12345")]).replace(b"12345", b"12845")),
        ("a.zip", b"PK but no more"),
        ("a.zip", encrypted()),
        ("a.tar.gz", tarred([("a", NOISE)])[:-1000]),
        ("a.tar.gz", b"\x1f\x8b but no more"),
        ("a.tar.gz", gzip.compress(b"no tar file")),
        ("a.tar.gz", GOOD),
    ],
    ids=["crc", "no zip", "encrypted", "cut", "no gzip", "no tar", "zip as tar.gz"],
)
def test_damaged_archives(tmp_path, name, content):
    with pytest.raises(FetchError, match="cannot be unpacked .*: remove it and run"):
        unpack(written(tmp_path, name, content), tmp_path / "out")


def test_what_unpacking_gives(tmp_path):
    files = [("top/", b""), ("top/a/b.txt", b"1"), ("top/empty/", b""), ("top/ü.txt", b"2")]
    for name, content in [("a.zip", zipped(files)), ("a.tar.gz", tarred(files[1::2]))]:
        folder = tmp_path / f"from {name}"
        unpack(written(tmp_path, name, content), folder, strip=1)
        assert (folder / "a" / "b.txt").read_bytes() == b"1"
        assert (folder / "ü.txt").read_bytes() == b"2"
    archive = written(tmp_path, "b.zip", zipped([("top/a", b""), ("loose", b"")]))
    with pytest.raises(FetchError, match="'loose' lies outside the archive's own folder"):
        unpack(archive, tmp_path / "out", strip=1)


# --- The table and the page ----------------------------------------------------------------


def test_the_pets_are_torchvisions():
    """Where torchvision learns of another address or file, this says so."""
    ours = [(web.url, web.checksums[0]) for web in SOURCES["oxford-pets"].archives]
    assert ours == [(url, f"md5:{md5}") for url, md5 in OxfordIIITPet._RESOURCES]


def test_the_comments_are_what_the_loader_reads():
    assert SOURCES["jigsaw"].files == (TOXIC_COMMENT_FILE, VALIDATION_FILE, TEST_FILE)


def test_the_page_tells_of_every_source():
    page = Path(__file__).parent.parent.joinpath("data", "README.md").read_text(encoding="utf-8")
    for name, source in SOURCES.items():
        assert f"`{name}`" in page and source.page in page
        for web in source.archives:
            assert web.url in page
            assert all(checksum.partition(":")[2] in page for checksum in web.checksums)
            assert web.size is None or f"{web.size:,}" in page
    for name in ("TRIES", "MOST_UNPACKED", "MOST_TIMES_LARGER", "MOST_ENTRIES"):
        assert f"| {getattr(fetch_module, name):,} |" in page, name


def test_unknown_names_are_refused(capsys):
    assert "add_data" in [add.__name__ for add in COMMANDS]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "cats"])
    assert "oxford-pets" in capsys.readouterr().err
