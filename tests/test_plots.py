import dataclasses
import itertools
import math
import re

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from helpers import machine, plots
from helpers.launching.results import Run
from helpers.measuring.records import Collective, Region
from helpers.plots import style
from helpers.plots.timeline import segments


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("value", "unit", "exact", "text"),
    [
        (13_116_416, "bytes", False, "12.5 MiB"),
        (13_116_416, "bytes", True, "13,116,416 B"),
        (1023, "bytes", False, "1,023 B"),
        (24 * 2**30, "bytes", False, "24 GiB"),
        (1.5, "bytes", True, "1.5 B"),
        (0.0123456, "s", False, "12.3 ms"),
        (2.0, "s", True, "2 s"),
        (64e-6, "s", False, "64 µs"),
        (1.234e9, "B/s", False, "1.23 GB/s"),
        (56, "all-reduces", True, "56 all-reduces"),
        (0, "bytes", False, "0 B"),
        (0.123456, "", False, "0.123"),
    ],
)
def test_amounts_are_written_for_people(value, unit, exact, text):
    assert plots.amount(value, unit, exact) == text


def test_compare_says_equal_only_where_it_is():
    assert plots.compare(predicted=13_116_416, measured=13_116_416, unit="bytes").finding == (
        "predicted 13,116,416 B, recorded 13,116,416 B: equal"
    )
    assert plots.compare(predicted=13_116_416, measured=13_116_415, unit="bytes").finding.endswith("equal within 0.1 %")


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (8, 10, "20 % too low"),
        (10.5, 10, "5.0 % too high"),
        (40, 10, "4 times too high"),
        (1, 10, "10 times too low"),
        (0, 10, "100 % too low"),
        (3, 0, "nothing was measured"),
        (0, 0, "equal"),
    ],
)
def test_an_error_is_relative_to_what_was_measured(predicted, measured, words):
    assert plots.compare(predicted=predicted, measured=measured, unit="messages").finding.endswith(f": {words}")


def test_compare_draws_guess_prediction_and_measurement_and_skips_what_is_missing():
    figure = plots.compare(guess=6.0, predicted=12.0, measured=15.0, unit="ms")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [6, 12, 15]
    assert texts(figure) == [" 6 ms", " 12 ms", " 15 ms"]
    assert figure.finding == "your guess 6 ms, predicted 12 ms, measured 15 ms: 20 % too low; your guess 60 % too low"
    assert figure.get_suptitle() == "The prediction is 20 % too low"

    skipped = plots.compare(guess=..., predicted=12.0, measured=15.0, unit="ms", title="Fifteen")
    assert len(skipped.axes[0].patches) == 2
    assert skipped.get_suptitle() == "Fifteen"
    assert "guess" not in skipped.finding
    assert plots.compare(guess=3, measured=4, unit="s").finding == "your guess 3 s, measured 4 s: your guess 25 % too low"


def test_a_guess_of_several_things_is_skipped_until_it_is_complete():
    guess, measured = {"gradients": 400, "activations": ...}, {"gradients": 400, "activations": 1000}
    assert "guess" not in plots.compare(guess=guess, measured=measured, unit="bytes").finding
    guess["activations"] = 2000
    lines = plots.compare(guess=guess, measured=measured, unit="bytes").finding.splitlines()
    assert lines[1] == "activations: your guess 2,000 B, recorded 1,000 B: your guess 100 % too high"


def test_compare_of_named_values_names_the_worst_prediction():
    predicted, measured = {"gradients": 400, "activations": 900}, {"gradients": 400, "activations": 1000}
    figure = plots.compare(predicted=predicted, measured=measured, unit="bytes")
    assert figure.get_suptitle() == "Worst of 2 predictions: activations, 10 % too low"
    assert figure.finding.splitlines() == [
        "gradients: predicted 400 B, recorded 400 B: equal",
        "activations: predicted 900 B, recorded 1,000 B: 10 % too low",
    ]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["gradients", "activations"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"guess": "much", "measured": 1}, TypeError, "guess is 'much'; it must be a number, or ... for no guess"),
        ({"predicted": True, "measured": 1}, TypeError, "predicted is True; it must be a number"),
        ({"measured": math.nan}, ValueError, "measured is nan; it must be finite"),
        ({"measured": {"a": math.inf}}, ValueError, "measured['a'] is inf"),
        ({"predicted": {"a": 1}, "measured": {"b": 1}}, ValueError, "predicted has ['a'], measured has ['b']"),
        ({"measured": {}}, ValueError, "measured is empty"),
        ({"predicted": 1, "measured": {"b": 1}}, ValueError, "name the same things in both"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        plots.compare(unit="s", **arguments)


def test_a_figure_carries_alt_text_with_its_values_and_the_machine_only_in_the_metadata():
    figure = plots.bars({"1 rank": 500.0, "2 ranks": 815.0}, unit="tokens/s", title="Two ranks help")
    data, metadata = figure.bundle()
    assert repr(figure) == data["text/plain"] == "<Figure: Bar chart: Two ranks help. 1 rank 500 tokens/s; 2 ranks 815 tokens/s.>"
    assert metadata["image/png"]["alt"] == f"{figure.alt} measured on {machine.describe().line}"
    assert metadata["image/png"]["width"] == 672
    assert figure.get_supxlabel() == f"measured on {machine.describe().line}"


def test_drawing_twice_gives_the_same_bytes_and_no_trace_of_the_program():
    def draw():
        return plots.sweep([1, 2], {"a": [1, 2]}, xlabel="ranks", ylabel="time", yunit="s", title="t").png()

    assert draw() == draw()
    assert b"Software" not in draw()


def test_pyplot_knows_none_of_the_figures():
    before = plt.get_fignums()
    plots.bars({"a": 1}, unit="", title="t")
    assert plt.get_fignums() == before


def test_series_differ_in_more_than_their_colour():
    assert len(style.PALETTE) == len(style.MARKERS) == len(style.DASHES) == len(style.HATCHES) == 7
    for looks in (style.PALETTE, style.MARKERS, style.DASHES, style.HATCHES):
        assert len(set(looks)) == 7


def test_stacked_parts_stand_on_each_other_and_limits_are_named():
    rows = {"plain": {"parameters": 2 * 2**30, "gradients": 2**30}, "sharded": {"gradients": 2**29}}
    figure = plots.stacked(rows, unit="bytes", label="memory", title="t", limits={"GPU memory": 4 * 2**30}, footer="predicted")
    bars = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert bars == [(0, 2), (2, 1), (0, 0.5)]
    assert texts(figure) == [" 3 GiB", " 512 MiB"]
    assert figure.axes[0].get_xlabel() == "memory (GiB)"
    assert "GPU memory: 4 GiB" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert figure.get_supxlabel() == "predicted"


def test_a_sweep_draws_predictions_as_lines_and_measurements_as_markers_of_the_same_colour():
    x = [2**10, 2**14, 2**20]
    figure = plots.sweep(
        x,
        {"all-reduce": [1e-3, None, 5e-3]},
        {"all-reduce": [1e-3, 2e-3, 4e-3], "broadcast": [1e-4, 1e-4, 1e-4]},
        xlabel="payload",
        ylabel="time",
        xunit="bytes",
        yunit="s",
        log="xy",
        spread={"all-reduce": [(5e-4, 2e-3), (0, 0), (4e-3, 6e-3)]},
        marks={"knee": 2**12},
        title="t",
    )
    axes = figure.axes[0]
    drawn = {container.get_label(): container.lines[0] for container in axes.containers}
    line, marker, other = (drawn[name] for name in ("all-reduce, predicted", "all-reduce, measured", "broadcast, predicted"))
    assert (line.get_linestyle(), line.get_marker()) == ("-", "None")
    assert (marker.get_linestyle(), marker.get_marker()) == ("None", "o")
    assert line.get_color() == marker.get_color() != other.get_color()
    assert list(marker.get_xdata()) == [2**10, 2**20]
    (low, high), _ = (segment[:, 1] for segment in axes.collections[0].get_segments())
    assert (low, high) == pytest.approx((5e-4, 2e-3))
    assert axes.get_xlabel() == "payload"  # the ticks carry the unit
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 KiB", "16 KiB", "1 MiB"]
    assert texts(figure) == [" knee: 4 KiB"]
    assert "measured all-reduce from 1 ms to 5 ms" in figure.alt


def test_a_linear_sweep_has_the_unit_in_its_label_and_starts_at_zero():
    figure = plots.sweep([1, 2, 4], {"": [0.5, 0.3, 0.2]}, xlabel="ranks", ylabel="time", yunit="s", title="t")
    axes = figure.axes[0]
    assert axes.get_ylabel() == "time (ms)"
    assert axes.get_ylim()[0] <= 0
    assert list(axes.get_xticks()) == [1, 2, 4]
    assert list(axes.lines[0].get_ydata()) == [500, 300, 200]


def test_values_by_rank_number_are_compared():
    figure = plots.compare(predicted={0: 1, 1: 2}, measured={0: 1, 1: 2}, unit="messages")
    assert figure.finding.splitlines()[1].startswith("1: predicted 2 messages, measured 2 messages")
    assert plots.compare(measured={0: 3}, unit="messages").finding == "0: measured 3 messages"


@pytest.mark.parametrize(
    ("x", "y", "more", "message"),
    [
        ([], [], {}, "no series has a point: there is nothing to draw"),
        ([1, 2], [None, None], {"limits": {"budget": 3}}, "no series has a point"),
        ([1, 2], [0, 1], {"log": "y"}, "a logarithmic axis shows positive values only, and y has 0: leave y out of log"),
        ([0, 1], [1, 2], {"log": "xy"}, "and x has 0: leave x out of log"),
    ],
)
def test_a_sweep_refuses_what_cannot_be_drawn(x, y, more, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plots.sweep(x, {"a": y}, xlabel="", ylabel="", title="", **more)


def test_a_series_of_another_length_is_refused():
    with pytest.raises(ValueError, match="series 'b' has 1 values for 2 of x; use None"):
        plots.sweep([1, 2], {"a": [1, 2]}, {"b": [1]}, xlabel="", ylabel="", title="")


def record(rank, sequence, start, end, op="all_reduce", group=(0, 1), source=None, **more):
    return Collective(rank, sequence, op, group, "float32", (1,), 4, start, end, source, **more)


def run_of(spans, *collectives, **more):
    values = {"ranks": len(spans), "device": "cpu", "backend": "gloo", "machine": "2 cores, no GPU", **more}
    return Run(spans=spans, collectives=tuple(collectives), **values)


def share(compute, communication, idle):
    return {"compute": compute, "communication": communication, "idle": idle}


BOTH = [(0.0, 16.0), (0.0, 16.0)]


def test_the_rank_that_comes_first_waits_until_the_last_has_come():
    run = run_of(BOTH, record(0, 0, 2.0, 10.0), record(1, 0, 7.0, 10.0))
    assert plots.shares(run) == [share(8.0, 3.0, 5.0), share(13.0, 3.0, 0.0)]
    assert segments(run)[0] == [(0, 2, "compute"), (2, 7, "idle"), (7, 10, "communication"), (10, 16, "compute")]


def test_the_nth_collective_of_a_group_meets_the_nth_of_the_others_and_groups_do_not_mix():
    spans = [(0.0, 10.0)] * 3
    run = run_of(
        spans,
        record(0, 0, 1.0, 3.0, group=(0, 1)),
        record(1, 0, 2.0, 3.0, group=(0, 1)),
        record(0, 1, 4.0, 8.0, group=(0, 1, 2), op="barrier"),
        record(1, 1, 5.0, 8.0, group=(0, 1, 2), op="barrier"),
        record(2, 0, 7.0, 8.0, group=(0, 1, 2), op="barrier"),
    )
    assert plots.shares(run) == [share(4.0, 2.0, 4.0), share(6.0, 2.0, 2.0), share(9.0, 1.0, 0.0)]


def test_a_receive_is_idle_until_its_send_is_issued():
    run = run_of(
        BOTH,
        record(0, 0, 6.0, 7.0, op="send", peer=1),
        record(0, 1, 9.0, 10.0, op="send", peer=1),
        record(1, 0, 2.0, 8.0, op="recv", peer=0),
        record(1, 1, 8.0, 10.0, op="recv", peer=0),
    )
    assert plots.shares(run) == [share(14.0, 2.0, 0.0), share(8.0, 3.0, 5.0)]


def test_what_ended_before_the_last_rank_came_waited_for_nobody():
    run = run_of(BOTH, record(0, 0, 2.0, 3.0, op="broadcast"), record(1, 0, 9.0, 10.0, op="broadcast"))
    assert plots.shares(run) == [share(15.0, 1.0, 0.0), share(15.0, 1.0, 0.0)]


def test_a_receive_from_anyone_whose_sender_is_unknown_counts_as_communication():
    run = run_of(BOTH, record(1, 0, 2.0, 5.0, op="recv"))
    assert plots.shares(run)[1] == share(13.0, 3.0, 0.0)


def test_a_rank_computes_until_it_waits_for_what_is_under_way():
    run = run_of(
        BOTH,
        record(0, 0, 2.0, 10.0, waited_from=9.0),
        record(1, 0, 4.0, 10.0, source="cell 3, line 2: work = dist.all_reduce(x, async_op=True)"),  # done before the wait
        record(0, 1, 12.0, 14.0, waited_from=12.0),
        record(1, 1, 13.0, 14.0, waited_from=13.0),
    )
    assert plots.shares(run) == [share(13.0, 2.0, 1.0), share(15.0, 1.0, 0.0)]


def test_what_cpp_waits_for_counts_from_when_its_rank_was_last_seen_free():
    backward = "cell 3, line 5: loss.backward()"
    run = run_of(
        BOTH,
        *(record(rank, 0, 2.0, 8.0, source=backward) for rank in (0, 1)),
        *(record(rank, 1, 6.0, 12.0, source=backward) for rank in (0, 1)),  # issued meanwhile: until then the rank computed
        *(record(rank, 2, 14.0, 15.0, source="cell 3, line 6: model(ids)") for rank in (0, 1)),
    )
    assert segments(run)[0] == [
        (0, 6, "compute"),
        (6, 12, "communication"),
        (12, 14, "compute"),
        (14, 15, "communication"),
        (15, 16, "compute"),
    ]


def test_a_limit_is_a_horizontal_line_with_its_name_and_value():
    words = {"xlabel": "x", "ylabel": "y", "title": "t"}
    figure = plots.sweep([1, 2], {"peak": [2**20, 2**21]}, limits={"budget": 2**22}, yunit="bytes", **words)
    (line,) = [line for line in figure.axes[0].lines if line.get_label().startswith("budget")]
    assert (line.get_label(), set(line.get_ydata())) == ("budget: 4 MiB", {4.0}), "drawn in the unit of the axis"


def test_a_value_that_a_limit_may_cross_stands_on_white():
    figure = plots.bars({"near": 0.95, "far": 0.5, "past": 1.2}, unit="", title="t", limits={"perfect": 1.0})
    on_white = {text.get_text().strip(): text.get_bbox_patch() is not None for text in figure.axes[0].texts}
    assert on_white == {"0.95": True, "0.5": False, "1.2": False}


def test_a_logarithmic_axis_is_for_positive_bars_that_stand_apart():
    figure = plots.bars({"a": 0.01, "b": 100.0}, unit="", title="t", log=True)
    assert figure.axes[0].get_xscale() == "log"
    drawn = [bar.get_width() for bar in figure.axes[0].patches]
    assert drawn == [0.01, 100.0]
    for values, stack in (({"a": 0.0}, False), ({"a": {"x": 1.0}}, True)):
        with pytest.raises(ValueError, match="leave out log=True"):
            plots.bars(values, unit="", title="t", log=True, stack=stack)


def test_what_is_under_way_behind_computing_is_drawn_below_the_lane_and_named():
    hidden = {"source": "cell 3, line 2: dist.all_reduce(x, async_op=True)"}
    figure = plots.timeline(run_of(BOTH, record(0, 0, 2.0, 10.0, **hidden), record(1, 0, 2.0, 10.0, **hidden)))
    assert "0 % communicating" in figure.get_suptitle()
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names[-1] == "below: under way meanwhile"
    strips = [
        path.get_extents() for drawn in figure.axes[0].collections for path in drawn.get_paths() if path.get_extents().x0 == 2
    ]
    assert [(box.x0, box.x1, box.y0 > 0.3) for box in strips] == [(2, 10, True), (2, 10, True)]


def test_collectives_under_way_at_once_count_once():
    run = run_of(BOTH, record(0, 0, 2.0, 8.0), record(0, 1, 4.0, 10.0), record(1, 0, 3.0, 8.0), record(1, 1, 9.0, 10.0))
    assert plots.shares(run)[0] == share(8.0, 5.0 + 1.0, 1.0 + 1.0)


def test_a_rank_that_never_comes_leaves_the_others_idle_to_the_last_moment():
    run = run_of([(0.0, None), (1.0, 9.0)], record(0, 0, 3.0, None))
    assert plots.shares(run) == [share(3.0, 0.0, 6.0), share(8.0, 0.0, 0.0)]


def test_an_end_that_was_not_recorded_is_a_tick_and_counts_as_computing():
    run = run_of(BOTH, record(0, 0, 3.0, None, op="send", peer=1), record(1, 0, 2.0, 4.0, op="recv", peer=0))
    assert plots.shares(run) == [share(16.0, 0.0, 0.0), share(14.0, 1.0, 1.0)]
    ticks = [line for line in plots.timeline(run).axes[0].lines if len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in ticks] == [[3.0]]


def test_what_ends_after_the_function_is_cut_at_its_end():
    run = run_of([(0.0, 4.0), (0.0, 4.0)], record(0, 0, 3.0, 6.0), record(1, 0, 3.5, 6.0))
    assert plots.shares(run) == [share(3.0, 0.5, 0.5), share(3.5, 0.5, 0.0)]


moment = st.integers(0, 256).map(lambda n: n / 16)


@st.composite
def runs(draw):
    ranks = draw(st.integers(1, 3))
    spans = []
    for _ in range(ranks):
        start, length = draw(moment), draw(st.one_of(st.none(), moment))
        spans.append(draw(st.one_of(st.none(), st.just((start, None if length is None else start + length)))))
    collectives = []
    for rank in range(ranks):
        for sequence in range(draw(st.integers(0, 4))):
            start, length, wait = draw(moment), draw(st.one_of(st.none(), moment)), draw(st.one_of(st.none(), moment))
            group, op, peer = draw(st.sampled_from([(tuple(range(ranks)), "all_reduce", None), ((0, rank), "send", 0)]))
            end = None if length is None else start + length
            collectives.append(record(rank, sequence, start, end, op, group, peer=peer, waited_from=wait and start + wait))
    return run_of(spans, *collectives)


@given(runs())
def test_states_cover_a_ranks_time_without_gap_or_overlap(run):
    for span, lane, seconds in zip(run.spans, segments(run), plots.shares(run), strict=True):
        if span is None:
            assert lane == []
            continue
        assert lane[0].start == span[0]
        assert span[1] is None or lane[-1].end == span[1]
        assert all(left.end == right.start and left.kind != right.kind for left, right in itertools.pairwise(lane))
        assert sum(seconds.values()) == lane[-1].end - lane[0].start  # sixteenths of a second: exact
        assert min(seconds.values()) >= 0


def test_a_timeline_says_who_did_what_and_where_it_ran():
    run = run_of(
        BOTH,
        record(0, 0, 2.0, 10.0),
        record(1, 0, 7.0, 10.0),
        regions=(Region(0, "forward", 0.0, 2.0), Region(1, "a name that does not fit", 0.0, 1.0)),
        oversubscribed=True,
    )
    figure = plots.timeline(run)
    assert figure.get_suptitle() == "All ranks together: 66 % computing, 19 % communicating, 16 % waiting"
    assert figure.finding.splitlines() == [
        "rank 0: 50 % computing, 19 % communicating, 31 % waiting of 16 s",
        "rank 1: 81 % computing, 19 % communicating, 0 % waiting of 16 s",
    ]
    footer = "measured on 2 cores, no GPU; 2 ranks, cpu, gloo; timings oversubscribed: more ranks than cores"
    assert figure.get_supxlabel() == footer
    assert texts(figure) == ["forward"]
    assert figure.axes[0].get_xlabel() == "time since the first rank began (s)"
    assert plots.timeline(run, title="Rank 1 comes late").get_suptitle() == "Rank 1 comes late"


def test_regions_are_named_in_the_legend_while_they_are_few():
    def legend(names):
        regions = tuple(Region(0, name, number, number + 1.0) for number, name in enumerate(names))
        figure = plots.timeline(run_of(BOTH, record(0, 0, 9.0, 10.0), record(1, 0, 9.0, 10.0), regions=regions))
        return [text.get_text() for text in figure.axes[0].get_legend().get_texts() if text.get_text().startswith("above")]

    assert legend(["load", "step", "load"]) == ["above: load", "above: step"]
    assert legend("abcde") == ["above: regions of the job"]
    assert legend([]) == []


def test_the_name_of_a_region_stands_beside_those_within_it():
    inner = (Region(0, "load", 0.0, 4.0), Region(0, "part", 1.0, 2.0))
    run = run_of(BOTH, record(0, 0, 9.0, 10.0), record(1, 0, 9.0, 10.0), regions=(Region(0, "step", 0.0, 10.0), *inner))
    places = {text.get_text(): text.get_position()[0] for text in plots.timeline(run).axes[0].texts}
    assert places["step"] == pytest.approx(7.0)  # the middle of 4 to 10
    assert places["load"] == pytest.approx(3.0)  # the middle of 2 to 4


def test_the_lanes_are_drawn_where_the_states_are():
    figure = plots.timeline(run_of([(10.0, 10.016), (10.0, 10.016)], record(0, 0, 10.002, 10.01), record(1, 0, 10.007, 10.01)))
    idle = next(
        drawn
        for drawn in figure.axes[0].collections
        if isinstance(drawn, PolyCollection) and drawn.get_hatch() == "//" and drawn.get_paths()
    )
    box = idle.get_paths()[0].get_extents()
    assert (box.x0, box.x1) == pytest.approx((2, 7))  # ms
    assert box.y0 < 0 < box.y1


def test_ranks_that_did_not_start_or_return_are_named():
    run = run_of([(0.0, None), None, (0.0, 4.0)], record(0, 0, 1.0, None, group=(0, 2)))
    lines = plots.timeline(run).finding.splitlines()
    assert lines[0] == "rank 0: 25 % computing, 0 % communicating, 75 % waiting of 4 s, did not return"
    assert lines[1] == "rank 1: did not start"


def test_a_run_that_never_started_cannot_be_drawn():
    with pytest.raises(ValueError, match="no rank of this run started"):
        plots.timeline(run_of([None, None]))


def test_a_measured_run_is_named_in_the_footer():
    run = run_of(BOTH)
    assert plots.measured_on(run) == "measured on 2 cores, no GPU; 2 ranks, cpu, gloo"
    assert "1 rank, cuda, nccl" in plots.measured_on(dataclasses.replace(run, ranks=1, device="cuda", backend="nccl"))


def test_a_decision_chart_asks_in_order_and_says_where_a_no_leads():
    steps = [("Does it start?", "the launch", "first traceback\nport"), ("Is it right?", "the numbers", "compare 1 and N")]
    figure = plots.decisions(steps, end="healthy", title="Two questions")
    said = texts(figure)
    assert [said.index(text) for text in ("Does it start?", "Is it right?", "healthy")] == sorted(
        said.index(text) for text in ("Does it start?", "Is it right?", "healthy")
    )
    assert "first traceback\nport" in said
    assert (said.count("no"), said.count("yes")) == (2, 2)
    assert "Does it start? If not: the launch" in figure.alt
    boxes = [patch.get_window_extent() for patch in figure.axes[0].patches]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    with pytest.raises(ValueError, match="at least one step"):
        plots.decisions([], end="healthy", title="none")


def test_a_plan_shows_memory_beside_the_room_and_time_by_what_it_goes_to():
    from helpers import predict

    llama = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    found = predict.plan(llama, predict.machines("H100-SXM", 8), predict.Workload(64, 4096, precision="fsdp_mixed"))
    drawn = plots.plan(found)
    left, right = drawn.axes
    for panel, totals in (
        (left, [each.memory.peak / 2**30 for each in found.candidates]),
        (right, [c.seconds for c in found.candidates]),
    ):
        for place, total in enumerate(totals[:5]):
            row = [bar for bar in panel.patches if abs(bar.get_y() + bar.get_height() / 2 - place) < 0.01]
            assert sum(bar.get_width() for bar in row) == pytest.approx(total)
    assert left.lines[0].get_xdata()[0] == pytest.approx(found.room / 2**30)
    assert found.best.name in drawn.alt
    assert found.candidates[4].name in drawn.alt
    with pytest.raises(LookupError, match="no layout fits"):
        plots.plan(predict.plan(llama, predict.machines("T4", 1), predict.Workload(64, 4096)))
