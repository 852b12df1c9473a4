"""Learners who share a machine: slots are held by at most one job each, in the order of asking, and freed by death.

The jobs are launched from plain Python processes, of which a dozen is cheap; one test has a notebook kernel with its live panel.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
from launch_support import folders_of, kernel, wait_until

from helpers import launch, machine, preflight
from helpers.launching import slots
from helpers.launching.job import Job
from helpers.launching.slots import held, tickets

ROOT = Path(__file__).resolve().parents[1]
LEARNER = """
import os, sys, time
from helpers import launch
def job(folder):
    begin = time.monotonic()
    while os.path.exists(os.path.join(folder, "hold")):
        time.sleep(0.02)
    time.sleep(0.3)  # long enough to overlap with others, if that were possible
    name = os.path.join(folder, f"ran-{os.environ['WORLD_SIZE']}-{os.getpid()}")
    with open(name + "~", "w") as file:
        file.write(f"{begin} {time.monotonic()}")
    os.rename(name + "~", name)
    return 7
run = launch(job, sys.argv[1], ranks=int(sys.argv[2]), timeout=float(sys.argv[3]))
assert set(run.results) == {7}
print("ran,", "oversubscribed" if run.oversubscribed else "with a slot for each rank")
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(slots.FOLDER_VARIABLE, str(tmp_path / "slots"))
    monkeypatch.delenv(slots.CPU_VARIABLE, raising=False)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cpu")
    return tmp_path / "slots"


@pytest.fixture
def interrupted():
    """Set by a test when waiting shall end."""
    return threading.Event()


@contextlib.contextmanager
def learner(where, ranks=1, timeout=200.0, **environment):
    """A process that imports helpers and launches one job; it is gone after the block."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", LEARNER, str(where), str(ranks), str(timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hold_in_a_thread(stack, wanted, count, name, stopped):
    """Ask for slots beside this test: (what was shown, an event set when they are held, a function that gives them back)."""
    shown, has, give_back = [], threading.Event(), threading.Event()

    def work():
        with contextlib.suppress(KeyboardInterrupt), held(wanted, count, name, shown.append, stopped):
            has.set()
            give_back.wait()

    thread = threading.Thread(target=work)
    thread.start()

    def end():
        give_back.set()
        thread.join()

    stack.callback(end)
    wait_until(lambda: any(ticket.job == name for ticket in tickets()), f"{name} has a ticket")
    return shown, has, end


def most_at_once(spans):
    """The largest number of spans that contain one moment."""
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(sum(step for _, step in events[: n + 1]) for n in range(len(events)))


# ---------------------------------------------------------------------------------------------------------------- the queue


def test_without_a_setting_nobody_waits_and_nothing_is_written(folder):
    assert slots.choices("cpu") == []
    assert launch(lambda: 1, ranks=1).results == [1]
    assert not folder.exists()
    assert tickets() == []


def test_a_slot_has_one_holder_and_the_next_is_told_who(interrupted):
    shown = []
    with (
        held(["a", "b"], 1, "first", shown.append, interrupted.is_set) as one,
        held(["a", "b"], 1, "second", shown.append, interrupted.is_set) as two,
    ):
        assert (one.slots, two.slots, shown) == (["a"], ["b"], [])
        interrupted.set()
        with pytest.raises(KeyboardInterrupt), held(["a", "b"], 1, "third", shown.append, interrupted.is_set):
            pass
        assert [(ticket.job, ticket.held, ticket.pid) for ticket in tickets()] == [
            ("first", ("a",), os.getpid()),
            ("second", ("b",), os.getpid()),
        ]
        assert shown == [f"waiting for 1 of 2 slots, place 1 in the queue; held by {tickets()[0]}; {tickets()[1]}",
                         "stopped while waiting for slots"]  # fmt: skip
    assert tickets() == []


def test_all_at_once_or_none_in_the_order_of_asking(interrupted):
    with contextlib.ExitStack() as stack:
        _, _, end_small = hold_in_a_thread(stack, ["a", "b"], 1, "small", interrupted.is_set)
        shown_big, big, end_big = hold_in_a_thread(stack, ["a", "b"], 2, "big", interrupted.is_set)
        shown_late, late, _ = hold_in_a_thread(stack, ["a", "b"], 1, "late", interrupted.is_set)
        stack.callback(interrupted.set)  # also where this test fails, nobody waits for ever
        wait_until(lambda: shown_big and shown_late, "both say what they wait for")
        assert [ticket.held for ticket in tickets()] == [("a",), (), ()]  # b is free: big takes no half, late does not overtake
        assert "waiting for 2 of 2 slots, place 1 in the queue; held by" in shown_big[0]
        assert "waiting for 1 of 2 slots, place 2 in the queue; held by" in shown_late[0]
        end_small()
        wait_until(big.is_set, "big has both")
        assert [ticket.held for ticket in tickets()] == [("a", "b"), ()]
        end_big()
        wait_until(late.is_set, "late has one")


def test_who_wants_other_slots_does_not_wait_for_those_in_front(interrupted):
    with contextlib.ExitStack() as stack:
        hold_in_a_thread(stack, ["a"], 1, "first", interrupted.is_set)
        hold_in_a_thread(stack, ["a"], 1, "behind", interrupted.is_set)
        stack.callback(interrupted.set)
        with held(["b"], 1, "elsewhere", print, interrupted.is_set) as other:
            assert other.slots == ["b"]


def test_more_ranks_than_slots_take_all(interrupted):
    with held(["a", "b"], 5, "many", print, interrupted.is_set) as many:
        assert many.slots == ["a", "b"]


# ---------------------------------------------------------------------------------------------------------------- settings


def test_an_instructor_sets_the_number_in_a_file_or_a_variable(folder, monkeypatch):
    folder.mkdir()
    (folder / "cpu_slots").write_text("3\n")
    assert (slots.cpu_slots(), slots.choices("cpu")) == (3, ["core 0", "core 1", "core 2"])
    monkeypatch.setenv(slots.CPU_VARIABLE, "2")
    assert slots.cpu_slots() == 2
    monkeypatch.setenv(slots.CPU_VARIABLE, "two")
    with pytest.raises(ValueError, match=r"WORKSHOP_CPU_SLOTS is 'two'; it must be a whole number of at least 1"):
        launch(lambda: 1, ranks=1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_number_set_by_some_user_does_not_count(folder):
    folder.mkdir()
    (folder / "cpu_slots").write_text("1")
    os.chown(folder / "cpu_slots", 65534, 65534)
    assert slots.cpu_slots() is None


def test_the_doctor_shows_slots(folder, monkeypatch, interrupted):
    assert preflight.slots().meaning == "not limited on cores: nobody waits for those"
    monkeypatch.setenv(slots.CPU_VARIABLE, "2")
    with held(slots.choices("cpu"), 1, "train", print, interrupted.is_set):
        assert preflight.slots().meaning == f"2 for ranks on cores; {tickets()[0]}"
    monkeypatch.setenv(slots.CPU_VARIABLE, "0")
    assert (preflight.slots().state, preflight.slots().mend) == ("fail", "unset WORKSHOP_CPU_SLOTS, or correct it")


# -------------------------------------------------------------------------------------------------------- several users, tricks


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
def test_slots_are_shared_by_users_and_a_dead_users_ticket_counts_for_nothing(folder, interrupted, tmp_path_factory):
    with held(["a"], 1, "root's", print, interrupted.is_set):
        pass
    assert folder.stat().st_mode & 0o7777 == 0o1777
    for parent in folder.parents:  # pytest's own folders are closed to others
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child only opens files
        child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            with held(["a"], 1, "nobody's", print, interrupted.is_set) as theirs:
                os.write(tell, theirs.slots[0].encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(tell)  # so that reading ends where the child has failed
    try:
        assert os.read(told, 10) == b"a"
        (ticket,) = tickets()
        assert (ticket.pid, ticket.job, ticket.held) == (child, "nobody's", ("a",))
        assert ticket.user == slots._user(65534) != slots._user(0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with held(["a"], 1, "root's", print, interrupted.is_set) as again:
        assert again.slots == ["a"]
    os.close(told)


def test_links_and_strange_files_lead_nowhere(folder, tmp_path, interrupted):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "00000001").symlink_to(victim)
    (folder / "00000002").symlink_to(tmp_path / "absent")
    os.mkfifo(folder / "00000003")
    (folder / "00000004").mkdir()
    with open(folder / "00000005", "w") as strange:
        strange.write('{"held": 5}')
        strange.flush()
        slots.fcntl.flock(strange, slots.fcntl.LOCK_SH)
        with held(["a"], 1, "job", print, interrupted.is_set) as mine:
            assert mine.slots == ["a"]
            assert [ticket.number for ticket in tickets()] == [6]
    assert victim.read_text() == "mine"
    assert not (tmp_path / "absent").exists()


def test_a_folder_that_cannot_be_used_is_named(folder, tmp_path, interrupted):
    folder.symlink_to(tmp_path)
    with (
        pytest.raises(PermissionError, match=r"slots are kept in .*slots.*no link.*WORKSHOP_SLOTS_FOLDER"),
        held(["a"], 1, "job", print, interrupted.is_set),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["slots"]


def test_what_others_write_is_shown_harmlessly(folder, interrupted):
    with held(["a"], 1, "job\x1b[31m\r\nno" + 1000 * "!", print, interrupted.is_set):
        shown = str(tickets()[0])
    assert ", job[31mno!!!" in shown
    assert len(shown) <= slots.LONGEST_SHOWN


# ---------------------------------------------------------------------------------------------------------------------- GPUs


def test_the_slot_decides_which_gpu_a_rank_gets(monkeypatch, interrupted):
    gpus = tuple(machine.Gpu(index, "made up", f"GPU-{index}", 2**30) for index in range(2))
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr("helpers.launching.engine._Workplace.engine", lambda self, environment: None)
    asked = []

    class Seen(Exception):
        pass

    def follow(job, engine, interrupts):
        asked.append(job.request["environment"].get("CUDA_VISIBLE_DEVICES"))
        raise Seen

    monkeypatch.setattr(Job, "follow", follow)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for ranks in (1, 2):
        with pytest.raises(Seen):
            launch(lambda: 1, ranks=ranks)
    with held(["GPU-0"], 1, "another's", print, interrupted.is_set), pytest.raises(Seen):
        launch(lambda: 1, ranks=1)
    assert asked == ["GPU-0", None, "GPU-1"]  # a job that has all sees them as they are
    with pytest.raises(ValueError, match="needs one GPU per rank: 3 ranks asked for"):
        launch(lambda: 1, ranks=3, backend="nccl")
    assert tickets() == []


# ---------------------------------------------------------------------------------------------------------------- real jobs


def test_waiting_for_a_slot_is_no_part_of_the_start(monkeypatch):
    @contextlib.contextmanager
    def long_waited(*arguments):
        yield slots.Held([], "", 1000.0)

    monkeypatch.setattr(slots, "held", long_waited)
    assert launch(lambda: 1, ranks=1).startup_seconds < 0  # the 1,000 s have not passed, and are taken off


def test_a_rank_has_the_threads_of_its_slot(monkeypatch):
    monkeypatch.setenv(slots.CPU_VARIABLE, "2")
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert launch(lambda: __import__("torch").get_num_threads(), ranks=1).results == [4]


def test_twelve_learners_on_two_slots(tmp_path):
    (tmp_path / "hold").touch()
    with contextlib.ExitStack() as stack:
        many = [
            stack.enter_context(learner(tmp_path, ranks, **{slots.CPU_VARIABLE: "2"}))
            for ranks in (1, 1, 2, 1, 1, 1, 3, 1, 1, 1, 1, 1)
        ]
        wait_until(lambda: len(tickets()) == 12, "all have asked")
        (tmp_path / "hold").unlink()
        said = [process.communicate(timeout=250)[0] for process in many]
    assert [process.returncode for process in many] == [0] * 12, said
    spans, three = (
        [tuple(map(float, name.read_text().split())) for name in tmp_path.glob(f"ran-{ranks}-*")] for ranks in ("[12]", "3")
    )
    assert (len(spans), len(three)) == (12, 3)
    assert most_at_once(spans) == 2
    assert not any(one[0] < other[1] and other[0] < one[1] for one in spans for other in three)  # it had all slots
    assert said[6].endswith("ran, oversubscribed\n")
    assert all(text.endswith("ran, with a slot for each rank\n") for text in said[:6])
    assert sum("in the queue; held by" in text for text in said) in (10, 11)
    assert tickets() == []


def test_a_killed_holder_frees_its_slot_when_its_ranks_are_gone_and_waiting_is_no_time_of_the_job(tmp_path):
    (tmp_path / "hold").touch()
    with (
        learner(tmp_path, **{slots.CPU_VARIABLE: "1"}) as holder,
        learner(tmp_path, timeout=3, **{slots.CPU_VARIABLE: "1"}) as waiting,
    ):
        wait_until(lambda: sorted(bool(ticket.held) for ticket in tickets()) == [False, True], "one holds, one waits")
        first = next(ticket.pid for ticket in tickets() if ticket.held)
        if first != holder.pid:
            holder, waiting = waiting, holder
        line = waiting.stdout.readline()
        asked = time.monotonic()
        assert f"waiting for 1 of 1 slots, place 1 in the queue; held by {tickets()[0].user} (process {holder.pid}, job" in line
        wait_until(lambda: psutil.Process(holder.pid).children(recursive=True)[1:], "its rank runs")
        below = psutil.Process(holder.pid).children(recursive=True)
        wait_until(lambda: time.monotonic() > asked + 3.2, "the other's timeout would have passed")
        assert waiting.poll() is None
        os.kill(holder.pid, signal.SIGKILL)
        wait_until(lambda: any(ticket.pid == waiting.pid and ticket.held for ticket in tickets()), "the slot is free")
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below)
        (tmp_path / "hold").unlink()
        said = waiting.communicate(timeout=100)[0]
    assert said.endswith("ran, with a slot for each rank\n"), said


def test_a_notebook_shows_the_queue_and_an_interrupt_leaves_nothing(folder, interrupted):
    settings = {slots.CPU_VARIABLE: "2", slots.FOLDER_VARIABLE: str(folder), "JPY_SESSION_NAME": "a notebook"}
    with kernel(**settings) as notebook:
        with held(["core 0", "core 1"], 1, "another's", print, interrupted.is_set):
            cell = notebook.start("try:\n    launch(lambda: 1, ranks=2)\nexcept KeyboardInterrupt as stop:\n    print(stop)")
            wait_until(lambda: [ticket.pid for ticket in tickets()] == [os.getpid(), notebook.pid], "the kernel has a ticket")
            notebook.interrupt()
            reply = notebook.finish(cell)
            panels = [shown["text/html"] for shown in reply.updates]
            assert "waiting for 2 of 2 slots, place 1 in the queue; held by" in panels[0]
            assert f"(process {os.getpid()}, another&#x27;s, since" in panels[0]
            assert "stopped while waiting for slots" in panels[1]
            assert reply.text == "the job was stopped; no rank is left\n"
            assert [ticket.pid for ticket in tickets()] == [os.getpid()]
            assert [path for base in folders_of(notebook.pid) for path in Path(base).glob("job*")] == []
        assert notebook.run("print(launch(lambda: 1, ranks=2).results)").text == "[1, 1]\n"
    assert tickets() == []


def test_two_hosts_take_slots_like_any_job(monkeypatch):
    from helpers.two_nodes import two_nodes

    possible, why = two_nodes.available()
    if not possible:
        pytest.skip(why)
    monkeypatch.setenv(slots.CPU_VARIABLE, "2")

    def job():
        return [ticket.held for ticket in tickets()]

    with two_nodes(rate="1gbit") as nodes:
        seen = launch(job, ranks=2, nodes=nodes, timeout=100).results
    assert seen == [[("core 0", "core 1")]] * 2
