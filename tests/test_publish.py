import base64
import os
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import nbformat
import notebook_files
import psutil
import publish
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_files import ROOT, execution_environment, named_or_all, read, text_of, write
from notebook_source import to_notebook

# What differs between two runs although nothing has changed, and how it must look in a published notebook.
RESTLESS = """
# %% id="settings"
import os, sys, tempfile, traceback
print(os.environ["WORKSHOP_DEVICE"], os.environ["WORKSHOP_MODEL"], os.environ["HF_HUB_OFFLINE"], "WORKSHOP_RECORD" in os.environ)

# %% id="chance"
with tempfile.NamedTemporaryFile() as file:
    print(file.name, object(), f"pid {os.getpid()}", {"a", "b", "c", "d", "e"})
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)

# %% id="streams"
for _ in range(3):
    print("err", file=sys.stderr, flush=True)
    print("out", flush=True)

# %% id="figure"
import matplotlib.pyplot as plt
plt.plot([1, 2]);

# %% id="explorer"
import ipywidgets
ipywidgets.interact(lambda x: print("square", x * x), x=3);

# %% id="clock" tags=["timing"]
import time
time.perf_counter_ns()
"""


def notebook(path: Path, text: str) -> Path:
    write(path, to_notebook(text))
    return path


def outputs(path: Path, cell_id: str) -> str:
    """The text of a cell's stored outputs."""
    cell = next(cell for cell in read(path).cells if cell.id == cell_id)
    return "".join(output.get("text") or output.data["text/plain"] for output in cell.outputs)


def png(*notes: bytes) -> str:
    """A base64 PNG of one white pixel with text chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, pixels = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0), zlib.compress(b"\x00\xff")
    chunks = [chunk(b"IHDR", head), *(chunk(b"tEXt", note) for note in notes), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return base64.b64encode(publish.PNG_SIGNATURE + b"".join(chunks)).decode()


def test_publishing_twice_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_RECORD", "mine")
    path = notebook(tmp_path / "restless.ipynb", RESTLESS)
    first = publish.publish(path)
    text = path.read_text(encoding="utf-8")
    assert first.written
    assert first.changed == ["settings", "chance", "streams", "figure", "explorer", "clock"]
    second = publish.publish(path)
    assert (second.written, second.changed) == (False, [])
    assert path.read_text(encoding="utf-8") == text

    assert outputs(path, "settings") == "cpu tiny-ernie 1 False\n"
    assert "<temporary> <object object at 0x…> pid … {" in outputs(path, "chance")
    assert 'File "<cell>", line 4' in outputs(path, "chance")
    assert outputs(path, "streams") == "out\n" * 3 + "err\n" * 3
    stored = read(path)
    assert [cell.execution_count for cell in stored.cells] == [1, 2, 3, 4, 5, 6]
    assert "widgets" not in stored.metadata
    assert publish.WIDGET_VIEW not in text
    assert "version" not in stored.metadata.language_info
    assert b"Software" not in base64.b64decode(stored.cells[3].outputs[0].data["image/png"])


@pytest.mark.slow
def test_the_first_notebook_of_the_course_is_as_published():
    """Real ranks, figures and widgets in it: executed again, nothing but times may differ, and these are kept."""
    (path,) = named_or_all(["00"])
    found = publish.publish(path, check=True)
    assert (found.written, found.changed) == (False, [])


def test_the_cell_that_takes_longest_is_named_first(tmp_path, capsys):
    work = "end = time.monotonic() + 0.3\nwhile time.monotonic() < end:\n    pass"
    path = notebook(tmp_path / "slow.ipynb", f'# %% id="quick"\nimport time\n\n# %% id="slow"\n{work}\n')
    (first, seconds), (second, _) = publish.publish(path).slowest
    assert (first, second) == ("slow", "quick")
    assert 0.3 <= seconds < 60


def test_what_takes_longer_than_it_says_is_marked_and_no_failure(tmp_path, capsys, monkeypatch):
    work = "import time\nend = time.monotonic() + 1.1\nwhile time.monotonic() < end:\n    pass"
    brief = notebook(tmp_path / "brief.ipynb", f'# %% [markdown] id="a"\n# about 1 s of machine time\n\n# %% id="b"\n{work}\n')
    silent = notebook(tmp_path / "silent.ipynb", '# %% id="sum"\n1 + 1\n')
    monkeypatch.setattr(notebook_files, "PROMISED_SECONDS", 10**6)
    monkeypatch.setattr(publish, "COURSE_SECONDS", 1)
    assert publish.main([str(brief), str(silent)]) == 0
    said = capsys.readouterr().out
    assert said.count("longer than the 1 s that its first cell says") == 1
    assert said.count("that its first cell says") == 1
    assert "longer than the course's 1 s" in said
    monkeypatch.setattr(publish, "COURSE_SECONDS", 10**6)
    assert publish.main([str(silent)]) == 0
    assert "s  of the course's 1000000 s" in capsys.readouterr().out


def test_check_finds_a_change_and_makes_none(tmp_path, capsys):
    path = notebook(tmp_path / "sum.ipynb", '# %% id="sum"\nprint(1 + 1)\n')
    before = path.read_text(encoding="utf-8")
    assert publish.main(["--check", str(path)]) == 1
    assert "would change: sum" in capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == before
    assert publish.main([str(path)]) == 0
    assert publish.main(["--check", str(path)]) == 0
    assert "unchanged" in capsys.readouterr().out


def test_a_failing_notebook_is_not_written_and_others_are(tmp_path, capsys):
    bad = notebook(tmp_path / "bad.ipynb", '# %% id="fine"\nprint(1)\n\n# %% id="broken"\nimport math\nmath.sqrt(-1)\n')
    planned = notebook(tmp_path / "planned.ipynb", '# %% id="planned" tags=["raises-exception"]\n1 / 0\n')
    before = bad.read_text(encoding="utf-8")
    assert publish.main([str(bad), str(planned)]) == 1
    said = capsys.readouterr()
    assert "bad.ipynb: not written: cell 'broken' (import math) raised ValueError" in said.err
    assert "planned.ipynb" in said.out
    assert bad.read_text(encoding="utf-8") == before
    assert read(planned).cells[0].outputs[0].ename == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("while True: pass", "'end' .* did not finish within 2 s"),
        ("import os; os.kill(os.getpid(), 9)", "kernel died in cell 'end'"),
    ],
)
def test_a_cell_that_never_ends_or_kills_its_kernel(tmp_path, source, message):
    path = notebook(tmp_path / "end.ipynb", f'# %% id="end"\n{source}\n')
    before = psutil.Process().children()  # other tests' warm process may be among them
    with pytest.raises(publish.CellFailed, match=message):
        publish.publish(path, cell_seconds=2)
    left = [process for process in psutil.Process().children() if process not in before]
    assert psutil.wait_procs(left, timeout=30)[1] == []


def test_a_planned_error_that_does_not_happen_is_an_error(tmp_path):
    path = notebook(tmp_path / "tame.ipynb", '# %% id="tame" tags=["raises-exception"]\n1 + 1\n')
    with pytest.raises(publish.CellFailed, match="'tame' is tagged raises-exception but raised nothing"):
        publish.publish(path)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_leaves_no_kernel_and_the_old_file(tmp_path, stop):
    reached = tmp_path / "reached"
    os.mkfifo(reached)
    path = notebook(tmp_path / "long.ipynb", f'# %% id="long"\nopen({str(reached)!r}, "w").close()\nwhile True: pass\n')
    before = path.read_text(encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "publish.py"), str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        reached.read_text()  # returns when the cell runs
        kernels = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(stop)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "long.ipynb: stopped, not written" in errors
    assert kernels
    assert psutil.wait_procs(kernels, timeout=30)[1] == []
    assert path.read_text(encoding="utf-8") == before


def timed(output: str, *, source: str = "clock()", published: bool = True) -> nbformat.NotebookNode:
    cell = new_code_cell(source, id="clock", metadata={"tags": ["timing"]}, execution_count=2)
    cell.outputs = [new_output("execute_result", {"text/plain": output}, execution_count=2)]
    if published:
        cell.metadata["source_hash"] = publish.source_hash(cell)
    return new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (timed("1 s"), "1 s"),
        (timed("1 s", source="clock(2)"), "9 s"),  # its source has changed
        (timed("1 s", published=False), "9 s"),  # who knows which source it came from
    ],
)
def test_times_are_kept_while_their_source_is_unchanged(stored, kept):
    fresh = timed("9 s", published=False)
    fresh.cells[0].execution_count = 5  # a cell came in before it
    publish.keep_timings(fresh, stored)
    output = fresh.cells[0].outputs[0]
    assert output.data["text/plain"] == kept
    assert fresh.cells[0].metadata["source_hash"] == publish.source_hash(fresh.cells[0])
    assert kept == "9 s" or output.execution_count == 5


def test_timings_can_be_measured_anew(tmp_path):
    path = notebook(tmp_path / "clock.ipynb", '# %% id="clock" tags=["timing"]\nimport time\ntime.perf_counter_ns()\n')
    publish.publish(path)
    before = outputs(path, "clock")
    publish.publish(path)
    assert outputs(path, "clock") == before
    publish.publish(path, timings=True)
    assert outputs(path, "clock") != before


def test_a_cell_that_is_no_longer_timed_loses_its_mark():
    fresh = timed("9 s")
    fresh.cells[0].metadata["tags"] = []
    publish.keep_timings(fresh, timed("1 s"))
    assert "source_hash" not in fresh.cells[0].metadata
    assert fresh.cells[0].outputs[0].data["text/plain"] == "9 s"


def test_pictures_lose_their_notes_and_keep_their_pixels():
    assert publish.without_notes(png(b"Software\0drawn by 1.2", b"Date\0today")) == png()
    assert publish.without_notes(png()) == png()
    assert publish.without_notes(base64.b64encode(b"GIF89a").decode()) == base64.b64encode(b"GIF89a").decode()


def settled(text: str) -> str:
    cell = new_code_cell("pass", outputs=[new_output("stream", name="stdout", text=text)])
    return publish.settle(new_notebook(cells=[cell])).cells[0].outputs[0].text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('File "/tmp/ipykernel_123/456.py", line 2', 'File "<cell>", line 2'),
        ("wrote /tmp/tmpab12cd/model.bin, 3 files", "wrote <temporary>, 3 files"),
        ("in /dev/shm/helpers_xy: 2", "in <temporary>: 2"),
        ('File "/srv/x/lib/python3.11/site-packages/torch/nn/m.py"', 'File "…/torch/nn/m.py"'),
        ('File "/srv/me/course/helpers/launching/verb.py", line 1', 'File "helpers/launching/verb.py", line 1'),
        ("<object at 0x7f00aa11bb22>", "<object at 0x…>"),
        ("rank 0 (pid 4711) died", "rank 0 (pid …) died"),
        ("dtype 0x10, /templates, 4711 processes, helpers/plots", "dtype 0x10, /templates, 4711 processes, helpers/plots"),
    ],
)
def test_what_is_replaced_in_outputs(text, expected):
    assert settled(text) == expected


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = notebook(tmp_path / "a.ipynb", '# %% id="a"\n1\n')
    before = path.read_text(encoding="utf-8")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write(path, to_notebook('# %% id="b"\n2\n'))
    assert path.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["a.ipynb"]


def test_writing_what_was_read_changes_nothing(tmp_path):
    path = notebook(tmp_path / "a.ipynb", RESTLESS)
    assert text_of(read(path)) == path.read_text(encoding="utf-8")


def test_an_invalid_notebook_is_not_written(tmp_path):
    broken = to_notebook('# %% id="a"\n1\n')
    broken.cells[0].id = "no spaces allowed"
    with pytest.raises(nbformat.ValidationError):
        write(tmp_path / "a.ipynb", broken)
    assert os.listdir(tmp_path) == []


def test_a_notebook_that_does_not_exist():
    with pytest.raises(SystemExit, match="no notebook 'nowhere'"):
        named_or_all(["nowhere"])


def test_the_environment_of_execution_is_not_the_persons(tmp_path, monkeypatch):
    for name in ("JPY_SESSION_NAME", "WORKSHOP_RECORD", "WORKSHOP_MODEL"):
        monkeypatch.setenv(name, "personal")
    environment = execution_environment(tmp_path)
    assert "personal" not in environment.values()
    assert environment["WORKSHOP_DEVICE"] == "cpu"
    assert Path(environment["IPYTHONDIR"]).is_relative_to(tmp_path)
