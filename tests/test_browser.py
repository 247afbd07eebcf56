"""Every notebook as a reader runs it: opened in JupyterLab in a browser, all cells run, watched.
And the pages of a run, on the screens of a phone and of a desk.

JupyterLab serves copies without outputs. A kernel that dies leaves no error output, only missing
execution counts and a dialog, so those are looked at too. Without Chromium these tests are skipped,
or fail where REQUIRE_BROWSER is set.
"""

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import get_kernel_dict
from PIL import Image
from playwright.sync_api import sync_playwright

from helpers.pages import write_pages

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_TIMEOUT = 120  # seconds for the server, and for a notebook with its kernel
RUN_TIMEOUT = 600  # seconds for all cells of a notebook
WITH_BARS = "01_vgg16_baseline"  # trains for several steps an epoch, with a progress bar
CHEAPEST = "06_fit_your_model"  # of those worth running as readers without a GPU do

# --- The browser ---------------------------------------------------------------------------


def find_browser():
    """The path of a Chromium; without one the test is skipped, or fails under REQUIRE_BROWSER."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    reason = f"no browser: none of {', '.join(BROWSERS)} is installed"
    if os.environ.get("REQUIRE_BROWSER"):
        pytest.fail(f"{reason}, and REQUIRE_BROWSER is set")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    with sync_playwright() as playwright:
        # Root, as in most containers, gets no sandbox; the pages are our own.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened.new_context()  # one for all pages, which so load JupyterLab once
        opened.close()


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_browser_is_skipped_or_fails(monkeypatch, tmp_path, required):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("REQUIRE_BROWSER", "1" if required else "")
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match="chromium"):
        find_browser()


# --- JupyterLab ----------------------------------------------------------------------------


@dataclass
class Lab:
    """A running JupyterLab: its address, the word that opens it, and the folder that it serves."""

    address: str
    token: str
    folder: Path

    def call(self, path, method="GET"):
        """The server's answer to a request of its API."""
        request = urllib.request.Request(
            f"{self.address}/api/{path}",
            method=method,
            headers={"Authorization": f"token {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def end_sessions(self):
        for session in self.call("sessions"):
            self.call(f"sessions/{session['id']}", "DELETE")


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """JupyterLab with settings, workspaces and kernels of its own, whatever the user has."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = tmp_path_factory.mktemp("served")
    (folder / "notebooks").mkdir()
    spec = home / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({**get_kernel_dict(), "display_name": "Python of the tests"}))
    news = home / "settings" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (news / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    environment = {
        **os.environ,
        "JUPYTER_PATH": str(home),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "OMP_WAIT_POLICY": "passive",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    environment.pop("TQDM_DISABLE", None)  # here somebody watches the bars
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.port=0"]
    command += ["--KernelManager.transport_encryption=auto", "--LabApp.expose_app_in_browser=True"]
    command += [f"--ServerApp.root_dir={folder}"]
    command += ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    log = home / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        lab = _lab_when_up(home / "runtime", server, log, folder)
        try:
            yield lab
        finally:
            lab.end_sessions()
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _lab_when_up(runtime, server, log, folder):
    """The server writes a file that says where it listens."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, OSError):  # half written, or not listening yet
                where = json.loads(path.read_text())
                lab = Lab(where["url"].rstrip("/"), where["token"], folder)
                lab.call("status")
                return lab
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


# --- Running a notebook --------------------------------------------------------------------

# Bars live for a moment and change in place: the page itself notes what each of them showed.
NOTE_BARS = """
window.barsSeen = new Map();
const note = () => {
  for (const bar of document.querySelectorAll('.widget-hbox .progress-bar')) {
    if (!window.barsSeen.has(bar)) window.barsSeen.set(bar, new Set());
    if (bar.style.width) window.barsSeen.get(bar).add(bar.style.width);
  }
};
new MutationObserver(note).observe(
  document, {subtree: true, childList: true, attributes: true, attributeFilter: ['style']});
"""

# Not awaited: with a dead kernel the command need not come to an end.
RUN_ALL = """() => {
  window.allRan = false;
  const done = () => { window.allRan = true; };
  window.jupyterapp.commands.execute('notebook:run-all-cells').then(done, done);
}"""

STATE = """() => ({
  finished: window.allRan,
  status: window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status ?? 'none',
  dialogs: [...document.querySelectorAll('.jp-Dialog')].map((dialog) => dialog.textContent),
  bars: [...window.barsSeen.values()].map((widths) => [...widths]),
  pictures: [...document.querySelectorAll('.jp-OutputArea-output img')].map((picture) => (
    {complete: picture.complete, width: picture.naturalWidth})),
})"""


@dataclass
class Seen:
    """What there was to see after all cells were asked to run."""

    finished: bool
    kernel_status: str
    dialogs: list[str]
    bars: list[list[str]]  # the widths that each progress bar showed
    picture_widths: list[int]  # natural ones, in pixels: 0 is a picture that cannot be drawn
    notebook: nbformat.NotebookNode | None = field(default=None, repr=False)  # as saved

    def problems(self):
        """Whatever a reader would not expect, a line each."""
        found = [] if self.finished else ["not all cells came to an end in time"]
        found += [f"a dialog: {text}" for text in self.dialogs]
        if self.kernel_status != "idle":
            found.append(f"the kernel is {self.kernel_status}")
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code" and cell.source]
        pictures = 0
        for number, cell in enumerate(cells, start=1):
            if cell.execution_count is None:
                found.append(f"code cell {number} did not run")
            for output in cell.outputs:
                if output.output_type == "error":
                    found.append(f"code cell {number}: {output.ename}: {output.evalue}")
                pictures += any(kind.startswith("image/") for kind in output.get("data", ()))
        if pictures != len(self.picture_widths) or 0 in self.picture_widths:
            found.append(f"{pictures} figures, drawn with widths of {self.picture_widths}")
        return found


def run_in_lab(browser, lab, path):
    """Open a copy of the notebook in JupyterLab, run all its cells, and tell what was seen."""
    page = browser.new_page()
    try:
        page.add_init_script(NOTE_BARS)
        page.goto(f"{lab.address}/lab/tree/notebooks/{path.name}?reset&token={lab.token}")
        # The indicator is idle before there is a kernel too; only both together mean ready.
        for ready in (
            ".jp-Toolbar-kernelName:has-text('Python of the tests')",
            ".jp-Notebook-ExecutionIndicator[data-status=idle]",
        ):
            page.wait_for_selector(ready, state="attached", timeout=START_TIMEOUT * 1000)
        page.wait_for_timeout(1000)
        page.evaluate(RUN_ALL)
        deadline = time.monotonic() + RUN_TIMEOUT
        while time.monotonic() < deadline:
            page.wait_for_timeout(200)
            state = page.evaluate(STATE)
            if state["dialogs"] or state["finished"] and state["status"] == "idle":
                break
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        page.wait_for_function(
            "() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=30_000
        )
        state = page.evaluate(STATE)
        return Seen(
            bool(state["finished"]),
            state["status"],
            state["dialogs"],
            state["bars"],
            [picture["width"] for picture in state["pictures"]],
            nbformat.read(path, as_version=4),
        )
    finally:
        page.close()
        lab.end_sessions()


def copy_of(path, lab, profile):
    """A copy without outputs in the served folder, its PROFILE set as a reader would."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if "parameters" in cell.metadata.get("tags", ()):
            assert 'PROFILE = "auto"' in cell.source
            cell.source = cell.source.replace('PROFILE = "auto"', f'PROFILE = "{profile}"')
    copy = lab.folder / "notebooks" / path.name
    nbformat.write(notebook, copy)
    return copy


CASES = [pytest.param(path, "tiny", id=f"{path.stem}-tiny") for path in NOTEBOOKS]
CASES += [
    pytest.param(path, "small", id=f"{path.stem}-small")
    for path in NOTEBOOKS
    if path.stem == CHEAPEST
]


@pytest.mark.parametrize(("path", "profile"), CASES)
def test_runs_in_jupyterlab(browser, lab, path, profile):
    seen = run_in_lab(browser, lab, copy_of(path, lab, profile))
    assert seen.problems() == []
    if path.stem == WITH_BARS:
        assert max(map(len, seen.bars)) >= 2


def made_up(lab, *sources):
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})
    path = lab.folder / "notebooks" / "made_up.ipynb"
    nbformat.write(notebook, path)
    return path


BROKEN_FIGURE = "from IPython.display import Image\nImage(b'no picture', format='png')"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        pytest.param(
            [BROKEN_FIGURE, "1 / 0", "1"],
            [
                "1 figures, drawn with widths of [0]",
                "code cell 2: ZeroDivisionError",
                "code cell 3 did not run",
            ],
            id="raises",
        ),
        pytest.param(
            ["import os", "os._exit(1)", "1"],
            ["a dialog: Kernel Restarting", "code cell 2 did not run", "code cell 3 did not run"],
            id="kills-its-kernel",
        ),
    ],
)
def test_what_goes_wrong_is_seen(browser, lab, sources, expected):
    problems = run_in_lab(browser, lab, made_up(lab, *sources)).problems()
    for sentence in expected:
        assert any(sentence in problem for problem in problems), problems


# --- The pages of a run --------------------------------------------------------------------

WIDE = "x = 1  # " + "as wide as no screen is, " * 20
TABLE = "<table><tr>" + "<td>some column</td>" * 30 + "</tr></table>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of all notebooks, and of one with everything that is wide."""
    folder = tmp_path_factory.mktemp("runs")
    figure = nbformat.v4.new_output(
        "display_data",
        {"image/png": base64.b64encode(wide_picture()).decode(), "text/plain": "figure"},
        metadata={"image/png": {"alt": "A wide figure"}},
    )
    table = nbformat.v4.new_output("display_data", {"text/html": TABLE, "text/plain": "table"})
    cells = [
        nbformat.v4.new_markdown_cell(
            f"# 0 · Wide\n`{'long_name' * 20}`\n\n```python\n{WIDE}\n```"
        ),
        nbformat.v4.new_code_cell(f"{WIDE}\n{WIDE}", outputs=[figure, table]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "00_wide.ipynb")
    for path in NOTEBOOKS:
        (folder / path.name).write_bytes(path.read_bytes())
    names = ["00_wide", *(path.stem for path in NOTEBOOKS)]
    write_pages(folder, names, results=TABLE, about="A machine.")
    return folder


def wide_picture():
    buffer = io.BytesIO()
    Image.new("RGB", (2000, 100)).save(buffer, "png")
    return buffer.getvalue()


# What sticks out of the page, or can be brought into view by no scrolling of its own box.
OUT_OF_REACH = """() => {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} wide`);
  for (const element of document.querySelectorAll('pre, table, img')) {
    let box = element;
    while (box && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX))
      box = box.parentElement;
    box = box ?? root;
    const content = document.createRange();
    content.selectNodeContents(element);
    const edges = () => {
      const inner = element.tagName === 'IMG' ? element : content;
      return [inner.getBoundingClientRect(), box.getBoundingClientRect()];
    };
    box.scrollLeft = 0;
    const [left, outerLeft] = edges();
    box.scrollLeft = 1e6;
    const [right, outerRight] = edges();
    if (left.left < outerLeft.left - 1 || right.right > outerRight.right + 1 ||
        outerRight.right > root.clientWidth + 1)
      found.push(`${element.tagName}: ${element.textContent.slice(0, 60)}`);
    if (element.tagName === 'IMG' && !element.naturalWidth) found.push('a broken figure');
  }
  return found;
}"""


@pytest.mark.parametrize("width", [375, 1280])
def test_pages_suit_a_screen_of(browser, pages, width):
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.set_viewport_size({"width": width, "height": 800})
        page.goto((pages / "index.html").as_uri())
        assert page.evaluate(OUT_OF_REACH) == []
        for number, path in enumerate(sorted(pages.glob("*.ipynb"))):
            page.locator("h2 a").nth(number).click()
            assert page.url == path.with_suffix(".html").as_uri()
            assert page.evaluate(OUT_OF_REACH) == [], path.stem
            page.locator("a", has_text="All results").first.click()
        assert page.url == (pages / "index.html").as_uri()
        assert [url for url in asked if not url.startswith(("file://", "data:"))] == []
    finally:
        page.close()
