"""The instructor's guide agrees with the notebooks: each is listed, with its minutes, its exercises and where people stumble."""

import re
from collections import Counter

import pytest
from notebook_files import NOTEBOOKS, course_notebooks, promised, read

from helpers import exercises

GUIDE = (NOTEBOOKS / "INSTRUCTOR.md").read_text(encoding="utf-8")
ROWS = {
    number: (int(minutes), int(seconds), int(count))
    for number, minutes, seconds, count in re.findall(
        r"^\| (\d\d) [^|]+\| (\d+) \| (\d+) \| [^|]+ \| (\d+) \|$", GUIDE, re.MULTILINE
    )
}
NUMBERS = [path.name[:2] for path in course_notebooks()]


def test_every_notebook_has_a_row_and_a_paragraph():
    assert list(ROWS) == NUMBERS
    assert re.findall(r"^\*\*(\d\d)\*\* Ask: ", GUIDE, re.MULTILINE) == NUMBERS


@pytest.mark.parametrize("path", course_notebooks(), ids=lambda path: path.name[:2])
def test_times_and_exercises_are_those_of_the_notebook(path):
    minutes, seconds, count = ROWS[path.name[:2]]
    opening = read(path).cells[0].source
    assert re.search(rf"\*\*Time:\*\* {minutes} minutes", opening)
    assert seconds <= promised(path), "the opening promises less machine time than the guide has"
    assert count == Counter(id[:2] for id, _ in exercises.listed())[path.name[:2]]


def test_exercises_that_are_named_exist():
    named = re.findall(r"[Ee]xercise (\d\d\.\d+)", GUIDE)
    assert named
    assert set(named) <= {id for id, _ in exercises.listed()}


def test_the_sum_of_all_is_what_the_guide_says():
    assert "ten hours for people and eleven minutes for the machine" in GUIDE.replace("\n", " ")
    assert round(sum(minutes for minutes, _, _ in ROWS.values()) / 60) == 10
    assert round(sum(seconds for _, seconds, _ in ROWS.values()) / 60) == 11
