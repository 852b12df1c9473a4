"""Real jobs: each fault that a CPU can produce is named, healthy jobs raise no alarm, silent faults are found by their tool."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import cloudpickle
import diagnosis_jobs as jobs
import healthy_jobs
import pytest

from helpers import LaunchError, RankFailed, diagnose, diagnosis, equivalence, exercises, launch, machine
from helpers.launching import verb

for module in (jobs, healthy_jobs, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # as with the functions of a cell

ROOT = Path(__file__).resolve().parents[1]
FAULTS = {fault.id: fault for fault in diagnosis.faults()}
LONG, HANG = 60.0, 3.0  # seconds: for jobs that end by themselves; until a job that hangs is ended
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
REAL = {  # case -> the fault to be named, the ranks to be blamed (None: not told), the job and how it is launched
    "port in use": ("port-in-use", (0,), jobs.port_in_use, {"ranks": 1}),
    "no process group": ("no-process-group", None, jobs.no_process_group, {}),
    "one rank raises": ("one-rank-raised", (1,), jobs.one_rank_raises, {}),
    "one rank raises and closes": ("one-rank-raised", (1,), jobs.one_rank_raises_and_closes, {}),
    "one rank closes and returns": ("peer-gone", (1,), jobs.closes_and_returns, {}),
    "killed": ("rank-killed", (1,), jobs.killed, {}),
    "crashes": ("rank-crashed", (1,), jobs.crashes, {}),
    "exits": ("rank-exited", (1,), jobs.exits, {}),
    "unused parameter": ("unused-parameter", None, jobs.unused_parameter, {}),
    "marked ready twice": ("marked-ready-twice", None, jobs.marked_ready_twice, {}),
    "no gradient path": ("no-gradient-path", None, jobs.no_gradient_path, {}),
    "uneven batches": ("uneven-batches", (0,), jobs.uneven_batches, {"timeout": HANG}),
    "uneven batches, told by Join": ("uneven-batches", None, jobs.uneven_batches_told, {}),
    "models differ": ("models-differ", None, jobs.models_differ, {}),
    "other operation": ("collective-op", None, jobs.other_op, {"timeout": HANG}),
    "other operation, DETAIL": ("collective-op", None, jobs.mixed_up, {"args": ("op",), "env": DETAIL}),
    "other size": ("collective-size", None, jobs.other_size, {}),
    "other size, DETAIL": ("collective-size", None, jobs.mixed_up, {"args": ("size",), "env": DETAIL}),
    "other dtype": ("collective-dtype", None, jobs.other_dtype, {}),
    "other dtype, DETAIL": ("collective-dtype", None, jobs.mixed_up, {"args": ("dtype",), "env": DETAIL}),
    "other group": ("collective-group", None, jobs.other_group, {"ranks": 3, "timeout": HANG}),
    "under a condition": ("collective-conditional", (1,), jobs.conditional, {"timeout": HANG}),
    "after an early return": ("collective-conditional", (1,), jobs.early_return, {"timeout": HANG}),
    "works alone": ("rank-works-alone", (0,), jobs.works_alone, {"timeout": HANG}),
    "works alone, on a mesh": ("rank-works-alone", (3,), jobs.works_alone_on_a_mesh, {"ranks": 4, "timeout": HANG}),
    "nobody sends": ("collective-conditional", (0,), jobs.nobody_sends, {"timeout": HANG}),
    "works alone past a group's timeout": ("collective-timeout", None, jobs.own_timeout, {}),
    "works alone past a barrier": ("collective-timeout", None, jobs.monitored, {}),
    "only slow": (None, None, jobs.only_slow, {"timeout": HANG}),
    "all receive first": ("send-recv-cycle", None, jobs.receive_cycle, {"timeout": HANG}),
    "swapped order": ("swapped-order", None, jobs.swapped, {}),
    "swapped order of branches": ("swapped-order", None, jobs.swapped_branches, {}),
    "swapped order of calls": ("swapped-order", None, jobs.swapped_calls, {}),
    "new_group on one rank": ("group-lists-differ", (0,), jobs.group_on_one_rank, {"ranks": 3, "timeout": HANG}),
    "mesh too large": ("degrees-do-not-multiply", None, jobs.mesh_too_large, {}),
    "layout too large": ("degrees-do-not-multiply", None, jobs.layout_does_not_fit, {}),
    "mixed tensors": ("mixed-tensors", None, jobs.mixed_tensors, {}),
    "more ranks than KV heads": ("heads-not-divisible", None, jobs.too_many_heads_ranks, {"ranks": 4}),
    "meta tensor": ("meta-tensor", None, jobs.meta_tensor, {"ranks": 1}),
    "device_map in a job": ("device-map-in-a-job", None, jobs.device_map_in_a_job, {}),
    "keys missing": ("checkpoint-incomplete", None, jobs.keys_missing, {"ranks": 1}),
    "out of memory": ("out-of-memory", None, jobs.out_of_memory, {"ranks": 1}),
    "an error of one's own": (None, (0,), jobs.unknown_error, {"ranks": 1}),
}


@cache
def outcome(case):
    """What launch gave: a run or an error, and its diagnosis."""
    _, _, job, keywords = REAL[case]
    keywords = {"timeout": LONG, "backend": "gloo", **keywords}
    try:
        found = launch(job, *keywords.pop("args", ()), **keywords)
    except LaunchError as error:
        found = error
    return found, diagnose(found)


@pytest.mark.parametrize("case", REAL)
def test_a_real_job_is_named(case):
    wanted, ranks, *_ = REAL[case]
    found, named = outcome(case)
    assert named.fault == wanted, f"{named}\n\n{found}"
    assert ranks is None or named.ranks == ranks, f"{named}\n\n{found}"
    if isinstance(found, LaunchError):
        assert found.diagnosis.fault == wanted
        assert (named.name in str(found)) == (wanted is not None)
    if isinstance(found, RankFailed) and wanted and FAULTS[wanted].patterns and FAULTS[wanted].says == "cause":
        assert diagnose(found.traceback).fault == wanted, "its traceback, pasted from elsewhere, is named as well"


def test_the_evidence_is_rank_by_rank_with_the_lines():
    for case, what in [
        ("other operation", "op"),
        ("other group", "group"),
        ("swapped order", "source"),
        ("swapped order of calls", "source"),
        ("under a condition", "missing"),
    ]:
        found, named = outcome(case)
        difference = diagnosis.mismatch(found)
        assert difference.what == what
        first = min(difference.rows)  # of "other group": 0 or 1, whichever group's operation was begun first
        assert f"rank {first} issued all_reduce (float32" in str(difference)
        assert "diagnosis_jobs.py, line" in str(difference)
        assert str(difference) in named.evidence[0]
    called = str(diagnosis.mismatch(outcome("swapped order of calls")[0]))
    assert re.search(r"rank 0 issued .*: dist\.all_reduce\(x\) <- .*: total\(loss\)\n", called)


def test_new_group_with_other_lists():
    """It hangs there or in the group's first use, as the ranks happen to meet; both names are true."""
    with pytest.raises(LaunchError) as info:
        launch(jobs.group_lists_differ, ranks=3, timeout=HANG, backend="gloo")
    assert info.value.diagnosis.fault in ("group-lists-differ", "collective-group"), info.value


def test_a_hook_whose_callbacks_change_places():
    """PowerSGD with several buckets: most runs hang or die, and how depends on timing. Never a wrong name."""
    named: set[str | None] = set()
    for _ in range(6):
        if "hook-order" in named:
            break
        try:
            named.add(diagnose(launch(jobs.hook_order, timeout=HANG, backend="gloo")).fault)
        except LaunchError as error:
            named.add(error.diagnosis.fault)
    assert named <= {"hook-order", None}  # how it ends decides whether there is enough to name it by


# -------------------------------------------------------------------------------------------------- other launchers, really run

SPAWNED = """
import multiprocessing
def train(): print("here")
if __name__ == "__main__": multiprocessing.get_context("spawn").Process(target=train).start()
"""


def test_a_function_that_spawn_cannot_find():
    done = subprocess.run([sys.executable, "-c", SPAWNED], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert diagnose(done.stderr).fault == "cell-function-not-found", done.stderr


TORCHRUN = """
import torch.distributed as dist, torch
dist.init_process_group("gloo")
table = {0: "a"}
row = table[dist.get_rank()]
dist.all_reduce(torch.ones(4))
"""


def test_torchruns_log_is_read_from_its_first_failing_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    found = diagnose(done.stdout + done.stderr)
    assert (found.fault, found.ranks) == ("one-rank-raised", (1,)), done.stderr
    assert "KeyError: 1" in found.evidence[0]


def test_more_ranks_than_gpus_are_refused_before_the_start():
    with pytest.raises(ValueError, match="needs one GPU per rank") as info:
        launch(jobs.swapped, ranks=64, backend="nccl")
    assert diagnose(str(info.value)).fault == "more-ranks-than-devices"


# ---------------------------------------------------------------------------------------------------------------------- healthy


@pytest.mark.parametrize(
    ("job", "ranks"),
    [(job, 2) for job in healthy_jobs.OF_TWO] + [(job, 4) for job in healthy_jobs.OF_FOUR],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_healthy_job_raises_no_alarm(job, ranks):
    run = launch(job, ranks=ranks, timeout=LONG, backend="gloo")
    found = diagnose(run)
    assert found.healthy, str(found)
    assert (found.fault, diagnosis.mismatch(run)) == (None, None)
    assert "all ranks issue the same" in found.ruled_out[0]


def test_the_notebooks_own_jobs_raise_no_alarm(monkeypatch):
    """Every exercise's answer is checked once more; each job that its check launches is diagnosed."""
    seen = []

    def watched(*arguments, **keywords):
        run = launch(*arguments, **keywords)
        seen.append(diagnose(run))
        return run

    monkeypatch.setattr(verb, "launch", watched)
    exercises.load.cache_clear()
    try:
        for id, _ in exercises.listed():
            if id[:2] in ("00", "01", "02", "03", "05", "06"):
                assert exercises.judge(id, exercises.find(id).answer).state == "solved"
    finally:
        exercises.load.cache_clear()
    assert len(seen) >= 6
    assert [str(found) for found in seen if not found.healthy] == []


# -------------------------------------------------------------------------------------------------------- all faults, one table


def test_the_confusion_table():
    """Fault × diagnosis over all real jobs, examples and logs: no wrong name; unknown only what is meant to be."""
    table = Counter()
    for case, (wanted, *_) in REAL.items():
        table[wanted, outcome(case)[1].fault, "job"] += 1
    for fault in FAULTS.values():
        if fault.example:
            table[fault.id, diagnose(fault.example).fault, "log"] += 1
    for path in (Path(__file__).parent / "data" / "logs").glob("*.log"):
        wanted = path.stem.partition(".")[0]
        table[None if wanted == "unknown" else wanted, diagnose(path).fault, "log"] += 1
    print(f"{'fault':<28}{'named':<28}{'jobs':>5}{'logs':>5}")
    for wanted, named in sorted({pair[:2] for pair in table}, key=str):
        print(
            f"{wanted or 'unknown':<28}{named or 'unknown':<28}{table[wanted, named, 'job']:>5}{table[wanted, named, 'log']:>5}"
        )
    assert [pair for pair in table if pair[0] != pair[1]] == []
    recognised = {wanted for wanted, *_ in table} | {"hook-order", "rank-never-joined"}
    assert {fault.id for fault in FAULTS.values() if fault.kind == "loud"} - recognised == set()
    by_other_tools = {fault.id for fault in FAULTS.values() if fault.tool != "diagnose"}
    assert by_other_tools - recognised - set(BY_TOOL) - set(COMPARED) == set()


# ------------------------------------------------------------------------------------------- silent faults, found by their tool


COMPARED = {  # fault -> a job of the tests of equivalence.compare, what it is called with, what is found
    "same-order-each-epoch": ("epochs", (False, True), "the same order in every epoch"),
    "no-sync-around-backward": ("job", ("no_sync around backward",), "gradients were exchanged 3 times in one step"),
    "same-augmentation": ("augmented", (False,), "the same random augmentation on every rank"),
    "samples-missed": ("job", ("dropped tail",), "samples are missed or repeated"),
    "not-synchronised": ("job", ("not synchronised",), "gradients differ between ranks"),
    "mean-of-means": ("job", ("mean of means",), "a mean of means over unequal counts"),
    "gradient-factor": ("job", ("summed",), "gradients are off by the factor W = 2"),
    "ties-lost": ("ties_lost", (), "gradients differ"),
    "bias-on-every-rank": ("tensor_parallel", ("bias each",), "a bias is added on every rank"),
    "shards-do-not-add-up": ("tensor_parallel", ("first slice",), "shards overlap"),
    "sampled-tokens-differ": ("tensor_parallel", ("samplers apart",), "sampled tokens differ between ranks"),
    "dropout-masks": ("tensor_parallel", ("dropout by rank",), "dropout masks differ where they must be the same"),
    "tied-gradients-apart": ("pipeline_parallel", ("ends apart",), "gradients of tied parameters are not summed"),
    "learning-rate-schedule": ("scheduled", ("per rank",), "the learning-rate schedule is stepped 2 times too often"),
    "loss-nan": ("diverging", ("negative",), "a NaN arises"),
}


@pytest.mark.parametrize("id", COMPARED)
def test_a_silent_fault_is_found_by_comparing_ranks(id):
    import test_equivalence
    import test_equivalence_parallel

    assert FAULTS[id].tool.startswith("equivalence.")
    name, arguments, wanted = COMPARED[id]
    job = next(getattr(module, name) for module in (jobs, test_equivalence, test_equivalence_parallel) if hasattr(module, name))
    comparison = equivalence.compare(job, *arguments)
    assert wanted in [finding.fault for finding in comparison.findings], comparison
    for run in comparison.runs:
        assert diagnose(run).healthy, "diagnose does not claim to see it"


def plan_misses_a_module():
    from helpers import models, shard_plan

    config = models.config("tiny-ernie")
    plan = {key: style for key, style in shard_plan.published_plan(config).items() if not key.endswith(("k_proj", "v_proj"))}
    return bool(shard_plan.check(config, plan, 2))


def mesh_axes_swapped():
    from helpers import grouping

    wrong, right = (grouping.layout(4, tp=2, ranks_per_node=2, order=order) for order in (("pp", "tp", "dp"), ("pp", "dp", "tp")))
    return bool(wrong.crossing("tp")) and not right.crossing("tp")


def output_missing():
    run = launch(jobs.prints, timeout=LONG)
    return [run.output(rank).split() for rank in range(2)] == [["said", "0"], ["said", "1"]]


def threads_oversubscribed():
    def of_two_started_by_hand(setting):
        command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
        return 2 * int(subprocess.check_output(command, env={**os.environ, "OMP_NUM_THREADS": str(setting)}))

    most = max(2, machine.cores())
    mended = of_two_started_by_hand(most // 2), sum(launch(jobs.threads, timeout=LONG).results)
    return of_two_started_by_hand(most) > most and all(threads <= most for threads in mended)


def dtype_surprise():
    from helpers import models, predict

    model, _ = models.load("tiny-ernie")  # meant in BF16, and loaded in FP32
    held = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    meant = predict.memory(models.config("tiny-ernie"), predict.Workload(1, 8, training=False, precision="bf16"))
    return held == 2 * meant.parameters


def peak_without_reset():
    after_training, anew = launch(jobs.peaks, ranks=1, timeout=LONG).results[0]
    return after_training > 1.5 * anew


def warm_up_counted():
    from helpers.measuring import clock

    calls = []

    def slow_at_first():
        if not calls:
            time.sleep(0.5)
        calls.append(1)

    return clock.measure(slow_at_first, repeats=3).median < 0.25


BY_TOOL = {
    "timing-without-synchronising": warm_up_counted,
    "plan-misses-a-module": plan_misses_a_module,
    "mesh-axes-swapped": mesh_axes_swapped,
    "output-missing": output_missing,
    "threads-oversubscribed": threads_oversubscribed,
    "dtype-surprise": dtype_surprise,
    "peak-without-reset": peak_without_reset,
}


@pytest.mark.parametrize("id", BY_TOOL)
def test_a_silent_fault_is_found_by_its_tool(id):
    assert BY_TOOL[id]()
