"""The recipes of CONTRIBUTING.md work: each example is taken from the page and done with as the page says."""

import re
import sys
import types
from pathlib import Path

import cloudpickle
import lint_notebooks
import nbformat
import notebook_source
import publish
import pytest
import yaml

import tests.benchmarks
from helpers import claims, diagnose, offload, record
from helpers.diagnosis import catalogue
from helpers.exercises import Wrong
from tests.benchmarks import framework

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^```\w+ (\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))


@pytest.fixture
def example_module(monkeypatch):
    """The example of that name as an imported module, whose functions travel to ranks by value."""

    def made(name, package=""):
        module = types.ModuleType(f"{package}.{name}".lstrip("."))
        module.__package__ = package
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(EXAMPLES[name], f"CONTRIBUTING.md, {name}", "exec"), module.__dict__)
        return module

    return made


def test_every_recipe_has_an_example():
    assert set(EXAMPLES) == {"notebook", "exercise", "claim", "fault", "template", "benchmark"}


@pytest.mark.parametrize(
    "path",
    sorted(set(re.findall(r"`((?:tests|tools|data|notebooks)/[\w/.]+\.(?:py|yaml))`", TEXT)) - {"notebooks/solutions/NN.py"}),
)
def test_files_that_are_named_exist(path):
    assert (ROOT / path).is_file()


def test_the_notebook_is_published_and_has_no_findings(tmp_path):
    path = tmp_path / "13_ring.ipynb"
    nbformat.write(notebook_source.to_notebook(EXAMPLES["notebook"]), path)
    assert publish.main([str(path)]) == 0
    assert lint_notebooks.lint(path, []) == []
    (printed,) = nbformat.read(path, 4).cells[3].outputs
    assert printed.text == "[2, 0, 1]\n"


def test_the_exercise_judges_its_answers(example_module):
    module = example_module("exercise")
    cloudpickle.register_pickle_by_value(module)
    (exercise,) = module.EXERCISES
    try:
        assert exercise.check(exercise.answer)
        assert len(exercise.wrong) >= 2
        for wrong, message in exercise.wrong:
            with pytest.raises(Wrong, match=re.escape(message)):
                exercise.check(wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_the_claim_can_have_a_verdict(tmp_path, monkeypatch, capsys):
    entry = yaml.safe_load(EXAMPLES["claim"])
    known = yaml.safe_load((ROOT / "data" / "claims.yaml").read_text(encoding="utf-8"))
    assert not entry.keys() & known["claims"].keys()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "claims.yaml").write_text(
        yaml.safe_dump(known | {"claims": known["claims"] | entry}, allow_unicode=True)
    )
    monkeypatch.setattr(record, "ROOT", tmp_path)
    record.data.cache_clear()
    try:
        claims.verdict("E22", "fails", measured=0.8, expected=1)
        assert "E22 fails: Two ranks are always faster than one." in capsys.readouterr().out
    finally:
        record.data.cache_clear()


def test_the_template_places_every_layer(tmp_path):
    (tmp_path / "mine.yaml").write_text(EXAMPLES["template"])
    template = offload.template("mine", tmp_path)
    assert template.layers == {"cpu": 0.5, "disk": 0.5}
    assert template.use.startswith("half of the layers")


def test_the_benchmark_is_found_and_its_requirement_can_fail(example_module):
    module = example_module("benchmark", tests.benchmarks.__name__)
    findings = framework.benchmark(module.ring)(2)
    assert [row.name for row in findings.rows] == ["by hand", "library"]
    (claim,) = findings.claims
    assert claim.holds
    assert not framework.at_most(claim.text, 2000, claim.most).holds


def test_the_fault_is_told_from_its_example(tmp_path, monkeypatch):
    known = (ROOT / "data" / "faults.yaml").read_text(encoding="utf-8")
    (entry,) = yaml.safe_load(EXAMPLES["fault"]).items()
    assert entry[0] not in yaml.safe_load(known)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "faults.yaml").write_text(f"{known}\n{EXAMPLES['fault']}", encoding="utf-8")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    record.data.cache_clear()
    catalogue.faults.cache_clear()
    try:
        found = diagnose(entry[1]["example"])
        assert (found.fault, found.name, found.ranks) == (entry[0], entry[1]["name"], (2,))
        number, _, heading = found.section.partition(" · ")
        (notebook,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        headings = [
            line for cell in nbformat.read(notebook, 4).cells for line in cell.source.splitlines() if line.startswith("#")
        ]
        assert f"## {heading}" in headings
    finally:
        record.data.cache_clear()
        catalogue.faults.cache_clear()
