"""Start vLLM's server, watch it come up, ask it, sample its batches, and end it with all that it started."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from helpers import machine, model_files, models
from helpers.server_process import NotReady, ServerProcess, free_port, started
from helpers.serving import checking, reading
from helpers.serving.settings import Settings, available, command, on_cpu, shell

SAMPLED = 0.2  # seconds between two looks at the batch
DYING = 8.0  # seconds in which a server whose engine has failed ends by itself
_COUNT = re.compile(r"^vllm:num_requests_(running|waiting)\{[^}]*\} ([\d.e+]+)$", re.MULTILINE)


class ServingFailed(RuntimeError):
    """vLLM did not come up or has ended; the message says of what. `log` is all it has printed."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class Server:
    """A running vLLM server.

    url: http://127.0.0.1:port; the API is below /v1. model: its name in requests. command: what started it, for a shell.
    facts: what its log says about the start. pid: of the process that all others descend from.
    """

    def __init__(self, process: ServerProcess, model: str, line: str, started_seconds: float) -> None:
        self._process, self.url, self.model, self.command, self.pid = process, process.url, model, line, process.pid
        self.facts = reading.facts(process.log(), started_seconds)
        self._client = httpx.Client(base_url=self.url, timeout=300, trust_env=False)
        self._samples: list[tuple[float, int, int]] = []
        self._ended, self._last = threading.Event(), ""
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def log(self) -> str:
        """All that the server has printed so far."""
        return self._last or self._process.log()

    def batches(self) -> list[tuple[float, int, int]]:
        """(time.time(), requests in the batch, requests that wait), over all replicas, up to five times a second so far."""
        return list(self._samples)

    def complete(
        self, prompt_token_ids: Sequence[Sequence[int]], max_tokens: int = 16, logprobs: int | None = None
    ) -> list[list[int]] | tuple[list[list[int]], list[list[float]]]:
        """Return the greedy continuation of each prompt, as token ids, the one that ends a text included.

        With logprobs=2 (or more) also, for each token, by how many nats it was likelier than the second best.
        Raises ValueError for what the server refuses, ServingFailed where it has ended or ends meanwhile.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": [list(ids) for ids in prompt_token_ids], "temperature": 0}
        body |= {"max_tokens": max_tokens, "return_token_ids": True} | ({"logprobs": logprobs} if logprobs else {})
        try:
            answer = self._client.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise self._failure(f"no answer ({error})") from None
        if answer.status_code >= 500:
            raise self._failure(f"HTTP {answer.status_code}")
        if answer.status_code != 200:
            raise ValueError(f"the server refuses (HTTP {answer.status_code}): {answer.json()['error']['message']}")
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        tokens = [choice["token_ids"] for choice in choices]
        if not logprobs:
            return tokens
        return tokens, [[_margin(top) for top in choice["logprobs"]["top_logprobs"]] for choice in choices]

    def _failure(self, what: str) -> ServingFailed:
        until = time.monotonic() + DYING
        while self._process.returncode is None and time.monotonic() < until:
            time.sleep(0.1)
        log = self.log
        return ServingFailed(f"{what}: {reading.explain(log)}", log)

    def _sample(self) -> None:
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            took = 0.0
            while not self._ended.wait(max(SAMPLED, 9 * took)):  # at most a tenth of the server's time
                begin = time.monotonic()
                try:
                    page = client.get("/metrics").text
                except httpx.TransportError:
                    continue
                counts = {"running": 0, "waiting": 0}
                for which, count in _COUNT.findall(page):
                    counts[which] += int(float(count))
                self._samples.append((time.time(), counts["running"], counts["waiting"]))
                took = time.monotonic() - begin

    def _close(self) -> None:
        self._ended.set()
        self._sampler.join()
        self._client.close()
        self._last = self._process.log()


@contextmanager
def serve(
    model: str | None = None, tensor_parallel: int = 1, *, timeout: float = 300, show: bool = True, **settings: Any
) -> Iterator[Server]:
    """Serve `model` (None: the notebooks' default) with vLLM on loopback while the block runs; other settings: `Settings`.

    show: print the command and how the start goes on. timeout: seconds until it must answer.

    Raises ValueError, before anything starts, for settings that cannot work; RuntimeError where vLLM cannot run here;
    ServingFailed, with the reason, where it does not come up. TypeError for a setting that does not exist.
    """
    chosen, name = Settings(tensor_parallel=tensor_parallel, **settings), model or models.default_name()
    if missing := available():
        raise RuntimeError(missing)
    if problems := checking.check(name, tensor_parallel, **settings):
        raise ValueError("\n".join(["vLLM would not run so:", *(f"  {problem}" for problem in problems)]))
    config, port = checking.config_of(name), free_port()
    place = model_files.find(name, complete="dummy" not in chosen.extra)  # --load-format dummy: random weights
    flags = chosen.flags(checking.kv_cache_bytes(config, chosen), checking.precision(config, chosen.dtype))
    words, variables = command(place, name, port, flags), chosen.variables()
    line = shell(words, variables)
    crowded = on_cpu() and chosen.ranks > machine.cores()
    note = f"\n{chosen.ranks} ranks on {machine.cores()} cores: timings oversubscribed" if crowded else ""
    progress = _Progress(line + note, show)
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    with ExitStack() as stack:
        try:
            process = stack.enter_context(started([sys.executable, *words], url, timeout=timeout, env=variables, watch=progress))
        except NotReady as failure:
            progress.end("failed")
            late = "it ended" if time.monotonic() - begin < timeout else f"it did not answer within {timeout:g} s"
            raise ServingFailed(f"vLLM did not come up, {late}: {reading.explain(failure.log)}", failure.log) from None
        except BaseException:
            progress.end("stopped")
            raise
        seconds = time.monotonic() - begin
        server = Server(process, name, line, seconds)
        stack.callback(server._close)
        progress.end(f"ready after {seconds:.1f} s")
        yield server


class _Progress:
    """Prints the command, then the phases of the start on one line; ends a server whose engine has failed and that stays."""

    def __init__(self, line: str, show: bool) -> None:
        self._show, self._warming, self._dying = show, False, 0.0
        self._next = time.monotonic()
        self._say(f"{line}\nloading …")

    def __call__(self, process: ServerProcess) -> None:
        if time.monotonic() < self._next:
            return
        self._next, log = time.monotonic() + 0.5, process.log()
        if not self._warming and reading.is_warming_up(log):
            self._warming = True
            self._say(" warming up …")
        if reading.is_dying(log):
            self._dying = self._dying or time.monotonic()
            if time.monotonic() - self._dying > DYING:
                raise NotReady("the engine failed and the server stayed", log)

    def end(self, how: str) -> None:
        self._say(f" {how}\n")

    def _say(self, text: str) -> None:
        if self._show:
            print(text, end="", flush=True)


def _margin(top: dict[str, float] | None) -> float:
    best = sorted((top or {}).values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
