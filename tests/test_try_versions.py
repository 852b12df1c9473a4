"""The supported ranges are stated in one place, told to readers as they are, and tried at both ends."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import try_versions
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def test_what_is_stated_is_what_is_tried():
    found = try_versions.ranges()
    assert set(found) == {"torch", "transformers", "accelerate"}
    readme = (ROOT / "README.md").read_text()
    for wanted in found.values():
        operators = "|".join(each.operator for each in wanted.specifier)
        assert len(re.findall(rf"`{wanted.name}(?:{operators})[^`]*`", readme)) == 1
        stated = Requirement(re.search(rf"`({wanted.name}(?:{operators})[^`]*)`", readme)[1])
        assert stated.specifier == wanted.specifier, f"README.md says {stated}, pyproject.toml {wanted}"
    assert [each.operator for each in found["torch"].specifier] == ["=="]  # one minor version: nothing to try
    for name in try_versions.TRIED:
        assert found[name].specifier.contains(try_versions.oldest(found[name]).partition("==")[2])
    assert try_versions.candidates()["newest"] == [str(found[name]) for name in try_versions.TRIED]
    assert all((ROOT / test).is_file() for test in try_versions.TESTS)


def test_there_is_a_command_for_it():
    assert re.search(
        r"^versions: set-up ##.*\n\t@\$\(RUN\) tools/try_versions.py$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )


def test_a_range_without_an_oldest_version_is_refused():
    with pytest.raises(ValueError, match="names no oldest version"):
        try_versions.oldest(Requirement("transformers<5.20"))


@pytest.mark.parametrize(("passes", "code", "result"), [(True, 0, "passed"), (False, 1, "FAILED")])
def test_the_table_tells_what_was_tried(monkeypatch, capsys, passes, code, result):
    installed = {name: importlib.metadata.version(name) for name in try_versions.SHOWN}
    monkeypatch.setattr(try_versions, "candidates", lambda: {"oldest": ["old"], "newest": ["new"]})
    monkeypatch.setattr(try_versions, "overlay", lambda folder, wanted: {"transformers": "5.0"} if wanted == ["old"] else {})
    monkeypatch.setattr(try_versions, "passes", lambda folder: passes)
    assert try_versions.main([]) == code
    oldest, newest = capsys.readouterr().out.splitlines()[1:]
    assert re.split(" {2,}", oldest)[:5] == ["oldest", installed["torch"], "5.0", installed["accelerate"], result]
    assert re.split(" {2,}", newest)[2:5] == [installed["transformers"], installed["accelerate"], "installed: make test"]


def test_packages_of_the_folder_come_first_and_what_they_lack_is_found(tmp_path):
    about = tmp_path / "accelerate-0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    lines = [
        "Name: accelerate",
        "Version: 0.1",
        "Requires-Dist: numpy<1",
        "Requires-Dist: packaging",
        'Requires-Dist: no-such; extra == "x"',
    ]
    about.write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    (tmp_path / "accelerate.py").write_text("")
    code = "import accelerate, importlib.metadata as m; print(accelerate.__file__, m.version('accelerate'))"
    run = {"capture_output": True, "text": True, "check": True, "env": try_versions.environment(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], **run).stdout.split() == [str(tmp_path / "accelerate.py"), "0.1"]
    assert subprocess.run([sys.executable, "-c", try_versions.UNMET, str(tmp_path)], **run).stdout.split() == ["numpy<1"]
    assert os.environ.get("PYTHONPATH") != run["env"]["PYTHONPATH"]
