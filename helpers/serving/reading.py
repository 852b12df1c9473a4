"""What vLLM's log says: facts of the start, the phase it is in, and what an engine that failed died of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

_PREFIX = r"^(?:\([^)]*\) )?(?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] )?"  # (EngineCore pid=7) ERROR 11-30 15:48:10 [core.py:1512]
_RAISED = re.compile(_PREFIX + r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt)\b: .+)$", re.MULTILINE)
_VALIDATED = re.compile(_PREFIX + r"\s+(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
_DIED = re.compile(r"(Worker proc \S+ died unexpectedly \(exit code: -?\d+\))")
_REFUSED = re.compile(r"^\S*api_server\S*: (error: .+)$", re.MULTILINE)


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


@lru_cache(maxsize=1)
def _knowledge() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parents[2] / "data" / "serving.yaml").read_text(encoding="utf-8"))


def facts(log: str, started_seconds: float | None = None) -> Facts:
    """The facts that a log holds."""
    found: dict[str, Any] = {"started_seconds": started_seconds}
    for name, pattern in _knowledge()["facts"].items():
        if match := re.search(pattern, log):
            text = match[1].replace(",", "")
            kind = {"model_class": str, "kv_cache_tokens": int, "max_num_batched_tokens": int}.get(name, float)
            found[name] = round(float(text) * 2**30) if name == "kv_cache_bytes" else kind(text)
    return Facts(**found)


def is_warming_up(log: str) -> bool:
    """Whether the weights are there, and what follows is cache, compilation and warm-up."""
    return bool(re.search(_knowledge()["warming_up"], log))


def is_dying(log: str) -> bool:
    """Whether the engine has failed and the server is about to end."""
    return bool(re.search(_knowledge()["fatal"], log))


def root_cause(log: str) -> str:
    """The line that says what went wrong first: not those that report another's failure. Empty where nothing went wrong."""
    found: list[tuple[int, str]] = []
    for pattern in (_VALIDATED, _RAISED, _DIED, _REFUSED):
        found += [(match.start(), match[1].strip()) for match in pattern.finditer(log)]
    no_cause = re.compile(_knowledge()["no_cause"] + "|ValidationError: ")
    causes = [line for _, line in sorted(found) if not no_cause.search(line)]
    return next(iter(causes), found[0][1] if found else "")


def explain(log: str) -> str:
    """What an engine died of: the line of its log, what that means, and what mends it."""
    cause = root_cause(log)
    if not cause:
        last = [line for line in log.splitlines() if line.strip()][-3:]
        return "its log names no cause; it ends with:\n  " + "\n  ".join(last or ["(nothing)"])
    for failure in _knowledge()["failures"]:
        if re.search(failure["pattern"], cause):
            return f"{cause}\n  meaning: {failure['means']}\n  mend: {failure['mend']}"
    return f"{cause}\n  (server.log, or the error's .log, has all of it)"
