"""The inference server: its HTTP side in this process, then real ranks under torchrun with the article's flags."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from launch_support import running, wait_until

from helpers import data_parallel, models
from helpers.batching import Batcher
from helpers.inference_server import MOST_BYTES, application, parse, serve
from helpers.load_generator import send
from helpers.server_process import free_port, started

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 12


class Words:
    """A tokenizer of numbers: "3 4" is [3, 4]."""

    def __call__(self, text):
        self.input_ids = [int(word) for word in text.split()]
        return self

    def __len__(self):
        return 100

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


def ask(*requests, **options):
    """(status, page) of each request, (method, path, options of httpx), sent one after the other to an application."""

    def replica(jobs):
        return [[*job.tokens[-job.new_tokens :], 2][: job.new_tokens] for job in jobs]

    async def work():
        batcher = Batcher([replica], **{"batch_size": 4, "max_wait": 0, "bound": 8, **options})
        app = application(batcher, Words(), "words", max_length=20, ends={2})
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for method, path, sent in requests:
                answer = await client.request(method, path, **sent)
                found.append((answer.status_code, answer.json()))
        batcher.close()
        return found

    return asyncio.run(asyncio.wait_for(work(), 60))


def completion(prompt, **fields):
    return ("POST", "/v1/completions", {"json": {"model": "words", "prompt": prompt, **fields}})


def test_a_completion_has_the_form_of_openai():
    ((status, page),) = ask(completion(["3 4", "5"], max_tokens=2))
    assert status == 200
    assert page["object"] == "text_completion"
    assert page["model"] == "words"
    assert page["choices"] == [
        {"index": 0, "text": "3 4", "logprobs": None, "finish_reason": "length"},
        {"index": 1, "text": "5 2", "logprobs": None, "finish_reason": "stop"},
    ]
    assert page["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_prompts_are_texts_or_token_ids_one_or_several():
    found = ask(*(completion(prompt, max_tokens=1) for prompt in ("3 4", [3, 4], [[3, 4], [5]], ["3 4", "5"])))
    assert [[choice["text"] for choice in page["choices"]] for _, page in found] == [["4"], ["4"], ["4", "5"], ["4", "5"]]


def test_the_identity_of_a_request_is_that_of_its_reply():
    named = completion("3")
    named[2]["headers"] = {"X-Request-Id": "abc"}
    (_, first), (_, second), (_, third) = ask(named, completion("3"), completion("3"))
    assert first["id"] == "cmpl-abc"
    assert second["id"] != third["id"]


def test_models_and_health():
    (_, listed), (status, health), _, (_, after) = ask(
        ("GET", "/v1/models", {}), ("GET", "/health", {}), completion(["3", "4"]), ("GET", "/health", {})
    )
    assert [model["id"] for model in listed["data"]] == ["words"]
    assert (status, health) == (200, {"status": "ok", "accepted": 0, "waiting": 0, "served": [0]})
    assert after["served"] == [2]


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (completion("3 " * 15, max_tokens=6), 422, "a prompt of 15 tokens and max_tokens 6 are more than max_length, 20 tokens"),
        (completion([3, 100]), 422, "ids from 0 to 99"),
        (completion([[]]), 422, "a prompt of 0 tokens"),
        (completion([]), 422, "there is no prompt"),
        (completion("3", max_tokens=0), 422, "max_tokens: Input should be greater than or equal to 1"),
        (completion("3", temperature=0.7), 422, "decodes greedily"),
        (completion("3", stream=True), 422, "replies in one piece"),
        (completion("3", best_of=2), 422, "best_of: Extra inputs are not permitted"),
        (completion(["3"] * 9), 422, "9 prompts in one request, but 8 may wait; send fewer"),
        (completion("3", model="other"), 404, "there is no model 'other' here; this server has 'words'"),
        (("POST", "/v1/completions", {"content": b"{"}), 422, "Invalid JSON"),
        (("POST", "/v1/completions", {"content": b"x" * (MOST_BYTES + 1)}), 413, "longer than 1,048,576 bytes"),
    ],
)
def test_what_is_not_answered_is_refused_with_a_reason(request_, status, reason):
    ((found, page), (after, _)) = ask(request_, completion("3"))
    assert found == page["error"]["code"] == status
    assert reason in page["error"]["message"]
    assert after == 200


def test_what_still_waits_when_time_is_up_is_refused_and_what_is_computed_is_answered():
    computing, go_on = threading.Event(), threading.Event()

    def slow(jobs):
        computing.set()
        assert go_on.wait(60)
        return [job.tokens for job in jobs]

    async def work():
        port = free_port()
        options = parse(["--model-name", "words", "--batch-size", "1", "--max-wait", "0", "--port", str(port)])
        serving = asyncio.create_task(serve([slow], options, Words(), 20, {2}, drain=0))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:

            async def asked(prompt):
                answer = await client.post("/v1/completions", json={"model": "words", "prompt": prompt, "max_tokens": 1})
                return answer.status_code, answer.json()

            async def accepted(count):
                with contextlib.suppress(httpx.ConnectError):
                    return (await client.get("/health")).json()["accepted"] == count

            async def reached(count):
                while not await accepted(count):
                    assert not serving.done(), serving
                    await asyncio.sleep(0.01)

            await reached(0)
            first = asyncio.create_task(asked("3"))
            await asyncio.to_thread(computing.wait, 60)
            second = asyncio.create_task(asked("4"))
            await reached(2)
            os.kill(os.getpid(), signal.SIGTERM)
            refused = await second
            go_on.set()
            return await first, refused, await serving

    (status, page), (refused, reason), code = asyncio.run(asyncio.wait_for(work(), 120))
    assert (status, page["choices"][0]["text"]) == (200, "3")
    assert refused == 503
    assert reason["error"]["message"] == "the server is ending, and time was up before this request had its turn"
    assert code == 0


@pytest.fixture(scope="module")
def expected():
    """Prompts and the greedy texts that one process gives for them, one at a time."""
    import torch

    torch.set_num_threads(1)
    model, tokenizer = models.load("tiny-ernie")
    prompts = [prompt for prompt in data_parallel.prompts() if len(prompt.split()) <= 30][:100]
    rows = [data_parallel.complete(model, [tokenizer(prompt).input_ids], [NEW_TOKENS])[0] for prompt in prompts]
    return prompts, tokenizer.batch_decode(rows, skip_special_tokens=True)


def serving(ranks, *flags):
    """A server started as the article says; torchrun meets on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "helpers/inference_server.py"]
    command += ["--model_name", "tiny-ernie", *flags, "--port", str(port)]
    return started(command, f"http://127.0.0.1:{port}", env={"PET_MASTER_PORT": str(free_port())})


def ranks_of(server):
    """The rank processes of a server, by rank."""
    found = {}
    for process in psutil.Process(server.pid).children(recursive=True):
        if "RANK" in (variables := process.environ()):
            found[int(variables["RANK"])] = process
    return [found[rank] for rank in sorted(found)]


class Sending(threading.Thread):
    """A load that is sent meanwhile: `finished()` waits for its replies."""

    def __init__(self, server, prompts, texts):
        super().__init__()
        self.server, self.prompts, self.texts = server, prompts, texts
        self.start()

    def run(self):
        options = {"model": "tiny-ernie", "max_tokens": NEW_TOKENS, "timeout": 600}
        self.load = send(self.server.url, self.prompts, expected=self.texts, **options)

    def finished(self):
        self.join()
        return self.load


def health(server):
    return httpx.get(server.url + "/health", timeout=60).json()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_answer_500_requests_each_with_its_own_text_and_finish_what_they_accepted(expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    prompts, texts = expected[0] * 5, expected[1] * 5
    assert len(prompts) == 500
    with serving(4, "--batch_size", "16", "--max_length", "2048") as server:
        family = ranks_of(server)
        first = Sending(server, prompts, texts).finished()
        served = health(server)["served"]
        second = Sending(server, prompts[:100], texts[:100])
        wait_until(lambda: health(server)["accepted"] == 600, "all are accepted")
        psutil.Process(server.pid).terminate()  # with requests under way
        second = second.finished()
        server.wait(120)
    for load, count in ((first, 500), (second, 100)):
        assert load.statuses == {200: count}, load
        assert len(load.right) == count, load
    assert sum(served) == 500
    assert all(served), "each rank has answered some"
    assert len(family) == 4
    assert not any(running(process) for process in family)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_under_load_costs_503s_and_the_server_but_no_reply_is_lost_or_swapped(expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    prompts, texts = (each[:80] * 3 for each in expected)
    with serving(3, "--batch-size", "1", "--max-wait", "0") as server:  # dashes too
        family = ranks_of(server)
        family[1].suspend()
        family[2].suspend()
        held = Sending(server, prompts[:3], texts[:3])  # one on each rank: ranks take turns
        wait_until(lambda: health(server)["served"] == [1, 0, 0], "rank 0 has answered one; ranks 1 and 2 have one each")
        sending = Sending(server, prompts, texts)
        wait_until(lambda: health(server)["accepted"] == 243, "all are accepted")
        family[1].kill()
        load = sending.finished()
        family[2].resume()  # and goes on with what it has, although rank 1 is gone
        on_ranks = held.finished()
        code, log = server.wait(120), server.log()
    assert code != 0
    assert on_ranks.statuses == {200: 2, 503: 1}, on_ranks
    assert len(on_ranks.right) == 2, on_ranks
    assert set(load.statuses) == {200, 503}, load
    assert len(load.right) == load.statuses[200], load
    assert all("rank 1 has ended" in reply.problem for reply in (*load.replies, *on_ranks.replies) if reply.status == 503)
    assert "rank 0: rank 1 has ended" in log
    assert "Signal 9 (SIGKILL)" in log  # torchrun's own report
    assert not any(running(process) for process in family)


def test_flags_that_make_no_sense_are_refused_before_a_model_is_loaded():
    done = subprocess.run(
        [sys.executable, "helpers/inference_server.py", "--model-name", "tiny-ernie", "--batch-size", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "batch_size is 0; it must be at least 1" in done.stderr
