"""vLLM, the course's own server and a plain loop side by side: the same prompts, model, number format and cores."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy

from .bench_data_parallel import two_ranks
from .framework import DoesNotRun, Findings, Row, at_least, at_most, benchmark, interleaved, shown

PROMPTS = 64
NEW_TOKENS = 32
PERCENTILES = (50, 95, 99)
REFUSED = {  # settings that cannot work, of each kind
    "heads": "tensor_parallel=3",
    "length": "max_model_len=5000",
    "cache": "kv_cache_gib=0.001",
    "memory": "kv_cache_gib=1e5",
    "binding": "tensor_parallel=2, env={'VLLM_CPU_OMP_THREADS_BIND': '0'}",
}


@benchmark
def side_by_side(repeats: int) -> Findings:
    """64 requests at once: vLLM (continuous batching), the own server with 2 ranks (static), a plain loop over generate."""
    from helpers import data_parallel, load_generator, models, serving

    if missing := serving.available():
        return Findings([Row("vLLM", (), note=missing)], [shown("vLLM runs here", False)])
    prompts = data_parallel.prompts(PROMPTS)
    model, tokenizer = models.load("tiny-ernie")
    rows = tokenizer(prompts).input_ids
    texts: list[str] = []
    speeds: dict[str, list[float]] = {}
    equal: dict[str, list[int]] = {}

    def figures(name: str, latencies: list[float], tokens: int, seconds: float, found: list[str]) -> dict[str, float]:
        speeds.setdefault(name, []).append(tokens / seconds)
        equal.setdefault(name, []).append(sum(a.strip() == b.strip() for a, b in zip(found, texts, strict=True)))
        return {f"{name}, p{percent}": float(numpy.percentile(latencies, percent)) for percent in PERCENTILES}

    def plain_loop() -> dict[str, float]:
        begin, latencies, found = time.perf_counter(), [], []
        for ids in rows:
            found.append(data_parallel.complete(model, [ids], [NEW_TOKENS])[0])
            latencies.append(time.perf_counter() - begin)  # all requests came at the beginning
        said = tokenizer.batch_decode(found, skip_special_tokens=True)
        texts[:] = texts or said
        return figures("plain loop", latencies, sum(map(len, found)), latencies[-1], said)

    def server(name: str, url: str) -> Callable[[], dict[str, float]]:
        def load() -> dict[str, float]:
            done = load_generator.send(url, prompts, model="tiny-ernie", max_tokens=NEW_TOKENS, timeout=600)
            if len(done.right) != PROMPTS:
                raise DoesNotRun(repr(done))
            seconds, said = [reply.seconds for reply in done.replies], [reply.text for reply in done.replies]
            return figures(name, seconds, sum(reply.tokens for reply in done.replies), done.seconds, said)

        load()
        speeds.clear()
        equal.clear()
        return load

    plain_loop()
    with serving.serve("tiny-ernie", dtype="float32", show=False) as vllm, two_ranks() as own:
        contenders = {"vLLM": server("vLLM", vllm.url), "own server": server("own server", own), "plain loop": plain_loop}
        timed = interleaved(contenders, repeats)
        batches = max(running for _, running, _ in vllm.batches())
    by_round = {
        name: tuple(a / b for a, b in zip(speeds["vLLM"], speeds[name], strict=True)) for name in ("own server", "plain loop")
    }
    throughput = [Row(f"{name}, throughput", tuple(found), "tokens/s") for name, found in speeds.items()]
    ratios = [Row(f"vLLM / {name}, by round", found, "×") for name, found in by_round.items()]
    gain = {name: statistics.median(found) for name, found in by_round.items()}
    return Findings(
        [*timed.rows(), *throughput, *ratios],
        [
            at_least("vLLM against a plain loop, tokens/s, median of rounds", gain["plain loop"], 1, "×"),
            shown("the own server gives the texts of a plain loop", min(equal["own server"]) == PROMPTS),
            at_least("texts of vLLM that are those of a plain loop, of 64", min(equal["vLLM"]), PROMPTS - 1),
        ],
        f"vLLM generates {gain['own server']:.1f} times the tokens of the own server and {gain['plain loop']:.1f} times those of "
        "a plain loop",
        [
            f"FP32, {PROMPTS} prompts, at most {NEW_TOKENS} new tokens each; latencies from the moment when all requests came",
            f"largest batch of vLLM that was seen: {batches} requests; the own server: 16 a rank",
        ],
    )


@benchmark
def refusals(repeats: int) -> Findings:
    """Settings that cannot work: seconds from the start of Python to its end with the refusal, nothing imported before."""
    from helpers import serving

    if missing := serving.available():
        return Findings([Row("refusals", (), note=missing)], [shown("vLLM runs here", False)])

    def refused(settings: str) -> Callable[[], float]:
        def ask() -> float:
            begin = time.perf_counter()
            code = f"from helpers import serving\nwith serving.serve('tiny-ernie', {settings}): pass"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if "ValueError: vLLM would not run so:" not in done.stderr:
                raise DoesNotRun(f"not refused: {settings}")
            return time.perf_counter() - begin

        return ask

    timed = interleaved({kind: refused(settings) for kind, settings in REFUSED.items()}, repeats)
    slowest = max(timed[kind].median if timed[kind].samples else float("inf") for kind in REFUSED)
    return Findings(timed.rows(), [at_most("the slowest of five kinds is refused", slowest, 5, "s")])
