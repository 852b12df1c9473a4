"""An HTTP server over data-parallel replicas: each rank holds the whole model and answers batches of requests, greedily.

    python -m torch.distributed.run --nproc_per_node=4 helpers/inference_server.py --model_name tiny-ernie \
        --batch_size 16 --max_length 2048

Rank 0 takes requests on 127.0.0.1, in the form of OpenAI's /v1/completions. They wait in a bounded queue; whenever a replica is
free it gets up to `batch_size` of them, waiting at most `max_wait` seconds for more once there is one. Batches travel over gloo.
When a rank ends before it should, what it worked on and what waits is answered 503 and the server exits with code 1. On SIGTERM
or SIGINT it finishes what it has accepted; what still waits after 20 seconds is answered 503. If rank 0 itself is killed,
connections close and the other ranks end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # started by its path: what it imports is the project's, not the files beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError

from helpers import data_parallel, machine, models
from helpers.batching import Answers, Batcher, Job, Refused, Replica, ReplicaLost
from helpers.launching.processes import die_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_BYTES = 2**20  # of a request
LINGER = 1.0  # seconds in which a server that ends still answers, with 503
DRAIN = 20  # seconds for what it has accepted; torchrun kills its ranks 30 seconds after the signal
LONG = datetime.timedelta(days=365)  # a replica may wait so long for work
log = logging.getLogger("inference_server")


OPTIONS: dict[str, dict[str, Any]] = {
    "model_name": {"required": True, "help": "tiny-ernie, ernie-0.3b, owner/name, or a folder"},
    "served_model_name": {"help": "what requests call it (default: as model_name)"},
    "batch_size": {"type": int, "default": 16, "help": "prompts in one batch of one rank, at most"},
    "max_length": {"type": int, "default": 2048, "help": "tokens of a prompt and its continuation, at most"},
    "max_wait": {"type": float, "default": 0.01, "help": "seconds to wait for a batch to fill up"},
    "queue": {"type": int, "default": 1024, "help": "prompts that may wait; more are refused with 429"},
    "port": {"type": int, "default": 8000, "help": "on 127.0.0.1"},
}


class Completion(BaseModel, extra="forbid"):
    """The body of a request; `seed`, `top_p` and `user` change nothing in greedy decoding."""

    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    temperature: float = 0
    n: int = 1
    stream: bool = False
    seed: int | None = None
    top_p: float | None = None
    user: str | None = None


def application(batcher: Batcher, tokenizer: PreTrainedTokenizerBase, model: str, *, max_length: int, ends: set[int]) -> FastAPI:
    """The HTTP side. A prompt and its new tokens together are at most `max_length` tokens; `ends` are the ids that end a text."""
    app = FastAPI(title="data-parallel inference", docs_url=None, redoc_url=None)

    @app.exception_handler(Refused)
    async def refused(_: Request, reason: Refused) -> JSONResponse:
        kind = "invalid_request_error" if reason.status < 500 else "server_error"
        return JSONResponse({"error": {"message": str(reason), "type": kind, "code": reason.status}}, reason.status)

    @app.get("/health")
    async def health() -> JSONResponse:
        counts = {"accepted": batcher.accepted, "waiting": batcher.waiting, "served": batcher.served}
        state = {"status": batcher.closed or "ok", **counts}
        return JSONResponse(state, 503 if batcher.closed else 200)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "owned_by": "local", "max_model_len": max_length}]}

    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, Any]:
        asked = _parse(await _body(request))
        if asked.model != model:
            raise Refused(404, f"there is no model {asked.model!r} here; this server has {model!r}")
        jobs = [Job(tokens, asked.max_tokens) for tokens in _token_rows(asked.prompt, tokenizer)]
        for job in jobs:
            _check_job(job, max_length, len(tokenizer))
        found = await batcher.answer(jobs)
        texts = tokenizer.batch_decode(found, skip_special_tokens=True)
        reasons = ["stop" if tokens[-1] in ends else "length" for tokens in found]
        prompt_tokens, new_tokens = sum(len(job.tokens) for job in jobs), sum(map(len, found))
        return {
            "id": f"cmpl-{request.headers.get('x-request-id') or uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
                for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": new_tokens,
                "total_tokens": prompt_tokens + new_tokens,
            },
        }

    return app


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise Refused(413, f"the request is longer than {MOST_BYTES:,} bytes")
    return body


def _parse(body: bytes) -> Completion:
    try:
        asked = Completion.model_validate_json(body)
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise Refused(422, "; ".join(dict.fromkeys(reasons))) from None
    if asked.temperature != 0 or asked.n != 1 or asked.stream:
        raise Refused(422, "this server decodes greedily and replies in one piece: temperature 0, n 1, stream false")
    return asked


def _token_rows(prompt: str | list[int] | list[str] | list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not prompt:
        raise Refused(422, "there is no prompt: give a text, a list of texts, or token ids")
    rows: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt  # type: ignore[assignment]
    return [tokenizer(row).input_ids if isinstance(row, str) else row for row in rows]


def _check_job(job: Job, max_length: int, vocabulary: int) -> None:
    length = len(job.tokens)
    if not length or not all(0 <= token < vocabulary for token in job.tokens):
        raise Refused(422, f"a prompt of {length} tokens; it needs at least one, and ids from 0 to {vocabulary - 1}")
    if length + job.new_tokens > max_length:
        raise Refused(
            422,
            f"a prompt of {length:,} tokens and max_tokens {job.new_tokens:,} are more than max_length, {max_length:,} tokens",
        )


async def serve(
    replicas: Sequence[Replica], options: argparse.Namespace, tokenizer: Any, max_length: int, ends: set[int], drain: int = DRAIN
) -> int:
    """Answer requests until SIGTERM, SIGINT or the loss of a replica, and `drain` seconds what was accepted; the exit code."""
    batcher = Batcher(replicas, batch_size=options.batch_size, max_wait=options.max_wait, bound=options.queue)
    app = application(batcher, tokenizer, options.served_model_name, max_length=max_length, ends=ends)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, batcher.end, "the server is ending")

    async def end() -> None:
        await batcher.ended.wait()
        await asyncio.sleep(LINGER)
        server.should_exit = True
        await asyncio.sleep(drain)
        batcher.refuse("the server is ending, and time was up before this request had its turn")

    ending = asyncio.create_task(end())
    log.warning("serving %s on http://127.0.0.1:%d with %d replicas", options.served_model_name, options.port, len(replicas))
    await server.serve()
    ending.cancel()
    batcher.close()
    return 1 if batcher.lost or not server.started else 0


def remote(rank: int) -> Replica:
    """The replica on another rank. A call raises ReplicaLost where that rank has gone, RuntimeError where its batch failed."""
    import torch.distributed as dist

    def call(jobs: list[Job]) -> Answers:
        try:
            dist.send_object_list([jobs], dst=rank)
            found = _received(rank)
        except RuntimeError as error:
            raise ReplicaLost(str(error).splitlines()[0]) from None
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    return call


def follow(replica: Replica) -> int:
    """Answer the batches that rank 0 sends, until it sends None; the exit code, 1 where rank 0 has gone."""
    import torch.distributed as dist

    try:
        while jobs := _received(0):
            found: Answers | str
            try:
                found = replica(jobs)
            except Exception as error:
                log.exception("a batch failed")
                found = f"{type(error).__name__}: {error}"
            dist.send_object_list([found], dst=0)
        return 0
    except RuntimeError as error:
        log.error("rank 0 has gone: %s", str(error).splitlines()[0])
        return 1


def _received(rank: int) -> Any:
    import torch.distributed as dist

    box: list[Any] = [None]
    dist.recv_object_list(box, src=rank)
    return box[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; torchrun's variables say which. Returns the exit code."""
    options = parse(arguments)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    logging.basicConfig(format=f"rank {rank}: %(message)s", stream=sys.stderr)
    die_with(os.getppid(), signal.SIGKILL if rank else signal.SIGTERM)  # with torchrun; rank 0 answers what it has accepted
    if rank:  # rank 0 decides when it is over
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, machine.cores() // here))
    device = f"cuda:{local}" if machine.placement(here).device == "cuda" else "cpu"
    model, tokenizer = models.load(options.model_name, device=device)
    max_length = min(options.max_length, model.config.max_position_embeddings)

    def replica(jobs: list[Job]) -> Answers:
        return data_parallel.complete(model, [job.tokens for job in jobs], [job.new_tokens for job in jobs])

    replica([Job([0], 1)])  # what is set up once is set up before the first request
    if ranks > 1:
        dist.init_process_group("gloo", timeout=LONG)
        dist.barrier()
    if rank:
        return follow(replica)
    replicas = [replica, *map(remote, range(1, ranks))]
    code = asyncio.run(serve(replicas, options, tokenizer, max_length, data_parallel.end_tokens(model)))
    for other in range(1, ranks):
        with contextlib.suppress(RuntimeError):
            dist.send_object_list([None], dst=other)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line (None: this process's), with dashes or underscores; what makes no sense ends the process."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser("inference_server", description=(__doc__ or "").split("\n")[0], formatter_class=formatter)
    for name, settings in OPTIONS.items():
        spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
        parser.add_argument(*sorted(spellings), dest=name, **settings)
    options = parser.parse_args(arguments)
    options.served_model_name = options.served_model_name or options.model_name
    for name in ("batch_size", "max_length", "queue"):
        if getattr(options, name) < 1:
            parser.error(f"{name} is {getattr(options, name)}; it must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
