"""vLLM really runs: tokens equal to transformers with one and two ranks, facts, batches, failures explained, nothing left."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gpu_measurements
import psutil
import pytest
from launch_support import descendants, running, wait_until

from helpers import data_parallel, diagnose, load_generator, models, serving
from helpers.serving import checking, deployment
from helpers.serving import running as starting

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 5
LENGTHS = (3, 9, 20, 33)  # words of the prompts, about
NEEDS = serving.available()
PLENTY = 600  # seconds for a start beside other tests
SHARED = Path("/dev/shm")

pytestmark = [
    pytest.mark.skipif(bool(NEEDS), reason=NEEDS or "vLLM is here"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def prompts():
    """Token ids of prompts of different lengths."""
    _, tokenizer = models.load("tiny-ernie")
    texts = data_parallel.prompts()
    return [tokenizer(min(texts, key=lambda text: abs(len(text.split()) - words))).input_ids for words in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts):
    """Greedy continuations by transformers in FP32, each prompt alone."""
    model, _ = models.load("tiny-ernie", dtype="float32")
    return [data_parallel.complete(model, [ids], [NEW_TOKENS])[0] for ids in prompts]


@pytest.fixture(scope="module")
def one():
    """A server with one rank."""
    with serving.serve("tiny-ernie", dtype="float32", kv_cache_gib=0.25, timeout=PLENTY, show=False) as server:
        yield server


def shared():
    """What lies in shared memory and is vLLM's or of a Python that shares."""
    return {path.name for path in SHARED.glob("*") if path.name.startswith(("psm_", "vllm_"))}


def named(pid, name):
    """Processes below `pid` with `name` in their command line."""
    found = []
    for process in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] * (name in " ".join(process.cmdline()))
    return found


def listening_elsewhere(pid):
    """Addresses other than loopback at which the process or one below it listens."""
    family = [psutil.Process(pid), *descendants(pid)]
    sockets = [each for process in family for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert sockets
    return [each.laddr for each in sockets if each.laddr.ip not in ("127.0.0.1", "::1")]


def test_one_rank_gives_the_tokens_of_transformers(one, prompts, expected):
    assert one.complete(prompts, NEW_TOKENS) == expected


def test_two_ranks_give_the_tokens_of_transformers_and_leave_nothing(prompts, expected, capsys):
    before = shared()
    with serving.serve("tiny-ernie", 2, dtype="float32", kv_cache_gib=0.25, timeout=PLENTY) as server:
        assert server.complete(prompts, NEW_TOKENS) == expected
        config = checking.config_of("tiny-ernie")
        assert server.facts.kv_cache_tokens == serving.kv_cache_tokens(config, 0.25, "fp32", tp=2)
        assert listening_elsewhere(server.pid) == []
        family = descendants(server.pid)
        assert len(named(server.pid, "Worker")) == 2
    assert [process for process in family if running(process)] == []
    assert shared() - before == set()
    printed = capsys.readouterr().out
    assert "--tensor-parallel-size 2 --dtype float32" in printed
    assert printed.index("loading …") < printed.index("warming up …") < printed.index("ready after ")


def test_its_facts_are_those_of_its_log_and_of_the_prediction(one):
    facts = one.facts
    assert facts.model_class == "Ernie4_5ForCausalLM"
    assert facts.kv_cache_tokens == serving.kv_cache_tokens(checking.config_of("tiny-ernie"), 0.25, "fp32")
    assert facts.kv_cache_bytes == 2**28
    assert facts.max_num_batched_tokens == 2048
    assert facts.compile_seconds is None
    assert 0 < facts.load_seconds < facts.started_seconds
    assert "Resolved architecture" in one.log
    assert listening_elsewhere(one.pid) == []


def test_its_batches_are_seen_while_it_works(one):
    texts = data_parallel.prompts(12)
    until = time.time()
    load = load_generator.send(one.url, texts, model=one.model, max_tokens=16, timeout=600)
    assert len(load.right) == 12, load
    wait_until(lambda: one.batches()[-1][0] > until, "it was looked at after the load")
    assert all(running >= 0 and waiting >= 0 for _, running, waiting in one.batches())
    assert max(running for _, running, _ in one.batches()) <= 12


def test_the_health_check_finds_it(one, tmp_path):
    port = int(one.url.rpartition(":")[2])
    done = subprocess.run(
        ["bash", "-c", deployment.render("health_check.sh", model=one.model, port=port, seconds=60)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"tiny-ernie answers on port {port}\n"), done.stderr


def test_what_the_server_refuses_is_said(one):
    with pytest.raises(ValueError, match=r"the server refuses \(HTTP 400\): .*"):
        one.complete([[1] * 5000], 4)


def test_an_engine_that_fails_is_explained_within_ten_seconds_of_its_exit():
    """Blocks of 16 tokens, which vLLM's attention on the CPU does not have, and which nothing here looks at before."""
    seen = []

    class Watched(starting._Progress):
        def __call__(self, process):
            if named(os.getpid(), "EngineCore"):
                seen.append(time.monotonic())
            super().__call__(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "_Progress", Watched)
        with (
            pytest.raises(serving.ServingFailed, match="ValueError: No common block size for 16") as failure,
            serving.serve("tiny-ernie", dtype="float32", extra=("--block-size", "16"), timeout=PLENTY, show=False),
        ):
            pass
    assert seen, "there was an engine"
    assert time.monotonic() - seen[-1] < 10
    assert "Traceback" in failure.value.log


OWNER = """
import sys
from helpers import serving
with serving.serve("tiny-ernie", 2, dtype="float32", kv_cache_gib=0.25, show=False, timeout=600):
    print("ready", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is looked for where Linux has it")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_start_leaves_nothing(number):
    before, folder = shared(), Path(tempfile.mkdtemp(prefix="serving-", dir="/tmp"))  # a short path: sockets are made below it
    surroundings = {**os.environ, "TMPDIR": str(folder)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=surroundings, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(named(owner.pid, "VLLM::")) or owner.poll() is not None, "an engine is starting", 600)
        family, engines = descendants(owner.pid), named(owner.pid, "VLLM::")
        owner.send_signal(number)
        said = owner.communicate(timeout=300)[1]
    finally:
        owner.kill()
    assert engines, said
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT), said
    wait_until(lambda: not any(running(process) for process in family), "all processes have ended")
    wait_until(lambda: list(folder.iterdir()) == [], "its folder is gone")
    folder.rmdir()
    assert shared() - before == set()


REFUSED = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.ompmultiprocessing import OMPProcessManager
import os
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
few = {"max_num_batched_tokens": 64, "max_num_seqs": 128}
for asked in ({"tensor_parallel_size": 3}, {"max_model_len": 5000}, few, {"tensor_parallel_size": 2}):
    try:
        config = EngineArgs(model="data/tiny_ernie", **asked).create_engine_config(UsageContext.OPENAI_API_SERVER)
        OMPProcessManager(config)
        print("REFUSED nothing")
    except Exception as error:
        print("REFUSED", " ".join(str(error).split()))
"""


@pytest.mark.skipif(not NEEDS and not checking.on_cpu(), reason="binding threads is the CPU build's")
def test_vllm_itself_refuses_what_is_refused_here():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=600, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(found) == 4, done.stderr
    assert "attention heads (8) must be divisible by tensor parallel size (3)" in found[0]
    assert "max_model_len (5000) is greater than the derived max_model_len" in found[1]
    assert "max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128)" in found[2]
    assert "CPU id list ['0'] doesn't match local world size 2" in found[3]
    assert [diagnose(line).fault for line in (found[0], found[3])] == ["heads-not-divisible", "cpu-binding"]


def test_what_make_gpu_check_measures_of_serving_runs_here_too():
    assert gpu_measurements.serving_possible()
    rows = gpu_measurements.serving()
    assert [name for name, _ in rows] == ["until it serves", "4 requests of at most 32 tokens"]
    assert all(seconds > 0 for _, seconds in rows)
