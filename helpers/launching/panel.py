"""What the learner sees while a job runs: plain lines in a fixed order, and in a live notebook a lane per rank."""

from __future__ import annotations

import html
import os
import sys
import time
from typing import Any

from helpers.launching.results import Run, current_cell, visible

LINES_SHOWN = 1000  # per rank; the log keeps all of them
LONGEST_LINE = 2000  # characters shown of one
CHUNK = 1 << 20  # bytes read at a time
TAIL = 4096  # bytes of a log that the panel reads to find the last line
PANEL_INTERVAL = 0.2  # seconds between two pictures


class Lines:
    """Prints "[rank] line", all of rank 0 as they come, then rank 1, …: the same order on every run."""

    def __init__(self, logs: list[str]) -> None:
        self._logs = logs
        self._turn = 0
        self._offset = 0
        self._printed = 0
        self._skipped = 0
        self._rest = b""

    def update(self, states: list[str]) -> None:
        """Print what is new of the rank whose turn it is; it stays its turn until it has finished."""
        while self._turn < len(self._logs):
            over = states[self._turn] not in ("joining", "running")  # asked before reading: what follows is all there is
            while data := self._read():
                *lines, rest = (self._rest + data).split(b"\n")
                self._rest = rest[-CHUNK:]  # of an endless line, what a terminal would show last
                self._print(lines)
                if not over:
                    return  # one that prints faster than we do shall not keep us from listening
            if not over:
                return
            self._print([self._rest] if self._rest else [])
            if self._skipped:
                print(f"[{self._turn}] … {self._skipped:,} more lines: run.output({self._turn})")
            self._turn, self._offset, self._printed, self._skipped, self._rest = self._turn + 1, 0, 0, 0, b""

    def wait(self, text: str) -> None:
        """Say what the job waits for before it starts."""
        print(text, flush=True)

    def finish(self) -> None:
        """Print what is left, of every rank."""
        self.update(["ended"] * len(self._logs))

    def close(self, run: Run) -> None:
        self.finish()

    def _read(self) -> bytes:
        try:
            with open(self._logs[self._turn], "rb") as file:
                file.seek(self._offset)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def _print(self, lines: list[bytes]) -> None:
        room = max(0, LINES_SHOWN - self._printed)
        shown, self._printed, self._skipped = lines[:room], self._printed + len(lines), self._skipped + len(lines[room:])
        if shown:
            sys.stdout.write("".join(f"[{self._turn}] {self._short(line)}\n" for line in shown))
            sys.stdout.flush()

    def _short(self, line: bytes) -> str:
        text = visible(line.decode(errors="replace"))
        if len(text) <= LONGEST_LINE:
            return text
        return f"{text[:LONGEST_LINE]} … all of this line: run.output({self._turn})"


class Panel:
    """A lane per rank: state, elapsed time, last line. Becomes the picture of the `Run`; the lines are printed below it."""

    def __init__(self, logs: list[str], name: str) -> None:
        from IPython.display import HTML, display

        self._logs, self._name, self._html = logs, name, HTML
        self._began = self._next = time.monotonic()
        self._handle: Any = display(HTML(self._picture(["joining"] * len(logs))), display_id=True)

    def wait(self, text: str) -> None:
        self._handle.update(self._html(f"<div class='helpers-panel'>{html.escape(f'{self._name}: {text}')} (■ stops it)</div>"))

    def update(self, states: list[str]) -> None:
        if time.monotonic() >= self._next:
            self._handle.update(self._html(self._picture(states)))
            self._next = time.monotonic() + PANEL_INTERVAL

    def close(self, run: Run) -> None:
        self._handle.update(self._html(run._repr_html_()))
        run.shown_in = current_cell()
        Lines(self._logs).finish()

    def _picture(self, states: list[str]) -> str:
        cell = "<td style='text-align:left; font-family:monospace; white-space:pre'>"
        rows = (
            f"<tr>{cell}{rank}</td>{cell}{html.escape(state)}</td>{cell}{html.escape(_last_line(log))}</td></tr>"
            for rank, (state, log) in enumerate(zip(states, self._logs, strict=True))
        )
        head = f"{html.escape(self._name)}: {time.monotonic() - self._began:.1f} s (■ stops it)"
        return f"<div class='helpers-panel'>{head}<table>{''.join(rows)}</table></div>"


def choose(logs: list[str], name: str) -> Panel | Lines:
    """The panel where a person looks on: a notebook kernel started by a notebook server or an editor; elsewhere lines only."""
    return Panel(logs, name) if current_cell() and _looked_at() else Lines(logs)


def _looked_at() -> bool:
    if "PYTEST_CURRENT_TEST" in os.environ:
        return False
    return any(name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG"))


def _last_line(log: str) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - TAIL))
            lines = [line for line in file.read().decode(errors="replace").split("\n") if line.strip()]
    except OSError:
        return ""
    return visible(lines[-1])[:160] if lines else ""
