"""Dumps of real hangs on gloo, and in the shape that NCCL's recorder writes, are summarised; strangers' pickles are not read."""

import itertools
import json
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from helpers import launch
from helpers.flight_recorder import read
from helpers.launching import RanksHung


def nothing_in_flight():
    return all(each["retired"] for each in json.loads(c10d._dump_fr_trace_json()).get("entries", []))


def wait_while(condition):
    while condition():
        threading.Event().wait(0.01)


def dump_when_waiting(folder, form):
    """A thread that writes this rank's dump as soon as one of its collectives is in flight."""

    def work():
        wait_while(nothing_in_flight)
        write(folder, form)

    threading.Thread(target=work, daemon=True).start()


def write(folder, form):
    content = c10d._dump_fr_trace_json() if form == "json" else c10d._dump_fr_trace()
    path = os.path.join(folder, f"trace_{dist.get_rank()}")
    with open(path + ".part", "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    os.rename(path + ".part", path)


def one_is_late(folder, form):
    """Rank 1 comes to the second all_reduce when both dumps are written."""
    dist.all_reduce(torch.ones(10))
    wait_while(lambda: not nothing_in_flight())  # gloo's own thread notes that it has ended
    if dist.get_rank() == 0:
        dump_when_waiting(folder, form)
    else:
        write(folder, form)
        wait_while(lambda: not os.path.exists(os.path.join(folder, "trace_0")))
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_a_rank_that_does_not_come(tmp_path, form):
    launch(one_is_late, str(tmp_path), form)
    summary = read(sorted(tmp_path.iterdir()))
    assert [str(summary.last[rank]).split(",")[0] for rank in (0, 1)] == ["all_reduce 1 of group 0 (default_pg)"] * 2
    (waiting,) = summary.waiting[0]
    assert (waiting.op, waiting.sequence, waiting.raw["input_sizes"], waiting.done) == ("all_reduce", 2, [[4]], False)
    assert summary.waiting[1] == ()
    assert summary.difference.startswith("rank 0: all_reduce 2 of group 0 (default_pg), [4] Float")
    assert summary.difference.endswith("not issued on 1")
    if form == "pickle":
        assert "test_flight_recorder.py, line" in waiting.source
        assert "dist.all_reduce(torch.ones(4))" in waiting.source
    text = str(summary)
    assert "rank 0 waits in all_reduce 2" in text
    assert "rank 1 waits in nothing" in text


def other_operations(folder):
    dump_when_waiting(folder, "pickle")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), src=0)
        dist.broadcast(torch.ones(4), src=0)


def test_two_ranks_in_different_operations(tmp_path):
    with pytest.raises(RanksHung):
        launch(other_operations, str(tmp_path), timeout=8)
    summary = read(tmp_path / f"trace_{rank}" for rank in (1, 0))
    assert "rank 0: all_reduce 1" in summary.difference
    assert "rank 1: broadcast 1" in summary.difference
    assert "collective type" in summary.difference


def nccl_dump(rank, ops, ranks=(0, 1), start=0):
    """What ProcessGroupNCCL's recorder writes, version 2: `ops` are (name, sizes, state)."""
    entries = []
    for number, (name, sizes, state) in enumerate(ops, start):
        point = name.startswith(("send", "recv"))
        entries.append(
            {
                "frames": [
                    {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 2500},
                    {"name": "train", "filename": "/data/train.py", "line": 31},
                ],
                "record_id": number,
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "collective_seq_id": 0 if point else number + 1,
                "p2p_seq_id": number + 1 if point else 0,
                "op_id": number + 1,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 10**18 + number,
                "input_sizes": sizes,
                "input_dtypes": ["BFloat16"],
                "output_sizes": sizes,
                "output_dtypes": ["BFloat16"],
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600000,
                "is_p2p": point,
            }
        )
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": json.dumps(list(ranks))}}
    return {"version": "2.10", "pg_config": config, "nccl_version": "2.27.5", "pg_status": {}, "entries": entries}


DONE = ("all_reduce", ((8,),), "completed")


def files(folder, *dumps):
    """Dumps of rank 0, 1 …, as NCCL's watchdog writes them."""
    for rank, dump in enumerate(dumps):
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump if isinstance(dump, bytes) else pickle.dumps(dump, protocol=2))
    return folder.glob("nccl_trace_rank_*")


def test_dumps_of_nccl(tmp_path):
    lasts = ("all_reduce", ((8,),), "started"), ("all_reduce", ((9,),), "scheduled")
    summary = read(files(tmp_path, *(nccl_dump(rank, [DONE, last], ranks=(0, 1, 2)) for rank, last in enumerate(lasts))))
    assert list(summary.last) == [0, 1]
    assert {rank: [each.sequence for each in waiting] for rank, waiting in summary.waiting.items()} == {0: [2], 1: [2]}
    assert summary.missing == (2,)
    assert "input sizes" in summary.difference
    assert "train.py, line 31" in summary.difference
    assert "no dump of rank 2" in str(summary)


def test_ranks_that_issued_the_same(tmp_path):
    waiting = ("send 0->1", ((8,),), "started")
    summary = read(files(tmp_path, nccl_dump(0, [DONE, DONE, waiting]), nccl_dump(1, [DONE, DONE])))
    assert summary.difference is None
    assert read(files(tmp_path, nccl_dump(0, [DONE, DONE]), nccl_dump(1, [DONE]))).difference is None  # the first goes on
    assert str(summary.waiting[0][0]).startswith("send 0->1 3 of group")
    assert "ranks issued the same" in str(summary)


def test_a_ring_buffer_that_has_lost_its_beginning(tmp_path):
    early = [("broadcast", ((2,),), "completed"), DONE, DONE]
    assert read(files(tmp_path, nccl_dump(0, early), nccl_dump(1, [DONE, DONE], start=1))).difference is None


class Evil:
    def __reduce__(self):
        return (os.system, ("echo never",))


def test_what_is_not_read(tmp_path):
    dump = nccl_dump(0, [DONE])
    with pytest.raises(ValueError, match=r"asks for posix\.system"):
        read(files(tmp_path, dump | {"entries": [Evil()]}))
    for text in (b"Traceback (most recent call last):", pickle.dumps(dump)[:-40]):
        with pytest.raises(ValueError, match="nccl_trace_rank_0 cannot be read as a flight recorder's dump"):
            read(files(tmp_path, text))
    with pytest.raises(ValueError, match=r'nccl_trace_rank_0 .*"version" and a "pg_config"'):
        read(files(tmp_path, b"{}"))
    with pytest.raises(ValueError, match="one dump of each rank"):
        read([])
    (file,) = files(tmp_path, dump)
    with pytest.raises(ValueError, match="one dump of each rank"):
        read([file, file])
    with pytest.raises(ValueError, match="one dump of each rank"):
        read([file.rename(tmp_path / "trace")])
    with pytest.raises(FileNotFoundError):
        read([tmp_path / "trace_0"])


WITHOUT_TIME = {key: value for key, value in nccl_dump(0, [DONE])["entries"][0].items() if key != "time_created_ns"}


@pytest.mark.parametrize(
    "content",
    [
        b"{not json",
        b"[1]",
        b"hello, this is a log",
        b"\x80\x04N.",
        b"\x80\x04\x8e" + b"\xff" * 8,  # bytes of a length that no number of this machine holds
        b"\x80\x04K\x01K\x02K\x03s.",  # an item set in a number
        pickle.dumps([1]),
        pickle.dumps(nccl_dump(0, []) | {"entries": [{"a": 1}]}),
        pickle.dumps(nccl_dump(0, []) | {"entries": [1, "abc"]}),
        pickle.dumps(nccl_dump(0, []) | {"entries": [WITHOUT_TIME]}),
        pickle.dumps(nccl_dump(0, []) | {"pg_config": ["0"]}),
        b'{"version": "2.10", "pg_config": {"0": {"desc": "x"}}, "entries": []}',
    ],
)
def test_whatever_is_no_dump_is_refused_with_the_name_of_the_file(tmp_path, content):
    with pytest.raises(ValueError, match="nccl_trace_rank_0 cannot be read"):
        read(files(tmp_path, content))


def test_a_damaged_pickle_raises_nothing_else(tmp_path):
    content, refused = pickle.dumps(nccl_dump(0, [])), []
    for place, byte in itertools.product(range(2, len(content)), (0x28, 0x6A, 0x73, 0x85, 0xFF)):
        damaged = files(tmp_path, content[:place] + bytes([byte]) + content[place + 1 :])
        try:
            read(damaged)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > len(content)
    assert all(told.startswith("nccl_trace_rank_0 cannot be read") for told in refused)
