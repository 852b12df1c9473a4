"""The folder for machines without a network: the tracked files, a script that uses nothing else, and clear refusals."""

import os
import subprocess
import sys

import offline
import pytest
import set_up


@pytest.fixture
def asked(monkeypatch):
    """Instead of pip, note what it is asked for."""
    calls = []

    def pip(venv, *arguments):
        where = arguments[arguments.index("--constraint") + 1]
        with open(where) as file:
            calls.append((arguments, file.read()))

    monkeypatch.setattr(set_up, "pip", pip)
    return calls


def test_the_course_and_its_packages_in_one_folder(tmp_path, asked):
    size = offline.pack(tmp_path / "away")
    course = tmp_path / "away" / "course"
    listed = subprocess.run(["git", "-C", str(offline.ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    there = {str(path.relative_to(course)) for path in course.rglob("*") if path.is_file()}
    assert there == {name for name in listed.splitlines() if (offline.ROOT / name).exists()}
    assert size > (course / "data" / "tiny_ernie" / "model.safetensors").stat().st_size
    ((arguments, constraints),) = asked
    assert any(each.startswith("torch==") for each in arguments)
    assert any(each.startswith("pytest") for each in arguments)
    installed = dict(line.split("==") for line in constraints.splitlines())
    assert installed["ipykernel"] == offline.metadata.version("ipykernel")
    assert set_up.project()["name"] not in installed
    assert not (tmp_path / "away" / "constraints.txt").exists()


def test_the_script_installs_from_its_own_folder(tmp_path, asked):
    """With a stand-in for make that says what it was given."""
    model = tmp_path / "ERNIE-tiny"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    away = tmp_path / "with space"
    offline.pack(away, model)
    (away / "wheels").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "make").write_text(
        '#!/bin/sh\necho "$PWD|$PIP_NO_INDEX|$PIP_FIND_LINKS|$(cd "$PIP_FIND_LINKS" && pwd)|$WORKSHOP_MODEL|$*"\n'
    )
    (tools / "make").chmod(0o755)
    environment = dict(os.environ, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    said = subprocess.run(
        ["sh", str(away / "start.sh"), "doctor"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == f"{away}/course|1|../wheels|{away}/wheels|{away}/model/ERNIE-tiny|doctor"
    assert (away / "model" / "ERNIE-tiny" / "model.safetensors").read_bytes() == b"weights"


def test_nothing_is_overwritten_and_a_model_must_be_one(tmp_path, asked, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert offline.main(["--into", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert offline.main(["--into", str(tmp_path / "new"), "--model", str(tmp_path)]) == 1
    assert "holds no *.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]
    assert asked == []


@pytest.mark.skipif(sys.platform != "linux", reason="the sentence names the system")
def test_the_script_says_which_machines_it_serves(tmp_path, asked):
    offline.pack(tmp_path / "away")
    assert f"Python {sys.version.split()[0]} on linux" in (tmp_path / "away" / "start.sh").read_text()
