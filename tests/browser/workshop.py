"""The workshop as a learner meets it: JupyterLab as `make lab` starts it, and a notebook open in Chromium."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from notebook_files import ROOT, execution_environment
from playwright.sync_api import Locator, Page, Playwright

SECONDS = 300  # for whatever is waited for: far more than it takes, also on a machine that is busy with much else
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/\S*\?token=(\w+)")
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing outside this machine has a name
]
IS_IDLE = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    return panel?.context?.isReady && panel.sessionContext?.session?.kernel?.status === 'idle';
}"""


class Workshop:
    """A running JupyterLab: its address, token and process."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.said: list[str] = []
        self._open = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._open.wait(SECONDS)
        found = next((found for line in self.said if (found := ADDRESS.search(line))), None)
        assert found, "JupyterLab did not open:\n" + "".join(self.said)
        self.address, self.token = found.groups()

    def _read(self) -> None:
        for line in self.process.stdout or []:
            self.said.append(line)
            if ADDRESS.search(line):
                self._open.set()
        self._open.set()


@contextmanager
def workshop(folder: Path, scratch: Path) -> Iterator[Workshop]:
    """JupyterLab on the notebooks in `folder`, configuration and state in `scratch`; at the end all its processes are gone."""
    settings = scratch / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    whole = {"windowingMode": "none"}  # cells outside the window are drawn too
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps(whole))
    (scratch / "config").mkdir()
    (scratch / "config" / "jupyter_lab_config.json").write_text(json.dumps({"LabApp": {"expose_app_in_browser": True}}))
    environment = execution_environment(scratch) | {
        "CI": "true",  # lab.py opens no browser
        "WORKSHOP_RECORD": str(folder / ".record.jsonl"),  # one for all notebooks, as a learner's own checkout has it
        "JUPYTER_CONFIG_DIR": str(scratch / "config"),
        "JUPYTER_DATA_DIR": str(scratch / "data"),
        "JUPYTER_RUNTIME_DIR": str(scratch / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(scratch / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(scratch / "workspaces"),
    }
    environment.pop("PYTEST_CURRENT_TEST", None)  # jobs would draw no panel
    command = [sys.executable, str(ROOT / "tools" / "lab.py"), "--folder", str(folder), "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            running = Workshop(process, folder)
            yield running
            print("JupyterLab said:", *running.said, sep="\n")  # pytest shows it when a test has failed
        finally:
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            left = psutil.wait_procs([psutil.Process(process.pid), *started], timeout=SECONDS)[1] if started else []
            for one in left:
                one.kill()
            assert not left, f"left behind by JupyterLab: {left}"


class OpenNotebook:
    """A notebook in a browser's page, with what went wrong in the page so far."""

    def __init__(self, page: Page, workshop: Workshop) -> None:
        self.page, self.workshop = page, workshop
        self.problems: list[str] = []
        self.outside: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self._note(request.url))
        page.on("websocket", lambda socket: self._note(socket.url))

    def _note(self, url: str) -> None:
        inside = (self.workshop.address, self.workshop.address.replace("http", "ws", 1), "data:", "blob:")
        if not url.startswith(inside):
            self.outside.append(url)

    def open(self, name: str) -> None:
        """Open the notebook and wait until its kernel is ready."""
        self.page.goto(f"{self.workshop.address}/lab/tree/{name}?token={self.workshop.token}&reset")
        self.wait_idle()

    def wait_idle(self) -> None:
        self.page.wait_for_function(IS_IDLE)

    def begin(self, command: str) -> None:
        """Start one of JupyterLab's commands."""
        script = """name => {
            window.finished = false;
            window.jupyterapp.commands.execute(name).then(() => { window.finished = true });
        }"""
        self.page.evaluate(script, command)

    def command(self, name: str) -> None:
        """Execute one of JupyterLab's commands and wait for its end."""
        self.begin(name)
        self.page.wait_for_function("() => window.finished", timeout=2 * SECONDS * 1000)

    def select(self, cell_id: str) -> None:
        """Make the cell the active one."""
        self.page.evaluate(
            """id => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = notebook.widgets.findIndex(cell => cell.model.id === id);
            }""",
            cell_id,
        )

    def cell(self, cell_id: str) -> Locator:
        """The cell on the page."""
        index = self.page.evaluate(
            "id => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(cell => cell.model.id === id)", cell_id
        )
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, cell_id: str) -> Locator:
        """What the cell has put out, on the page."""
        return self.cell(cell_id).locator(".jp-Cell-outputArea")

    def picture(self, cell_id: str, folder: Path, moment: str = "") -> None:
        """Save a screenshot of the window with the cell at its top."""
        self.cell(cell_id).evaluate("cell => cell.scrollIntoView({block: 'start'})")
        self.page.screenshot(path=folder / f"{cell_id}{moment and '_'}{moment}.png")

    def pictures(self, folder: Path) -> int:
        """Save screenshots of the whole notebook, window by window, and return their number."""
        panel = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
        height = panel.evaluate("panel => panel.clientHeight")
        number = -(-panel.evaluate("panel => panel.scrollHeight") // height)
        for k in range(number):
            panel.evaluate("(panel, top) => panel.scrollTo(0, top)", k * height)
            panel.screenshot(path=folder / f"window_{k:02d}.png")
        return number

    def counts(self) -> list[int | None]:
        """How often code cells have been executed: the number before each that is not empty."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(cell => cell.model.type === 'code' && cell.model.sharedModel.source.trim())
                .map(cell => cell.model.executionCount)"""
        )


@contextmanager
def chromium(playwright: Playwright, executable: str, profile: Path, workshop: Workshop) -> Iterator[OpenNotebook]:
    """A headless Chromium with a profile of its own that has one empty page."""
    context = playwright.chromium.launch_persistent_context(
        profile,
        executable_path=executable,
        headless=True,
        args=CHROMIUM_FLAGS,
        viewport={"width": 1280, "height": 1600},
        env={key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
    )
    try:
        yield OpenNotebook(context.pages[0], workshop)
    finally:
        context.close()
