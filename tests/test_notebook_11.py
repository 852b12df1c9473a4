"""Notebook 11: the answer of the exercise that asks for a rank is what the notebook's own job shows."""

import collections

import torch
import torch.distributed as dist
from notebook_files import course_notebooks, read

from helpers import corpus, diagnosis, exercises, launch


def job_of(cell_id, name, file):
    """The function with which this cell of the notebook begins, its lines in `file`, where records of a job find them."""
    path = next(path for path in course_notebooks() if path.name.startswith("11_"))
    source = next(cell.source for cell in read(path).cells if cell.id == cell_id)
    file.write_text(source[: source.index("\n\n\n")])
    namespace = {"__name__": "__main__", "dist": dist, "torch": torch, "corpus": corpus}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return namespace[name]


def test_one_rank_of_the_night_report_passes_its_lines_in_another_order(tmp_path):
    answer = exercises.find("11.5").answer
    job = job_of("exercise-5", "night_report", tmp_path / "night.py")
    found = diagnosis.mismatch(launch(job, ranks=5, backend="gloo"))
    assert found.what == "source"
    lines = {rank: issued.source.partition(": ")[2] for rank, issued in found.rows.items()}
    usual = collections.Counter(lines.values()).most_common(1)[0][0]
    assert usual == "dist.all_reduce(tokens)"
    assert {rank: line for rank, line in lines.items() if line != usual} == {
        answer["rank"]: f"dist.all_reduce({answer['sums there']})"
    }
