"""A saved trace is what Perfetto reads: one process a rank, each span a beginning and an end with a number of its own."""

import json

from hypothesis import given
from hypothesis import strategies as st

from helpers import launch
from helpers.launching.results import Run
from helpers.measuring import trace
from helpers.measuring.records import Collective, Region


def spans_of(path):
    """What the trace event format demands; returns by rank and category its spans: (name, start, duration, arguments)."""
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] in ("ms", "ns")
    begun, spans = {}, {}
    for event in content["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index")
            continue
        assert event["ts"] >= 0
        same = tuple(event[key] for key in ("pid", "tid", "cat", "id", "name"))
        if event["ph"] == "b":
            assert event["id"] not in begun
            begun[event["id"]] = same, event
        else:
            assert event["ph"] == "e"
            (expected, begin) = begun[event["id"]]  # the beginning stands before the end
            assert same == expected
            row = (event["name"], begin["ts"], event["ts"] - begin["ts"], begin["args"])
            assert row[2] >= 0
            spans.setdefault((event["pid"], event["cat"]), []).append(row)
    assert len(begun) == sum(map(len, spans.values()))
    return spans


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
    spans = spans_of(path)
    for rank in range(2):
        ((name, began, lasted, _),) = spans[rank, "function"]
        assert name == "job"
        assert sorted(name for name, *_ in spans[rank, "region"]) == ["inner", "outer"]
        collectives = spans[rank, "collective"]
        assert sorted(name for name, *_ in collectives) == ["all_reduce", "all_reduce", "all_reduce", "barrier"]
        first = next(arguments for *_, arguments in collectives if arguments["sequence"] == 0)
        assert first["bytes"] == 8
        assert first["group"] == [0, 1]
        assert "dist.all_reduce" in first["source"]
        for _, start, length, _ in [*spans[rank, "region"], *collectives]:
            assert began <= start
            assert start + length <= began + lasted + 1e-3


def test_what_never_ended_lasts_to_the_end_of_the_run(tmp_path):
    run = Run(
        ranks=2,
        device="cpu",
        backend="gloo",
        spans=[(10.0, None), None],
        collectives=(collective(0, 0, 11.0, None), collective(0, 1, 11.5, 12.0, waited_from=11.75)),
    )
    spans = spans_of(trace.write(run, tmp_path / "trace.json"))
    assert spans[0, "function"] == [("function", 0.0, 2e6, {"unfinished": True})]
    (_, start, length, hanging), (_, _, _, done) = spans[0, "collective"]
    assert (start, length, hanging["unfinished"]) == (1e6, 1e6, True)
    assert done["blocked for ms"] == 250.0
    assert "unfinished" not in done
    assert not any(rank == 1 for rank, _ in spans)


def test_an_empty_run_is_a_valid_trace(tmp_path):
    assert spans_of(trace.write(Run(ranks=1, device="cpu", backend="gloo"), str(tmp_path / "trace.json"))) == {}


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=25)


@given(intervals)
def test_what_overlaps_is_written_like_anything_else(tmp_path_factory, intervals):
    run = Run(ranks=1, device="cpu", backend="gloo")
    run.collectives = tuple(collective(0, n, float(start), float(start + length)) for n, (start, length) in enumerate(intervals))
    run.regions = tuple(Region(0, "r", float(start), float(start + length)) for start, length in intervals)
    spans = spans_of(trace.write(run, tmp_path_factory.getbasetemp() / "trace.json"))
    first = min((start for start, _ in intervals), default=0)
    for category in ("collective", "region"):
        written = [(start / 1e6 + first, length / 1e6) for _, start, length, _ in spans.get((0, category), [])]
        assert written == intervals
