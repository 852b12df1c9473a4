"""The recorder sees everything that passes between ranks exactly once, and its bytes are those of the arithmetic."""

import contextlib
import linecache
import os
import signal
import subprocess
import sys

import pytest

from helpers import RankDied, RankFailed, launch
from helpers.measuring import clock, collectives, journal, sources
from helpers.measuring.operators import OPERATORS

FLOAT = 4  # bytes
IN, HIDDEN, BATCH = 16, 32, 4
WEIGHTS = [(HIDDEN, IN), (IN, HIDDEN)]  # of the two layers, (out, in)
PARAMETERS = sum(rows * columns + rows for rows, columns in WEIGHTS)


def two_layers():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, IN))


def step(model):
    import torch

    from helpers.measuring import clock

    inputs = torch.ones(BATCH, IN, requires_grad=True)
    with clock.region("step"):
        model(inputs).sum().backward()


def in_step(run, rank, number=0):
    """What `rank` issued within its region "step"."""
    region = [region for region in run.regions if region.rank == rank and region.name == "step"][number]
    return [c for c in run.collectives if c.rank == rank and region.start <= c.start <= region.end]


def moved(records):
    return [(c.op, c.bytes) for c in records]


def check_times(run):
    """What the physics of a run demands of every record that says when it ended."""
    for c in run.collectives:
        if c.end is not None:
            assert c.start <= c.end
            assert c.waited_from is None or c.start <= c.waited_from <= c.end
    together = {"all_reduce", "all_gather", "barrier"}  # none of these can end before every member has come
    positions = {}
    for c in run.collectives:
        if c.op in together:
            nth = sum(
                1
                for o in run.collectives
                if o.rank == c.rank and o.op in together and o.group == c.group and o.sequence < c.sequence
            )
            positions.setdefault((c.group, nth), []).append(c)
    for (group, _), records in positions.items():
        assert {c.rank for c in records} == set(group)
        last = max(c.start for c in records)
        assert all(c.end is None or c.end >= last for c in records)


# Every operator ----------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_operator_of_this_torch_that_takes_a_group():
    import torch
    import torch.distributed  # registers the operators

    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]
    with_group = {s.name.removeprefix("c10d::") for s in schemas if any(a.name == "process_group" for a in s.arguments)}
    assert with_group == set(OPERATORS)


def every_operator(rank, other):
    """One of each; returns what the recorder is to have seen of it."""
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    warnings.simplefilter("ignore")  # some of these are deprecated names that jobs still use
    world = dist.group.WORLD
    part, whole = torch.ones(3), torch.ones(6)
    parts = [torch.ones(3), torch.ones(3)]
    expected = []

    def expect(call, op, size, shape, dtype="float32", peer=None):
        call()
        expected.append((op, size, shape, dtype, peer))

    expect(lambda: dist.all_reduce(part), "all_reduce", 12, (3,))
    expect(lambda: dist.all_reduce(torch.ones(2, 5, dtype=torch.bfloat16)), "all_reduce", 20, (2, 5), "bfloat16")
    expect(lambda: dist.all_reduce_coalesced([part, whole]), "all_reduce", 36, (9,))
    expect(lambda: dist.broadcast(part, 0), "broadcast", 12, (3,))
    expect(lambda: dist.all_gather(parts, part), "all_gather", 24, (6,))
    expect(lambda: dist.all_gather_into_tensor(whole, part), "all_gather", 24, (6,))
    expect(lambda: dist.all_gather_coalesced([parts, parts], [part, part]), "all_gather", 48, (12,))
    expect(lambda: dist.reduce(part, 0), "reduce", 12, (3,))
    expect(lambda: dist.reduce_scatter(part, parts), "reduce_scatter", 24, (6,))
    expect(lambda: dist.reduce_scatter_tensor(part, whole), "reduce_scatter", 24, (6,))
    root = rank == 0
    expect(lambda: dist.gather(part, parts if root else None), "gather", 24 if root else 12, (6,) if root else (3,))
    expect(lambda: dist.scatter(part, parts if root else None), "scatter", 24 if root else 12, (6,) if root else (3,))
    expect(lambda: dist.all_to_all([torch.ones(3), torch.ones(3)], parts), "all_to_all", 24, (6,))
    expect(lambda: dist.all_to_all_single(torch.ones(6), whole), "all_to_all", 24, (6,))
    expect(dist.barrier, "barrier", 0, (), None)
    expect(dist.monitored_barrier, "barrier", 0, (), None)
    if root:
        expect(lambda: dist.send(part, 1), "send", 12, (3,), peer=1)
        expect(lambda: dist.send(whole, 1), "send", 24, (6,), peer=1)
    else:
        expect(lambda: dist.recv(part, 0), "recv", 12, (3,), peer=0)
        expect(lambda: dist.recv(whole), "recv", 24, (6,), peer=0)  # from whoever sends
    expect(lambda: functional.all_reduce(part, "sum", world).sum(), "all_reduce", 12, (3,))
    expect(lambda: functional.all_reduce_coalesced([part, whole], "sum", world)[0].sum(), "all_reduce", 36, (9,))
    expect(lambda: functional.broadcast(part, 0, world).sum(), "broadcast", 12, (3,))
    expect(lambda: functional.all_gather_tensor(part, 0, world).sum(), "all_gather", 24, (6,))
    expect(lambda: functional.all_gather_into_tensor_coalesced([part, part], world)[0].sum(), "all_gather", 48, (12,))
    expect(lambda: functional.reduce_scatter_tensor(whole, "sum", 0, world).sum(), "reduce_scatter", 24, (6,))
    expect(lambda: functional.reduce_scatter_tensor_coalesced([whole], "sum", [0], world)[0].sum(), "reduce_scatter", 24, (6,))
    expect(lambda: functional.all_to_all_single(whole, None, None, world).sum(), "all_to_all", 24, (6,))
    return expected


@pytest.fixture(scope="module")
def operators():
    def job():
        import torch.distributed as dist

        rank = dist.get_rank()
        return every_operator(rank, 1 - rank)

    return launch(job, ranks=2)


def test_every_operator_is_recorded_once_with_its_payload(operators):
    for rank in range(2):
        seen = [(c.op, c.bytes, c.shape, c.dtype, c.peer) for c in operators.collectives if c.rank == rank]
        assert seen == operators.results[rank]
        assert [c.sequence for c in operators.collectives if c.rank == rank] == list(range(len(seen)))
    assert {c.group for c in operators.collectives} == {(0, 1)}
    assert operators.problem is None


def test_every_operator_ends_and_what_blocks_says_since_when(operators):
    check_times(operators)
    assert [c for c in operators.collectives if c.end is None] == []
    called_directly = [c for c in operators.collectives if "functional" not in c.source]
    assert [c for c in called_directly if c.waited_from is None] == []


def test_the_source_is_the_learners_line(operators):
    first = operators.collectives[0]
    assert first.source.startswith("test_collectives.py, line ")
    assert first.source.endswith("call()") or "dist.all_reduce(part)" in first.source


# Libraries that communicate on the learner's behalf ---------------------------------------------------------------------


def test_ddp_moves_every_gradient_once():
    def job():
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(two_layers())
        for _ in range(3):
            step(model)

    run = launch(job, ranks=2)
    check_times(run)
    for rank in range(2):
        built = [c for c in run.collectives if c.rank == rank and "DistributedDataParallel(two_layers())" in c.source]
        assert ("broadcast", PARAMETERS * FLOAT) in moved(built)  # rank 0's parameters
        gradients = ("all_reduce", PARAMETERS * FLOAT)
        assert moved(in_step(run, rank, 0)) == [gradients]
        # In the second step the ranks agree on new buckets: int32 numbers of the 4 parameters and of the bucket; its size.
        assert moved(in_step(run, rank, 1)) == [("broadcast", 5 * 4), ("broadcast", 4), gradients]
        assert moved(in_step(run, rank, 2)) == [gradients]
    assert {c.source.partition(": ")[2] for c in in_step(run, 0, 2)} == {"model(inputs).sum().backward()"}
    assert [c for c in run.collectives if c.end is None] == []


def test_an_end_is_written_also_where_the_thread_that_writes_it_comes_late():
    def job():
        import time

        from torch.nn.parallel import DistributedDataParallel

        done = collectives._Recorder._done
        model = DistributedDataParallel(two_layers())

        def late(*arguments):
            time.sleep(0.2)  # as where the cores are busy: C++ has waited for the operation itself only
            done(*arguments)

        collectives._Recorder._done = late
        step(model)

    run = launch(job, ranks=2)
    assert [c for c in run.collectives if c.end is None] == []


def test_no_sync_moves_nothing():
    def job():
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(two_layers())
        with model.no_sync():
            step(model)
        step(model)

    run = launch(job, ranks=2)
    assert in_step(run, 0, 0) == []
    assert moved(in_step(run, 0, 1))[0] == ("all_reduce", PARAMETERS * FLOAT)


def test_fp16_hook_halves_the_bytes():
    def job():
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(two_layers())
        model.register_comm_hook(None, fp16_compress_hook)
        step(model)
        step(model)

    run = launch(job, ranks=2)
    (record,) = in_step(run, 1)
    assert (record.op, record.dtype, record.bytes) == ("all_reduce", "float16", PARAMETERS * 2)


def test_powersgd_moves_the_two_factors_and_the_biases():
    def job():
        from torch import distributed
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(two_layers())
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powersgd.powerSGD_hook)
        for _ in range(4):
            step(model)
        distributed.barrier()  # the callbacks' operations are over, and noted, on every rank

    run = launch(job, ranks=2)
    check_times(run)
    biases = sum(rows for rows, _ in WEIGHTS) * FLOAT
    left = sum(rows for rows, _ in WEIGHTS) * FLOAT  # P: rows × 1
    right = sum(columns for _, columns in WEIGHTS) * FLOAT  # Q: columns × 1
    for rank in range(2):
        for number in (2, 3):
            records = in_step(run, rank, number)
            assert moved(records) == [("all_reduce", biases), ("all_reduce", left), ("all_reduce", right)]
            assert records[0].source.endswith("model(inputs).sum().backward()")
            assert {c.source for c in records[1:]} <= {None, records[0].source}  # None where a callback thread issued it
            assert all(c.end is not None for c in records)


def test_tensor_parallel_moves_one_activation_each_way():
    def job(sequence_parallel):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        first, last = ColwiseParallel(), RowwiseParallel()
        if sequence_parallel:
            first, last = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        model = parallelize_module(two_layers(), init_device_mesh("cpu", (2,)), {"0": first, "2": last})
        step(model)

    activation = BATCH * IN * FLOAT
    run = launch(job, False, ranks=2)
    check_times(run)
    for rank in range(2):
        assert moved(in_step(run, rank)) == [("all_reduce", activation), ("all_reduce", activation)]
    assert [c for c in run.collectives if c.end is None] == []

    run = launch(job, True, ranks=2)
    check_times(run)
    for rank in range(2):
        records = in_step(run, rank)
        assert moved(records) == [
            ("all_gather", 2 * activation),
            ("reduce_scatter", 2 * activation),
            ("all_gather", 2 * activation),
            ("reduce_scatter", 2 * activation),
        ]
        forward, backward = records[1], records[3]
        assert forward.waited_from <= forward.end
        assert (backward.waited_from, backward.end) == (None, None)  # the gradient of the inputs, which nobody reads


def test_fsdp2_gathers_each_layer_twice_and_scatters_its_gradients_once():
    def job():
        import torch
        from torch.distributed.fsdp import fully_shard

        model = two_layers()
        fully_shard(model[0])
        fully_shard(model[2])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(model)
            optimizer.step()

    run = launch(job, ranks=2)
    check_times(run)
    first, last = ((rows * columns + rows) * FLOAT for rows, columns in WEIGHTS)  # 2 divides all of it: no padding
    for rank in range(2):
        for number in range(2):
            assert moved(in_step(run, rank, number)) == [
                ("all_gather", first),
                ("all_gather", last),
                ("all_gather", last),
                ("all_gather", first),
                ("reduce_scatter", last),
                ("reduce_scatter", first),
            ]
    assert [c for c in run.collectives if c.end is None] == []
    assert [c for c in run.collectives if c.waited_from is None] == []


def test_a_pipeline_sends_activations_forward_and_gradients_back():
    def job(micro_batches):
        import torch
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        from helpers.measuring import clock

        rank = dist.get_rank()
        stage = PipelineStage(two_layers(), rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, micro_batches, loss_fn=lambda output, target: (output - target).sum())
        batch = torch.ones(BATCH, IN)
        for name in ("first", "step"):  # in the first step the stages exchange shapes as well
            with clock.region(name):
                schedule.step(batch) if rank == 0 else schedule.step(target=batch)

    run = launch(job, 2, ranks=2)
    piece = BATCH // 2 * IN * FLOAT
    assert moved(in_step(run, 0)) == [("send", piece), ("send", piece), ("recv", piece), ("recv", piece)]
    assert moved(in_step(run, 1)) == [("recv", piece), ("recv", piece), ("send", piece), ("send", piece)]
    for rank in range(2):
        records = in_step(run, rank)
        assert {c.peer for c in records} == {1 - rank}
        assert all(c.start <= c.waited_from <= c.end for c in records)
        branch = "schedule.step(target=batch)" if rank else "schedule.step(batch)"
        assert {c.source.partition(": ")[2] for c in records} == {branch}
    sent = {rank: [c for c in in_step(run, rank) if c.op == "send"] for rank in range(2)}
    received = {rank: [c for c in in_step(run, rank) if c.op == "recv"] for rank in range(2)}
    for rank in range(2):  # nothing arrives before it was sent
        assert all(there.end >= here.start for here, there in zip(sent[rank], received[1 - rank], strict=True))


def test_objects_hooks_on_groups_and_compiled_code():
    def job():
        import torch
        import torch.distributed as dist

        gathered = [None, None]
        dist.all_gather_object(gathered, {"rank": dist.get_rank()})
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        dist.all_reduce(torch.ones(5), group=alone)

        @torch.compile(backend="aot_eager")
        def double(tensor):
            dist.all_reduce(tensor)
            return tensor * 2

        return gathered, double(torch.ones(3)).tolist()

    run = launch(job, ranks=2)
    for rank in range(2):
        assert run.results[rank] == ([{"rank": 0}, {"rank": 1}], [4.0, 4.0, 4.0])
        own = [c for c in run.collectives if c.rank == rank and c.op != "barrier"]
        assert [c.op for c in own] == ["all_gather", "all_gather", "all_reduce", "all_reduce"]
        assert [c.group for c in own] == [(0, 1), (0, 1), (rank,), (0, 1)]
        assert own[0].bytes == 2 * 8  # the sizes of the two objects
        assert own[3].bytes == 3 * FLOAT


def test_ranks_of_a_subgroup_are_global():
    def job():
        import torch
        import torch.distributed as dist

        pair = dist.new_group([0, 2])
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), group=pair, group_dst=1)
        if dist.get_rank() == 2:
            dist.recv(torch.ones(2), group=pair)  # from whoever sends
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(2), group=pair)

    run = launch(job, ranks=3)
    seen = [(c.rank, c.op, c.group, c.peer) for c in run.collectives if c.op != "barrier"]
    assert seen == [
        (0, "send", (0, 2), 2),
        (0, "all_reduce", (0, 2), None),
        (2, "recv", (0, 2), 0),
        (2, "all_reduce", (0, 2), None),
    ]


# Waiting, failing ------------------------------------------------------------------------------------------------------


def test_a_send_nobody_waits_for_has_no_end():
    def job():
        import torch
        import torch.distributed as dist

        tensor = torch.ones(2)
        if dist.get_rank() == 0:
            dist.isend(tensor, 1)
        else:
            dist.recv(tensor, 0)
        dist.barrier()

    run = launch(job, ranks=2)
    (sent,) = (c for c in run.collectives if c.op == "send")
    assert (sent.end, sent.waited_from) == (None, None)
    (received,) = (c for c in run.collectives if c.op == "recv")
    assert received.end is not None


def test_an_asynchronous_collective_done_before_the_wait_never_blocked():
    def job():
        import time

        import torch
        import torch.distributed as dist

        work = dist.all_reduce(torch.ones(2), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()

    run = launch(job, ranks=2)
    for c in run.collectives:
        assert c.end is not None
        assert c.waited_from is None


def test_a_collective_that_fails_has_no_end():
    def job():
        import datetime

        import torch
        import torch.distributed as dist

        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), group=group)
        else:
            dist.recv(torch.ones(2), 0)

    with pytest.raises(RankFailed) as caught:
        launch(job, ranks=2, timeout=30)
    (record,) = (c for c in caught.value.run.collectives if c.op == "all_reduce")
    assert record.end is None
    assert record.waited_from == record.start
    (record,) = (c for c in caught.value.run.collectives if c.op == "recv")
    assert record.end is None
    assert record.waited_from >= record.start


MISFIT = """
import sys
import torch, torch.distributed as dist
from helpers.measuring import clock, collectives, operators

folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
tensor = torch.ones(2)

operators.OPERATORS["no_such_operator"] = operators.Operator("none", 0)
collectives.start(f"{folder}/missing")
dist.all_reduce(tensor)
with clock.region("still timed"):
    pass
collectives.stop()

del operators.OPERATORS["no_such_operator"]
collectives.start(f"{folder}/broken")
collectives.payload = lambda operator, arguments: 1 / 0
dist.all_reduce(tensor)
dist.all_reduce(tensor)
collectives.stop()

collectives.payload = operators.payload
collectives.start(f"{folder}/whole")
try:
    collectives.start(f"{folder}/second")
except RuntimeError as error:
    assert "records already" in str(error)
else:
    raise AssertionError("two recorders at once")
dist.all_reduce(tensor)
collectives.stop()
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0, 1.0]
dist.destroy_process_group()
"""


def test_a_torch_that_does_not_fit_leaves_the_job_alone(tmp_path):
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-W", "error", "-c", MISFIT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    missing = collectives.read(str(tmp_path / "missing"), 0)
    assert missing.collectives == ()
    assert "collectives were not recorded" in missing.problem
    assert "no_such_operator" in missing.problem
    assert [region.name for region in missing.regions] == ["still timed"]
    broken = collectives.read(str(tmp_path / "broken"), 0)
    assert "the recorder stopped: ZeroDivisionError" in broken.problem
    whole = collectives.read(str(tmp_path / "whole"), 0)
    assert whole.problem is None
    assert [c.op for c in whole.collectives] == ["all_reduce"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_records_of_a_killed_rank_survive(number):
    def job(number):
        import os

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(7))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(9))

    with pytest.raises(RankDied) as caught:
        launch(job, int(number), ranks=2)
    records = [c for c in caught.value.run.collectives if c.rank == 1]
    assert [(c.op, c.bytes) for c in records] == [("all_reduce", 28)]
    assert records[0].end is not None


def test_an_event_cut_off_by_death_is_left_out(tmp_path):
    path = str(tmp_path / "records")
    writer = journal.Journal(path)
    writer.write("issue", 0, "all_reduce", (0, 3), "float32", (2,), 8, 1.0, None, 'cell 1, line 1: f("é")', None, None)
    writer.write("region", "name", 1.0, 2.0)
    writer.write("issue", 1, "barrier", (0, 3), None, (), 0, 3.0, None, None, None, 3.0)
    writer.close()
    writer.write("region", "after the end", 1.0, 2.0)
    whole = collectives.read(path, 3)
    assert whole.collectives[0].source == 'cell 1, line 1: f("é")'
    assert whole.collectives[1].waited_from == 3.0
    assert (len(whole.collectives), len(whole.regions), whole.problem) == (2, 1, None)
    content = (tmp_path / "records").read_bytes()
    for cut in range(len(content)):
        (tmp_path / "records").write_bytes(content[:cut])
        partial = collectives.read(path, 3)
        assert partial.collectives == whole.collectives[: len(partial.collectives)]
    assert len(partial.collectives) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no imitation of a full disk here")
def test_a_full_disk_ends_the_recording_and_nothing_else():
    writer = journal.Journal("/dev/full")
    writer.write("region", "no room", 1.0, 2.0)
    assert writer._file is None, "room later would leave an event behind one that was cut off"
    writer.write("region", "closed", 1.0, 2.0)
    writer.close()


def test_an_event_behind_one_that_was_cut_off_is_no_error(tmp_path):
    path = tmp_path / "records"
    writer = journal.Journal(str(path))
    writer.write("issue", 0, "all_reduce", (0, 3), "float32", (2,), 8, 1.0, None, 'cell 1, line 1: f("é")', None, None)
    writer.close()
    event = path.read_bytes()
    for cut in range(1, len(event)):
        path.write_bytes(event + event[:cut] + event)
        assert collectives.read(str(path), 3).collectives[0].op == "all_reduce"


def test_a_rank_that_never_recorded_is_told(tmp_path):
    assert "rank 2 recorded nothing" in collectives.read(str(tmp_path / "nothing"), 2).problem


def test_reading_needs_no_torch():
    code = "import sys; from helpers.measuring import collectives, clock, sources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# The learner's line -----------------------------------------------------------------------------------------------------


def test_the_same_line_of_two_cells_is_each_cells_own():
    def described(filename):
        found = {"learner_lines": sources.learner_lines, "sys": sys}
        exec(compile("lines = learner_lines(sys._getframe())", filename, "exec"), found)
        return found["lines"][0]

    assert [described("<cell 41>"), described("<cell 42>")] == ["cell 41, line 1", "cell 42, line 1"]


def test_lines_of_cells_and_files(tmp_path):
    text = "\n" * 6 + "    dist.all_reduce(x)\n"
    linecache.cache["<cell 5>"] = (len(text), None, text.splitlines(True), "<cell 5>")
    job = tmp_path / "job.py"
    job.write_text("first = 1\n" + "x" * 300)
    assert sources.describe_line("<cell 5>", 7) == "cell 5, line 7: dist.all_reduce(x)"
    assert sources.describe_line("<cell 5>", 8) == "cell 5, line 8"
    assert sources.describe_line(str(job), 1) == "job.py, line 1: first = 1"
    assert len(sources.describe_line(str(job), 2)) < 140
    assert sources.describe_line("/nowhere/gone.py", 3) == "gone.py, line 3"


def test_whose_code_a_file_is():
    assert sources.is_learner_file("<cell 5>")
    assert sources.is_learner_file(__file__)
    assert sources.is_learner_file("relative.py")
    for other in (linecache.__file__, pytest.__file__, sources.__file__, "<frozen runpy>", "/tmp/torchinductor_me/ab/cab.py"):
        assert not sources.is_learner_file(other)


def test_the_innermost_line_of_the_learner_is_named_and_who_called_it():
    def ask():
        return sources.learner_lines(sys._getframe())

    @contextlib.contextmanager
    def library():
        yield

    def texts(lines):
        return [line.partition(": ")[2] for line in lines]

    assert sources.learner_lines(None) == []
    found = library()(ask)()  # a decorated function: a library's frame lies between
    assert texts(found) == ["return sources.learner_lines(sys._getframe())", "found = library()(ask)()"]
    found = ask() if found else []  # two branches: the call alone
    assert texts(found)[1:] == ["ask()"]
    found.clear()
    clock.measure(lambda: found.append(ask()), repeats=1)
    assert texts(found[-1])[1:] == ["clock.measure(lambda: found.append(ask()), repeats=1)"], "and none that lies outside helpers"
