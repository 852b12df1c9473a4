"""A saved trace is what Perfetto reads: one process a rank, proper slices, nothing overlapping within a track."""

import json

from hypothesis import given
from hypothesis import strategies as st

from helpers import launch
from helpers.launching.results import Run
from helpers.measuring import trace
from helpers.measuring.records import Collective, Region


def check_format(path):
    """What the trace event format demands; returns the events by kind."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    tracks = {}
    names = {}
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert set(tracks) <= set(names)
    assert len(set(names.items())) == len(names)
    for slices in tracks.values():
        enclosing = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while enclosing and enclosing[-1] <= event["ts"] + 1e-3:
                enclosing.pop()
            assert not enclosing or event["ts"] + event["dur"] <= enclosing[-1] + 1e-3  # within it, or after it
            enclosing.append(event["ts"] + event["dur"])
    return {(pid, names[pid, tid]): slices for (pid, tid), slices in tracks.items()}


def collective(rank, sequence, start, end, **more):
    return Collective(rank, sequence, "all_reduce", (0, 1), "float32", (4,), 16, start, end, "cell 1, line 2: f()", **more)


def test_a_run_of_real_ranks(tmp_path):
    def job():
        import torch
        import torch.distributed as dist

        from helpers.measuring import clock

        with clock.region("outer"), clock.region("inner"):
            works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
        dist.barrier()

    run = launch(job, ranks=2)
    path = run.save_trace(tmp_path / "trace.json")
    tracks = check_format(path)
    for rank in range(2):
        assert [event["name"] for event in tracks[rank, "function"]] == ["job"]
        assert [event["name"] for event in tracks[rank, "regions"]] == ["outer", "inner"]
        collectives = [
            event for (pid, name), events in tracks.items() if pid == rank and "collectives" in name for event in events
        ]
        assert sorted(event["name"] for event in collectives) == ["all_reduce", "all_reduce", "all_reduce", "barrier"]
        first = next(event for event in collectives if event["args"]["sequence"] == 0)
        assert first["args"]["bytes"] == 8
        assert first["args"]["group"] == [0, 1]
        assert "dist.all_reduce" in first["args"]["source"]
        (function,) = tracks[rank, "function"]
        assert all(function["ts"] <= event["ts"] for event in collectives)


def test_what_never_ended_lasts_to_the_end_of_the_run(tmp_path):
    run = Run(
        ranks=2,
        device="cpu",
        backend="gloo",
        spans=[(10.0, None), None],
        collectives=(collective(0, 0, 11.0, None), collective(0, 1, 11.5, 12.0, waited_from=11.75)),
    )
    tracks = check_format(trace.write(run, tmp_path / "trace.json"))
    (function,) = tracks[0, "function"]
    assert (function["ts"], function["dur"], function["args"]) == (0.0, 2e6, {"unfinished": True})
    (hanging,) = tracks[0, "collectives"]
    assert (hanging["ts"], hanging["dur"], hanging["args"]["unfinished"]) == (1e6, 1e6, True)
    (done,) = tracks[0, "collectives 2"]
    assert done["args"]["blocked for ms"] == 250.0
    assert "unfinished" not in done["args"]
    assert not any(rank == 1 for rank, _ in tracks)


def test_an_empty_run_is_a_valid_trace(tmp_path):
    assert check_format(trace.write(Run(ranks=1, device="cpu", backend="gloo"), str(tmp_path / "trace.json"))) == {}


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=25)


@given(intervals)
def test_collectives_in_flight_together_lie_on_as_few_tracks_as_possible(tmp_path_factory, intervals):
    run = Run(ranks=1, device="cpu", backend="gloo")
    run.collectives = tuple(collective(0, n, float(start), float(start + length)) for n, (start, length) in enumerate(intervals))
    tracks = check_format(trace.write(run, tmp_path_factory.getbasetemp() / "trace.json"))
    assert sum(len(slices) for slices in tracks.values()) == len(intervals)
    assert len(tracks) == max((sum(s <= moment < s + length for s, length in intervals) for moment in range(41)), default=0)


@given(intervals)
def test_regions_may_nest_but_not_cross(tmp_path_factory, intervals):
    run = Run(ranks=1, device="cpu", backend="gloo")
    run.regions = tuple(Region(0, "r", float(start), float(start + length)) for start, length in intervals)
    tracks = check_format(trace.write(run, tmp_path_factory.getbasetemp() / "trace.json"))
    assert sum(len(slices) for slices in tracks.values()) == len(intervals)
