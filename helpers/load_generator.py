"""Load for a server with OpenAI's /v1/completions: open or closed loop, latencies, and a check that each reply is one's own.

Closed loop: `concurrency` clients, each sending its next request when it has its reply; a slow server is asked less often.
Open loop: requests come at random moments (a Poisson process of `rate` requests a second), whether or not replies come.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy


@dataclass(frozen=True)
class Reply:
    """What became of one request. Seconds count from the start of the load (`sent`) and from `sent` on (the others).

    `status` is 0 where no HTTP answer came. `problem` is empty for a reply that is right: status 200, the request's own id in its
    id and, where the text was known before, that text.
    """

    number: int
    sent: float
    seconds: float
    status: int
    text: str = ""
    tokens: int = 0  # generated
    problem: str = ""
    first_token: float | None = None  # where replies are streamed


@dataclass(frozen=True)
class Load:
    """All replies of one load, by number of request, and the seconds from the first request to the last reply."""

    replies: tuple[Reply, ...] = field(repr=False)
    seconds: float

    @property
    def right(self) -> list[Reply]:
        """Replies without a problem."""
        return [reply for reply in self.replies if not reply.problem]

    @property
    def statuses(self) -> dict[int, int]:
        """How many replies had each status."""
        return dict(sorted(Counter(reply.status for reply in self.replies).items()))

    @property
    def requests_per_second(self) -> float:
        """Right replies a second."""
        return len(self.right) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of right replies a second, over all ranks."""
        return sum(reply.tokens for reply in self.right) / self.seconds

    def percentile(self, percent: float, what: str = "seconds") -> float:
        """The latency in seconds that `percent` % of right replies do not exceed; `what` may be "first_token".

        Raises ValueError where no reply has that figure.
        """
        values = [value for reply in self.right if (value := getattr(reply, what)) is not None]
        if not values:
            raise ValueError(f"no right reply with {what}: statuses {self.statuses}")
        return float(numpy.percentile(values, percent))

    def __repr__(self) -> str:
        line = f"{len(self.right)} of {len(self.replies)} replies right in {self.seconds:.2f} s"
        if self.right:
            line += f", {self.requests_per_second:.1f} requests/s, {self.tokens_per_second:.0f} tokens/s; latency "
            line += ", ".join(f"p{percent} {self.percentile(percent):.3f} s" for percent in (50, 95, 99))
        problems = Counter(reply.problem for reply in self.replies if reply.problem)
        return "\n".join([line, *(f"  {count} × {problem}" for problem, count in problems.most_common(5))])


def send(
    url: str,
    prompts: Sequence[str],
    *,
    model: str,
    max_tokens: int | Sequence[int] = 16,
    concurrency: int | None = None,
    rate: float | None = None,
    expected: Sequence[str] | None = None,
    stream: bool = False,
    seed: int = 0,
    timeout: float = 120,
) -> Load:
    """Send one request per prompt to `url` + /v1/completions and return all replies; also from a cell, where a loop runs already.

    concurrency: closed loop with so many clients. rate: open loop, requests a second. Neither: all at once.
    max_tokens: of every answer, or one number for each. expected: the texts that the replies must have.
    stream: ask for tokens as they come, and note when the first did.
    timeout: seconds for one request; later it counts as not answered.

    Raises ValueError for both loops at once, and for numbers that are not above 0.
    """
    if concurrency is not None and rate is not None:
        raise ValueError("concurrency (closed loop) and rate (open loop) were both given; give one, or none for all at once")
    if (concurrency is not None and concurrency < 1) or (rate is not None and rate <= 0):
        raise ValueError(f"{concurrency=}, {rate=}: they must be above 0")
    if expected is not None and len(expected) != len(prompts):
        raise ValueError(f"{len(expected)} expected texts for {len(prompts)} prompts")
    generator = random.Random(seed)
    moments = [0.0] * len(prompts)
    for number in range(1, len(prompts)) if rate else ():
        moments[number] = moments[number - 1] + generator.expovariate(rate)  # type: ignore[arg-type]
    most = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(most) != len(prompts):
        raise ValueError(f"{len(most)} max_tokens for {len(prompts)} prompts; give one number for all, or one for each")
    body = {"model": model, "temperature": 0} | ({"stream": True} if stream else {})

    async def everything() -> Load:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency or 0)
        places = asyncio.Semaphore(concurrency or max(1, len(prompts)))
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as client:
            begin = time.perf_counter()

            async def one(number: int) -> Reply:
                await asyncio.sleep(moments[number])
                async with places:
                    wanted = None if expected is None else expected[number]
                    asked = {**body, "prompt": prompts[number], "max_tokens": most[number]}
                    return await _ask(client, asked, number, begin, wanted)

            replies = await asyncio.gather(*map(one, range(len(prompts))))
            return Load(tuple(replies), time.perf_counter() - begin)

    return _run(everything())


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], number: int, begin: float, expected: str | None) -> Reply:
    own, sent, first = uuid.uuid4().hex, time.perf_counter(), None
    status, text, tokens, identity, problem = 0, "", 0, own, ""
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": own}) as answer:
            status = answer.status_code
            async for page in _pages(answer):
                if status != 200:
                    problem = f"HTTP {status}: {page.get('error', page)}"
                    break
                choice, identity = (page["choices"] or [{}])[0], page["id"]
                text += choice.get("text", "")
                tokens = page["usage"]["completion_tokens"] if page.get("usage") else tokens + bool(choice.get("text"))
                first = time.perf_counter() - sent if first is None and body.get("stream") else first
    except (httpx.HTTPError, KeyError, ValueError) as error:
        problem = f"no answer: {type(error).__name__} {error}".rstrip()
    if not problem and own not in identity:
        problem = "the reply has another request's id"
    elif not problem and expected is not None and text != expected:
        problem = "the reply has another text than expected"
    return Reply(number, sent - begin, time.perf_counter() - sent, status, text, tokens, problem, first)


async def _pages(answer: httpx.Response) -> Any:
    """The JSON objects of an answer: one, or those of its server-sent events."""
    if "event-stream" not in answer.headers.get("content-type", ""):
        yield json.loads(await answer.aread())
        return
    async for line in answer.aiter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))


def _run(work: Any) -> Any:
    """Run a coroutine in a thread of its own, since a notebook's kernel has a loop; an interrupt cancels it."""
    loop, box = asyncio.new_event_loop(), {}
    task = loop.create_task(work)

    def follow() -> None:
        try:
            box["result"] = loop.run_until_complete(task)
        except BaseException as error:
            box["error"] = error
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if "error" in box:
        raise box["error"]
    return box["result"]
