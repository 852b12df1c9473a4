"""What `diagnose` reads in logs and in hand-made records: every fault's signs, no guesses, any size, any dirt."""

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from notebook_files import course_notebooks, read

import helpers
from helpers import LaunchError, RankFailed, RanksHung, Run, diagnose, diagnosis
from helpers.diagnosis import catalogue, reading
from helpers.diagnosis.predicates import PREDICATES
from helpers.launching import errors
from helpers.launching.results import Log
from helpers.measuring.records import Collective

ROOT = Path(__file__).resolve().parents[1]
FAULTS = {fault.id: fault for fault in diagnosis.faults()}
WITH_EXAMPLE = [fault.id for fault in FAULTS.values() if fault.example]
HEALTHY_LOG = """\
W1130 10:00:00.000000 71 torch/distributed/run.py:803] Setting OMP_NUM_THREADS environment variable for each process to be 1
[rank0]: NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
[rank0]: NCCL INFO P2P Chunksize set to 131072
[rank1]: NCCL INFO comm 0x55d0 rank 1 nranks 2 cudaDev 1 busId 1000 - Init COMPLETE
epoch 0 step 10 loss 6.9312 grad_norm 1.20 lr 2.0e-4 error_rate 0.31
{'loss': 2.41, 'grad_norm': 0.83, 'learning_rate': 1e-05, 'epoch': 1.0}
  0%|          | 0/100 [00:00<?, ?it/s]\r 50%|█████     | 50/100 [00:01<00:01, 49.8it/s]\r100%|██████████| 100/100 [00:02<00:00]
saved checkpoint-100; finance report nanoseconds 12
"""
OTHER_LIBRARY = """\
2026-11-30 10:00:01 ERROR [main] clients.NetworkClient - Connection to node 3 could not be established.
java.lang.IllegalStateException: Cannot commit offsets
    at org.example.Consumer.run(Consumer.java:71)
"""
POEM = "Slowly the river goes by, and nobody waits at the barrier any more.\nThe gates are closed; the peers have gone home.\n"


# ---------------------------------------------------------------------------------------------------------------- the catalogue


def test_every_entry_is_whole():
    headings = {}
    for path in course_notebooks():
        text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
        headings[path.name[:2]] = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    for fault in FAULTS.values():
        assert fault.kind in ("loud", "silent", "slow"), fault.id
        assert fault.says in catalogue.SAYS, fault.id
        assert fault.name[0].isupper() or fault.name.startswith(("dp", "vLLM", "new_group", "no_sync", "macOS", "device_map"))
        assert fault.explanation.endswith((".", ")")), fault.id
        assert fault.mend.endswith("."), fault.id
        assert fault.patterns or fault.predicate or fault.tool != "diagnose", f"nothing finds {fault.id}"
        assert bool(fault.patterns) == bool(fault.example), f"{fault.id}: a pattern needs an example, an example a pattern"
        number, _, heading = fault.section.partition(" · ")
        if number in headings:
            assert [line for line in headings[number] if line.startswith(heading)], f"{fault.id}: no section {fault.section!r}"
    assert {fault.predicate for fault in FAULTS.values()} - {None} == set(PREDICATES)


def test_a_fixed_text_is_part_of_every_match():
    for fault in FAULTS.values():
        for fixed, pattern in fault.searches:
            for match in pattern.finditer(fault.example):
                assert fixed in match[0]
    assert catalogue.needle(r"[Aa]ddress (?:already|still) in uses? \(code \d+\)") == "ddress "
    with pytest.raises(ValueError, match="must contain a fixed text"):
        catalogue.needle(r"(?:Error|error): \d")
    with pytest.raises(ValueError, match="alternatives belong in brackets"):
        catalogue.needle("killed|crashed")


@pytest.mark.parametrize("id", WITH_EXAMPLE)
def test_an_example_is_named(id):
    found = diagnose(FAULTS[id].example)
    assert found.fault == id, str(found)
    assert (found.name, found.mend, found.section) == (FAULTS[id].name, FAULTS[id].mend, FAULTS[id].section)
    assert found.evidence[0].startswith(("line ", "rank "))
    assert not found.healthy
    assert str(found).startswith(found.name)
    assert f"Mend: {found.mend}" in str(found)


@pytest.mark.parametrize("id", WITH_EXAMPLE)
def test_an_example_is_named_in_the_middle_of_other_lines_and_dirt(id):
    example = FAULTS[id].example.rstrip("\n")
    lines = [f"\x1b[31m{line}\x1b[0m" for line in example.split("\n")]
    dirty = HEALTHY_LOG + "\r\n".join(lines) + "\n"
    if not any(pattern.endswith(r"\Z") for pattern in FAULTS[id].patterns):
        dirty += HEALTHY_LOG
    assert diagnose(dirty).fault == id


# ---------------------------------------------------------------------------------------------------------- logs from elsewhere

LOGS = sorted((Path(__file__).parent / "data" / "logs").glob("*.log"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_is_named(path):
    """The file's name says the fault and, behind a dot, which library's log it is; the ranks stand in its first line."""
    wanted, _, _ = path.stem.partition(".")
    found = diagnose(path)
    assert found.fault == (None if wanted == "unknown" else wanted), str(found)
    ranks = re.match(r"# ranks: (.*)", path.read_text(errors="replace"))
    if ranks:
        assert found.ranks == tuple(map(int, ranks[1].split())), str(found)


def test_the_cause_comes_before_what_follows_from_it_wherever_it_stands():
    gone, killed, raised = (FAULTS[id].example for id in ("peer-gone", "rank-killed", "one-rank-raised"))
    unused = FAULTS["unused-parameter"].example
    assert diagnose(gone + unused).fault == "unused-parameter"
    assert diagnose(gone + killed).fault == "rank-killed"
    assert diagnose(raised + FAULTS["collective-timeout"].example).ranks == (1,)
    assert diagnose(FAULTS["meta-tensor"].example + unused).fault == "meta-tensor"  # of two causes the first


def test_an_unrecognised_error_of_one_rank_is_shown_beside_its_victims():
    log = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer\n[rank2]: KeyError: 'b'\n"
    found = diagnose(log)
    assert (found.fault, found.ranks) == ("one-rank-raised", (2,))
    assert found.evidence[0] == "rank 2 raised KeyError: 'b'"


def test_whether_a_rank_raised_on_its_own_is_told_from_who_is_gone():
    gone = "[rank{}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer\n"
    two = diagnose(gone.format(0) + "[rank1]: KeyError: 'b'\n[rank2]: ValueError: c\n")
    assert (two.fault, two.ranks, two.evidence[0]) == ("one-rank-raised", (1,), "rank 1 raised KeyError: 'b'")
    both = diagnose(gone.format(1) + "[rank1]: KeyError: 'b'\n")  # of one rank, who then saw others go
    assert (both.fault, both.ranks) == ("one-rank-raised", (1,))
    alike = diagnose(gone.format(1) + gone.format(2) + "[rank1]: KeyError: 'b'\n[rank2]: KeyError: 'b'\n")
    assert alike.fault == "peer-gone"  # no rank only says that another is gone


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[rank1]: AssertionError", "rank 1 raised AssertionError"),
        ("[default1]:torch.foo.BarError", "rank 1 raised torch.foo.BarError"),
        ("(Worker_TP1 pid=33) AssertionError", "rank 1 raised AssertionError"),
    ],
)
def test_an_exception_without_a_message_is_seen(line, told):
    gone = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1\n"
    for log in (f"[rank1]: Traceback (most recent call last):\n{line}\n{gone}", f"{gone}{line}\n"):
        found = diagnose(log)
        assert (found.fault, found.ranks, found.evidence[0]) == ("one-rank-raised", (1,), told)


def test_an_exception_is_not_every_word_that_ends_like_one():
    assert not diagnose("AssertionError\n").healthy
    assert diagnose("AssertionError\n").evidence == ("AssertionError",)
    assert diagnose("it catches ValueError\nRaises: KeyError\nno Error\n").healthy


# ----------------------------------------------------------------------------------------------------------------- I don't know


def test_what_is_healthy_or_no_log_is_not_named():
    healthy = diagnose(HEALTHY_LOG)
    assert healthy.fault is None
    assert healthy.healthy
    assert "no line looks like a fault" in str(healthy)
    for text in ("", " \n \r\n", OTHER_LIBRARY, "Traceback (most recent call last):\n  File 'x'\nFooError: what\n"):
        found = diagnose(text)
        assert found.fault is None, str(found)
        assert not found.healthy
        assert str(found).startswith("I don't know")
        assert found.look_next
    assert diagnose(POEM).fault is None


@pytest.mark.parametrize("name", ["README.md", "helpers/batching.py", "helpers/pipeline.py", "pyproject.toml"])
def test_files_that_are_no_logs_are_not_named(name):
    assert diagnose(ROOT / name).fault is None


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_read_and_none_is_guessed(text):
    assume(not any(pattern.search(text) for fault in FAULTS.values() for _, pattern in fault.searches))  # drawn from code
    assert diagnose(text).fault is None


def test_what_was_ruled_out_is_said():
    found = diagnose("Traceback (most recent call last):\nFooError: what\n")
    assert "FooError: what" in found.evidence[0]
    assert re.search(r"none of \d+ known signs of \d+ faults stands in 2 lines", found.ruled_out[0])


def test_what_diagnose_takes(tmp_path):
    with pytest.raises(TypeError, match=r"not an exception \(ValueError\)"):
        diagnose(ValueError("x"))
    with pytest.raises(TypeError, match="not int"):
        diagnose(3)
    with pytest.raises(TypeError, match="mismatch takes what launch"):
        diagnosis.mismatch("text")
    with pytest.raises(FileNotFoundError):
        diagnose(tmp_path / "absent.log")
    for name in ("logs/job.log", " ../train.err\n"):
        with pytest.raises(ValueError, match=re.escape(f"diagnose(Path({name.strip()!r}))")):
            diagnose(name)
    assert diagnose("see job.log\n").healthy
    assert diagnosis.mismatch(LaunchError("none was started")) is None


# ---------------------------------------------------------------------------------------------------------------- size and dirt

MEASURED = """
import resource, sys
from pathlib import Path
from helpers import diagnose
small = diagnose(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
large = diagnose(Path(sys.argv[2]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(after - before, small.fault, large.fault, large.evidence[0])
"""


@pytest.mark.parametrize("endless", [False, True])
def test_fifty_megabytes_are_read_in_bounded_memory(tmp_path, endless):
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    cause = FAULTS["meta-tensor"].example.strip()
    small.write_text(cause + "\n")
    line = " ".join(f"w{random.Random(0).random()}" for _ in range(5)) + (" " if endless else " loss 2.1\n")
    with open(large, "w") as file:
        for number in range(50_000_000 // len(line)):
            file.write(line)
            if number == 300_000:
                file.write(cause + ("" if endless else "\n"))
    assert large.stat().st_size > 49_000_000
    done = subprocess.run([sys.executable, "-c", MEASURED, str(small), str(large)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, *named = done.stdout.split(maxsplit=3)
    assert named[:2] == ["meta-tensor", "meta-tensor"]
    assert int(grown) < 30_000  # KiB
    if not endless:
        assert named[2].startswith("line 300002: "), named[2]


def test_bytes_that_are_no_text_progress_bars_and_windows_lines(tmp_path):
    log = tmp_path / "job.log"
    bar = b"".join(b"\r%3d%%|\xe2\x96\x88\xff\xfe" % i for i in range(100))
    log.write_bytes(bar + b"\r\n\x1b[1;31m[rank1]:\x1b[0m RuntimeError: got mixed torch.Tensor and DTensor\r\n\xff\xff\x00")
    found = diagnose(log)
    assert (found.fault, found.ranks) == ("mixed-tensors", (1,))


def test_a_sign_over_the_border_of_two_blocks_is_seen(monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 64)
    for shift in range(70):
        text = "x" * shift + "\n" + FAULTS["heads-not-divisible"].example
        assert diagnose(text).fault == "heads-not-divisible"
    several = (
        "key = self.k_proj(x).view(shape)\n  frame\nRuntimeError: shape '[2, 16, -1, 32]' is invalid for input of size 512\n"
    )
    monkeypatch.setattr(reading, "BLOCK", 16)  # its two lines are in different ones
    found = diagnose(several)
    assert found.fault == "heads-not-divisible"
    assert "(2 times)" not in found.evidence[0]


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank12]: x", 12),
        ("[rank1]:[E1130 10:00:00 ProcessGroupNCCL.cpp:683] x", 1),
        ("[default3]:x", 3),
        ("[Rank 2] x", 2),
        ("4: x", 4),
        ("(Worker_TP1 pid=33) x", 1),
        ("rank 3 of 4 raised x", 3),
        ("  File x", None),
        ("12:30:11 x", None),
        ("2026-11-30 x", None),
    ],
)
def test_who_a_line_is_from(line, rank):
    assert reading.rank_of(line) == rank


def test_the_command(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(FAULTS["port-in-use"].example)

    def command(*arguments):
        return subprocess.run([sys.executable, "-m", "helpers.diagnosis", *arguments], cwd=ROOT, capture_output=True, text=True)

    done = command(str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(FAULTS["port-in-use"].name)
    for arguments, said in [((), "Which log?"), (("",), "Which log?"), ((str(tmp_path / "no"),), "cannot be read")]:
        done = command(*arguments)
        assert done.returncode == 2
        assert said in done.stdout


# ----------------------------------------------------------------------------------------------------- errors and their message


def an_error(message="rank 1 of 2 raised RuntimeError: got mixed torch.Tensor and DTensor"):
    return RankFailed(message, 1, Run(2, "cpu", "gloo"), exception="RuntimeError", traceback="")


def test_an_errors_message_ends_with_its_diagnosis():
    error = an_error()
    assert error.diagnosis.fault == "mixed-tensors"
    assert error.diagnosis.ranks == (1,)
    first, *_, name, teaches = str(error).splitlines()
    assert first == error.args[0]
    assert name.startswith(f"Diagnosis: {FAULTS['mixed-tensors'].name}.")
    assert FAULTS["mixed-tensors"].section in teaches
    assert error._render_traceback_() == [f"RankFailed: {error}"]
    unknown = an_error("rank 1 of 2 raised FooError: what")
    assert str(unknown) == unknown.args[0]
    assert str(unknown.diagnosis).startswith("I don't know")


def test_what_was_recorded_is_named_before_a_sign_in_the_text_that_says_as_much():
    run = replace(run_of("a", "b"), collectives=(made(0, 0, "a"), made(1, 0, "b", "broadcast")))
    error = RankFailed(an_error().args[0], 1, run, exception="RuntimeError", traceback="")
    named = FAULTS[error.diagnosis.fault]
    assert (named.predicate, named.weight) == ("op differs", FAULTS["mixed-tensors"].weight)


def test_what_a_victim_prints_does_not_hide_the_rank_that_raised(tmp_path):
    said = "[E1201 PGGloo.cpp:67] Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc] Connection closed by peer"
    for rank, text in enumerate((said, "")):
        (tmp_path / str(rank)).write_text(text)
    run = Run(2, "cpu", "gloo", logs=[Log(str(tmp_path / str(rank))) for rank in (0, 1)])
    error = RankFailed("rank 1 of 2 raised KeyError: 'b'", 1, run, exception="KeyError", traceback="")
    assert (error.diagnosis.fault, error.diagnosis.ranks) == ("one-rank-raised", (1,))
    assert "KeyError: 'b'" in error.diagnosis.evidence[0]
    assert "Connection closed by peer" in error.diagnosis.evidence[1]
    lost = RankFailed(
        "rank 0 of 2 raised RuntimeError: ranks 1 closed the connection before", 0, run, exception="RuntimeError", traceback=""
    )
    assert lost.diagnosis.fault == "peer-gone"


def test_an_error_is_shown_even_if_reading_it_fails(monkeypatch):
    def broken(error):
        raise ZeroDivisionError

    monkeypatch.setattr(errors, "diagnosers", [broken])
    error = an_error()
    assert error.diagnosis is None
    assert str(error) == error.args[0]


def test_diagnosis_is_loaded_only_when_a_job_fails():
    code = "import sys, helpers; from helpers import launch; print('helpers.diagnosis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
    assert helpers.diagnose is diagnosis.diagnose


# ----------------------------------------------------------------------------------------------------------------- the mismatch


def made(rank, sequence, line, op="all_reduce", group=(0, 1), size=4, dtype="float32", end=1.0):
    return Collective(rank, sequence, op, group, dtype, (size // 4,), size, float(sequence), end, line)


def run_of(*lines_by_rank, op="all_reduce", group=None, inside=None):
    """One letter an operation: its line's text; of the line that calls it where it is issued `inside` another."""
    group = group or tuple(range(len(lines_by_rank)))
    made_all = [
        made(rank, place, line and f"cell 1, line {5 + 10 * rank + place}: {line}", op, group)
        for rank, lines in enumerate(lines_by_rank)
        for place, line in enumerate(lines)
    ]
    if inside:
        made_all = [replace(c, source=f"cell 1, line 2: {inside}", callers=(c.source,)) for c in made_all]
    return Run(len(lines_by_rank), "cpu", "gloo", collectives=tuple(made_all))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_swapped_lines_are_found(ranks):
    run = run_of("ab", *["ba"] * (ranks - 1))
    found = diagnosis.mismatch(run)
    assert found.what == "source"
    assert found.rows[0].source.endswith(": a")
    assert found.rows[1].source.endswith(": b")
    assert found.later[0].source.endswith(": b")
    assert "cell 1, line 5: a" in str(found)
    assert "opposite order" in str(found)
    named = diagnose(run)
    assert named.fault == "swapped-order"
    assert not named.healthy


def test_a_swap_is_found_beside_lines_that_only_one_rank_passes():
    found = diagnosis.mismatch(run_of("xab", "yba"))
    assert [issued.source.partition(": ")[2] for issued in found.rows.values()] == ["a", "b"]


def test_a_swap_is_found_where_one_line_is_called_from_two():
    found = diagnosis.mismatch(run_of("ab", "ba", inside="dist.all_reduce(x)"))
    assert found.what == "source"
    assert found.rows[0].source == "cell 1, line 2: dist.all_reduce(x) <- cell 1, line 5: a"
    assert found.later[1].source == "cell 1, line 2: dist.all_reduce(x) <- cell 1, line 16: a"
    assert diagnosis.mismatch(run_of("ab", "ab", inside="dist.all_reduce(x)")) is None


def test_lines_in_the_same_order_are_claimed_only_where_they_are():
    ends = {True: "from lines in the same order", False: "though not all from the same lines"}
    for run, same in (
        (run_of("ab", "ab"), True),
        (run_of([None, "a"], ["a", None]), True),
        (run_of("a", "b"), False),
        (run_of("a", "b", inside="dist.all_reduce(x)"), False),
    ):
        assert diagnose(run).ruled_out[0].endswith(ends[same])


@pytest.mark.parametrize(
    "run",
    [
        run_of("ab", "ab"),
        run_of("a", "b"),  # two branches to the same sum
        run_of("aab", "acb"),
        run_of("abab", "acac"),  # branches in a loop
        run_of("abb", "bab", "bba"),  # a part taken in turn
        run_of("ab", "ba", op="broadcast"),  # who sends is not who receives
        run_of([None, "a"], ["a", None]),  # issued by a library's thread
        run_of("aaw", "aww"),  # Join: one rank stands in for what it lacks
    ],
)
def test_branches_are_no_swap(run):
    assert diagnosis.mismatch(run) is None
    assert diagnose(run).healthy


def test_differences_have_a_kind():
    def what(*collectives):
        run = Run(3, "cpu", "gloo", collectives=collectives)
        hung = any(collective.end is None for collective in collectives)
        found = diagnosis.mismatch(LaunchError("hung", run=run) if hung else run)
        assert all(text in str(found) for text in ("rank 0", "rank 1"))
        return found.what, found.odd

    assert what(made(0, 0, "a"), made(1, 0, "a", op="broadcast")) == ("op", None)
    assert what(made(0, 0, "a"), made(1, 0, "a", size=8)) == ("bytes", None)
    assert what(made(0, 0, "a"), made(1, 0, "a", dtype="int32")) == ("dtype", None)
    three = (0, 1, 2)
    assert what(*(made(r, 0, "a", group=three, size=8 if r == 2 else 4) for r in three)) == ("bytes", 2)
    assert what(made(0, 0, "a", group=three, end=None), made(1, 0, "a", group=three, end=None)) == ("missing", 2)
    other = made(2, 0, "a", group=(1, 2), end=None)
    waiting = [made(r, 0, "a", group=three, end=None) for r in (0, 1)]
    assert what(*waiting, other)[0] == "group"
    assert what(made(0, 0, "a"), made(1, 0, "b"), made(0, 1, "b"), made(1, 1, "a")) == ("source", None)


def test_who_is_absent_is_sought_along_the_chain_of_those_who_wait():
    """Rank 0 waits for 1, 1 for 3 and 2 for 3 on a mesh of 2 × 2; a receive waits for its sender."""
    chain = (made(0, 0, "tp", end=None), made(1, 0, "dp", group=(1, 3), end=None), made(2, 0, "tp", group=(2, 3), end=None))
    found = diagnosis.mismatch(LaunchError("hung", run=Run(4, "cpu", "gloo", collectives=chain)))
    assert found.what == "missing"
    assert [rank for rank, issued in found.rows.items() if issued is None] == [3]
    receive = Collective(1, 0, "recv", (0, 1), "float32", (1,), 4, 0.0, None, "cell 1, line 1: recv", 0)
    found = diagnosis.mismatch(LaunchError("hung", run=Run(2, "cpu", "gloo", collectives=(receive,))))
    assert found.rows == {1: receive, 0: None}
    assert diagnosis.mismatch(Run(2, "cpu", "gloo", collectives=(receive,))) is None


def test_an_operation_that_nobody_met_in_a_job_that_returned():
    run = Run(2, "cpu", "gloo", collectives=(made(0, 0, "cell 1, line 1: a", end=None),), spans=[(0.0, 1.0), (0.0, 1.0)])
    found = diagnose(run)
    assert (found.fault, found.ranks, found.healthy) == ("collective-conditional", (1,), False)
    unequal = Run(2, "cpu", "gloo", collectives=(made(0, 0, "a"), made(1, 0, "a", op="barrier", size=0)), spans=run.spans)
    assert diagnose(unequal).fault == "collective-op"


def hung(*collectives, ended=()):
    """A job of two ranks that hung after 3 s in what has no end; the ranks in `ended` had returned."""
    spans = [(0.0, 1.0 if rank in ended else None) for rank in range(2)]
    run = Run(2, "cpu", "gloo", collectives=collectives, spans=spans)
    facts = {"waiting": {c.rank: c for c in collectives if c.end is None}, "stacks": {}, "difference": None, "timeout": 3.0}
    return RanksHung("job did not return within 3 s", None, run, **facts)


def test_operations_of_a_hook_that_do_not_match():
    """As PowerSGD leaves them: issued by a callback's thread, so without a line, on one rank more or of another size."""
    met = [made(rank, 0, None) for rank in range(2)]
    assert diagnose(hung(*met, made(0, 1, None, size=2048, end=None))).fault == "hook-order"
    assert diagnose(hung(*met, made(0, 1, None, size=2048, end=None), made(1, 1, None, size=64, end=None))).fault == "hook-order"


def test_batches_are_uneven_only_where_the_rank_has_returned():
    line = "cell 1, line 5: loss.backward()"
    issued = [made(0, 0, line), made(1, 0, line), made(0, 1, line, end=None)]
    assert diagnose(hung(*issued, ended=[1])).fault == "uneven-batches"
    assert diagnose(hung(*issued)).fault != "uneven-batches"


@pytest.mark.parametrize(
    ("text", "told"), [("hello", "in 1 line"), ("hello\n", "in 1 line"), ("a\nb", "in 2 lines"), ("a\nb\n", "in 2 lines")]
)
def test_lines_are_counted_whether_or_not_the_last_one_ends(text, told):
    assert diagnose(text).ruled_out[0].endswith(told)
