"""The framework of the benchmarks: verdicts, order, reports, exit codes, and that nothing is left behind. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tests.benchmarks
from tests.benchmarks import __main__ as command
from tests.benchmarks import bench_recorder, framework, processes, report
from tests.benchmarks.framework import Benchmark, Claim, DoesNotRun, Findings, Row, at_least, at_most, interleaved, shown
from tests.benchmarks.kernels import Kernel

FAKE = """
import subprocess
import sys
from pathlib import Path
from tests.benchmarks.framework import Findings, Row, at_least, at_most, benchmark

@benchmark
def good(repeats):
    '''Holds.'''
    rows = [Row("theirs", (4.0,) * repeats), Row("ours", tuple(0.1 + 0.001 * i for i in range(repeats)))]
    ratio = rows[0].median / rows[1].median
    return Findings(rows, [at_least("ours is faster", ratio, 20, "times")], "ours is faster", ["a note"])

@benchmark
def bad(repeats):
    '''Does not hold.'''
    return Findings([Row("ours", (2.0,) * repeats)], [at_most("ours is fast", 2.0, 1.0, "s")])

@benchmark
def broken(repeats):
    '''Raises, and leaves processes that left their parent.'''
    code = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3).pid)"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
    Path(__file__).with_name("left").write_text(child)
    raise ZeroDivisionError("on purpose")

def helper(repeats):
    raise AssertionError("no benchmark")
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = tmp_path / "fake_benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "bench_fake.py").write_text(FAKE)
    (folder / "other.py").write_text("raise AssertionError('not a module of benchmarks')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fake_benchmarks", "fake_benchmarks.bench_fake"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(command, "wait_until_quiet", lambda limit: "")
    monkeypatch.setattr(processes.Watch, "others", lambda self: 0.01)
    return importlib.import_module("fake_benchmarks")


@pytest.fixture
def run(fakes: ModuleType, tmp_path: Path):
    return lambda *arguments: command.main(arguments, fakes, tmp_path / "build", tmp_path / "recorded")


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        (at_least("", 20.0, 20), True),
        (at_least("", 19.9, 20), False),
        (at_most("", 5.0, 5), True),
        (at_most("", 5.1, 5), False),
        (at_most("", -30.0, 5), True),
        (at_most("", math.nan, 5), False),
        (at_least("", math.nan, 20), False),
        (at_least("", math.inf, 20), True),
        (Claim("", 3, least=1, most=2), False),
        (shown("", True), True),
        (shown("", False), False),
    ],
)
def test_a_claim_holds_up_to_its_limit(claim: Claim, holds: bool) -> None:
    assert claim.holds is holds


def test_a_claim_on_what_did_not_run_fails() -> None:
    missing = Row("theirs", (), note="does not run here")
    assert not at_least("", missing.median / 0.1, 20).holds
    assert Row("", (3.0, 1.0, 2.0, 100.0)).median == 2.5


def test_contenders_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []

    def contender(name: str):
        def seconds() -> float:
            order.append(name)
            return float(len(order))

        return seconds

    timed = interleaved({name: contender(name) for name in "abc"}, 3)
    assert order == list("abcbcacab")
    assert timed["a"].samples == (1.0, 6.0, 8.0)
    assert [row.name for row in timed.rows()] == ["a", "b", "c"]


def test_a_contender_that_does_not_run_is_left_out_with_its_reason() -> None:
    calls = []

    def missing() -> float:
        calls.append(1)
        raise DoesNotRun("no such package")

    timed = interleaved({"theirs": missing, "ours": lambda: {"ours, first": 2.0, "ours, second": 1.0}}, 5)
    assert len(calls) == 1
    assert [(row.name, len(row.samples)) for row in timed.rows()] == [("ours, first", 5), ("ours, second", 5), ("theirs", 0)]
    assert timed["theirs"].note == "does not run here: no such package"


def test_an_error_of_a_contender_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        interleaved({"ours": lambda: 1 / 0}, 5)


def test_benchmarks_are_found_by_the_name_of_their_module(fakes: ModuleType) -> None:
    found = framework.discover(fakes)
    assert [one.full_name for one in found] == ["fake.good", "fake.bad", "fake.broken"]
    assert found[1].summary == "Does not hold."
    assert framework.select(found, []) == framework.select(found, ["fake"]) == found
    assert framework.select(found, ["fake.bad"]) == [found[1]]
    with pytest.raises(ValueError, match=r"'fake\.worse'; there are fake, fake\.bad, fake\.broken, fake\.good"):
        framework.select(found, ["fake.worse"])


def test_every_benchmark_says_what_it_measures() -> None:
    found = framework.discover(tests.benchmarks)
    assert {one.topic for one in found} >= {"launch", "recorder", "failures"}
    assert all(one.summary.endswith((".", ")")) for one in found)


def test_exit_code_zero_when_every_requirement_holds(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake.good") == 0
    said = capsys.readouterr().out
    assert "holds  ours is faster: 39.2 times (at least 20 times required)" in said
    assert "note   a note" in said
    assert "every requirement holds" in said
    assert (tmp_path / "build" / "fake_good.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "recorded").exists()


def test_the_file_holds_samples_date_and_machine(run, tmp_path: Path) -> None:
    run("fake.good", "fake.bad", "--repeats", "7")
    page = json.loads((tmp_path / "build" / "fake.json").read_text())
    good, bad = page["benchmarks"]
    assert page["date"].endswith("UTC")
    assert "core" in page["machine"]
    assert page["versions"]["torch"].startswith("2.")
    assert page["quiet"] is True
    assert good["rows"][1]["samples"] == [0.1, 0.101, 0.102, 0.103, 0.104, 0.105, 0.106]
    assert good["rows"][1]["median"] == 0.103
    assert good["claims"][0] | {"measured": 38.835} == {
        "text": "ours is faster",
        "measured": 38.835,
        "least": 20.0,
        "most": None,
        "unit": "times",
        "holds": True,
    }
    assert (good["passed"], bad["passed"]) == (True, False)


def test_exit_code_one_when_a_requirement_fails(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fake.bad", "fake.good") == 1
    said = capsys.readouterr().out
    assert "FAILS  ours is fast: 2 s (at most 1 s required)" in said
    assert "not as required: fake.bad\n" in said


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
def test_one_that_raises_fails_alone_and_nothing_of_it_is_left(
    run, fakes: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert run("fake.broken", "fake.good") == 1
    said = capsys.readouterr().out
    assert "ZeroDivisionError: on purpose" in said
    assert "holds  ours is faster" in said
    pid = int(Path(fakes.__path__[0], "left").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "TMPDIR" not in os.environ


def test_names_are_listed_and_a_wrong_one_runs_nothing(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    assert capsys.readouterr().out.split("\n")[1].split(maxsplit=1) == ["fake.bad", "Does not hold."]
    assert run("fake.worse") == 2
    assert "no benchmark is called 'fake.worse'" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_a_busy_machine_is_refused_unless_it_is_meant(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "wait_until_quiet", lambda limit: "other processes use 1.20 cores: train.py (1.2 cores)")
    assert run("fake.good") == 2
    assert "other processes use 1.20 cores: train.py" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()
    assert run("fake.good", "--anyway") == 0
    assert "disturbed: other processes use 1.20 cores" in capsys.readouterr().out


def test_results_are_recorded_only_on_request_and_undisturbed(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fake", "--record", "--repeats", "2") == 2
    assert run("fake", "--record", "--anyway") == 2
    assert run("fake.good", "--record") == 2
    assert not (tmp_path / "recorded").exists()
    assert run("fake", "--record") == 1
    names = {path.name for path in (tmp_path / "recorded").iterdir()}
    assert names == {"bench_fake.json", "bench_fake_good.png", "bench_fake_bad.png"}
    before = (tmp_path / "recorded" / "bench_fake.json").read_text()
    monkeypatch.setattr(processes.Watch, "others", lambda self: 0.9)
    assert run("fake", "--record", "--repeats", "6") == 1
    captured = capsys.readouterr()
    assert "Nothing was recorded" in captured.err
    assert "other processes used 0.90 cores meanwhile" in captured.out
    assert (tmp_path / "recorded" / "bench_fake.json").read_text() == before


def test_who_uses_the_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LOOK", 0.0)
    monkeypatch.setattr(command, "busiest", lambda seconds: ["train.py (1.2 cores)"])
    readings = iter([1.2, 0.1])
    monkeypatch.setattr(processes.Watch, "others", lambda self: next(readings))
    assert command.wait_until_quiet(0) == "other processes use 1.20 cores: train.py (1.2 cores)"
    assert command.wait_until_quiet(0) == ""
    readings = iter([1.2, 0.9, 0.1, 2.0])
    assert command.wait_until_quiet(300) == ""
    assert next(readings) == 2.0


def test_our_own_work_is_not_that_of_others() -> None:
    times = processes.Watch()
    fake = processes._Reading(times._begin.time + 10, times._begin.machine + 12, times._begin.ours + 9)
    times._read = lambda: fake  # type: ignore[method-assign]
    assert times.others() == pytest.approx(0.3)


def test_a_row_that_did_not_run_is_in_the_table_and_not_in_the_figure() -> None:
    rows = [Row("ours", (0.5, 0.25)), Row("theirs", (), note="does not run here: no such package"), Row("more", (3.0,), "%")]
    outcome = report.Outcome(Benchmark("fake", "good", test_a_claim_holds_up_to_its_limit), 1.0, 0.0, Findings(rows))
    said = report.table(outcome)
    assert "ours    375 ms   250 ms … 500 ms  2" in said
    assert "0  does not run here: no such package" in said
    drawn = report.figure(outcome)
    assert drawn is not None
    assert drawn.alt.startswith("Medians on a logarithmic axis: ours 375 ms.")
    assert report.figure(report.Outcome(outcome.benchmark, 1.0, 0.0, Findings(rows[1:2]))) is None


def test_a_kernel_answers_as_a_notebook_and_leaves_nothing() -> None:
    with processes.contained(), Kernel(GREETING="hello") as kernel:
        cell = "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'])\nprint(os.environ['GREETING'], child.pid)"
        answer = kernel.check(cell, "hello")
        child = int(answer.text.split()[-1])
        assert kernel.run("6 * 7").text == "42"
        failed = kernel.run("1 / 0")
        assert (failed.error, failed.message) == ("ZeroDivisionError", "division by zero")
        with pytest.raises(RuntimeError, match="was to answer 'no'; it answered 'yes"):
            kernel.check("print('yes')", "no")
        begun = kernel.begin("print('running', flush=True)\nwhile True: pass")
        with pytest.raises(TimeoutError):
            kernel.finish(begun, 0.5)
        kernel.interrupt()
        assert kernel.finish(begun).error == "KeyboardInterrupt"
    assert processes.gone([process for process in psutil.process_iter() if process.pid in (child, kernel.process.pid)])


def test_a_recorded_and_a_plain_step_differ_as_they_should() -> None:
    from helpers import launch

    result = launch(bench_recorder.paired_steps, 2, warm_up=2, record=False, timeout=250).results[0]
    assert result["as_meant"]
    assert 2.5e6 < result["parameters"] < 4.5e6
    assert len(result["pairs"]) == 2


def test_the_command_line_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "--help"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--record" in done.stdout
    assert "Exit codes" in done.stdout
