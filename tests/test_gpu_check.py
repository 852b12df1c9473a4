"""`make gpu-check` without a GPU says so and writes nothing; its measurements run on the CPU; what it keeps is shown, marked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import gpu_measurements
import pytest
from notebook_files import named_or_all, read

from helpers import machine, recorded

ROOT = Path(__file__).resolve().parents[1]
GPU = machine.Gpu(0, "a made-up GPU", "GPU-0", 2**34)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    return tmp_path / "recorded"


@pytest.fixture
def made_up(monkeypatch):
    """A machine with a GPU, of which the driver tells and nothing else; tests pass, measuring gives what the test says."""
    given = {"gpu_levers": lambda: [["plain", 1.5, 2, None, 4.0]]}
    monkeypatch.setattr(machine, "gpus", lambda: (GPU,))
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "_ask_driver", lambda visible: ((GPU,), ()))
    monkeypatch.setattr(gpu_check, "tests", lambda: 0)
    monkeypatch.setattr(gpu_check, "measurements", lambda: given)
    return given


def test_without_a_gpu_it_says_that_nothing_was_recorded_and_writes_nothing(folder, tmp_path, capsys):
    assert gpu_check.main(["--into", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("Nothing was recorded: no NVIDIA GPU here")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu"])  # a CPU's numbers would be taken for a GPU's
    assert "--device cpu needs --into" in capsys.readouterr().err


def test_the_measurements_run_on_a_cpu(tmp_path):
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--into", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("gpu_*.json")}
    assert set(pages) == {"gpu_arithmetic", "gpu_transfers", "gpu_levers", "gpu_tokens", "gpu_all_reduce"}
    for name, page in pages.items():
        assert page["machine"].endswith("no GPU")
        assert page["values"]["columns"] == gpu_measurements.COLUMNS[name]
        for _, *values in page["values"]["rows"]:
            assert len(values) == len(page["values"]["columns"]) - 1
            assert all(value is None or value > 0 for value in values)
    levers = {row[0]: row[1:] for row in pages["gpu_levers"]["values"]["rows"]}
    assert levers.keys() == gpu_measurements.LEVERS.keys()
    assert levers["full checkpointing"][1] < levers["plain, FP32"][1]
    assert all(row[2:] == [None, None] for row in levers.values())  # a CPU has no caching allocator


def test_what_was_recorded_is_shown_with_machine_and_date(folder, made_up, capsys):
    recorded.table("gpu_levers", "Steps")
    assert capsys.readouterr().out == "Steps: not recorded yet.\n  `make gpu-check` on a machine with an NVIDIA GPU records it.\n"
    assert gpu_check.main(["--into", str(folder)]) == 0
    page = json.loads((folder / "gpu_levers.json").read_text())
    assert "a made-up GPU" in page["machine"]
    capsys.readouterr()
    recorded.table("gpu_levers", "Steps")
    assert capsys.readouterr().out.splitlines() == [
        f"Steps; recorded on {page['machine']}, {page['date']}:",
        "  training step   ms  MiB of tensors  MiB allocated  MiB reserved",
        "  plain          1.5               2              –             4",
    ]


def test_nothing_is_recorded_where_a_test_fails(folder, made_up, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "tests", lambda: 1)
    assert gpu_check.main(["--into", str(folder)]) == 1
    assert "Nothing was recorded: the tests in tests/gpu ended with exit code 1." in capsys.readouterr().out
    assert not folder.exists()


def test_a_measurement_that_fails_is_named_and_the_others_are_kept(folder, made_up, capsys):
    def fails():
        raise MemoryError("too much")

    made_up["gpu_tokens"] = fails
    assert gpu_check.main(["--into", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "gpu_tokens: MemoryError: too much" in captured.err
    assert "FAILED: gpu_tokens" in captured.out
    assert [file.name for file in folder.iterdir()] == ["gpu_levers.json"]


def test_on_a_gpu_the_allocator_is_asked_by_the_notebooks_own_cell(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: (GPU,))
    assert {"gpu_allocator", "gpu_levers", "gpu_tokens"} <= set(gpu_check.measurements())
    assert "gpu_all_reduce" not in gpu_check.measurements()  # a single GPU has nobody to talk to


@pytest.mark.parametrize(("hole", "outcome"), [(8, "holds"), (1, "fails"), (64, "fails"), (None, "not testable here")])
def test_the_notebook_shows_a_recorded_snapshot_and_does_without(folder, hole, outcome, capsys):
    """The cells of claim A15, with a made-up allocator in the place of CUDA's."""
    cells = {cell.id: cell.source for cell in read(named_or_all(["07"])[0]).cells}
    mib = 2**20
    parts = [{"size": (hole or 0) * mib, "state": "inactive"}, {"size": 8 * mib, "state": "active_allocated"}]
    cuda = SimpleNamespace(memory_snapshot=lambda: [{"total_size": 20 * mib, "blocks": parts}] * 16)
    torch = SimpleNamespace(cuda=cuda, uint8=None, empty=lambda size, **_: SimpleNamespace(nbytes=size))
    told = []
    names = {
        "torch": torch,
        "machine": SimpleNamespace(device=lambda: SimpleNamespace(type="cpu")),
        "launch": None,
        "table": recorded.table,
        "verdict": lambda *arguments, **more: told.append((arguments, more)),
        "measured_or_recorded": recorded.measured_or_recorded,
    }
    exec(cells["fragmented"].partition("\n\n\n")[0], names)
    if hole:
        recorded.write("gpu_allocator", names["fragmented"](), folder)
    exec(cells["fragmented"], names)
    ((claim, found), more), printed = told[0], capsys.readouterr().out
    assert (claim, found) == ("A15", outcome)
    if hole:
        free = f"{16 * hole} MiB free in pieces of at most {hole} MiB, recorded on {machine.describe().line}"
        assert more["measured"].startswith(free)
        assert "Not measured here: there is no GPU here. What follows was recorded on" in printed
        assert f"a segment of 20 MiB: {hole} inactive, 8 active_allocated" in printed
    else:
        assert printed.count("not recorded yet") == 3
