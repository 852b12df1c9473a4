import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers import exercises, record

TOY = """
from helpers.exercises import Exercise, Wrong


def double(x):
    return 2 * x


def check_double(function):
    if function(3) == 3:
        raise Wrong("double(3) gave 3 < 6: multiply.")
    return "double(3) gave 6."


EXERCISES = [
    Exercise("90.1", "double a number", answer=double, hints=["Think.", "Multiply."], check=check_double, wrong=[]),
    Exercise("90.2", "name a number", answer=7, hints=["Seven."], check=lambda answer: "Right.", wrong=[]),
]
"""


@pytest.fixture(autouse=True)
def _toy_notebook(monkeypatch, tmp_path):
    (tmp_path / "90.py").write_text(TOY)
    (tmp_path / "91.py").write_text("raise RuntimeError('read only when one of its exercises is asked for')")
    monkeypatch.setattr(exercises, "SOLUTIONS", tmp_path)
    monkeypatch.setattr(exercises, "_hints_given", {})
    monkeypatch.setattr(exercises, "_checked_here", set())
    monkeypatch.setenv("WORKSHOP_RECORD", str(tmp_path / "record.jsonl"))
    exercises.listed.cache_clear()
    exercises.load.cache_clear()
    yield
    exercises.listed.cache_clear()
    exercises.load.cache_clear()


def stub(model):
    """With a docstring."""
    # and a comment
    ...


def closure_stub():
    outside = 1

    def inner():
        ...
        return outside

    def stub_only(): ...

    return inner, stub_only


UNANSWERED = [..., None, stub, closure_stub()[1], lambda: ..., (1, ...), {"q_proj": "colwise", "o_proj": ...}]


@pytest.mark.parametrize("answer", UNANSWERED)
def test_what_is_still_the_stub_is_not_answered_and_not_noted(answer, capsys):
    exercises.check("90.1", answer)
    assert capsys.readouterr().out.startswith("… 90.1 not answered yet. Replace the ... above")
    assert record.notes("exercise") == []


@pytest.mark.parametrize("answer", [0, "", [], {"axis": None}, closure_stub()[0], lambda x: 2 * x, lambda x: print(x)])
def test_what_holds_something_is_an_answer(answer):
    assert not exercises.unanswered(answer)


def test_a_right_answer_is_confirmed_and_noted(capsys):
    exercises.check("90.1", lambda x: x + x)
    assert capsys.readouterr().out == "✔ 90.1 solved. double(3) gave 6.\n"
    assert [(note["name"], note["state"]) for note in record.notes("exercise")] == [("90.1", "solved")]


def test_a_wrong_answer_gets_its_message_and_is_noted(capsys):
    exercises.check("90.1", lambda x: x)
    assert capsys.readouterr().out == "✘ 90.1 wrong. double(3) gave 3 < 6: multiply.\n"
    assert record.notes("exercise")[0]["state"] == "wrong"


def test_an_answer_that_raises_shows_its_line_and_does_not_raise(capsys):
    def halves(x):
        return x / 0

    exercises.check("90.1", halves)
    said = capsys.readouterr().out
    assert "could not be judged" in said
    assert "return x / 0" in said
    assert said.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_value_where_a_function_is_asked_for_is_said():
    found = exercises.judge("90.1", 5)
    assert (found.state, found.error) == ("wrong", "")
    assert "is a function, itself and not its result; yours is a int" in found.message


@pytest.mark.parametrize(
    ("answer", "number"),
    [(3, 3), (2.5, 2.5), (np.float32(2.5), 2.5), (torch.tensor(3), 3), (Fraction(5, 2), 2.5), (0, 0)]
    + [(none, None) for none in (True, math.nan, math.inf, 10**400, "3", [3], np.ones(2), torch.ones(2), 1j, None)],
)
def test_numbers_are_known_however_they_were_made(answer, number):
    assert exercises.as_number(answer) == number


def test_a_job_that_fails_when_the_check_runs_it_shows_its_own_error(monkeypatch):
    from helpers.launching.errors import LaunchError

    def run_it(job):
        raise LaunchError("rank 1 of 2 raised ValueError: no such dim")

    toy = exercises.find("90.1")
    monkeypatch.setattr(exercises, "find", lambda id: exercises.Exercise(id, toy.task, toy.answer, toy.hints, run_it, toy.wrong))
    found = exercises.judge("90.1", lambda: 1)
    assert (found.state, found.error) == ("wrong", "rank 1 of 2 raised ValueError: no such dim")
    assert "your job" in found.message


@pytest.mark.parametrize("ask", [lambda id: exercises.check(id, 1), exercises.hint, exercises.solution])
def test_an_unknown_exercise_names_the_nearest(ask):
    with pytest.raises(ValueError, match=r"no exercise '90\.3'; nearest: 90\.\d, 90\.\d"):
        ask("90.3")


def test_an_id_that_is_no_text_is_an_unknown_exercise():
    with pytest.raises(ValueError, match=r"no exercise 90\.1"):
        exercises.check(90.1, 1)


def test_hints_come_one_after_the_other_and_the_last_stays(capsys):
    for _ in range(3):
        exercises.hint("90.1")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "Hint 1 of 2 (another call shows the next): Think."
    assert second == third == 'Hint 2 of 2 (the last one; solution("90.1") shows an answer): Multiply.'


def test_a_solution_is_the_source_of_a_function_or_the_value(capsys):
    exercises.solution("90.1")
    exercises.solution("90.2")
    assert capsys.readouterr().out == "def double(x):\n    return 2 * x\n7\n"


def test_progress_lists_all_exercises_and_what_was_solved_stays_solved(capsys):
    exercises.check("90.1", lambda x: 2 * x)
    exercises.check("90.1", lambda x: x)
    exercises.check("90.2", 8)
    capsys.readouterr()
    exercises.progress()
    assert capsys.readouterr().out.splitlines() == [
        "2 of 2 exercises solved",
        "90.1  double a number  ✔ solved",
        "90.2  name a number    ✔ solved",
    ]


def test_progress_before_anything_was_tried(capsys):
    exercises.check("90.1", lambda x: x)
    capsys.readouterr()
    exercises.progress()
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 exercises solved",
        "90.1  double a number  ✘ not solved yet",
        "90.2  name a number    – not tried yet",
    ]


def test_progress_lists_the_notebook_at_work_and_counts_the_others(capsys, tmp_path):
    (tmp_path / "89.py").write_text('EXERCISES = [Exercise("89.1", "halve"), Exercise("89.2", "add")]')
    exercises.check("90.1", lambda x: 2 * x)
    capsys.readouterr()
    exercises.progress()
    assert capsys.readouterr().out.splitlines() == [
        "1 of 4 exercises solved",
        "89                     – 0 of 2 solved",
        "90.1  double a number  ✔ solved",
        "90.2  name a number    – not tried yet",
    ]


def test_messages_are_escaped_where_they_become_html(monkeypatch):
    cards = []
    monkeypatch.setattr(record.Card, "show", lambda card: cards.append(card))
    exercises.check("90.1", lambda x: x)
    assert "gave 3 &lt; 6" in cards[0]._repr_html_()
