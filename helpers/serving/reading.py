"""What vLLM's log says: facts of the start, the phase it is in, and what an engine that failed died of."""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from helpers import record

KNOWN = record.data("serving")
_CAUSE = re.compile(KNOWN["cause"], re.MULTILINE | re.VERBOSE)


@dataclass(frozen=True)
class Facts:
    """What the log says about the start; None where it says nothing. Sizes are of one rank.

    load_seconds: reading the weights. compile_seconds: torch.compile. capture_seconds: CUDA graphs. warm_up_seconds: profiling,
    cache, compilation and warm-up together. kv_cache_tokens, kv_cache_bytes: the KV cache (bytes to 0.01 GiB).
    started_seconds: from the launch to the first answer, measured.
    """

    load_seconds: float | None = None
    compile_seconds: float | None = None
    capture_seconds: float | None = None
    warm_up_seconds: float | None = None
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    model_class: str | None = None
    max_num_batched_tokens: int | None = None
    started_seconds: float | None = None


def facts(log: str, started_seconds: float | None = None) -> Facts:
    """The facts that a log holds."""
    found: dict[str, Any] = {"started_seconds": started_seconds}
    for name, pattern in KNOWN["facts"].items():
        if match := re.search(pattern, log):
            found[name] = yaml.safe_load(match[1].replace(",", ""))  # a number or a name
    if "kv_cache_bytes" in found:  # the log has GiB
        found["kv_cache_bytes"] = round(found["kv_cache_bytes"] * 2**30)
    return Facts(**found)


def says(log: str, what: str) -> bool:
    """Whether a log says that the server is "warming_up" (the weights are there), or "fatal": the engine has failed."""
    return bool(re.search(KNOWN[what], log))


def explain(log: str) -> str:
    """What an engine died of: the line of its log, what that means, and what mends it."""
    causes = [match[match.lastindex or 0] for match in _CAUSE.finditer(log)]
    if not causes:
        last = [line for line in log.splitlines() if line.strip()][-3:]
        return "its log names no cause; it ends with:\n  " + "\n  ".join(last or ["(nothing)"])
    cause = next((each for each in causes if not re.search(KNOWN["no_cause"], each)), causes[0])
    for failure in KNOWN["failures"]:
        if re.search(failure["pattern"], cause):
            return f"{cause}\n  meaning: {failure['means']}\n  mend: {failure['mend']}"
    return f"{cause}\n  (server.log, or the error's .log, has all of it)"
