"""What cannot be measured here is read from a recording that says where and when; with nothing recorded, that is said."""

import json

import pytest

from helpers import machine, recorded
from helpers.recorded import measured_or_recorded


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path / "recorded")
    monkeypatch.delenv("WORKSHOP_WRITE_RECORDINGS", raising=False)
    return tmp_path / "recorded"


def never():
    raise AssertionError("measured though it is not possible")


def test_a_measurement_is_taken_and_kept_only_when_asked(folder, monkeypatch, capsys):
    found = measured_or_recorded("link", lambda: {"200mbit": (1, 2)}, True, "")
    assert (found.values, found.here) == ({"200mbit": [1, 2]}, True)
    assert found.where == f"measured on {machine.describe().line}"
    assert not folder.exists()
    monkeypatch.setenv("WORKSHOP_WRITE_RECORDINGS", "1")
    measured_or_recorded("link", lambda: {"200mbit": (1, 2)}, True, "")
    again = measured_or_recorded("link", never, False, "no second host")
    page = json.loads((folder / "link.json").read_text())
    assert (again.values, again.here) == (found.values, False)
    assert again.where == f"recorded on {machine.describe().line}, {page['date']}"
    assert "Not measured here: no second host. What follows was recorded on" in capsys.readouterr().out


def test_without_a_recording_that_is_said():
    with pytest.raises(FileNotFoundError, match=r"no second host.*link\.json was never recorded"):
        measured_or_recorded("link", never, False, "no second host")
