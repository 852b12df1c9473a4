"""Every notebooks/solutions/NN.py: the answer passes, also put into its stub; each wrong answer gets its message."""

import ast
import itertools
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from types import FunctionType

import cloudpickle
import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from notebook_files import course_notebooks, read
from publish import execute

from helpers import exercises, pipeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell
IDS = [id for id, _ in exercises.listed()]
NOTEBOOKS = {path.name[:2]: path for path in course_notebooks()}


def with_answer(source: str, id: str, answer: str) -> str:
    """A stub cell's source with the answer in place of the stub.

    The stub is the function, or the assignment of `...`, whose name the cell passes to `check`; `answer` is a function's source
    or an expression.
    """
    tree = ast.parse(source)
    call = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" and ast.literal_eval(node.args[0]) == id
    )
    name = call.args[1].id
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            replacement = answer
        elif isinstance(statement, ast.Assign) and [target.id for target in statement.targets] == [name]:
            replacement = f"{name} = {answer}"
        else:
            continue
        lines = source.splitlines()
        lines[statement.lineno - 1 : statement.end_lineno] = textwrap.dedent(replacement).splitlines()
        return "\n".join(lines)
    raise AssertionError(f"the cell of {id} passes {name} to check, but defines no stub of that name")


def test_the_stub_is_replaced_and_nothing_else():
    source = 'import torch\n\ndef job():\n    ...  # start here\n\ncheck("90.1", job)\nhint("90.1")'
    assert with_answer(source, "90.1", "def job():\n    return 1\n") == (
        'import torch\n\ndef job():\n    return 1\n\ncheck("90.1", job)\nhint("90.1")'
    )
    assert with_answer('guess = ...  # bytes\ncheck("90.2", guess)', "90.2", "4000") == 'guess = 4000\ncheck("90.2", guess)'


def test_ids_are_unique_and_belong_to_their_file():
    assert len(set(IDS)) == len(IDS)
    for file in exercises.SOLUTIONS.glob("[0-9][0-9].py"):
        listed = [exercise.id for exercise in exercises.load(file.stem)]
        assert listed == [f"{file.stem}.{number}" for number in range(1, len(listed) + 1)]


@pytest.mark.parametrize("id", IDS)
def test_an_answer_passes_its_own_check(id):
    exercise = exercises.find(id)
    found = exercises.judge(id, exercise.answer)
    assert found.state == "solved", f"{found.message}\n{found.error}"
    assert found.message


def orders_as_planned(rank, ranks, micro_batches):
    return tuple(pipeline.order("1F1B", ranks, micro_batches)[rank])


def sum_in_four_steps(mesh, tensor):
    import torch.distributed as dist

    local, across = mesh.get_group("local"), mesh.get_group("host")
    part = tensor.new_empty(len(tensor) // mesh["local"].size())
    dist.reduce_scatter_single(part, tensor, group=local)
    share = part.new_empty(len(part) // mesh["host"].size())
    dist.reduce_scatter_single(share, part, group=across)
    dist.all_gather_single(part, share, group=across)
    dist.all_gather_single(tensor, part, group=local)


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("04.3", {4, 2, 1}),
        ("04.5", np.float32(160 * 15e-3)),
        ("05.1", 7 / 0.1 - 7),
        ("05.2", orders_as_planned),
        ("05.4", {"pipeline": np.int64(8192), "tensor": 393216.0}),
        ("06.1", np.array([6, 3, 7, 2, 4, 1, 5, 0])),
        ("06.3", sum_in_four_steps),
        ("06.4", Fraction(28 * 10**9)),
        ("07.1", {"micro_batches": True, "checkpointing": "none", "chunks": 8.0}),
        ("07.5", np.int64(14_218_750_000)),
    ],
)
def test_right_answers_pass_however_they_are_written(id, answer):
    found = exercises.judge(id, answer)
    assert found.state == "solved", f"{found.message}\n{found.error}"


def test_the_answer_of_07_1_is_the_cheapest_choice_that_fits():
    exercise = exercises.find("07.1")
    names = exercise.check.__globals__
    fitting = {}
    for choice in itertools.product(*names["ALLOWED"].values()):
        if 8 // choice[0] >= names["LEAST_ROWS"]:
            use, multiplications, _ = names["training_run"](*choice)
            if use.peak <= names["BUDGET"]:
                fitting[choice] = multiplications, choice[0]
    assert fitting[tuple(exercise.answer.values())] == min(fitting.values())
    assert {choice[:2] for choice in fitting if fitting[choice] == min(fitting.values())} == {(1, "none")}


@pytest.mark.parametrize("id", IDS)
def test_wrong_answers_get_their_messages(id):
    exercise = exercises.find(id)
    assert len(exercise.wrong) >= 2
    assert exercise.hints
    for answer, message in exercise.wrong:
        found = exercises.judge(id, answer)
        said = f"{found.message}\n{found.error}"
        assert found.state == "wrong", f"{id}: {answer!r} passes"
        assert message in said, f"{id}: {answer!r} gets {said!r}"


@pytest.mark.parametrize("notebook", sorted({id[:2] for id in IDS}))
def test_answers_put_into_the_stubs_are_solved_in_a_kernel(notebook):
    """The set-up cells (tag `setup`) run, then each exercise cell with the answer in place of its stub."""
    if notebook not in NOTEBOOKS:
        pytest.skip(f"notebook {notebook} is not here yet")
    code = [cell for cell in read(NOTEBOOKS[notebook]).cells if cell.cell_type == "code"]
    setup = [cell for cell in code if "setup" in cell.metadata.get("tags", [])]
    solved = []
    for exercise in exercises.load(notebook):
        stub = next((cell for cell in code if f'check("{exercise.id}"' in cell.source), None)
        assert stub is not None, f"no cell of {NOTEBOOKS[notebook].name} checks {exercise.id}"
        solved.append(new_code_cell(with_answer(stub.source, exercise.id, exercise.source), id=f"solved-{len(solved)}"))
    outputs = outputs_of([*setup, *solved], NOTEBOOKS[notebook].parent)[-len(solved) :]
    for exercise, text in zip(exercises.load(notebook), outputs, strict=True):
        assert f"✔ {exercise.id} solved" in text


def outputs_of(cells: list[nbformat.NotebookNode], folder: Path) -> list[str]:
    """The text of each cell's outputs, executed one after the other in a fresh kernel."""
    executed = execute(new_notebook(cells=cells), folder)
    return ["\n".join(output.get("text") or output.data["text/plain"] for output in cell.outputs) for cell in executed.cells]


@pytest.mark.parametrize("id", IDS)
def test_a_solution_is_what_a_learner_could_write(id):
    exercise = exercises.find(id)
    tree = ast.parse(textwrap.dedent(exercise.source))
    if isinstance(exercise.answer, FunctionType):
        assert isinstance(tree.body[0], ast.FunctionDef)
    else:
        assert ast.literal_eval(tree.body[0].value) == exercise.answer
