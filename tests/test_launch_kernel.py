"""`launch` in real notebook kernels: cells, interrupts at any moment, killed kernels, several at once, the live panel."""

import contextlib
import glob
import os

import pytest
import stress_launch
from launch_support import descendants, folders_of, kernel, running, wait_until, warm_processes, working_in
from stress_launch import interrupt_once

SOON = 30.0  # seconds; ten times what may pass until nothing is left

ADD_UP = """
def add_up(here=1):
    import torch, torch.distributed as dist
    total = torch.tensor([float(here)])
    dist.all_reduce(total)
    return total.item()
"""


@pytest.fixture(scope="module")
def notebook():
    """A kernel without anybody who looks at it, as under nbclient; it knows `add_up`."""
    with kernel() as opened:
        opened.run(ADD_UP)
        yield opened


def works(notebook):
    reply = notebook.run("print(launch(add_up).results)")
    assert (reply.text, reply.error) == ("[2.0, 2.0]\n", None)


# ---------------------------------------------------------------------------------------------------------------------- cells


def test_a_function_uses_what_other_cells_define(notebook):
    notebook.run("import math\nimport collections as col\nLIMIT = 3")
    notebook.run(
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    size: int = 2\n"
        "    def area(self):\n"
        "        return self.size * LIMIT\n"
        "def helper(config):\n"
        "    return col.Counter('aab')['a'] + config.area()"
    )
    notebook.run(
        "def outer(k):\n    def job(config):\n        return config, helper(config) * k + math.floor(2.5)\n    return job"
    )
    reply = notebook.run("run = launch(outer(10), Config(5))\nprint(run.results[1][1], type(run.results[0][0]) is Config)")
    assert (reply.text, reply.error) == ("172 True\n", None)
    reply = notebook.run("LIMIT = 4\nprint(run.results[0][0].area(), launch(lambda: helper(Config(1))).results)")
    assert reply.text == "20 [6, 6]\n"


def test_a_whole_number_of_numpy_is_a_number_of_ranks(notebook):
    reply = notebook.run("import numpy\nprint(launch(add_up, ranks=numpy.int64(3)).results)")
    assert (reply.text, reply.error) == ("[3.0, 3.0, 3.0]\n", None)


def test_a_traceback_shows_the_lines_of_its_cells_and_none_of_ours(notebook):
    notebook.run("def inner(x):\n    return 1 / x")
    reply = notebook.run("# a comment\n\ndef job():\n    return inner(0)\nlaunch(job)")
    name, value, shown = reply.error
    assert name == "RankFailed"
    assert "line 4, in job\n    return inner(0)\n" in value
    assert "line 2, in inner\n    return 1 / x\n" in value
    assert 'File "<cell ' in value
    assert "ipykernel_" not in value
    assert shown == f"RankFailed: {value}"
    source = notebook.run(
        "def job():\n  import torch.distributed as dist\n  dist.barrier()\nprint(launch(job).collectives[0].source)"
    )
    assert source.text.strip().startswith("cell ")
    assert source.text.strip().endswith(", line 3: dist.barrier()")


def test_a_hang_shows_the_line_of_the_cell(notebook):
    code = (
        "import time\n"
        "def job():\n"
        "    import torch.distributed as dist\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(1000)\n"
        "    dist.barrier()\n"
        "try:\n"
        "    launch(job, timeout=1)\n"
        "except RanksHung as error:\n"
        "    print(error.rank, error.stacks[1], error)"
    )
    reply = notebook.run(code)
    assert reply.text.startswith("1 ['cell ")
    assert ", line 5: time.sleep(1000)']" in reply.text
    assert ", line 6: dist.barrier()" in reply.text


def test_without_anybody_looking_lines_are_plain_and_the_run_is_shown_once(notebook):
    reply = notebook.run("def job():\n    print('hello')\nlaunch(job, ranks=3)")
    assert reply.text == "[0] hello\n[1] hello\n[2] hello\n"
    assert len(reply.shown) == 1
    assert reply.shown[0]["text/plain"].startswith("job on 3 ranks, cpu, gloo")
    assert "<table>" in reply.shown[0]["text/html"]


# ----------------------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_at_any_moment_ends_the_job_and_only_the_job():
    outcome = stress_launch.interrupts(12)
    assert outcome.right == outcome.runs, str(outcome)
    assert max(outcome.seconds) < SOON


def test_an_interrupt_while_the_warm_process_still_starts():
    with kernel() as notebook:
        notebook.run(ADD_UP)
        interrupt_once(notebook, "while True:\n    launch(add_up)", 0.05)
        works(notebook)
        assert len(warm_processes(notebook.pid)) == 1


def test_a_launch_outside_the_main_thread_works_and_is_not_interrupted(notebook):
    code = (
        "import threading\n"
        "results = []\n"
        "thread = threading.Thread(target=lambda: results.append(launch(add_up).results))\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(results)"
    )
    assert notebook.run(code).text == "[[2.0, 2.0]]\n"


# ------------------------------------------------------------------------------------------------------------- killed kernels

RUNNING = """
import os, subprocess, time
os.chdir({folder!r})
def job():
    import torch, torch.distributed as dist
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    dist.barrier()
    print("running", flush=True)
    time.sleep(1000)
launch(job)
"""


def kill_and_look(notebook, folder):
    """Kill the kernel; nothing of it may be left, in processes or folders."""
    below = descendants(notebook.pid)
    assert below
    notebook.kill()
    wait_until(lambda: not any(map(running, below)), "the warm process and its ranks are gone", SOON)
    wait_until(lambda: not working_in(folder), "what the ranks started is gone", SOON)
    wait_until(lambda: not folders_of(notebook.pid), "its folders are gone", SOON)


def test_a_kernel_killed_during_a_job_leaves_nothing(tmp_path):
    with kernel() as notebook:
        notebook.start(RUNNING.format(folder=str(tmp_path)))
        wait_until(lambda: len(working_in(tmp_path)) == 5, "the kernel, two ranks and what each of them started run")
        kill_and_look(notebook, tmp_path)


def test_ranks_that_were_not_forked_end_with_an_interrupt_and_with_the_kernel(tmp_path):
    with kernel(WORKSHOP_START_METHOD="spawn") as notebook:
        notebook.run(ADD_UP)
        interrupt_once(notebook, RUNNING.format(folder="."), "running")
        works(notebook)
        notebook.start(RUNNING.format(folder=str(tmp_path)))
        wait_until(lambda: len(working_in(tmp_path)) == 5, "the kernel, two ranks and what each of them started run")
        kill_and_look(notebook, tmp_path)


@pytest.mark.parametrize("moment", ["starting", "idle"])
def test_a_kernel_killed_between_jobs_leaves_nothing(moment, tmp_path):
    with kernel() as notebook:
        if moment == "idle":
            notebook.run(ADD_UP)
            works(notebook)
        notebook.warm()
        kill_and_look(notebook, tmp_path)


def test_a_child_of_the_kernel_that_holds_its_pipes_keeps_nothing_alive():
    with kernel() as notebook:
        notebook.run(ADD_UP)
        works(notebook)
        warm = notebook.warm()
        child = int(notebook.run("import os, time\nchild = os.fork()\nif child == 0:\n    time.sleep(1000)\nprint(child)").text)
        try:
            notebook.kill()
            wait_until(lambda: not running(warm), "the warm process is gone", SOON)
            wait_until(lambda: not folders_of(notebook.pid), "its folders are gone", SOON)
        finally:
            os.kill(child, 9)


def test_a_kernel_that_is_shut_down_leaves_nothing():
    with kernel() as notebook:
        notebook.run(ADD_UP)
        works(notebook)
        warm, pid = notebook.warm(), notebook.pid
    wait_until(lambda: not running(warm), "the warm process is gone", SOON)
    wait_until(lambda: not folders_of(pid), "its folders are gone", SOON)


def test_four_kernels_at_the_same_time():
    semaphores = set(glob.glob("/dev/shm/sem.*"))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(kernel()) for _ in range(4)]
        executions = [
            (notebook, notebook.start(f"{ADD_UP}for turn in range(3):\n    print(launch(add_up, turn).results)"))
            for notebook in opened
        ]
        for notebook, execution in executions:
            assert notebook.finish(execution).text == "[0.0, 0.0]\n[2.0, 2.0]\n[4.0, 4.0]\n"
        for notebook in opened:
            left = [notebook.warm()]
            wait_until(lambda notebook=notebook, left=left: descendants(notebook.pid) == left, "its ranks are gone", SOON)
    for notebook in opened:
        wait_until(lambda notebook=notebook: not folders_of(notebook.pid), "its folders are gone", SOON)
    wait_until(lambda: set(glob.glob("/dev/shm/sem.*")) <= semaphores, "their semaphores are gone", SOON)


# ------------------------------------------------------------------------------------------------------------ the warm process


def test_the_warm_process_starts_with_the_import_in_a_kernel_and_can_be_forked_safely(notebook):
    works(notebook)
    warm = notebook.warm()
    mapped = {m.path for m in warm.memory_maps()}
    assert warm.num_threads() == 1
    assert any("libtorch" in path for path in mapped)
    assert not any("libcuda.so" in path for path in mapped)
    wait_until(
        lambda: "transformers" in notebook.run("print(launch(lambda: __import__('sys').modules.keys() | set()).results[0])").text,
        "what jobs often use has been imported",
    )
    assert warm.num_threads() == 1


# ------------------------------------------------------------------------------------------------------------------- the panel


def test_a_learner_sees_a_lane_per_rank_that_becomes_the_run():
    with kernel(JPY_SESSION_NAME="a.ipynb") as notebook:
        code = (
            "import sys, time\n"
            "def job():\n"
            "    import torch.distributed as dist\n"
            "    for percent in (10, 50, 90):\n"
            "        print(f'\\r{percent} % <of it>', end='', file=sys.stderr)\n"
            "        dist.barrier()\n"
            "        time.sleep(0.5)\n"
            "    print(file=sys.stderr)\n"
            "    return dist.get_rank()\n"
            "run = launch(job)\n"
            "run"
        )
        reply = notebook.run(code)
        assert reply.error is None
        assert len(reply.shown) == 1, "the panel is the picture of the run: it is not shown again as the cell's value"
        assert reply.shown[0]["text/html"].count("joining") == 2
        lanes = [update["text/html"] for update in reply.updates]
        assert any(lane.count("running") == 2 and "% &lt;of it&gt;" in lane for lane in lanes[:-1])
        assert "job on 2 ranks" in lanes[-1]
        assert "running" not in lanes[-1]
        assert reply.text == "[0] 90 % <of it>\n[1] 90 % <of it>\n"
        again = notebook.run("run")
        assert len(again.shown) == 1
        assert again.shown[0]["text/plain"].startswith("job on 2 ranks")
        failed = notebook.run("launch(lambda: 1 / 0)")
        assert "did not finish" in failed.updates[-1]["text/html"]
        assert failed.error[0] == "RankFailed"
