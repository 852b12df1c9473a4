"""Whether two hosts on one machine are what they say: the link as fast as its rate, its counters true, a host itself unslowed."""

from __future__ import annotations

import statistics
import threading
import time

from .framework import DoesNotRun, Findings, Row, at_least, at_most, benchmark, interleaved

MIB = 1 << 20
PAYLOADS = {"200mbit": 16 * MIB, "1gbit": 64 * MIB}  # bytes whose transfer takes half a second or more
SLOW = "50mbit"  # a rate that nothing inside a host may show


def hosts():
    """Two hosts, closed. Raises DoesNotRun where this machine cannot be two."""
    from helpers.two_nodes import two_nodes

    possible, why = two_nodes.available()
    if not possible:
        raise DoesNotRun(why)
    return two_nodes()


@benchmark
def bandwidth(repeats: int) -> Findings:
    """All-reduces of 2 ranks, one a host, against the time that the rate allows: the payload once each way."""
    from helpers import launch

    rows, claims = [], []
    with hosts() as nodes:
        for rate, payload in PAYLOADS.items():
            nodes.set_rate(rate)
            results = launch(all_reduces, payload, [[0, 1]], repeats, ranks=2, nodes=nodes, record=False).results
            seconds = [max(pair) for pair in zip(*results, strict=True)]
            shares = tuple(100 * payload / nodes.bytes_per_second / each for each in seconds)
            rows.append(Row(f"{rate}, share of the rate", shares, "%"))
            claims.append(at_least(f"all-reduce bandwidth at {rate}, of what the rate allows", rows[-1].median, 85, "%"))
            claims.append(at_most(f"all-reduce bandwidth at {rate}, of what the rate allows", rows[-1].median, 115, "%"))
    shown = " and ".join(f"{row.median:.0f} %" for row in rows)
    return Findings(rows, claims, f"Between hosts an all-reduce gets {shown} of the rate ({', '.join(PAYLOADS)})")


@benchmark
def inside(repeats: int) -> Findings:
    """All-reduces within a host of two that a slow link joins, against ranks of the machine as it is."""
    from helpers import launch

    def seconds(nodes: object) -> float:
        run = launch(all_reduces, 16 * MIB, [[0, 1], [2, 3]], 5, ranks=4, nodes=nodes, record=False)
        return statistics.median(map(max, zip(*run.results[:2], strict=True)))

    with hosts() as nodes:
        nodes.set_rate(SLOW)
        timed = interleaved({"one host": lambda: seconds(None), f"inside a host, link {SLOW}": lambda: seconds(nodes)}, repeats)
    rows = timed.rows()
    ratio = rows[1].median / rows[0].median
    claim = at_most("time of an all-reduce inside a host, of that without hosts", 100 * ratio, 120, "%")
    return Findings(rows, [claim], f"Inside a host an all-reduce takes {100 * ratio:.0f} % of its time without hosts")


@benchmark
def counters(repeats: int) -> Findings:
    """Bytes that the interfaces count for all-reduces of 64 MiB over 2 and 4 ranks, against those of a ring."""
    from helpers import launch

    rows, claims = [], []
    with hosts() as nodes:
        for ranks in (2, 4):
            counted = []
            for _ in range(repeats):
                before = nodes.bytes_between()
                launch(all_reduces, 64 * MIB, [list(range(ranks))], 1, ranks=ranks, nodes=nodes, record=False, timeout=300)
                counted += [after - earlier for after, earlier in zip(nodes.bytes_between(), before, strict=True)]
            ring = 2 * (ranks - 1) / ranks * 64 * MIB  # that each rank sends to the next: one of them across, each way
            rows.append(Row(f"{ranks} ranks, of the prediction", tuple(100 * each / ring for each in counted), "%"))
            worst = max(rows[-1].samples, key=lambda share: abs(share - 100))
            claims += [
                at_least(f"bytes each way, {ranks} ranks, of the prediction (worst)", worst, 92, "%"),
                at_most(f"bytes each way, {ranks} ranks, of the prediction (worst)", worst, 108, "%"),
            ]
    shares = " and ".join(f"{row.median:.1f} %" for row in rows)
    return Findings(rows, claims, f"The link's counters show {shares} of the predicted bytes (2 and 4 ranks)")


@benchmark
def lives(repeats: int) -> Findings:
    """Seconds to open two hosts, to run an empty job of 4 ranks on them, to report a host that fails, and to close."""
    from helpers import LaunchError, launch

    samples: dict[str, list[float]] = {}

    def timed(name: str, begin: float) -> None:
        samples.setdefault(name, []).append(time.perf_counter() - begin)

    hosts()  # raises where there can be none
    launch(nothing, ranks=2)  # the warm process is there
    for _ in range(repeats):
        begin, nodes = time.perf_counter(), hosts()
        nodes.open()
        timed("open", begin)
        launch(nothing, ranks=4, nodes=nodes)
        begin = time.perf_counter()
        launch(nothing, ranks=4, nodes=nodes)
        timed("an empty job", begin)
        failed: list[float] = []
        timer = threading.Timer(1.5, lambda nodes=nodes, failed=failed: (failed.append(time.perf_counter()), nodes.fail(1)))
        timer.start()
        try:
            launch(for_ever, ranks=4, nodes=nodes)
        except LaunchError:
            timed("from a host's failure to its error", failed[0])
        timer.join()
        begin = time.perf_counter()
        nodes.close()
        timed("close", begin)
    rows = [Row(name, tuple(seconds)) for name, seconds in samples.items()]
    claims = [at_most(f"seconds: {row.name}", row.median, most, "s") for row, most in zip(rows, (2, 3, 3, 1), strict=True)]
    return Findings(
        rows, claims, f"Two hosts are there in {rows[0].median:.2f} s, a job on them takes {rows[1].median:.2f} s more"
    )


def all_reduces(size: int, groups: list[list[int]], times: int) -> list[float]:
    """On each rank: seconds of all-reduces of `size` bytes within its group."""
    import torch
    import torch.distributed as dist

    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
    tensor, seconds = torch.ones(size // 4), []
    dist.all_reduce(tensor[:1], group=mine)  # connects
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=mine)
        seconds.append(time.perf_counter() - begin)
    return seconds


def nothing() -> None:
    """An empty job."""


def for_ever() -> None:
    """All-reduces without an end."""
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(4))
