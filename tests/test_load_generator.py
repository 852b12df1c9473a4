"""The load generator: loops, arrivals, percentiles, and replies that are not one's own."""

import asyncio
import itertools
import signal
import socket
import statistics
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from launch_support import wait_until

from helpers.load_generator import Load, Reply, moments, send


@contextmanager
def serving(answer):
    """A server in a thread whose /v1/completions is `answer(body, id)`; yields its address."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await answer(await request.json(), request.headers["x-request-id"])

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def reply(text, own, tokens=2):
    return {"id": f"cmpl-{own}", "choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": tokens}}


async def shout(body, own):
    return reply(body["prompt"].upper(), own)


def test_each_request_gets_its_own_reply_also_where_a_loop_runs_already():
    prompts = [f"prompt {number}" for number in range(40)]

    async def in_a_kernel(url):
        return send(url, prompts, model="m", expected=[prompt.upper() for prompt in prompts])

    with serving(shout) as url:
        load = asyncio.run(in_a_kernel(url))
    assert [reply.text for reply in load.replies] == [prompt.upper() for prompt in prompts]
    assert [reply.number for reply in load.replies] == list(range(40))
    assert load.statuses == {200: 40}
    assert len(load.right) == 40
    assert load.tokens_per_second == pytest.approx(80 / load.seconds)
    assert repr(load).startswith("40 of 40 replies right in ")


def test_a_proxy_of_the_environment_is_passed_by(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody answers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(shout) as url:
        assert send(url, ["a"], model="m", expected=["A"]).statuses == {200: 1}


def test_each_request_may_ask_for_another_number_of_tokens():
    async def as_asked(body, own):
        return reply("", own, tokens=body["max_tokens"])

    with serving(as_asked) as url:
        assert [each.tokens for each in send(url, "abc", model="m", max_tokens=[5, 1, 3], concurrency=2).replies] == [5, 1, 3]
        assert [each.tokens for each in send(url, "ab", model="m", max_tokens=7).replies] == [7, 7]


def test_a_closed_loop_never_has_more_requests_under_way_than_clients():
    under_way, most = 0, 0

    async def slow(body, own):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return reply("x", own)

    with serving(slow) as url:
        load = send(url, ["p"] * 20, model="m", concurrency=3)
    assert load.statuses == {200: 20}
    assert most <= 3


def test_moments_of_an_open_loop_are_poisson():
    """Gaps of a Poisson process are exponential: as wide on average as they spread."""
    sent = moments(5001, 200)
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    mean = statistics.mean(gaps)
    assert sent[0] == 0
    assert len(gaps) == 5000
    assert mean == pytest.approx(1 / 200, rel=0.05)
    assert 0.93 < statistics.stdev(gaps) / mean < 1.07
    assert moments(5001, 200) == sent
    assert moments(0, 200) == []


def test_an_open_loop_sends_at_its_moments_whether_or_not_replies_come():
    blocked = asyncio.Event()
    asked = []

    async def stuck_until_all_have_come(body, own):
        asked.append(own)
        if len(asked) == 10:
            blocked.set()
        await blocked.wait()
        return reply("x", own)

    with serving(stuck_until_all_have_come) as url:
        load = send(url, ["p"] * 10, model="m", rate=200)
    assert load.statuses == {200: 10}
    sent = [each.sent for each in load.replies]
    assert sent == sorted(sent)
    assert all(begun >= moment - 0.001 for begun, moment in zip(sent, moments(10, 200), strict=True))  # loops' clocks are coarse


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda body, own: reply(body["prompt"].upper(), "another"), "another request's id"),
        (lambda body, own: reply("TEXT OF ANOTHER", own), "another text than expected"),
        (lambda body, own: JSONResponse({"error": {"message": "full"}}, 429), "HTTP 429: {'message': 'full'}"),
        (lambda body, own: {"id": own}, "no answer: KeyError"),
        (lambda body, own: {"id": own, "choices": []}, "no answer: IndexError"),
        (lambda body, own: {"id": own, "choices": [{"text": "a"}], "usage": None}, "no answer: TypeError"),
    ],
)
def test_a_reply_that_is_not_right_has_a_problem(answer, problem):
    async def wrong_once(body, own):
        return answer(body, own) if body["prompt"] == "b" else reply(body["prompt"].upper(), own)

    with serving(wrong_once) as url:
        load = send(url, ["a", "b", "c"], model="m", expected=["A", "B", "C"])
    assert [bool(each.problem) for each in load.replies] == [False, True, False]
    assert problem in load.replies[1].problem
    assert f"  1 × {load.replies[1].problem}" in repr(load)


def test_an_interrupt_ends_a_load_whose_replies_do_not_come():
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def interrupt():
            with silent.accept()[0] as connection:
                assert connection.recv(4) == b"POST"
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                assert ended.wait(60)

        ended = threading.Event()
        clicking = threading.Thread(target=interrupt)
        clicking.start()
        with pytest.raises(KeyboardInterrupt):
            send(f"http://127.0.0.1:{silent.getsockname()[1]}", ["a"], model="m", timeout=600)
        ended.set()
        clicking.join()
    assert threading.active_count() == threads


def test_a_server_that_is_not_there_is_a_problem_of_each_request():
    load = send("http://127.0.0.1:9", ["a", "b"], model="m")
    assert load.statuses == {0: 2}
    assert all(each.problem.startswith("no answer: ConnectError") for each in load.replies)
    with pytest.raises(ValueError, match=r"no reply is right: statuses \{0: 2\}"):
        load.percentile(50)


def test_percentiles_are_those_of_right_replies():
    right = [Reply(number, 0, seconds, 200) for number, seconds in enumerate((1.0, 2.0, 3.0, 4.0, 5.0))]
    load = Load((*right, Reply(5, 0, 100.0, 503, problem="HTTP 503")), 5.0)
    assert load.percentile(50) == 3
    assert load.percentile(100) == 5
    assert load.requests_per_second == 1


def test_what_cannot_be_sent_is_said_before_anything_is():
    with pytest.raises(ValueError, match="were both given"):
        send("http://x", ["a"], model="m", concurrency=1, rate=1)
    with pytest.raises(ValueError, match="must be above 0"):
        send("http://x", ["a"], model="m", rate=0)
    with pytest.raises(ValueError, match="1 expected texts for 2 prompts"):
        send("http://x", ["a", "b"], model="m", expected=["A"])
    with pytest.raises(ValueError, match="1 max_tokens for 2 prompts"):
        send("http://x", ["a", "b"], model="m", max_tokens=[3])
    assert send("http://x", [], model="m").replies == ()
