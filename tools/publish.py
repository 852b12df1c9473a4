"""Execute notebooks on the CPU with the small model and write them back with reproducible outputs.

    python tools/publish.py                   # all notebooks (`make notebooks`)
    python tools/publish.py 03 04             # some of them
    python tools/publish.py --check           # execute, change nothing, fail where a notebook would change
    python tools/publish.py --timings 03      # measure the times anew as well

What a run leaves by chance is taken out (see `settle`), so that publishing twice gives the same bytes. Cells tagged `timing` keep
their stored output for as long as their own source is unchanged. A notebook in which a cell fails is not written. What takes
longer than a notebook's first cell says, or than the course may take, is marked; no time is a failure, for machines differ.
"""

import argparse
import base64
import hashlib
import itertools
import json
import re
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbval.plugin import get_sanitize_patterns
from notebook_files import SANITIZE_RULES, execution_environment, named_or_all, promised, read, shown, text_of, write

CELL_SECONDS = 300  # a start of vLLM takes half a minute on cores to itself, and more beside other work
COURSE_SECONDS = 900  # of machine time that all notebooks together may take, on two cores to themselves
KEPT_NOTEBOOK_METADATA = ("kernelspec", "language_info")
DROPPED_CELL_METADATA = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted", "outputId")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_NOTES = (b"tEXt", b"zTXt", b"iTXt", b"tIME", b"eXIf")


class CellFailed(RuntimeError):
    """A cell did not end as planned; the message names the notebook and the cell."""


@dataclass(frozen=True)
class Published:
    """What publishing a notebook did: seconds to execute it, its slowest cells, ids of the cells that are new or have changed."""

    path: Path
    seconds: float
    slowest: list[tuple[str, float]]
    changed: list[str]
    written: bool


class _Client(NotebookClient):
    """Executes cells with this environment's kernel, which no network can reach; remembers the cell it is at."""

    scratch: Path
    working, stopped = True, False
    current: NotebookNode | None = None

    def create_kernel_manager(self) -> AsyncKernelManager:
        self.km = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(self.scratch / "kernel"))
        self.km.kernel_spec_manager.kernel_dirs = [str(Path(sys.prefix) / "share" / "jupyter" / "kernels")]
        return self.km

    async def async_start_new_kernel_client(self, **kwargs: Any) -> Any:
        """Start the client with replies read in slices of a quarter second.

        A widget's answer goes out on the socket that replies arrive on, and doing so can swallow the wake-up for a reply that has
        arrived already: the cell then seems to run until its time is over.
        """
        client = await super().async_start_new_kernel_client(**kwargs)
        read_message = client.shell_channel.get_msg

        async def read_in_slices(timeout: float | None = None) -> Any:
            deadline = None if timeout is None else time.monotonic() + timeout
            while True:
                left = 0.25 if deadline is None else min(0.25, max(0.0, deadline - time.monotonic()))
                try:
                    return await read_message(timeout=left)
                except Empty:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise

        client.shell_channel.get_msg = read_in_slices
        return client

    async def async_execute_cell(self, cell: NotebookNode, *args: Any, **kwargs: Any) -> NotebookNode:
        self.current, self.working = cell, True
        try:
            return await super().async_execute_cell(cell, *args, **kwargs)
        finally:
            self.working = False

    async def _async_cleanup_kernel(self) -> None:
        self.stopped |= self.working  # from nbclient's handler of SIGINT and SIGTERM: otherwise it comes after the work
        await super()._async_cleanup_kernel()


def execute(notebook: NotebookNode, folder: Path, cell_seconds: int = CELL_SECONDS) -> NotebookNode:
    """A copy of the notebook with the outputs of a fresh kernel that starts in `folder`.

    Raises CellFailed for a cell that raises, takes longer than `cell_seconds` or loses the kernel, and for one tagged
    `raises-exception` that raises nothing.
    """
    notebook = nbformat.from_dict(notebook)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    with tempfile.TemporaryDirectory(prefix="publish_") as scratch:
        client = _Client(notebook, timeout=cell_seconds, record_timing=True, coalesce_streams=True)
        client.scratch = Path(scratch)
        try:
            client.execute(cwd=str(folder), env=execution_environment(Path(scratch)))
        except CellExecutionError as error:
            raise CellFailed(f"cell {_name(client)} raised {error.ename}: {error.evalue}\n\n{error.traceback}") from None
        except CellTimeoutError:
            raise CellFailed(f"cell {_name(client)} did not finish within {cell_seconds} s") from None
        except (DeadKernelError, AssertionError):  # the latter: nbclient puts away what its signal handler has put away
            if client.stopped:
                raise KeyboardInterrupt from None
            raise CellFailed(f"the kernel died in cell {_name(client)}") from None
    for cell in notebook.cells:
        if "raises-exception" in _tags(cell) and not any(output.output_type == "error" for output in cell.outputs):
            raise CellFailed(f"cell {cell.id!r} is tagged raises-exception but raised nothing: mend the cell or take the tag off")
    return notebook


def slowest(notebook: NotebookNode, count: int = 3) -> list[tuple[str, float]]:
    """The cells of an executed notebook that took longest: id and seconds."""

    def seconds(times: dict[str, str]) -> float:
        start, end = (datetime.fromisoformat(times[moment]) for moment in ("iopub.execute_input", "shell.execute_reply"))
        return (end - start).total_seconds()

    took = [(cell.id, seconds(cell.metadata.execution)) for cell in notebook.cells if "execution" in cell.metadata]
    return sorted(took, key=lambda pair: pair[1], reverse=True)[:count]


def settle(notebook: NotebookNode) -> NotebookNode:
    """A copy without what a run leaves by chance.

    Gone: execution times and display state in the metadata, widget views and their state (a stored view shows nothing without its
    kernel; the text or picture beside it stays), text chunks of PNG pictures. Replaced, by the rules of
    tests/notebooks/sanitize.cfg: temporary names, process ids, addresses, this machine's paths.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(
        {key: notebook.metadata[key] for key in KEPT_NOTEBOOK_METADATA if key in notebook.metadata}
    )
    notebook.metadata.get("language_info", {}).pop("version", None)
    rules = [(re.compile(pattern), value) for pattern, value in get_sanitize_patterns(SANITIZE_RULES.read_text(encoding="utf-8"))]
    for cell in notebook.cells:
        for key in DROPPED_CELL_METADATA:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            settled = (_settle_output(output, rules) for output in _streams_in_order(cell.outputs))
            cell.outputs = [output for output in settled if output]
    return notebook


def _streams_in_order(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of stdout and stderr as one of each: the kernel sends the two when a timer says so."""
    ordered: list[NotebookNode] = []
    for is_stream, group in itertools.groupby(outputs, key=lambda output: output.output_type == "stream"):
        pieces = list(group)
        if is_stream:
            texts = {name: "".join(piece.text for piece in pieces if piece.name == name) for name in ("stdout", "stderr")}
            pieces = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in texts.items() if text]
        ordered += pieces
    return ordered


def _settle_output(output: NotebookNode, rules: list[tuple[re.Pattern[str], str]]) -> NotebookNode | None:
    def settled(value: Any) -> Any:
        if isinstance(value, list):
            return [settled(item) for item in value]
        if isinstance(value, str):
            for pattern, replacement in rules:
                value = pattern.sub(replacement, value)
        return value

    for field in ("text", "evalue", "traceback"):
        if field in output:
            output[field] = settled(output[field])
    if "data" not in output:
        return output
    output.data.pop(WIDGET_VIEW, None)
    for kind, value in output.data.items():
        output.data[kind] = without_notes(value) if kind == "image/png" else settled(value)
    return output if output.data else None


def without_notes(picture: str) -> str:
    """A base64 PNG without its text and time chunks (which name the program's version), pixels untouched."""
    data = base64.b64decode(picture)
    if not data.startswith(PNG_SIGNATURE):
        return picture
    kept, position = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while position < len(data):
        end = position + 12 + struct.unpack(">I", data[position : position + 4])[0]
        if data[position + 4 : position + 8] not in PNG_NOTES:
            kept.append(data[position:end])
        position = end
    return base64.b64encode(b"".join(kept)).decode("ascii")


def source_hash(cell: NotebookNode) -> str:
    """A short name for the cell's source: a `timing` cell carries the one that its stored output belongs to."""
    return hashlib.sha256(cell.source.encode()).hexdigest()[:12]


def sources_hash(notebook: NotebookNode) -> str:
    """A short name for all code of the notebook: a published notebook carries the one that its outputs came from."""
    code = [[cell.get("id"), cell.source] for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]


def keep_timings(fresh: NotebookNode, stored: NotebookNode) -> None:
    """Give cells of `fresh` tagged `timing` their output in `stored` where that was published from the same source."""
    earlier = {cell.id: cell for cell in stored.cells}
    for cell in fresh.cells:
        if cell.cell_type == "code" and "timing" in _tags(cell):
            before = earlier.get(cell.id)
            if before and before.get("outputs") and before.metadata.get("source_hash") == source_hash(cell):
                cell.outputs = before.outputs
                for output in cell.outputs:
                    if output.output_type == "execute_result":
                        output.execution_count = cell.execution_count
            cell.metadata["source_hash"] = source_hash(cell)
        else:
            cell.metadata.pop("source_hash", None)


def publish(path: Path, *, check: bool = False, timings: bool = False, cell_seconds: int = CELL_SECONDS) -> Published:
    """Execute one notebook and, unless `check`, write it back where it changed.

    With `timings` the cells tagged `timing` get new outputs too. Raises CellFailed (nothing is written then).
    """
    stored = read(path)
    start = time.perf_counter()
    executed = execute(stored, path.parent, cell_seconds)
    seconds = time.perf_counter() - start
    fresh = settle(executed)
    keep_timings(fresh, nbformat.v4.new_notebook() if timings else stored)
    fresh.metadata["published_sources"] = sources_hash(fresh)
    before = {cell.id: cell for cell in stored.cells}
    changed = [cell.id for cell in fresh.cells if cell != before.get(cell.id)]
    differs = text_of(fresh) != path.read_text(encoding="utf-8")
    if differs and not check:
        write(path, fresh)
    return Published(path, seconds, slowest(executed), changed, differs)


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _name(client: _Client) -> str:
    cell = client.current
    first_line = cell.source.strip().partition("\n")[0] if cell else ""
    return f"{cell.id!r} ({first_line})" if cell else "?"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="files, or starts of file names such as 04; default: all")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a notebook would change")
    parser.add_argument("--timings", action="store_true", help="replace the outputs of cells tagged timing too")
    parser.add_argument(
        "--cell-seconds", type=int, default=CELL_SECONDS, help="longest time one cell may take (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    total, bad = 0.0, 0
    for path in named_or_all(options.notebooks):
        try:
            done = publish(path, check=options.check, timings=options.timings, cell_seconds=options.cell_seconds)
        except CellFailed as error:
            print(f"{shown(path)}: not written: {error}", file=sys.stderr)
            bad += 1
            continue
        except KeyboardInterrupt:
            print(f"{shown(path)}: stopped, not written", file=sys.stderr)
            return 130
        total += done.seconds
        bad += options.check and done.written
        verb = "would change" if options.check else "written"
        what = f"{verb}: {', '.join(done.changed) or 'layout only'}" if done.written else "unchanged"
        print(f"{shown(path):44} {done.seconds:6.1f} s  {what}")
        if done.seconds > (promise := promised(path)):
            print(f"{'':4}longer than the {promise} s that its first cell says")
        print(f"{'':4}slowest cells: {', '.join(f'{id} {seconds:.1f} s' for id, seconds in done.slowest)}", flush=True)
    print(f"{'in all':44} {total:6.1f} s  {'longer than' if total > COURSE_SECONDS else 'of'} the course's {COURSE_SECONDS} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
