"""What the learner sees while a job runs: plain lines in a fixed order, and in a live notebook a lane per rank."""

import html
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from helpers.launching.results import Run, current_cell, visible

LINES_SHOWN = 1000  # per rank; the log keeps all of them
LONGEST_LINE = 2000  # characters shown of one
CHUNK = 1 << 20  # bytes read at a time
TAIL = 4096  # bytes of a log that the panel reads to find the last line
PANEL_INTERVAL = 0.2  # seconds between two pictures


class Lines:
    """Prints "[rank] line", all of rank 0 as they come, then rank 1, …: the same order on every run."""

    def __init__(self, logs: Sequence[str]) -> None:
        self._logs = logs
        self._turn = self._offset = self._count = 0  # whose lines are printed, bytes read and lines seen of it
        self._rest = b""  # what was read behind the last newline

    def update(self, states: Sequence[str]) -> None:
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
            if self._count > LINES_SHOWN:
                print(f"[{self._turn}] … {self._count - LINES_SHOWN:,} more lines: run.output({self._turn})")
            self._turn, self._offset, self._count, self._rest = self._turn + 1, 0, 0, b""

    def wait(self, text: str) -> None:
        """Say what the job waits for before it starts."""
        print(text, flush=True)

    def close(self, run: Run) -> None:
        """Print what is left, of every rank."""
        self.update(["ended"] * len(self._logs))

    def _read(self) -> bytes:
        with open(self._logs[self._turn], "rb") as file:
            file.seek(self._offset)
            data = file.read(CHUNK)
        self._offset += len(data)
        return data

    def _print(self, lines: list[bytes]) -> None:
        shown = lines[: max(0, LINES_SHOWN - self._count)]
        self._count += len(lines)
        if shown:
            sys.stdout.write("".join(f"[{self._turn}] {self._short(line)}\n" for line in shown))
            sys.stdout.flush()

    def _short(self, line: bytes) -> str:
        text = visible(line.decode(errors="replace"))
        more = f" … all of this line: run.output({self._turn})" if len(text) > LONGEST_LINE else ""
        return text[:LONGEST_LINE] + more


class Panel:
    """A lane per rank: state, elapsed time, last line. Becomes the picture of the `Run`; the lines are printed below it."""

    def __init__(self, logs: Sequence[str], name: str) -> None:
        from IPython.display import display

        self._logs, self._name = logs, name
        self._began = self._next = time.monotonic()
        self._handle: Any = display(self._lanes(["joining"] * len(logs)), display_id=True)

    def wait(self, text: str) -> None:
        self._handle.update(self._picture(text))

    def update(self, states: Sequence[str]) -> None:
        if time.monotonic() >= self._next:
            self._handle.update(self._lanes(states))
            self._next = time.monotonic() + PANEL_INTERVAL

    def close(self, run: Run) -> None:
        from IPython.display import HTML

        self._handle.update(HTML(run._repr_html_()))
        run.shown_in = current_cell()
        Lines(self._logs).close(run)

    def _lanes(self, states: Sequence[str]) -> Any:
        cell = "<td style='text-align:left; font-family:monospace; white-space:pre'>"
        lanes = zip(range(len(states)), states, map(_last_line, self._logs), strict=True)
        rows = ("".join(f"{cell}{html.escape(str(text))}</td>" for text in lane) for lane in lanes)
        table = f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"
        return self._picture(f"{time.monotonic() - self._began:.1f} s", table)

    def _picture(self, text: str, lanes: str = "") -> Any:
        from IPython.display import HTML

        return HTML(f"<div class='helpers-panel'>{html.escape(f'{self._name}: {text}')} (■ stops it){lanes}</div>")


def choose(logs: Sequence[str], name: str) -> Panel | Lines:
    """The panel where a person looks on: a notebook kernel started by a notebook server or an editor; elsewhere lines only."""
    looked_at = any(name in os.environ for name in ("JPY_SESSION_NAME", "VSCODE_PID", "COLAB_RELEASE_TAG"))
    return Panel(logs, name) if current_cell() and looked_at and "PYTEST_CURRENT_TEST" not in os.environ else Lines(logs)


def _last_line(log: str) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - TAIL))
        lines = [line for line in file.read().decode(errors="replace").split("\n") if line.strip()]
    return visible(lines[-1])[:160] if lines else ""
