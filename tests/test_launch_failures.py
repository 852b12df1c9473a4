"""Jobs that fail, die or hang: the right rank, its own lines, what the others did, within seconds; and nothing is left."""

import ctypes
import os
import re
import signal
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import cloudpickle
import pytest
import stress_launch
from launch_support import wait_until, working_in

from helpers import LaunchError, RankDied, RankFailed, RanksHung, launch
from helpers.launching import engine, warm
from helpers.launching.judgement import judge
from helpers.launching.results import Run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell
SOON = 30.0  # seconds; an error is there within one on a quiet machine, which `make bench` judges


def add_up():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def caught(kind, fn, *args, ranks=2, soon=SOON, **keywords):
    """The error that a job ends with, within `soon` seconds."""
    begin = time.monotonic()
    with pytest.raises(kind) as info:
        launch(fn, *args, ranks=ranks, **{"timeout": 100, **keywords})
    assert time.monotonic() - begin < soon
    assert type(info.value) is kind
    assert info.value.run.ranks == ranks
    return info.value


@pytest.fixture(autouse=True, scope="module")
def _the_first_launch_is_not_timed():
    launch(add_up)


@pytest.fixture(autouse=True)
def _the_next_launch_works():
    yield
    assert launch(add_up).results == [2.0, 2.0]


def test_every_kind_of_fault_names_the_right_rank():
    outcome = stress_launch.faulted_runs(len(stress_launch.FAULTS))
    assert outcome.right == outcome.runs, str(outcome)
    assert max(outcome.seconds) < SOON


def sits(dist, torch):
    dist.all_reduce(torch.ones(4))


# ---------------------------------------------------------------------------------------------------------------- exceptions


def test_the_rank_that_raises_is_named_with_its_own_lines_while_others_sit_in_a_collective():
    def job():
        import torch
        import torch.distributed as dist

        def inner(there):
            return {"a": 1}[there]

        if dist.get_rank() == 1:
            inner("b")
        dist.all_reduce(torch.ones(4))

    error = caught(RankFailed, job, ranks=3)
    assert (error.rank, error.exception) == (1, "KeyError")
    assert str(error).startswith("rank 1 of 3 raised KeyError: 'b'\nMeanwhile:\n  rank 0 was in all_reduce (float32, 16 B)")
    lines = error.traceback.splitlines()
    assert lines[1].endswith("in job")
    assert lines[2].strip() == 'inner("b")'
    assert 'return {"a": 1}[there]' in error.traceback
    assert "helpers" not in error.traceback
    assert "Connection" not in str(error)
    assert error.run.seconds == [None] * 3


def test_the_learners_frames_come_before_those_of_libraries():
    def job():
        import torch

        @torch.no_grad()
        def wrapped(x):
            return x.view(3, 3)

        wrapped(torch.ones(4))

    lines = caught(RankFailed, job).traceback.splitlines()
    assert lines[2].strip() == "wrapped(torch.ones(4))"
    assert lines[-1].startswith("RuntimeError: shape '[3, 3]' is invalid")


def test_an_exception_in_a_backward_hook():
    def job():
        import torch
        import torch.distributed as dist

        x = torch.ones(3, requires_grad=True)

        def hook(gradient):
            if dist.get_rank() == 0:
                raise ArithmeticError("gradient refused")
            sits(dist, torch)

        x.register_hook(hook)
        x.sum().backward()

    error = caught(RankFailed, job)
    assert (error.rank, error.exception) == (0, "ArithmeticError")
    assert "x.sum().backward()" in error.traceback
    assert 'raise ArithmeticError("gradient refused")' in error.traceback


def test_an_exception_whose_type_and_text_the_notebook_could_not_rebuild():
    def job():
        import types

        module = types.ModuleType("only_here")
        sys.modules["only_here"] = module
        exec("class Odd(Exception):\n def __init__(self, a, b): pass\n def __str__(self): raise ValueError", module.__dict__)
        raise module.Odd(1, 2)

    error = caught(RankFailed, job, ranks=1)
    assert error.exception == "only_here.Odd"
    assert "exception str() failed" in str(error)


def test_errors_on_many_ranks_at_once_are_one_error():
    def job():
        import torch.distributed as dist

        raise ValueError(f"rank {dist.get_rank()} is wrong")

    error = caught(RankFailed, job, ranks=8)
    assert f"raised ValueError: rank {error.rank} is wrong" in str(error)
    assert str(error).count("Traceback") == 1


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ([("wrong", 3.0, False), ("wrong", 2.0, False), ("wrong", 1.0, False)], 0),  # the very same: on every run the lowest
        ([("wrong", 3.0, False), ("worse", 1.0, False), ("worse", 2.0, False)], 1),  # the earliest
        ([("lost", 1.0, True), ("wrong", 3.0, False), None], 1),  # a lost peer is a consequence
        ([("lost", 1.0, True), ("lost", 2.0, True), None], 2),  # somebody must have gone
    ],
)
def test_the_first_cause_of_several_is_named(reports, named, tmp_path):
    (tmp_path / "stack2").touch()
    job = SimpleNamespace(
        name="job",
        request={"hosts": []},
        states=["ended"] * 3,
        started=dict.fromkeys(range(3), 0.0),
        raised={
            rank: dict(zip(("traceback", "time", "lost_peer"), report, strict=True), type="E", summary="E")
            for rank, report in enumerate(reports)
            if report is not None
        },
        exits={rank: {"code": 1, "killed": report is None, "time": 9.0} for rank, report in enumerate(reports)},
        file=lambda kind, rank: str(tmp_path / f"{kind}{rank}"),
        hung=None,
        printed_too_much=None,
    )
    with pytest.raises(RankFailed) as info:
        judge(job, Run(3, "cpu", "gloo"))
    assert info.value.rank == named


def test_a_chain_of_exceptions_is_shown_whole():
    def job():
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError as error:
            raise ValueError("no result") from error

    traceback = caught(RankFailed, job, ranks=1).traceback
    assert traceback.index("ZeroDivisionError") < traceback.index("direct cause") < traceback.index("ValueError: no result")


def test_a_rank_fails_while_another_computes_and_a_third_has_finished():
    def job():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            while True:
                sum(range(1000))
        if dist.get_rank() == 2:
            time.sleep(0.2)
            raise OSError("disk gone")

    error = caught(RankFailed, job, ranks=3)
    assert (error.rank, error.exception) == (2, "OSError")
    assert "rank 0 had finished job" in str(error)
    assert re.search(r"rank 1 was at test_launch_failures.py, line \d+: sum\(range\(1000\)\)", str(error))


def test_a_survivor_that_wraps_the_lost_connection_is_not_blamed():
    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            sits(dist, torch)
        except RuntimeError as error:
            raise ValueError("step failed") from error

    assert caught(RankDied, job, ranks=4).rank == 1


def test_a_rank_that_closes_its_group_and_leaves_is_named_not_the_survivor():
    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            dist.destroy_process_group()
            return
        sits(dist, torch)

    error = caught(RankFailed, job)
    assert error.rank == 1
    assert "Rank 1 closed the connection before job had returned on every rank." in str(error)


@pytest.mark.parametrize("record", [True, False])
def test_a_rank_that_closes_its_group_in_an_error_handler_and_lingers_is_named(record):
    def job():
        import torch
        import torch.distributed as dist

        try:
            if dist.get_rank() == 1:
                raise ValueError("first")
            sits(dist, torch)
        except ValueError:
            dist.destroy_process_group()
            time.sleep(60)
            raise

    error = caught(RankFailed, job, record=record)
    assert error.rank == 1
    assert "rank 1 was at test_launch_failures.py" in str(error)
    assert "time.sleep(60)" in str(error)


def test_an_error_that_only_looks_like_a_lost_peer_is_the_ranks_own():
    def job():
        import torch.distributed as dist

        if dist.get_rank() == 0:
            raise ConnectionRefusedError(111, "Connection refused")
        time.sleep(60)

    assert caught(RankFailed, job).rank == 0


def test_the_error_is_shown_without_our_frames():
    error = caught(RankFailed, lambda: 1 / 0)
    assert error._render_traceback_() == [f"RankFailed: {error}"]


def test_a_value_that_cannot_be_shipped_names_rank_and_type():
    def job():
        import torch.distributed as dist

        return {"deep": [(n for n in range(3))]} if dist.get_rank() == 1 else 5

    error = caught(RankFailed, job)
    assert (error.rank, error.exception) == (1, "TypeError")
    assert "the dict that rank 1 returned, key 'deep', item 0 (a generator) cannot be shipped" in str(error)
    assert "open file" in str(caught(RankFailed, lambda: open(os.devnull)))  # noqa: SIM115


def test_a_value_that_the_notebook_cannot_rebuild_names_the_rank():
    def job():
        import torch.distributed as dist

        class Odd:
            def __reduce__(self):
                return int, ("no number",)

        return Odd() if dist.get_rank() == 1 else 5

    error = caught(LaunchError, job)
    assert error.rank == 1
    assert "ValueError: invalid literal for int()" in str(error)
    assert error.run.results == [5, None]


def test_launching_inside_a_rank_is_refused():
    def job():
        from helpers import launch

        launch(print)

    assert "launch was called inside a rank" in str(caught(RankFailed, job))


# --------------------------------------------------------------------------------------------------------------------- deaths


def crash(how):
    if how == "exit":
        os._exit(3)
    elif how == "sys.exit":
        sys.exit(4)
    elif how == "sys.exit text":
        sys.exit("enough")
    elif how == "segmentation fault":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), getattr(signal, how))


DEATHS = [
    ("exit", 3, None),
    ("sys.exit", 4, None),
    ("sys.exit text", 1, None),
    ("segmentation fault", None, "SIGSEGV"),
    ("SIGKILL", None, "SIGKILL"),
    ("SIGTERM", None, "SIGTERM"),
    ("SIGABRT", None, "SIGABRT"),
]


@pytest.mark.parametrize(("how", "code", "name"), DEATHS)
@pytest.mark.parametrize("others", ["sit in a collective", "compute", "return"])
def test_a_death_is_named_with_code_or_signal(how, code, name, others, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(0.05)
            print("about to go")
            crash(how)
        if others == "sit in a collective":
            sits(dist, torch)
        while others == "compute":
            sum(range(1000))

    error = caught(RankDied, job)
    assert (error.rank, error.code, error.signal) == (1, code, name)
    assert "about to go" in str(error)
    if how in ("segmentation fault", "sys.exit"):
        assert re.search(r"test_launch_failures.py\", line \d+,? in crash", str(error))
        assert "warm_job.py" not in str(error)
    assert list(tmp_path.iterdir()) == []  # no core file


def test_a_rank_that_dies_after_it_has_returned_is_named():
    def job():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            threading.Timer(0.3, os._exit, [7]).start()
            return
        time.sleep(60)

    error = caught(RankDied, job)
    assert (error.rank, error.code) == (1, 7)
    assert "after it had returned from job" in str(error)


def test_sizes_that_do_not_match_are_shown_and_the_odd_rank_is_named():
    def job():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(800 if dist.get_rank() == 2 else 4))

    error = caught(RankDied, job, ranks=3)
    assert (error.rank, error.signal) == (2, "SIGABRT")
    assert "rank 2 issued all_reduce (float32, 3,200 B) over ranks 0, 1, 2" in str(error)
    assert "Received data size doesn't match" in str(error)


def test_a_rank_that_dies_while_it_starts():
    class Bomb:
        def __reduce__(self):
            return os._exit, (9,)

    error = caught(RankDied, lambda bomb: None, Bomb())
    assert error.code == 9


def test_an_early_request_for_a_stack_kills_no_rank(monkeypatch):
    """Rank 1 dies at once, rank 0 is an interpreter that has not come to its first line when it is asked what it does."""
    monkeypatch.setenv("WORKSHOP_START_METHOD", "spawn")

    class Bomb:
        def __reduce__(self):
            return eval, (
                "__import__('os').environ['RANK'] == '1' and __import__('os')._exit(9) or __import__('time').sleep(60)",
            )

    error = caught(RankDied, lambda bomb: None, Bomb(), soon=100)
    assert (error.rank, error.code) == (1, 9)


# ---------------------------------------------------------------------------------------------------------------------- hangs


def hung(fn, ranks=2, timeout=1.0, **keywords):
    begin = time.monotonic()
    error = caught(RanksHung, fn, ranks=ranks, timeout=timeout, soon=timeout + 2 * SOON, **keywords)
    assert timeout <= time.monotonic() - begin
    return error


@pytest.mark.parametrize("record", [True, False])
def test_a_rank_that_never_joins_is_waited_for(record):
    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 2:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4))

    error = hung(job, ranks=3, record=record)
    assert error.rank == 2
    assert "job did not return on ranks 0, 1, 2 within 1 s: ranks 0, 1 wait for rank 2." in str(error)
    assert error.stacks[2][-1].endswith("time.sleep(1000)")
    assert error.stacks[0][0].endswith("dist.all_reduce(torch.ones(4))")
    assert error.stacks[0][1].startswith("torch/distributed/")
    if record:
        assert {rank: c.op for rank, c in error.waiting.items()} == {0: "all_reduce", 1: "all_reduce"}
        assert "rank 2 issued nothing any more" in error.difference


@pytest.mark.parametrize("record", [True, False])
def test_a_rank_that_left_early_is_waited_for(record):
    def job():
        import torch
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == 0:
            return
        dist.broadcast(torch.ones(4), src=1)

    error = hung(job, record=record)
    assert error.rank == 0
    assert "rank 1 waits for rank 0, which returned already" in str(error)
    assert "rank 0 had finished job" in str(error)
    assert list(error.stacks) == [1]


def test_collectives_in_another_order_are_shown():
    def job():
        import torch
        import torch.distributed as dist

        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 1:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    error = hung(job, ranks=3)
    assert error.rank == 1
    assert re.search(
        r"rank 1 issued broadcast \(float32, 16 B\) over ranks 0, 1, 2 at .*: dist.broadcast\(x, 0\)", error.difference
    )
    assert hung(job, ranks=2).rank is None


@pytest.mark.parametrize("stuck", ["in a loop", "in C", "in C with the lock held", "deep down", "behind a thread"])
def test_a_rank_stuck_anywhere_shows_the_learners_line(stuck):
    def deep(levels):
        if levels:
            deep(levels - 1)
        time.sleep(1000)

    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            if stuck == "in a loop":
                while True:
                    sum(range(10))
            if stuck == "in C":
                time.sleep(1000)
            if stuck == "in C with the lock held":
                ctypes.PyDLL(None).usleep(1_000_000_000)
            if stuck == "deep down":
                deep(300)
            threading.Thread(target=deep, args=[0], daemon=True).start()
            threading.Event().wait()
        sits(dist, torch)

    line = {
        "in a loop": "sum(range(10))",
        "in C": "time.sleep(1000)",
        "in C with the lock held": "ctypes.PyDLL(None).usleep(1_000_000_000)",
        "deep down": "time.sleep(1000)",
        "behind a thread": "threading.Event().wait()",
    }[stuck]
    error = hung(job)
    assert error.rank == 1
    assert any(entry.endswith(line) for entry in error.stacks[1][-2:])
    assert error.stacks[0][-2].endswith("dist.all_reduce(torch.ones(4))")


def test_work_that_is_waited_for_later_is_found():
    def job():
        import torch
        import torch.distributed as dist

        first = dist.all_reduce(torch.ones(1), async_op=True)
        first.wait()
        if dist.get_rank() == 1:
            time.sleep(1000)
        second = dist.all_reduce(torch.ones(2), async_op=True)
        sum(range(10))
        second.wait()

    error = hung(job)
    assert error.rank == 1
    assert error.waiting[0].bytes == 8
    assert error.stacks[0][0].endswith("second.wait()")


def test_a_receive_that_nobody_sends_to_follows_the_chain():
    def job():
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank == 0:
            dist.recv(torch.ones(1), src=1)
        elif rank == 1:
            dist.recv(torch.ones(1), src=2)
            dist.send(torch.ones(1), dst=0)
        else:
            time.sleep(1000)

    error = hung(job, ranks=3)
    assert error.rank == 2
    assert re.search(r"rank 1 waits in recv \(float32, 4 B\) from rank 2 at .*dist.recv", str(error))


def test_ranks_that_wait_for_each_other():
    def job():
        import torch
        import torch.distributed as dist

        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    error = hung(job)
    assert error.rank is None
    assert sorted(error.waiting) == [0, 1]


def test_only_the_subgroup_waits():
    def job():
        import torch
        import torch.distributed as dist

        pair = dist.new_group([0, 2])
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), group=pair)
        if dist.get_rank() == 2:
            time.sleep(1000)

    error = hung(job, ranks=3)
    assert error.rank == 2
    assert error.waiting[0].group == (0, 2)
    assert "rank 1 had finished job" in str(error)


def test_making_a_group_that_one_rank_does_not_make():
    def job():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.new_group([0, 1])
        dist.barrier()

    assert hung(job).rank == 1


def test_finished_sends_and_scatters_without_a_known_end_are_not_taken_for_the_hang():
    def job():
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank == 0:
            dist.isend(torch.ones(1), dst=1)
        else:
            dist.recv(torch.ones(1), src=0)
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(2), async_op=True)
        time.sleep(0.1)
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    error = hung(job)
    assert error.rank == 1
    assert error.waiting[0].op == "all_reduce"


def test_one_rank_alone_hangs():
    error = hung(lambda: time.sleep(1000), ranks=1)
    assert error.rank == 0


def test_the_timeout_counts_from_the_start_of_the_function():
    class Slow:
        def __reduce__(self):
            return time.sleep, (2,)

    assert launch(lambda slow: 5, Slow(), timeout=1).results == [5, 5]


# -------------------------------------------------------------------------------------------------------- nothing is left over


STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
os.setsid()
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["returns", "raises", "dies", "hangs"])
def test_processes_that_a_rank_started_end_with_the_job(end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def job():
        import subprocess

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:  # holds every descriptor of the rank open, in a session of its own
            os.setsid()
            time.sleep(1000)
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"up\n"
        if end == "raises":
            raise ValueError
        if end == "dies":
            os._exit(1)
        while end == "hangs":
            time.sleep(1)
        return "value"

    begin = time.monotonic()
    if end == "returns":
        assert launch(job).results == ["value"] * 2
    else:
        with pytest.raises({"raises": RankFailed, "dies": RankDied, "hangs": RanksHung}[end]):
            launch(job, timeout=1 if end == "hangs" else 100)
    assert time.monotonic() - begin < 3 * SOON
    assert working_in(tmp_path) == []


def warm_process():
    """The one that the next launch would use."""
    launch(add_up)
    return list(engine.workplace().engines.values())[-1].process


def test_the_warm_process_is_killed_between_jobs():
    process = warm_process()
    process.kill()
    process.wait()
    assert launch(add_up).results == [2.0, 2.0]


def test_the_warm_process_is_killed_during_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = warm_process()

    def job():
        (tmp_path / "here").touch()
        time.sleep(1000)

    def kill():
        wait_until((tmp_path / "here").exists, "the job runs")
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LaunchError, match=r"warm process .* ended with exit code -9; the next launch starts a new one"):
        launch(job)
    killer.join()
    wait_until(lambda: not working_in(tmp_path), "no rank is left", SOON)


def test_a_warm_process_is_ended_once():
    """A descriptor closed twice may have become another's in between."""
    ended = engine.Engine(dict(os.environ), [tempfile.gettempdir()])
    ended.end()
    pipes = [os.pipe() for _ in range(4)]
    ended.end()
    for pipe in pipes:
        for descriptor in pipe:
            os.fstat(descriptor)
            os.close(descriptor)


def test_an_interrupt_comes_through_whatever_ends_the_job():
    before = signal.getsignal(signal.SIGINT)
    for error in (LaunchError("failed"), None):
        with pytest.raises(KeyboardInterrupt, match="no rank is left"):
            interrupted_in_the_middle(error)
        assert signal.getsignal(signal.SIGINT) is before


def interrupted_in_the_middle(error):
    with engine.Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: interrupts.asked, "the interrupt is seen")
        if error is not None:
            raise error


def test_a_broken_library_does_not_end_the_warm_process(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("raise RuntimeError('built for another machine')")
    monkeypatch.syspath_prepend(str(tmp_path))
    warm._import("broken_part")
    warm._import("a_part_that_is_not_installed")


def test_a_warm_process_that_cannot_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").touch()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LaunchError, match="this torch is broken"):
        launch(add_up, env={"OMP_NOTHING": "1"})


def test_an_error_of_the_display_ends_the_job(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def job():
        print("x")
        time.sleep(1000)

    class Closed:
        def write(self, text):
            raise OSError("closed")

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(OSError, match="closed"):
        launch(job)
    monkeypatch.undo()
    assert working_in(tmp_path) == []


@pytest.mark.parametrize("case", ["raises", "hangs"])
def test_the_spawn_path_fails_as_the_fork_path_does(case, monkeypatch):
    monkeypatch.setenv("WORKSHOP_START_METHOD", "spawn")

    def job():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            if case == "raises":
                raise ValueError("wrong")
            time.sleep(1000)
        sits(dist, torch)

    kind = {"raises": RankFailed, "hangs": RanksHung}[case]
    with pytest.raises(kind) as info:
        launch(job, timeout=2)
    assert info.value.rank == 1
