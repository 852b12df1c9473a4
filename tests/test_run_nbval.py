import re
from types import SimpleNamespace

import publish
import pytest
import run_nbval
from notebook_files import PROMISED_SECONDS, write
from notebook_source import to_notebook

EXACT = """
# %% id="exact" tags=["nbval-check-output"]
import os
print(2 + 2, os.environ["WORKSHOP_DEVICE"], os.environ["WORKSHOP_MODEL"])

# %% id="free"
print(os.getpid())
"""
NUMBERED = """
# %% id="first"
from IPython import get_ipython
1

# %% id="numbered" tags=["nbval-check-output"]
print("in cell", get_ipython().execution_count)
"""
NOISY_TRACEBACK = """
# %% id="traceback" tags=["nbval-check-output"]
import sys, traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)
"""
PLANNED = """
# %% id="planned" tags=["nbval-check-output", "raises-exception"]
open("nowhere")
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    """Published notebooks by name, as text."""
    found = {}
    for name, text in {"exact": EXACT, "traceback": NOISY_TRACEBACK, "planned": PLANNED, "numbered": NUMBERED}.items():
        path = tmp_path_factory.mktemp("published") / f"{name}.ipynb"
        write(path, to_notebook(text))
        publish.publish(path)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_what_was_published_passes(tmp_path, capfd, texts):
    for name, text in texts.items():
        (tmp_path / f"{name}.ipynb").write_text(text, encoding="utf-8")
    assert run_nbval.nbval(sorted(tmp_path.glob("*.ipynb"))) == 0
    out = capfd.readouterr().out
    assert "6 passed" in out
    assert "in cell 3" in texts["numbered"]
    assert all(f"\n{name}.ipynb" in out for name in texts)
    assert "over twice" not in out


DIFFERENCES = {  # name -> (notebook, what it held, what it holds, the failure)
    "a_stored": ("exact", '"4 cpu tiny-ernie', '"5 cpu tiny-ernie', "assert reference_output == test_output failed"),
    "b_computed": ("exact", "print(2 + 2", "print(2 + 3", "assert reference_output == test_output failed"),
    "c_raises": ("exact", "print(os.getpid())", "print(os.getpid(0))", "Cell execution caused an exception"),
    "d_tame": ("planned", r"open(\"nowhere\")", "1", "Missing output fields from running code"),
    "e_other": ("planned", r"open(\"nowhere\")", "1 / 0", "assert reference_output == test_output failed"),
}


def test_what_differs_fails(tmp_path, capfd, texts):
    for name, (original, old, new, _) in DIFFERENCES.items():
        assert texts[original].count(old) == 1
        (tmp_path / f"{name}.ipynb").write_text(texts[original].replace(old, new), encoding="utf-8")
    assert run_nbval.nbval(sorted(tmp_path.glob("*.ipynb"))) == 1
    out = capfd.readouterr().out
    assert "5 failed, 3 passed" in out
    failures = {
        path.split("::")[0]: text for path, text in re.findall(r"_ (\w+)\.ipynb::Cell \d _+\n(.*?)(?=\n_{5}|\n=)", out, re.S)
    }
    assert failures.keys() == DIFFERENCES.keys()
    for name, (_, _, _, message) in DIFFERENCES.items():
        assert message in failures[name]


def test_a_hang_and_a_dead_kernel_end_in_time(tmp_path, capfd):
    for name, source in {"hang": "while True: pass", "dead": "import os; os.kill(os.getpid(), 9)"}.items():
        write(tmp_path / f"{name}.ipynb", to_notebook(f'# %% id="end"\n{source}\n\n# %% id="next"\n1\n'))
    assert run_nbval.nbval(sorted(tmp_path.glob("*.ipynb")), cell_seconds=3) == 1
    out = capfd.readouterr().out
    assert "Timeout of 3 seconds exceeded executing cell" in out
    assert "Failed to interrupt kernel" in out
    assert re.search(r"2 failed, .*1 xfailed", out)  # the cell after the dead kernel's


def test_cells_that_were_not_run_are_noticed(tmp_path, monkeypatch, capfd, texts):
    path = tmp_path / "exact.ipynb"
    path.write_text(texts["exact"], encoding="utf-8")
    monkeypatch.setattr(run_nbval.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert run_nbval.nbval([path]) == 1
    assert "0 cells were run, but the notebooks have 2 code cells" in capfd.readouterr().out


def test_times_by_notebook():
    times = {"notebooks.04_split.ipynb": {"Cell 0": 119.0, "Cell 1": 2.0}, "notebooks.09_serve.ipynb": {"Cell 0": 190.0}}
    lines = run_nbval.summary(times, {"04_split": 60, "09_serve": 180}).splitlines()
    assert lines[0].split() == ["notebooks.04_split.ipynb", "121.0", "s", "over", "twice", "the", "60", "s", "promised"]
    assert lines[1].strip() == "slowest: Cell 0 119.0 s, Cell 1 2.0 s"
    assert lines[2].split() == ["notebooks.09_serve.ipynb", "190.0", "s"]
    assert lines[-1].split() == ["in", "all", "311.0", "s"]


def test_a_promise_is_read_from_the_first_cell(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, to_notebook('# %% [markdown] id="opening"\n# **Time:** an hour; about 75 s of machine time on two cores.\n'))
    assert run_nbval.promised(path) == 75
    write(path, to_notebook('# %% [markdown] id="opening"\n# Nothing about time.\n'))
    assert run_nbval.promised(path) == PROMISED_SECONDS


def test_the_command_fails_for_a_finding_of_the_lint(tmp_path, monkeypatch, capfd):
    write(tmp_path / "a.ipynb", to_notebook(EXACT))
    monkeypatch.setattr(run_nbval, "nbval", lambda paths, cell_seconds: 0)
    assert run_nbval.main([str(tmp_path / "a.ipynb")]) == 1
    assert "does not open with text" in capfd.readouterr().out
