import ast
import json
import re

import numpy
import pytest
from notebook_files import course_notebooks, read

from helpers import claims, machine, record

IDS = [f"E{n}" for n in range(1, 22)] + [f"A{n}" for n in range(1, 17)] + [f"P{n}" for n in range(1, 8)]


@pytest.fixture(autouse=True)
def _own_record(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_RECORD", str(tmp_path / "record.jsonl"))


def test_every_claim_of_the_three_articles_is_listed_once_and_in_order():
    assert list(claims.load()) == IDS
    assert len(IDS) == 44


def test_every_claim_says_something_and_belongs_to_notebooks_of_the_course():
    for claim in claims.load().values():
        assert len(claim.claim) > 20
        assert claim.article
        assert claim.notebooks
        assert all(re.fullmatch("0[1-9]|1[0-2]", notebook) for notebook in claim.notebooks)


def test_a_verdict_shows_claim_figures_and_reason(capsys):
    claims.verdict("P2", "fails", measured=1.0, expected="1/2 of the parameters", reason="the wrapper splits nothing")
    said = capsys.readouterr().out
    assert said.startswith("✘ P2 fails: ")
    assert "DistributedDataParallel" in said
    assert said.rstrip().endswith("measured 1, expected 1/2 of the parameters: the wrapper splits nothing")


@pytest.mark.parametrize(
    ("measured", "text"),
    [(13_116_416, "13,116,416"), (1.93456, "1.935"), ("1.8 ms", "1.8 ms"), (numpy.float32(0.5), "0.5"), (numpy.int64(7), "7")],
)
def test_a_measured_figure_is_written_for_people(measured, text):
    claims.verdict("E15", "holds", measured=measured)
    assert claims.states()["E15"]["measured"] == text


def test_the_latest_verdict_counts_and_only_this_machines(monkeypatch):
    claims.verdict("E3", "undecided", measured=1.0)
    claims.verdict("E3", "holds only if", measured=1 / 4, reason="the forward pass is inside no_sync")
    assert claims.states()["E3"]["outcome"] == "holds only if"

    elsewhere = machine.describe()
    monkeypatch.setattr(type(elsewhere), "line", property(lambda self: "8 cores, 1 × NVIDIA H200"))
    assert claims.states() == {}
    claims.verdict("E3", "fails", measured=1)
    assert claims.states()["E3"]["outcome"] == "fails"


def test_the_page_has_every_claim_with_its_state(capsys):
    claims.verdict("A2", "holds only if", measured="24.2 GiB", expected="26 GB", reason="weights alone are counted")
    capsys.readouterr()
    claims.page()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"1 of 44 claims tried on {machine.describe().line}"
    rows = {line.split()[0]: line for line in lines if line.split()[0] in IDS}
    assert list(rows) == IDS
    assert "◐ holds only if" in rows["A2"]
    assert sum("not run here" in row for row in rows.values()) == 43
    assert "     measured 24.2 GiB, expected 26 GB; only if weights alone are counted" in lines


def test_the_page_is_a_table_in_a_notebook(monkeypatch):
    cards = []
    monkeypatch.setattr(record.Card, "show", lambda card: cards.append(card))
    claims.page()
    shown = cards[0]._repr_html_()
    assert shown.count("<tr>") == 1 + 44
    assert "<th style=text-align:left>what the article says</th></tr><tr><td style=text-align:left>E1</td>" in shown
    assert "<code>vllm serve" in shown
    assert record.table([("a < b", "`x`")]) == (
        "<table><tr><td style=text-align:left>a &lt; b</td><td style=text-align:left><code>x</code></td></tr></table>"
    )


def test_published_verdicts_are_those_shown_in_committed_outputs(monkeypatch, tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    claims.load()  # from the course's own data

    def cell(*texts):
        return {"cell_type": "code", "outputs": [{"output_type": "display_data", "data": {"text/plain": text}} for text in texts]}

    cells = [cell("✘ E3 fails: How often\n  measured 1", ["◐ E3 holds only ", "if: How often"]), cell("✔ 03.1 solved. Right"), {}]
    (tmp_path / "notebooks" / "03_x.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    (tmp_path / "notebooks" / "11_y.ipynb").write_text(
        json.dumps({"cells": [cell("– E3 not testable here: How often")]}), encoding="utf-8"
    )
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert claims.published() == {"E3": {"03": "holds only if", "11": "not testable here"}}
    claims.page()
    said = capsys.readouterr().out
    assert "published 03: holds only if, 11: not testable here" in said
    assert "published 02: no verdict" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("P9", "fails", 1), "no claim 'P9'; nearest: P7"),
        (("p2", "maybe", 1), "no claim 'p2'; nearest: P2"),
        (("P2", "true", 1), "outcome is 'true'; it must be one of 'holds', 'holds only if', 'fails'"),
        (("P2", "fails"), "'fails' on P2 needs measured="),
        (("P2", "holds only if", 1), "'holds only if' on P2 needs reason=: the condition"),
        (("P2", "not testable here"), "'not testable here' on P2 needs reason=: why"),
    ],
)
def test_a_verdict_that_says_too_little_is_refused_and_not_noted(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        claims.verdict(*arguments)
    assert record.notes("claim") == []


def test_every_claim_is_named_by_the_code_of_a_notebook_that_tries_it():
    named = {}
    for file in course_notebooks():
        code = [ast.parse(cell.source) for cell in read(file).cells if cell.cell_type == "code"]
        constants = [node.value for cell in code for node in ast.walk(cell) if isinstance(node, ast.Constant)]
        named[file.name[:2]] = {each for each in constants if each in IDS}
    known = claims.load().values()
    assert [each.id for each in known if not any(each.id in named.get(number, ()) for number in each.notebooks)] == []


def test_every_claim_shows_a_verdict_in_the_committed_outputs():
    assert [id for id in IDS if id not in claims.published()] == []
