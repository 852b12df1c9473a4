import json
import subprocess
import sys

import pytest

from helpers import record


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("WORKSHOP_RECORD", raising=False)
    monkeypatch.setattr(record, "_memory", [])


def test_outside_my_notebooks_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    record.note("exercise", "00.1", state="solved")
    assert record.notes("exercise") == [{"kind": "exercise", "name": "00.1", "state": "solved"}]
    assert list(tmp_path.rglob("*")) == [tmp_path / "notebooks"]


def test_my_notebooks_and_its_folders_share_one_file(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "my_notebooks" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my_notebooks")
    record.note("exercise", "00.1", state="wrong")
    monkeypatch.chdir("mine")
    record.note("claim", "P2", reason="für alle", outcome="fails")
    assert [note["name"] for kind in ("exercise", "claim") for note in record.notes(kind)] == ["00.1", "P2"]
    assert record.notes("claim")[0]["reason"] == "für alle"
    assert [path.name for path in (tmp_path / "my_notebooks").glob("*.jsonl")] == [".record.jsonl"]


def test_the_variable_names_another_file_in_a_folder_that_need_not_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_RECORD", str(tmp_path / "new" / "record.jsonl"))
    assert record.notes("exercise") == []
    record.note("exercise", "00.1", state="solved")
    assert json.loads((tmp_path / "new" / "record.jsonl").read_text())["state"] == "solved"


def test_a_line_cut_short_by_a_crash_is_left_out(monkeypatch, tmp_path):
    file = tmp_path / "record.jsonl"
    monkeypatch.setenv("WORKSHOP_RECORD", str(file))
    record.note("exercise", "00.1", state="solved")
    file.write_text(file.read_text() + '{"kind": "exer')
    assert [note["name"] for note in record.notes("exercise")] == ["00.1"]


def test_kernels_that_write_at_the_same_time_lose_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_RECORD", str(tmp_path / "record.jsonl"))
    code = "import sys; from helpers import record; [record.note('exercise', sys.argv[1], number=n) for n in range(200)]"
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=record.ROOT) for name in ("00.1", "00.2", "00.3")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    for name in ("00.1", "00.2", "00.3"):
        assert [note["number"] for note in record.notes("exercise") if note["name"] == name] == list(range(200))


def test_what_a_crash_left_harms_neither_what_was_there_nor_what_comes(monkeypatch, tmp_path):
    """A line cut anywhere, even within a character that an earlier version wrote, and separators that are no line's end."""
    file = tmp_path / "record.jsonl"
    monkeypatch.setenv("WORKSHOP_RECORD", str(file))
    record.note("claim", "P1", reason="für\u2028alle\u0085")
    assert file.read_bytes().isascii()
    file.write_bytes(file.read_bytes() + '{"kind": "claim", "name": "f\u00fc'.encode()[:-1])
    record.note("claim", "P2", reason="later")
    assert [(note["name"], note["reason"]) for note in record.notes("claim")] == [("P1", "für\u2028alle\u0085"), ("P2", "later")]
