"""What cannot work is refused at once, the command says all that is set, a log's facts and causes are read. No vLLM runs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from helpers import serving
from helpers.predict import kv_bytes_per_token
from helpers.serving import checking, reading, running, settings

ROOT = Path(__file__).resolve().parents[1]
BIND = settings.BIND
QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "intermediate_size": 18944, "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.fixture(autouse=True)
def two_cores_without_gpu(monkeypatch):
    """A machine with cores 0 and 1, 16 GiB free, and the CPU build of vLLM."""
    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.delenv("WORKSHOP_VLLM", raising=False)
    for module in (checking, settings):
        monkeypatch.setattr(module, "on_cpu", lambda: True)
        monkeypatch.setattr(module.machine, "cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(checking.machine, "memory", lambda: 16 * 2**30)
    monkeypatch.setattr(checking.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 16 * 2**30}))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tensor_parallel": 2},
        {"tensor_parallel": 4},
        {"tensor_parallel": 8, "max_model_len": 64},
        {"replicas": 2, "dtype": "float32"},
        {"env": {BIND: "0-1"}},
        {"env": {BIND: "nobind"}},
        {"tensor_parallel": 2, "env": {BIND: "0|1"}},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    ],
)
def test_what_can_work_is_not_refused(asked):
    assert serving.check("tiny-ernie", **asked) == []


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tensor_parallel": 3}, "8 attention heads cannot be divided among tensor_parallel=3 ranks; this model can have "
                                 "tensor_parallel 1, 2, 4, 8"),
        ({"tensor_parallel": 3}, "2 key-value heads cannot be divided among tensor_parallel=3 ranks"),
        ({"tensor_parallel": 3}, "1,024 vocabulary entries cannot be divided"),
        ({"max_model_len": 5000}, "max_model_len is 5,000, and the model was made for 4,096 positions"),
        ({"kv_cache_gib": 0.001}, "max_model_len of 4,096 tokens needs 0.00391 GiB of KV cache on each rank, and 0.001 GiB hold "
                                  "1,024 tokens; right: max_model_len=1024 at most, or kv_cache_gib=0.004"),
        ({"kv_cache_gib": 20}, "1 rank would take 21.5 GiB"),
        ({"kv_cache_gib": 8, "replicas": 2}, "2 ranks would take 18.5 GiB"),
        ({"gpu_memory_utilization": 0.95}, "and 16.0 GiB are free in memory; right: a smaller kv_cache_gib"),
        ({"tensor_parallel": 2, "env": {BIND: "0"}}, f"{BIND} is '0': cores for 1 of 2 ranks"),
        ({"tensor_parallel": 2, "env": {BIND: "0|7"}}, "may not use core 7, only 0 to 1"),
        ({"env": {BIND: "first"}}, "which is no list of cores"),
        ({"max_num_batched_tokens": 64}, "less than a token for each of 128 requests in a step; give max_num_seqs=64"),
        ({"replicas": 0}, "replicas is 0; it must be above 0"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(asked, says):
    assert says in "\n".join(serving.check("tiny-ernie", **asked))


def test_a_model_of_another_shape():
    assert serving.check(QWEN, 4, dtype="bfloat16", kv_cache_gib=2) == [
        found for found in serving.check(QWEN, 4, dtype="bfloat16", kv_cache_gib=2) if "in memory" in found
    ]  # 14 GiB of weights need more than 16 GiB; its shape is fine
    found = "\n".join(serving.check(QWEN, 7))
    for says in ("4 key-value heads cannot be divided", "152,064 vocabulary entries", "18,944 MLP columns", "1, 2, 4"):
        assert says in found
    assert "attention heads" not in found, "28 heads can be"


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(checking, "on_cpu", lambda: False)
    monkeypatch.setattr(checking.machine, "gpus", lambda: ("one",))
    monkeypatch.setattr(checking, "_gpu_memory", lambda count: (10 * 2**30, 80 * 2**30))
    found = serving.check("tiny-ernie", 2)
    assert found[0] == "2 × 1 ranks need a GPU each, and 1 may be used here"
    assert "would take 73.6 GiB" in found[1]
    assert "10.0 GiB are free on the fullest GPU" in found[1]
    assert serving.check("tiny-ernie", gpu_memory_utilization=0.1) == []


REFUSED = """
import sys
programs = []
sys.addaudithook(lambda event, found: programs.append(found[0]) if event == "subprocess.Popen" else None)
from helpers import serving
from helpers.serving import checking, running, settings
serving.available()
running.available = lambda: ""  # so that a machine without vLLM refuses too, and one with GPUs binds cores
checking.on_cpu = settings.on_cpu = lambda: True
try:
    with serving.serve("tiny-ernie", **{settings}):
        print("served")
except ValueError as error:
    print(error)
print(sys.executable in programs, sorted({{"torch", "transformers", "vllm"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tensor_parallel": 3}, "8 attention heads cannot be divided"),
        ({"max_model_len": 5000}, "max_model_len is 5,000"),
        ({"kv_cache_gib": 0.001}, "max_model_len of 4,096 tokens needs 0.00391 GiB"),
        ({"kv_cache_gib": 10**5}, "1 rank would take"),
        ({"tensor_parallel": 2, "env": {BIND: "0"}}, f"{BIND} is '0': cores for 1 of 2 ranks"),
    ],
    ids=["heads", "length", "cache", "memory", "binding"],
)
def test_refusals_come_at_once_and_before_anything_starts(monkeypatch, asked, says):
    """In a fresh process, where nothing is imported; the benchmark `serving` claims the 5 s, this only that nothing hangs."""
    monkeypatch.undo()
    code = REFUSED.format(settings=asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.startswith("vLLM would not run so:\n")
    assert says in done.stdout
    assert done.stdout.endswith("\nFalse []\n"), "neither does Python start, nor is what takes seconds to import imported"


def test_where_vllm_is_missing_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(
        settings.preflight, "vllm", lambda: settings.preflight.Check("vLLM", "warn", "not installed", "make vllm")
    )
    assert serving.available() == "vLLM cannot run here: not installed. What helps: make vllm."
    with pytest.raises(RuntimeError, match="not installed"), serving.serve("tiny-ernie"):
        pass
    monkeypatch.setenv("WORKSHOP_VLLM", "no")
    assert "WORKSHOP_VLLM=no" in serving.available()


def test_a_setting_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="max_tokens"):
        serving.check("tiny-ernie", max_tokens=3)


@pytest.mark.parametrize(
    ("ranks", "cores", "lists"),
    [
        (1, [0, 1], ["0"]),  # one core is left to the server and the scheduler
        (2, [0, 1], ["0", "1"]),
        (4, [0, 1], ["0", "1", "0", "1"]),
        (1, [0], ["0"]),
        (2, [4, 5, 6, 7, 8], ["4,5", "6,7"]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], ["0,1", "2,3", "4,5"]),
    ],
)
def test_each_rank_has_cores_of_its_own_where_there_are_enough(ranks, cores, lists):
    assert settings.binding(ranks, cores) == lists


def test_the_command_says_all_that_is_set(monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    chosen = serving.Settings(
        tensor_parallel=2, replicas=2, max_num_batched_tokens=256, model_impl="transformers", env={"A": "b c"}
    )
    line = settings.shell(settings.command(ROOT / "data" / "tiny_ernie", "tiny", 8123, chosen.flags(2**30)), chosen.variables())
    assert line == (
        "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo "
        f"{BIND}='0|1|0|1' OMP_NUM_THREADS=1 A='b c' python -m vllm.entrypoints.openai.api_server --model ../data/tiny_ernie "
        "--served-model-name tiny --host 127.0.0.1 --port 8123 --tensor-parallel-size 2 --data-parallel-size 2 --dtype auto "
        "--max-num-batched-tokens 256 --kv-cache-memory-bytes 1073741824 --model-impl transformers --enforce-eager"
    )
    monkeypatch.setenv(BIND, "auto")
    assert chosen.variables()[BIND] == "0|1|0|1", "vLLM itself has no lists for more ranks than NUMA nodes"
    monkeypatch.setenv(BIND, "1|0|1|0")
    assert chosen.variables()[BIND] == "1|0|1|0"
    assert "--enforce-eager" not in serving.Settings(compile=True).flags(None)
    assert serving.Settings(compile=True).variables()["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    monkeypatch.setattr(settings, "_has_amx", lambda: True)
    assert "helpers.serving.amx_worker.Worker" in serving.Settings().flags(None, "bf16")
    assert "--worker-cls" not in serving.Settings().flags(None, "fp32")


def test_the_capacity_of_a_cache_follows_its_bytes():
    config = checking.config_of("tiny-ernie")
    each = kv_bytes_per_token(config, precision="bf16")
    assert serving.kv_cache_tokens(config, 1, block_size=128) == 2**30 // (128 * each) * 128 == 1048576
    assert serving.kv_cache_tokens(config, 1, "fp32", 128) == 524288
    assert serving.kv_cache_tokens(config, 1, "bf16", 128, tp=2) == 2097152
    assert serving.kv_cache_tokens(config, 0.0001, "bf16", 16) == 96, "whole blocks only"
    assert checking.kv_cache_bytes(config, serving.Settings()) == 2**30
    assert checking.kv_cache_bytes(config, serving.Settings(kv_cache_gib=0.5)) == 2**29
    assert checking.kv_cache_bytes(config, serving.Settings(gpu_memory_utilization=0.5)) is None
    long = {**QWEN, "max_position_embeddings": 2**17}
    assert checking.kv_cache_bytes(type("Config", (), long), serving.Settings()) == 2**17 * 2 * 28 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("stored", "asked", "kept"),
    [("float32", "auto", "bf16"), ("float16", "auto", "fp16"), ("bfloat16", "auto", "bf16"), (None, "auto", "bf16"),
     ("torch.float16", "auto", "fp16"), ("float32", "float32", "fp32"), ("float32", "half", "fp16")],
)  # fmt: skip
def test_the_format_of_weights_and_cache(stored, asked, kept):
    assert checking.precision(type("Config", (), {"dtype": stored}), asked) == kept


LOG = """
(APIServer pid=1) INFO 11-30 15:47:34 [model.py:733] Resolved architecture: Ernie4_5ForCausalLM
(EngineCore pid=2) INFO 11-30 15:47:42 [core.py:133] config: {'compile_sizes': None, 'compile_ranges_endpoints': [2048], 'a': []}
(Worker pid=3) INFO 11-30 15:48:04 [default_loader.py:501] Loading weights took 0.09 seconds
(Worker pid=3) INFO 11-30 15:48:07 [cpu_worker.py:260] Explicitly set (1.0/21.09) GiB for KV cache on node 0.
(EngineCore pid=2) INFO 11-30 15:48:07 [kv_cache_utils.py:2327] CPU KV cache size: 1,048,576 tokens, Maximum concurrency: 256x
(EngineCore pid=2) INFO 11-30 15:48:07 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.77 s
"""
GPU_LOG = """
(EngineCore pid=2) INFO [gpu_model_runner.py:5259] Model loading took 0.68 GiB memory and 1.25 seconds
(EngineCore pid=2) INFO [monitor.py:53] torch.compile took 11.75 s in total
(EngineCore pid=2) INFO [gpu_worker.py:440] Available KV cache memory: 2.5 GiB
(EngineCore pid=2) INFO [gpu_model_runner.py:6346] Graph capturing finished in 4 secs, took 0.30 GiB
"""


def test_facts_are_read_from_the_log():
    assert reading.facts(LOG, 33.0) == serving.Facts(
        load_seconds=0.09, warm_up_seconds=0.77, kv_cache_tokens=1048576, kv_cache_bytes=2**30, model_class="Ernie4_5ForCausalLM",
        max_num_batched_tokens=2048, started_seconds=33.0,
    )  # fmt: skip
    assert reading.facts(GPU_LOG) == serving.Facts(
        load_seconds=1.25, compile_seconds=11.75, capture_seconds=4.0, kv_cache_bytes=round(2.5 * 2**30)
    )
    assert reading.facts("") == serving.Facts()
    assert reading.says(LOG, "warming_up")
    assert not reading.says(LOG[:100], "warming_up")


ENGINE = "(EngineCore pid=2) ERROR 11-30 15:48:10 [core.py:1512] "
SERVER = "(APIServer pid=1) "


@pytest.mark.parametrize(
    ("log", "cause", "means"),
    [
        (f"{ENGINE}Traceback (most recent call last):\n{ENGINE}ValueError: Available memory on node 0 (1.0/2.0 GiB) is less than "
         f"desired CPU memory utilization (0.9).\n{SERVER}RuntimeError: Engine core initialization failed. See root cause above.",
         "ValueError: Available memory on node 0", "less memory is free"),
        (f"{SERVER}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
         f"{SERVER}  Value error, Total number of attention heads (8) must be divisible by tensor parallel size (3). "
         "[type=value_error, input_value=ArgsKwargs]",
         "Total number of attention heads (8) must be divisible by tensor parallel size (3).", "heads cannot be divided"),
        (f"{ENGINE}Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down.\n{ENGINE}RuntimeError: cancelled\n"
         f"{SERVER}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
         "Worker proc VllmWorker-0 died unexpectedly (exit code: -4)", "illegal instruction"),
        ("usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --speed 3", "error: unrecognized arguments",
         "does not know a flag"),
        (f"{ENGINE}AssertionError: Given number of CPU id list ['0'] doesn't match local world size 2.", "AssertionError: Given",
         "a list of cores for each rank"),
        (f"{ENGINE}zmq.error.ZMQError: ipc path \"/tmp/{'x' * 110}\" is longer than 107 characters (and so on).",
         "ZMQError: ipc path", "TMPDIR=/tmp before Python starts"),
        (f"{ENGINE}KeyError: 'something new'", "KeyError: 'something new'", "has all of it"),
        ("one\ntwo\n\nthree\nfour", "its log names no cause", "two\n  three\n  four"),
        ("", "its log names no cause", "(nothing)"),
    ],
)  # fmt: skip
def test_the_first_cause_is_found_and_explained(log, cause, means):
    said = reading.explain(log)
    assert said.startswith(cause)
    assert means in said


def test_every_failure_that_is_known_has_a_meaning_and_a_mend():
    page = yaml.safe_load((ROOT / "data" / "serving.yaml").read_text())
    for failure in page["failures"]:
        assert set(failure) == {"pattern", "means", "mend"}
        re.compile(failure["pattern"])
    assert set(page["facts"]) < set(serving.Facts.__dataclass_fields__)


@pytest.fixture
def imitation(monkeypatch):
    """Runs `serve` with a program of our own in the place of vLLM; gives what it did."""
    monkeypatch.setattr(running, "available", lambda: "")

    def serve(program, **settings):
        monkeypatch.setattr(running, "command", lambda place, name, port, flags: ["-c", program, str(port)])
        return serving.serve("tiny-ernie", show=False, **settings)

    return serve


def test_an_engine_that_fails_is_explained_soon_after_its_exit(imitation):
    program = f"import sys; print('{ENGINE}MemoryError: no room'); sys.exit(1)"
    begin = time.monotonic()
    with (
        pytest.raises(
            serving.ServingFailed, match=r"\(exit code 1\): MemoryError: no room\n  meaning: memory ran out"
        ) as failure,
        imitation(program),
    ):
        pass
    assert time.monotonic() - begin < 60
    assert "MemoryError" in failure.value.log


def test_a_server_that_stays_after_its_engine_failed_is_ended(imitation, monkeypatch):
    monkeypatch.setattr(running, "DYING", 0.0)
    program = f"import time; print('EngineCore failed to start\\n{ENGINE}KeyError: 3', flush=True); time.sleep(600)"
    with pytest.raises(serving.ServingFailed, match="KeyError: 3"), imitation(program):
        pass


def test_a_server_that_never_answers_is_given_up(imitation):
    with (
        pytest.raises(serving.ServingFailed, match="did not answer within 2 s"),
        imitation("import time; time.sleep(600)", timeout=2),
    ):
        pass


def test_a_share_of_memory_that_leaves_no_cache():
    assert serving.check("ernie-0.3b", gpu_memory_utilization=0.01)[-1].endswith("of each rank's 0.16 GiB; no cache is left")
