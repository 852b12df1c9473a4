"""Plans: nothing that does not fit or divide, in the order of the goal, explained, with commands that their programs take."""

import dataclasses
import importlib.util
import math
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import predict
from helpers.predict import IMPLEMENTATIONS, Layout, Workload, commands, planning

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
LARGE = LLAMA | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "intermediate_size": 28672}
H100 = predict.machines("H100-SXM", 8)
JOB = Workload(64, 4096, precision="fsdp_mixed")
ASK = Workload(64, 2048, training=False, precision="bf16", implementation="vllm", new_tokens=256)


@st.composite
def configs(draw):
    key_value = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    heads = key_value * draw(st.sampled_from([1, 2, 3, 4]))
    return LLAMA | {
        "num_hidden_layers": draw(st.integers(1, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "hidden_size": heads * draw(st.sampled_from([32, 64, 128])),
        "intermediate_size": draw(st.sampled_from([768, 1000, 2730, 4096, 11008])),
        "vocab_size": draw(st.sampled_from([1024, 32000, 50257, 103424])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    name=st.sampled_from(["T4", "RTX-4090", "H100-SXM"]),
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]),
    sequences=st.integers(1, 96),
    goal=st.sampled_from(planning.GOALS),
    code=st.sampled_from(["transformers", "megatron", "nanotron", "torchtitan"]),
)
def test_a_training_plan_never_proposes_what_does_not_fit_or_cannot_be_divided(config, name, gpus, sequences, goal, code):
    machines = predict.machines(name, gpus)
    job = Workload(sequences, 512, precision="mixed", implementation=code)
    found = predict.plan(config, machines, job, goal)
    room = 0.9 * machines.gpu.memory_bytes
    for each in found.candidates:
        layout, work = each.layout, each.workload
        assert layout.ranks == layout.dp * layout.tp * layout.pp <= gpus
        assert gpus % layout.ranks == 0
        assert layout.tp <= 8
        assert config["num_attention_heads"] % layout.tp == config["intermediate_size"] % layout.tp == 0
        key_value = config["num_key_value_heads"]
        assert key_value % layout.tp == 0 or (code != "transformers" and layout.tp % key_value == 0)
        if IMPLEMENTATIONS[code].vocabulary_parallel:
            assert config["vocab_size"] % layout.tp == 0
        if not IMPLEMENTATIONS[code].stages_by_cost:
            assert config["num_hidden_layers"] % layout.pp == 0
        assert layout.pp == 1 or (layout.zero < 2 and work.micro_batches >= layout.pp)
        assert layout.dp * work.batch * work.micro_batches == sequences
        whole = predict.memory(config, work, layout)  # of all stages
        away = whole.optimizer_state + whole.master_weights if each.offloaded else 0
        assert whole.peak - away <= room
        assert each.offloaded or each.memory.peak == whole.peak
    worth = [each.worth(goal) for each in found.candidates]
    assert worth == sorted(worth)
    assert found.candidates or found.rejected


@settings(max_examples=40, deadline=None)
@given(
    config=configs(),
    gpus=st.sampled_from([1, 2, 4, 8, 16]),
    requests=st.integers(1, 300),
    code=st.sampled_from(["vllm", "transformers"]),
    goal=st.sampled_from(planning.GOALS),
)
def test_a_serving_plan_never_proposes_what_does_not_fit_or_cannot_be_divided(config, gpus, requests, code, goal):
    machines = predict.machines("T4", gpus)
    ask = Workload(requests, 1024, training=False, precision="fp16", implementation=code, new_tokens=128, batched_tokens=2048)
    found = predict.plan(config, machines, ask, goal)
    for each in found.candidates:
        layout, work = each.layout, each.workload
        assert (layout.pp, layout.zero) == (1, 0)
        assert config["num_attention_heads"] % layout.tp == config["intermediate_size"] % layout.tp == 0
        copied = code == "vllm" and layout.tp % config["num_key_value_heads"] == 0
        assert copied or config["num_key_value_heads"] % layout.tp == 0
        assert work.batch * layout.dp >= requests > (work.batch - 1) * layout.dp
        cache = predict.kv_bytes_per_token(config, precision="fp16", tp=layout.tp) * work.batch * 1152
        assert each.memory.kv_cache == cache
        apart = cache if code == "vllm" else 0
        assert predict.memory(config, work, layout).peak + apart <= 0.9 * machines.gpu.memory_bytes
    worth = [each.worth(goal) for each in found.candidates]
    assert worth == sorted(worth)


@pytest.mark.parametrize(("goal", "ranks"), [("throughput", 8), ("latency", 8), ("fits", 1)])
def test_the_goal_decides_how_many_gpus_are_used(goal, ranks):
    found = predict.plan(LLAMA, H100, JOB, goal)
    assert {each.layout.ranks for each in found.candidates} == {ranks}


def test_cost_also_looks_at_parts_of_the_machines():
    found = predict.plan(LLAMA, predict.machines("H100-SXM", 64), JOB, "cost")
    assert len({each.layout.ranks for each in found.candidates}) > 2
    best = found.best
    assert best.gpu_hours_per_million_tokens == min(each.gpu_hours_per_million_tokens for each in found.candidates)
    assert f"{best.gpu_hours_per_million_tokens:.2g} GPU-hours a million tokens." in found.explanation


def test_time_and_memory_of_a_candidate_are_those_that_predict_gives():
    best = predict.plan(LLAMA, H100, JOB).best
    assert best.seconds == predict.step_time(LLAMA, best.workload, best.layout, H100).total
    assert best.memory == predict.memory(LLAMA, best.workload, best.layout)
    assert best.tokens == 64 * 4096
    served = predict.plan(LARGE, H100, ASK, "latency").best
    assert served.seconds == predict.decode_latency(LARGE, served.workload, served.layout, H100)


def test_levers_are_pulled_only_where_a_step_does_not_fit_without():
    small = LLAMA | {"num_hidden_layers": 2, "vocab_size": 1024}
    assert {each.workload.checkpointing for each in predict.plan(small, H100, Workload(8, 128)).candidates} == {"none"}
    tight = predict.plan(LLAMA, predict.machines("H100-SXM", 1), JOB)
    assert all(each.workload.checkpointing == "full" and each.offloaded for each in tight.candidates)
    best = tight.best
    assert best.memory.optimizer_state == 0
    assert best.seconds > predict.step_time(LLAMA, best.workload, best.layout, tight.machines).total
    assert best.offloaded == 2 * 4 * predict.architecture(LLAMA).parameter_count  # FP32 gradients down, FP32 weights up


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_offloaded_optimiser_moves_the_part_that_a_rank_updates(zero):
    layout, work = Layout(dp=4, zero=zero), Workload(1, 128, precision="fsdp_mixed")
    needed = predict.memory(LLAMA, work, layout)
    whole = 2 * 4 * predict.architecture(LLAMA).parameter_count
    assert planning._moved(layout, needed) == pytest.approx(whole / (4 if zero else 1), rel=1e-6)


def test_nothing_fits_is_a_plan_that_says_why():
    found = predict.plan(LARGE, predict.machines("T4", 2), JOB)
    assert found.candidates == ()
    assert found.explanation.startswith("No layout fits. Left out: does not fit (")
    assert repr(found) == found.explanation
    with pytest.raises(LookupError, match="no layout fits: Left out"):
        found.commands()


def test_rejections_are_counted_by_reason_with_an_example():
    found = predict.plan(LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 3}, H100, JOB)
    reasons = {each.reason: each for each in found.rejected}
    assert reasons["attention heads are not divided"].example == "12 by tp 8"
    assert reasons["key-value heads are not divided"].example == "3 by tp 2"
    assert all(each.count > 0 for each in found.rejected)
    assert "for example 12 by tp 8" in found.explanation


@pytest.mark.parametrize(
    ("layout", "work", "why"),
    [
        (Layout(dp=8, zero=3), Workload(1, 4096, precision="fsdp_mixed", micro_batches=8), ""),
        (Layout(dp=8), Workload(1, 4096, precision="fsdp_mixed"), "does not fit: dp 8, 1 micro-batch of 1: "),
        (Layout(dp=16), JOB, "GPUs: 16 ranks, 8 GPUs"),
        (Layout(tp=3), JOB, "attention heads are not divided: 32 by tp 3; key-value heads are not divided: 8 by tp 3; MLP"),
        (Layout(pp=5), JOB, "layers are not divided: 32 by pp 5"),
        (Layout(pp=4, dp=2), Workload(1, 512, micro_batches=2), "a pipeline that is never full: 2 micro-batches, 4 stages"),
        (Layout(pp=2, dp=2, zero=3), JOB, "ZeRO 2 and 3 in a pipeline: pp 2 with ZeRO 3"),
    ],
)
def test_a_problem_is_told_for_one_layout(layout, work, why):
    assert predict.problem(LLAMA, H100, layout, work).startswith(why)
    assert bool(predict.problem(LLAMA, H100, layout, work)) == bool(why)


def test_a_tensor_parallel_group_stays_on_one_host():
    machines = predict.machines("H100-SXM", 16)
    assert max(each.layout.tp for each in predict.plan(LLAMA, machines, JOB).candidates) == 8
    assert predict.problem(LLAMA, machines, Layout(tp=16), JOB).startswith("tensor parallelism across hosts: tp 16 with 8 GPUs")


def test_no_candidate_has_a_problem():
    for each in predict.plan(LLAMA, H100, JOB).candidates:
        if not each.offloaded:
            assert predict.problem(LLAMA, H100, each.layout, each.workload) == ""


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="goal 'speed': choose one of throughput"):
        predict.plan(LLAMA, H100, JOB, "speed")
    with pytest.raises(dataclasses.FrozenInstanceError):
        predict.plan(LLAMA, H100, JOB).goal = "cost"


def test_a_plan_shows_its_table_and_one_paragraph():
    found = predict.plan(LLAMA, H100, JOB)
    heads, first, *_, paragraph = repr(found).splitlines()
    assert heads.split() == ["layout", "GiB", "step", "tokens/s", "GPU-h/M", "tokens"]
    assert found.best.name in first
    assert paragraph == found.explanation
    assert "10 % are kept free" in paragraph
    html = found._repr_html_()
    assert html.count("<tr>") == 6
    assert found.best.name in html


def layouts_of(plan):
    return [(each.layout, each.workload, bool(each.offloaded)) for each in plan.candidates]


def test_torchrun_takes_its_line_and_the_script_its_options():
    from torch.distributed.run import get_args_parser

    for machines in (H100, predict.machines("H100-SXM", 32)):
        found = predict.plan(LLAMA, machines, JOB)
        words = shlex.split(found.commands(script="job.py")["torchrun"])
        assert words[0] == "torchrun"
        asked = get_args_parser().parse_args(words[1:])
        assert (int(asked.nnodes), int(asked.nproc_per_node)) == (machines.gpus // 8, 8)
        assert asked.training_script == "job.py"
        options = dict(zip(asked.training_script_args[::2], asked.training_script_args[1::2], strict=True))
        best = found.best
        assert options["--zero"] == str(best.layout.zero)
        assert int(options["--micro-batch"]) * int(options["--micro-batches"]) * int(options["--dp"]) == 64


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_accelerate_reads_every_config_that_it_is_given(tmp_path, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    plans = [predict.plan(LLAMA, predict.machines("H100-SXM", gpus), JOB) for gpus in (1, 8, 16)]
    seen = set()
    for layout, work, offload in [each for plan in plans for each in layouts_of(plan)]:
        text = commands.accelerate(layout, work, min(8, layout.ranks), offload)
        assert bool(text) == (layout.pp == 1 and (layout.tp == 1 or (layout.zero > 1 and not offload)))
        if not text:
            continue
        file = tmp_path / "config.yaml"
        file.write_text(text)
        read = load_config_from_file(str(file))
        seen.add(read.distributed_type)
        assert read.num_processes == layout.ranks
        if read.distributed_type is DistributedType.FSDP:
            sizes = {key.removeprefix("parallelism_config_"): size for key, size in read.parallelism_config.items()}
            assert ParallelismConfig(**sizes).total_size == layout.ranks
            assert read.fsdp_config["fsdp_reshard_after_forward"] == (layout.zero == 3)
    assert seen >= {DistributedType.FSDP, DistributedType.DEEPSPEED}


def test_accelerate_launch_understands_a_sharded_config(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = tmp_path / "config.yaml"
    file.write_text(predict.plan(LLAMA, H100, JOB).commands()["accelerate"])
    options, config, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(file), "train.py", "--zero", "3"])
    )
    assert options.use_fsdp
    assert options.use_parallelism_config
    assert int(options.parallelism_config_dp_shard_size) == options.num_processes == config.num_processes == 8


@pytest.mark.parametrize(("zero", "offload"), [(0, False), (1, False), (3, False), (3, True)])
def test_accelerate_lets_several_hosts_meet(tmp_path, zero, offload):
    """By accelerate's own rules, on the second host, with and without the address of the first on the command line."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = tmp_path / "config.yaml"
    file.write_text(commands.accelerate(Layout(dp=16, zero=zero), Workload(1, 8), 8, offload))
    for named, head in ([], "HEAD"), (["--main_process_ip", "10.0.0.1"], "10.0.0.1"):
        line = ["--config_file", str(file), "--machine_rank", "1", *named, "train.py"]
        options, config, _ = _validate_launch_command(launch_command_parser().parse_args(line))
        options.deepspeed_fields_from_accelerate_config = list(config.deepspeed_config)
        assert options.use_deepspeed == (zero == 1 or offload)
        (prepare_deepspeed_cmd_env if options.use_deepspeed else prepare_multi_gpu_env)(options)
        met = options.rdzv_endpoint, options.nnodes, options.nproc_per_node, options.node_rank
        assert met == (f"{head}:29500", "2", "8", 1)


def test_a_cpu_size_model_uses_plain_data_parallelism():
    text = commands.accelerate(Layout(dp=4), Workload(1, 8), 4)
    assert yaml.safe_load(text)["distributed_type"] == "MULTI_GPU"
    assert yaml.safe_load(commands.accelerate(Layout(), Workload(1, 8), 1))["distributed_type"] == "NO"


def test_the_command_of_vllm_names_what_a_host_serves():
    best = predict.plan(LARGE, predict.machines("H100-SXM", 16), ASK)
    words = shlex.split(best.commands("some/model")["vllm"])
    assert words[:3] == ["vllm", "serve", "some/model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert int(options["--tensor-parallel-size"]) * int(options["--data-parallel-size"]) == 8
    assert options["--max-model-len"] == "2304"
    assert options["--gpu-memory-utilization"] == "0.9"
    assert int(options["--max-num-seqs"]) == math.ceil(64 / best.best.layout.dp)


VLLM = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(found.model_tag, found.tensor_parallel_size, found.max_num_seqs, found.max_num_batched_tokens, found.gpu_memory_utilization)
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed (make vllm)")
def test_vllm_takes_its_command():
    ask = dataclasses.replace(ASK, batched_tokens=4096)
    words = shlex.split(predict.plan(LARGE, H100, ask).commands("some/model")["vllm"])
    done = subprocess.run([sys.executable, "-c", VLLM, *words[2:]], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-5:] == ["some/model", "8", "64", "4096", "0.9"]
