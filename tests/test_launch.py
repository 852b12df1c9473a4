"""`launch` where nothing fails: values, output, the surroundings of a rank, what is shipped, and what is left afterwards."""

import contextlib
import functools
import gc
import io
import mmap
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import psutil
import pytest
from launch_support import descendants, folders_of, warm_processes

import helpers
from helpers import LaunchError, launch
from helpers.launching import engine, panel, shipping
from helpers.launching.results import Log, Run, visible

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as with the functions of a cell


def add_up(here):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(here)]) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()


@pytest.fixture
def fresh_workplace(monkeypatch):
    """The launcher of a process that has not launched yet."""
    monkeypatch.setattr(engine, "_workplace", None)
    yield
    if engine._workplace is not None:
        engine._workplace.close()


def test_values_come_back_by_rank_and_the_run_says_what_happened():
    def job(a, b=0):
        import torch
        import torch.distributed as dist

        total = torch.tensor([float(a + b)])
        dist.all_reduce(total)
        print("hello")
        return dist.get_rank(), total.item()

    run = launch(job, 1, ranks=3, b=2)
    assert run.results == [(0, 9.0), (1, 9.0), (2, 9.0)]
    assert (run.ranks, run.device, run.backend, run.name) == (3, "cpu", "gloo", "job")
    assert all(seconds > 0 for seconds in run.seconds)
    assert run.startup_seconds > 0
    assert run.spans[0][1] - run.spans[0][0] == run.seconds[0]
    assert [run.output(rank) for rank in range(3)] == ["hello\n"] * 3
    assert [(c.rank, c.op, c.group, c.bytes) for c in run.collectives] == [(r, "all_reduce", (0, 1, 2), 4) for r in range(3)]
    assert run.collectives[0].source == f"{Path(__file__).name}, line {job.__code__.co_firstlineno + 5}: dist.all_reduce(total)"
    assert launch(add_up, 1, ranks=1).results == [1.0]
    with pytest.raises(IndexError, match="ranks 0 to 2"):
        run.output(3)


def test_without_recording_there_are_no_collectives():
    run = launch(add_up, 1, record=False)
    assert (run.results, run.collectives) == ([3.0, 3.0], ())


def test_the_surroundings_of_a_rank(monkeypatch):
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "no")

    def job():
        import random

        import numpy
        import torch
        import torch.distributed as dist

        from helpers import machine

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SEEN_BY_RANKS", "PYTEST_CURRENT_TEST")
        return {
            "variables": [os.environ.get(name) for name in names],
            "threads": torch.get_num_threads(),
            "drawn": (torch.rand(1).item(), random.random(), numpy.random.rand()),
            "order": list({f"item {index}" for index in range(50)}),
            "device": str(machine.device()),
            "cuda": torch.cuda.is_available() or torch.cuda.is_initialized(),
            "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
            "input": sys.stdin.read(),
            "folder": os.getcwd(),
            "path": sys.path,
        }

    first, second = launch(job, env={"SEEN_BY_RANKS": "really"}).results
    assert first["variables"] == ["0", "0", "2", "2", "127.0.0.1", "really", None]
    assert second["variables"] == ["1", "1", "2", "2", "127.0.0.1", "really", None]
    assert first["threads"] == max(1, helpers.machine.cores() // 2)
    assert first["drawn"] == second["drawn"]
    assert first["order"] == second["order"]
    assert (first["device"], first["cuda"], first["input"]) == ("cpu", False, "")
    assert [rank["group"] for rank in (first, second)] == [(0, 2, "gloo"), (1, 2, "gloo")]
    assert (first["folder"], first["path"]) == (os.getcwd(), sys.path)


def test_variables_that_are_read_at_start_are_there_from_the_start():
    def job():
        with open("/proc/self/environ") as file:  # as the process was started, whatever Python has set since
            return "MALLOC_TRIM_THRESHOLD_=65537" in file.read(), os.environ["MALLOC_TRIM_THRESHOLD_"]

    engines = set(engine.workplace().engines)
    assert launch(job, env={"MALLOC_TRIM_THRESHOLD_": "65537"}).results == [(True, "65537")] * 2
    assert len(set(engine.workplace().engines) - engines) == 1
    assert len(engine.workplace().engines) <= engine.ENGINES_KEPT


@pytest.mark.skipif(sys.platform != "linux", reason="reads the variables a process was started with")
def test_threads_that_wait_sleep_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def job():
        with open("/proc/self/environ") as file:
            return [entry for entry in file.read().split("\0") if entry.startswith("OMP_WAIT_POLICY")]

    assert launch(job, ranks=1).results == [["OMP_WAIT_POLICY=PASSIVE"]]
    assert launch(job, ranks=1, env={"OMP_WAIT_POLICY": "ACTIVE"}).results == [["OMP_WAIT_POLICY=ACTIVE"]]


def test_variables_of_libraries_that_a_warm_process_has_imported_count_too():
    def hub():
        import accelerate  # noqa: F401  (the warm process then has it too)
        from huggingface_hub import constants

        return constants.HF_HUB_OFFLINE, constants.HF_HOME

    launch(hub, ranks=1)
    assert launch(hub, ranks=1, env={"HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere"}).results == [(True, "/nowhere")]
    for name in ("TRANSFORMERS_CACHE", "TORCHDYNAMO_VERBOSE", "TORCHINDUCTOR_CACHE_DIR", "HUGGING_FACE_HUB_TOKEN"):
        assert name.startswith(engine.READ_AT_START)


def test_a_second_launch_does_not_start_another_warm_process(monkeypatch):
    launch(add_up, 1)
    before = set(map(id, engine.workplace().engines.values()))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")  # torch sets it at the first compilation in this process
    launch(add_up, 1, env={"PLAIN": "1"})
    assert set(map(id, engine.workplace().engines.values())) <= before


class Plus:
    def __init__(self, here):
        self.here = here

    def __call__(self, there):
        return self.here + there

    def method(self, there):
        return self.here * there


def shipped_kinds():
    def decorated(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args) + 1

        return wrapper

    base = 10

    def closure(here):
        return base + here

    def recursive(here):
        return 1 if here == 0 else 2 * recursive(here - 1)

    return [
        (lambda here: here + 5, 8),
        (closure, 13),
        (recursive, 8),
        (decorated(closure), 14),
        (functools.partial(lambda there, here: there - here, 7), 4),
        (Plus(2), 5),
        (Plus(2).method, 6),
        (abs, 3),
        (Plus, Plus),
    ]


@pytest.mark.parametrize(("fn", "expected"), shipped_kinds())
def test_functions_of_every_kind_are_shipped(fn, expected):
    for result in launch(fn, 3).results:
        assert type(result) is expected if isinstance(expected, type) else result == expected


def test_the_name_of_a_partial_is_that_of_its_function():
    assert launch(functools.partial(add_up, 1)).name == "add_up"


def local_class():
    class Counter:
        total = 0

        def value(self):
            return self.total + LIMIT

    LIMIT = 100
    Counter.__module__ = Counter.__qualname__ = "Counter"
    Counter.__module__ = "__main__"  # as the class of a cell: shipped by value
    return Counter


def test_instances_come_back_as_the_same_class_and_leave_it_as_it_was():
    counter = local_class()

    def job():
        counter.total += 5  # in the rank's copy
        return counter()

    method = counter.value
    for result in launch(job).results:
        assert type(result) is counter
    assert counter.total == 0
    assert counter.value is method


def test_plain_pickle_knows_the_notebooks_classes_in_a_rank():
    counter = local_class()

    def job():
        import torch.distributed as dist

        everyone = [None, None]
        dist.all_gather_object(everyone, counter())
        return [type(one) is counter for one in everyone]

    assert launch(job).results == [[True, True], [True, True]]


def test_a_module_beside_the_notebook_is_read_anew_by_each_launch(tmp_path, monkeypatch):
    module = tmp_path / "beside_the_notebook.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def job():
        import beside_the_notebook

        return beside_the_notebook.value()

    module.write_text("def value():\n    return 'first'\n")
    assert launch(job).results == ["first"] * 2
    module.write_text("def value():\n    return 'the second'\n")
    assert launch(job).results == ["the second"] * 2


def unshippable():
    lock = threading.Lock()
    generator = (number for number in range(3))
    with open(__file__) as closed:
        pass
    return [
        ({"a": closed}, r"argument 'a' \(a TextIOWrapper\).*open file"),
        ({"a": lock}, r"argument 'a' \(a lock\)"),
        ({"a": generator}, r"argument 'a' \(a generator\)"),
        ({"a": {"deep": [1, lock]}}, r"argument 'a', key 'deep', item 1 \(a lock\)"),
        ({"a": Plus(generator)}, r"argument 'a', attribute 'here' \(a generator\)"),
    ]


@pytest.mark.parametrize(("keywords", "said"), unshippable())
def test_an_argument_that_cannot_be_shipped_is_named_before_anything_starts(keywords, said):
    def job(a):
        return a

    jobs = engine.workplace().jobs
    with pytest.raises(TypeError, match=said):
        launch(job, **keywords)
    assert engine.workplace().jobs == jobs


def test_what_a_function_uses_and_cannot_be_shipped_is_named():
    lock = threading.Lock()

    def uses():
        return [lock for _ in range(3)]

    def calls():
        return uses()

    for job in (uses, calls, functools.partial(uses)):
        with pytest.raises(TypeError, match=r"variable 'lock' that uses uses \(a lock\) cannot be shipped"):
            launch(job)
    with pytest.raises(TypeError, match=r"partial add_up, item 0 \(a lock\)"):
        launch(functools.partial(add_up, lock))
    with pytest.raises(TypeError, match=r"Plus, attribute 'here' \(a lock\)"):
        launch(Plus(lock), 1)


REFUSED = [
    ({"ranks": 0}, ValueError, "ranks is 0"),
    ({"ranks": -1}, ValueError, "ranks is -1"),
    ({"ranks": 2.5}, TypeError, "ranks is 2.5"),
    ({"ranks": "two"}, TypeError, "ranks is 'two'"),
    ({"ranks": True}, TypeError, "ranks is True"),
    ({"ranks": 100_000}, ValueError, "at most 256"),
    ({"backend": "nccl"}, ValueError, "needs one GPU per rank"),
    ({"backend": "mpi"}, ValueError, "backend is 'mpi'"),
    ({"timeout": 0}, ValueError, "timeout is 0"),
    ({"timeout": -1}, ValueError, "timeout is -1"),
    ({"timeout": "x"}, ValueError, "timeout is 'x'"),
    ({"timeout": float("nan")}, ValueError, "timeout is nan"),
    ({"timeout": float("inf")}, ValueError, "timeout=None"),
    ({"env": ["A"]}, TypeError, "env is"),
    ({"env": {"A": 1}}, TypeError, "dictionary of texts"),
    ({"env": {"WORKSHOP_DEVICE": "cpu"}}, ValueError, "env sets WORKSHOP_DEVICE, .*: set it in os.environ"),
    ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, ValueError, "env sets CUDA_VISIBLE_DEVICES"),
    ({"nodes": 2}, TypeError, "two_nodes"),
    ({"unknown": 2}, TypeError, "does not take these arguments"),
    ({}, TypeError, "missing a required argument: 'here'"),
]


@pytest.mark.parametrize(("keywords", "error", "said"), REFUSED)
def test_a_call_that_cannot_work_is_refused_before_anything_starts(keywords, error, said):
    jobs = engine.workplace().jobs
    with pytest.raises(error, match=said):
        launch(add_up, *[1] * ("here" not in said and "unknown" not in keywords), **keywords)
    assert engine.workplace().jobs == jobs


def test_what_is_no_function_and_what_shares_a_parameter_with_launch_are_refused():
    with pytest.raises(TypeError, match=r"not float: launch\(job\), not launch\(job\(\)\)"):
        launch(3.0)
    with pytest.raises(TypeError, match="'timeout'"):
        launch(lambda timeout: timeout)


def test_a_timeout_beyond_all_reason_means_no_limit():
    assert launch(add_up, 1, timeout=1e30).results == launch(add_up, 1, timeout=None).results == [3.0, 3.0]


def test_large_values_come_back_whole():
    def job():
        import torch
        import torch.distributed as dist

        return torch.arange(25 << 20, dtype=torch.int32) + dist.get_rank()  # 100 MiB

    for rank, value in enumerate(launch(job).results):
        assert value.shape == (25 << 20,)
        assert (value[0], value[-1]) == (rank, (25 << 20) - 1 + rank)
        assert value.sum().item() == sum(range(25 << 20)) + rank * (25 << 20)


@pytest.mark.usefixtures("fresh_workplace")
def test_a_small_shared_memory_is_left_alone(monkeypatch):
    monkeypatch.setattr(engine, "MEMORY_NEEDED", 1 << 62)
    run = launch(lambda: print("x" * (Log.SMALL + 1)) or 7)
    assert run.results == [7, 7]
    assert len(run.output(1)) == Log.SMALL + 2
    assert [os.path.dirname(path) for path in folders_of(os.getpid())] != ["/dev/shm"]


def test_a_full_shared_memory_is_not_the_end(tmp_path):
    """/dev/full says of every write that there is no room."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "value0").symlink_to("/dev/full")
    folders = [str(tmp_path / "small"), str(tmp_path)]
    path = shipping.write_where_room(folders, "value0", lambda file: file.write(b"x" * 100_000))
    assert Path(path) == tmp_path / "value0"
    assert (tmp_path / "value0").read_bytes() == b"x" * 100_000
    (tmp_path / "value1").symlink_to("/dev/full")
    with pytest.raises(OSError, match="no room"):
        shipping.write_where_room(folders[1:], "value1", lambda file: file.write(b"x" * 100_000))


def test_a_million_lines_neither_hang_nor_fill_the_notebook(capsys):
    def job():
        for number in range(1_000_000):
            print(f"line {number}")

    run = launch(job)
    lines = run.output(1).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (1_000_000, "line 0", "line 999999")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 * (panel.LINES_SHOWN + 1)
    assert shown[panel.LINES_SHOWN] == "[0] … 999,000 more lines: run.output(0)"
    assert isinstance(run.logs[0]._data, mmap.mmap), "on disk, not in memory"
    assert [os.listdir(folder) for folder in folders_of(os.getpid())] == [[]] * len(folders_of(os.getpid()))


def test_lines_appear_in_the_order_of_ranks_whoever_prints_first(capsys):
    def job():
        import torch.distributed as dist

        for turn in range(3):
            if dist.get_rank() == 1:
                print("one", turn)
            dist.barrier()
            if dist.get_rank() == 0:
                print("zero", turn, file=sys.stderr)
            dist.barrier()
        print("no newline", end="")

    launch(job)
    rank0 = ["[0] zero 0", "[0] zero 1", "[0] zero 2", "[0] no newline"]
    assert capsys.readouterr().out.splitlines() == [*rank0, "[1] one 0", "[1] one 1", "[1] one 2", "[1] no newline"]


def test_lines_of_rank_0_appear_while_it_runs():
    shown = io.StringIO()
    printed_at = []

    class Clock(io.StringIO):
        def write(self, text):
            printed_at.append(time.perf_counter())
            return shown.write(text)

    def job():
        import torch.distributed as dist

        print("early")
        dist.barrier()
        time.sleep(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Clock())
        run = launch(job)
    assert shown.getvalue().startswith("[0] early\n")
    assert printed_at[0] < run.spans[0][1]


def test_junk_on_standard_output_does_no_harm(capsys):
    def job():
        import ctypes

        os.write(1, b"\xff\xfe\x00 junk\n")
        os.write(1, b"x" * 3_000_000 + b"\nafter\n")
        ctypes.CDLL(None).printf(b"from C\n")
        print("\ud800 half a pair, ä")

    run = launch(job, ranks=1)
    shown = capsys.readouterr().out
    assert "[0] after\n" in shown
    assert len(shown) < 10_000
    assert "��\x00 junk\n" in run.output(0)
    assert "from C\n" in run.output(0)
    assert "? half a pair, ä\n" in run.output(0)
    assert len(run.output(0)) > 3_000_000


def test_a_progress_bar_is_one_line(capsys):
    def job():
        for percent in range(0, 101, 10):
            print(f"\r{percent:3d} %", end="", file=sys.stderr)
        print(file=sys.stderr)
        print("done\r")

    run = launch(job, ranks=1)
    assert run.output(0) == "100 %\ndone\n"
    assert capsys.readouterr().out == "[0] 100 %\n[0] done\n"


@pytest.mark.parametrize(("written", "seen"), [("a\rb", "b"), ("a\rbc\r", "bc"), ("", ""), ("\r", ""), ("abc", "abc")])
def test_what_a_terminal_shows_of_carriage_returns(written, seen):
    assert visible(written) == seen


def test_a_rank_that_prints_without_end_does_not_keep_the_notebook_from_listening(monkeypatch):
    from helpers.launching import job as jobs

    monkeypatch.setattr(jobs, "LARGEST_LOG", 20 << 20)

    def job():
        while True:
            print("x" * 1000)

    with pytest.raises(helpers.LaunchError, match="printed more than"):
        launch(job, ranks=1)


def sockets_of(pids):
    """(address, port) of every listening TCP socket of these processes, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    listening = []
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == "0A":  # LISTEN
                address = bytes.fromhex(fields[1].split(":")[0])
                assert len(address) * 2 == width
                words = [address[i : i + 4][::-1] for i in range(0, len(address), 4)]
                listening.append(b"".join(words))
    return listening


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's socket tables")
def test_no_socket_listens_where_other_hosts_could_reach_it(tmp_path):
    """Read from outside while two ranks hold a finished collective and a subgroup."""
    go_on = tmp_path / "go on"

    def job():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        (tmp_path / f"ready{dist.get_rank()}").touch()
        while not go_on.exists():
            time.sleep(0.01)
        return os.getpid()

    seen = []

    def look():
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.01)
        seen.append(sockets_of([process.pid for process in descendants(os.getpid())]))
        go_on.touch()

    watcher = threading.Thread(target=look)
    watcher.start()
    launch(job)
    watcher.join()
    assert seen[0], "gloo listens on loopback: the test must see that"
    loopback = (b"\x7f\x00\x00\x01", b"\x00" * 15 + b"\x01", b"\x00" * 10 + b"\xff\xff\x7f\x00\x00\x01")
    assert all(address in loopback for address in seen[0])


def left_behind(pid):
    """What the launcher could leave: descriptors and threads here and in the warm processes, folders, semaphores."""
    processes = [psutil.Process(pid), *warm_processes(pid)]
    inside = {path for folder in folders_of(pid) for path in os.listdir(folder)}
    return {
        "processes": sorted(p.pid for p in descendants(pid)),
        "descriptors": [p.num_fds() for p in processes],
        "threads": [p.num_threads() for p in processes],
        "folders": sorted(folders_of(pid)),
        "inside": inside,
        "semaphores": [[m.path for m in p.memory_maps() if m.path.startswith("/dev/shm/sem.")] for p in processes],
    }


def test_ten_launches_in_a_row_leave_nothing():
    launch(add_up, 1)
    gc.collect()
    before = left_behind(os.getpid())
    handler = signal.getsignal(signal.SIGINT)
    for _ in range(10):
        assert launch(add_up, 1).results == [3.0, 3.0]
    gc.collect()
    after = left_behind(os.getpid())
    assert after == before
    assert before["inside"] == set()
    assert not any(before["semaphores"][1:]), "in warm processes; in this one a library of another test may have made some"
    assert before["threads"][1:] == [1] * len(before["threads"][1:])
    assert signal.getsignal(signal.SIGINT) is handler


def test_launches_from_threads_take_turns():
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(launch(add_up, n).results)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [[0.0, 0.0], [3.0, 3.0], [6.0, 6.0]]


def test_a_fork_of_the_notebook_has_a_launcher_of_its_own():
    launch(add_up, 1)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child():
        sender.send((os.getpid(), launch(add_up, 2).results))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    pid, results = receiver.recv()
    process.join()
    assert results == [6.0, 6.0]
    end = time.monotonic() + 30
    while folders_of(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert folders_of(pid) == []
    assert launch(add_up, 1).results == [3.0, 3.0]


def test_a_job_that_trains_finds_its_imports_done_in_the_second_launch():
    def job():
        import_cost = ("torch.nn.parallel", "torch.distributed.fsdp", "torch.optim", "torch._dynamo")
        there = [name in sys.modules for name in import_cost]
        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        for wrap in (DistributedDataParallel, fully_shard):
            model = wrap(torch.nn.Linear(4, 4))
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return there, len(os.listdir("/proc/self/task")) if sys.platform == "linux" else None

    launch(job)
    for there, _ in launch(job).results:
        assert there == [True] * 4


def test_ranks_start_as_new_interpreters_where_fork_is_unsafe(monkeypatch, capsys):
    monkeypatch.setenv("WORKSHOP_START_METHOD", "spawn")
    counter = local_class()

    def job(here):
        import torch
        import torch.distributed as dist

        total = torch.tensor([here])
        dist.all_reduce(total)
        print("rank", dist.get_rank())
        return counter(), total.item(), hash("the same in every rank")

    run = launch(job, 4)
    assert [(type(a), b) for a, b, _ in run.results] == [(counter, 8)] * 2
    assert run.results[0][2] == run.results[1][2]
    assert capsys.readouterr().out == "[0] rank 0\n[1] rank 1\n"
    assert [c.op for c in run.collectives] == ["all_reduce"] * 2


def test_a_large_environment_and_odd_entries_of_the_path_do_no_harm(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    run = launch(lambda: (len(os.environ["LARGE"]), str(tmp_path) in sys.path), env={"LARGE": "x" * 120_000})
    assert run.results == [(120_000, False)] * 2


def test_an_unknown_start_method_is_refused(monkeypatch):
    monkeypatch.setenv("WORKSHOP_START_METHOD", "forkserver")
    with pytest.raises(ValueError, match="WORKSHOP_START_METHOD is 'forkserver'"):
        launch(add_up, 1)


def test_folders_of_killed_notebooks_are_removed_and_those_of_others_are_not(tmp_path):
    here = engine._place()
    gone, alive, *others = (
        tmp_path / name
        for name in (
            f"helpers-{here}-999999999-a",
            f"helpers-{here}-{os.getpid()}-a",
            f"helpers-{here}1-999999999-a",  # in another container
            f"helpers-another_{here}-999999999-a",  # on another host
            "helpers-x",
        )
    )
    for folder in (gone, alive, *others):
        folder.mkdir()
    engine._remove_orphans(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([alive, *others])


def test_hosts_that_share_a_temporary_folder_tell_theirs_apart(monkeypatch):
    def place(host):
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=host))
        return engine._place()

    assert place("node-1") != place("node-2")
    assert "-" not in place("node-1"), "it divides the parts of a folder's name"


def test_public_names():
    from helpers import launching

    assert launching.__all__ == ["LaunchError", "RankDied", "RankFailed", "RanksHung", "Run", "launch"]
    for name in launching.__all__:
        assert getattr(helpers, name) is getattr(launching, name)


def test_a_run_in_a_terminal_and_in_a_notebook():
    run = Run(2, "cpu", "gloo", [{"<b>": "&"}, None], [0.25, None], 0.1, oversubscribed=True, name="<lambda>")
    assert repr(run).splitlines() == [
        "<lambda> on 2 ranks, cpu, gloo; started in 0.10 s; timings oversubscribed",
        "  rank  time            result",
        "  0     0.250 s         {'<b>': '&'}",
        "  1     did not finish  None",
    ]
    html = run._repr_html_()
    assert "&lt;lambda&gt; on 2 ranks" in html
    assert "{&#x27;&lt;b&gt;&#x27;: &#x27;&amp;&#x27;}" in html
    assert "<b>" not in html
    with pytest.raises(NotImplementedError):  # IPython then takes the representations above
        run._ipython_display_()


def test_a_large_result_is_shortened_in_the_picture():
    text = repr(Run(1, "cpu", "gloo", ["x" * 10_000], [1.0]))
    assert len(text) < 300


def test_importing_helpers_loads_no_torch():
    import subprocess

    code = "import sys, helpers; print([name for name in ('torch', 'numpy', 'matplotlib', 'cloudpickle') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_large_log_is_kept_without_its_file_and_goes_with_the_run(tmp_path):
    path = tmp_path / "log0"
    path.write_bytes(b"a\n" * Log.SMALL)
    log = Log(str(path))
    path.unlink()
    assert log.text() == "a\n" * Log.SMALL
    assert log.last(3) == "\na\n"
    assert str(path) in Path("/proc/self/maps").read_text()
    del log
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_result_takes_one_line_of_the_table_and_floats_take_four_digits():
    run = launch(lambda: (0.123456789, {"seconds": 2.5}, "word " * 40), ranks=1)
    line = repr(run).splitlines()[-1]
    assert "(0.1235, {'seconds': 2.5}, 'word word" in line
    assert len(line) < 130
    assert run.results[0][0] == 0.123456789


def test_a_tensor_in_the_table_has_its_shape_and_no_number_cut_in_two():
    import torch

    held = [torch.full((4, 9), 1 / 3), torch.tensor(2.5), torch.ones(0), torch.ones(2, device="meta")]
    line = repr(Run(1, "cpu", "gloo", [held], [1.0])).splitlines()[-1]
    assert "[tensor of shape (4, 9): 0.3333, 0.3333, 0.3333, 0.3333, …, tensor(2.5000), tensor([]), tensor(" in line
    assert "tensor(indices=" in repr(Run(1, "cpu", "gloo", [torch.eye(2).to_sparse()], [1.0]))


def test_one_collective_is_singular():
    def add(times):
        import torch
        import torch.distributed as dist

        for _ in range(times):
            dist.all_reduce(torch.ones(2))

    assert "; 1 collective, 8 B" in repr(launch(add, 1, ranks=1))
    assert "; 2 collectives, 16 B" in repr(launch(add, 2, ranks=1))


@pytest.mark.skipif(sys.platform != "linux", reason="limits are set for one process, and read, as Linux has them")
def test_descriptors_of_the_warm_process_do_not_grow_by_four_a_rank(tmp_path):
    script = tmp_path / "many.py"
    script.write_text(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (104, 104))\n"
        "from helpers import launch\n"
        "print(sum(launch(lambda: 1, ranks=26, record=False, timeout=240).results))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["26"], 0), done.stderr


@pytest.mark.skipif(0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="not more files may be open here")
def test_a_notebook_with_many_open_files_launches(tmp_path):
    script = tmp_path / "many.py"
    script.write_text(
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
        "from helpers import launch\n"
        "print(launch(lambda: 1, ranks=1).results)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["[1]"], 0), done.stderr


def test_a_launch_works_after_its_folders_were_cleaned_away():
    assert launch(lambda: 1, ranks=1).results == [1]
    for folder in folders_of(os.getpid()):
        shutil.rmtree(folder)
    assert launch(lambda: 2, ranks=1).results == [2]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are told apart by /proc")
def test_an_error_is_shown_where_the_job_has_closed_every_descriptor():
    def careless():
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # without gloo's, whose threads abort the process when they notice it first
                if number > 2 and not os.readlink(f"/proc/self/fd/{number}").startswith(("socket:", "anon_inode:")):
                    os.close(number)
        raise ValueError("what went wrong")

    with pytest.raises(LaunchError) as failure:
        launch(careless, ranks=1)
    assert "ValueError: what went wrong" in str(failure.value)


def test_a_run_with_much_output_travels():
    run = launch(lambda: print("x" * (2 << 20)), ranks=1)
    again = pickle.loads(pickle.dumps(run))
    assert again.output(0) == run.output(0)
    assert launch(lambda: len(run.output(0)) > (2 << 20) - 1, ranks=1).results == [True]
