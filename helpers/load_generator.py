"""Load for a server with OpenAI's /v1/completions: open or closed loop, latencies, and a check that each reply is one's own.

Closed loop: `concurrency` clients, each sending its next request when it has its reply; a slow server is asked less often.
Open loop: requests come at random moments (a Poisson process of `rate` requests a second), whether or not replies come.
"""

import asyncio
import itertools
import random
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy
from anyio.from_thread import start_blocking_portal


@dataclass(frozen=True)
class Reply:
    """What became of one request. Seconds count from the start of the load (`sent`) and from `sent` on (`seconds`).

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

    def percentile(self, percent: float) -> float:
        """The latency in seconds that `percent` % of right replies do not exceed. Raises ValueError where none is right."""
        if not self.right:
            raise ValueError(f"no reply is right: statuses {self.statuses}")
        return float(numpy.percentile([reply.seconds for reply in self.right], percent))

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
    timeout: float = 120,
) -> Load:
    """Send one request per prompt to `url` + /v1/completions and return all replies; also from a cell, where a loop runs already.

    concurrency: closed loop with so many clients. rate: open loop, requests a second. Neither: all at once.
    max_tokens: of every answer, or one number for each. expected: the texts that the replies must have.
    timeout: seconds for one request; later it counts as not answered.

    Raises ValueError for both loops at once, and for numbers that are not above 0.
    """
    if concurrency is not None and rate is not None:
        raise ValueError("concurrency (closed loop) and rate (open loop) were both given; give one, or none for all at once")
    if (concurrency is not None and concurrency < 1) or (rate is not None and rate <= 0):
        raise ValueError(f"{concurrency=}, {rate=}: they must be above 0")
    count = len(prompts)
    most = [max_tokens] * count if isinstance(max_tokens, int) else max_tokens
    texts = [None] * count if expected is None else expected
    for what, given in (("max_tokens", most), ("expected texts", texts)):
        if len(given) != count:
            raise ValueError(f"{len(given)} {what} for {count} prompts; give one for each")
    starts = moments(count, rate) if rate else [0.0] * count

    async def everything() -> Load:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency or 0)
        places = asyncio.Semaphore(concurrency or max(1, count))
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False) as client:
            begin = time.perf_counter()

            async def one(number: int) -> Reply:
                await asyncio.sleep(starts[number])
                async with places:
                    body = {"model": model, "temperature": 0, "prompt": prompts[number], "max_tokens": most[number]}
                    return await _ask(client, body, number, begin, texts[number])

            replies = await asyncio.gather(*map(one, range(count)))
            return Load(tuple(replies), time.perf_counter() - begin)

    with start_blocking_portal() as portal:  # a loop in another thread, since a kernel has one; an interrupt cancels what runs
        return portal.call(everything)


def moments(count: int, rate: float) -> list[float]:
    """When an open loop sends: `count` seconds from its start, the same on every call, with exponential gaps of mean 1 / rate."""
    pauses = random.Random(0)
    return list(itertools.accumulate((pauses.expovariate(rate) for _ in range(count - 1)), initial=0.0))[:count]


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], number: int, begin: float, expected: str | None) -> Reply:
    own, sent = uuid.uuid4().hex, time.perf_counter()
    status, text, tokens, problem = 0, "", 0, ""
    try:
        answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": own})
        status, page = answer.status_code, answer.json()
        if status != 200:
            problem = f"HTTP {status}: {page.get('error', page)}"
        else:
            text, tokens = page["choices"][0]["text"], page["usage"]["completion_tokens"]
            if own not in page["id"]:
                problem = "the reply has another request's id"
            elif expected not in (None, text):
                problem = "the reply has another text than expected"
    except (httpx.HTTPError, LookupError, TypeError, AttributeError, ValueError) as error:  # or an answer of another shape
        problem = f"no answer: {type(error).__name__} {error}".rstrip()
    return Reply(number, sent - begin, time.perf_counter() - sent, status, text, tokens, problem)
