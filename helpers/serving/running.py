"""Start vLLM's server, watch it come up, ask it, sample its batches, and end it with all that it started."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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

    def __init__(self, what: str, log: str) -> None:
        super().__init__(f"{what}: {reading.explain(log)}")
        self.log = log


class Server:
    """A running vLLM server.

    url: http://127.0.0.1:port; the API is below /v1. model: its name in requests. command: what started it, for a shell.
    facts: what its log says about the start. pid: of the process that all others descend from.
    """

    def __init__(self, process: ServerProcess, model: str, line: str, started_seconds: float) -> None:
        self._process, self.url, self.model, self.command, self.pid = process, process.url, model, line, process.pid
        self.facts = reading.facts(process.log(), started_seconds)
        self._samples: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def log(self) -> str:
        """All that the server has printed so far."""
        return self._process.log()

    def batches(self) -> list[tuple[float, int, int]]:
        """(time.time(), requests in the batch, requests that wait), over all replicas, up to five times a second so far."""
        return list(self._samples)

    def complete(self, prompt_token_ids: Sequence[Sequence[int]], max_tokens: int = 16) -> list[list[int]]:
        """Return the greedy continuation of each prompt, as token ids, the one that ends a text included.

        Raises ValueError for what the server refuses, ServingFailed where it has ended or ends meanwhile.
        """
        body = {"model": self.model, "prompt": [list(ids) for ids in prompt_token_ids], "temperature": 0}
        body |= {"max_tokens": max_tokens, "return_token_ids": True}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300, trust_env=False)
        except httpx.TransportError as error:
            raise self._failure(f"no answer ({error})") from None
        if answer.status_code >= 500:
            raise self._failure(f"HTTP {answer.status_code}")
        if answer.status_code != 200:
            raise ValueError(f"the server refuses (HTTP {answer.status_code}): {answer.json()['error']['message']}")
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    def _failure(self, what: str) -> ServingFailed:
        with suppress(subprocess.TimeoutExpired):  # so that its log is whole
            self._process.wait(DYING)
        return ServingFailed(what, self.log)

    def _sample(self) -> None:
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            pause = SAMPLED
            while not self._ended.wait(pause):
                with suppress(httpx.TransportError):
                    page = client.get("/metrics")
                    counts = {"running": 0, "waiting": 0}
                    for which, count in _COUNT.findall(page.text):
                        counts[which] += int(float(count))
                    self._samples.append((time.time(), counts["running"], counts["waiting"]))
                    pause = max(SAMPLED, 9 * page.elapsed.total_seconds())  # at most a tenth of the server's time

    def _close(self) -> None:
        self._ended.set()
        self._sampler.join()


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
    flags = chosen.flags(checking.kv_cache_bytes(config, chosen), checking.precision(config, chosen.dtype))
    place = model_files.find(name, complete="dummy" not in chosen.extra)  # a load format that needs no weights
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
            progress.say(" failed\n")
            raise ServingFailed(f"vLLM did not come up, {failure.reason}", failure.log) from None
        seconds = time.monotonic() - begin
        progress.say(f" ready after {seconds:.1f} s\n")
        server = Server(process, name, line, seconds)
        stack.callback(server._close)
        yield server


class _Progress:
    """Prints the command, then the phases of the start on one line; ends a server whose engine has failed and that stays."""

    def __init__(self, line: str, show: bool) -> None:
        self._show, self._warming, self._dying = show, False, 0.0
        self.say(f"{line}\nloading …")

    def __call__(self, process: ServerProcess) -> None:
        log = process.log()
        if not self._warming and reading.says(log, "warming_up"):
            self._warming = True
            self.say(" warming up …")
        if reading.says(log, "fatal"):
            self._dying = self._dying or time.monotonic()
            if time.monotonic() - self._dying > DYING:
                raise NotReady("the engine failed and the server stayed", log)

    def say(self, text: str) -> None:
        if self._show:
            print(text, end="", flush=True)
