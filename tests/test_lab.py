"""The workshop opens for its learner alone, and their notebooks are never overwritten."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import uuid
from datetime import datetime
from pathlib import Path

import lab
import learner_notebooks
import psutil
import pytest
import try_lab
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

ROOT = learner_notebooks.ROOT


@pytest.fixture
def course(tmp_path):
    """A course of two notebooks; returns its folder and the folder for the learner's copies."""
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    (notebooks / "00_start_here.ipynb").write_text("first")
    (notebooks / "04_shard.ipynb").write_text("fourth")
    return notebooks, tmp_path / "my_notebooks"


def test_new_notebooks_are_copied_once(course):
    notebooks, mine = course
    assert learner_notebooks.copy_new(notebooks, mine) == [
        "00_start_here.ipynb: copied to my_notebooks/",
        "04_shard.ipynb: copied to my_notebooks/",
    ]
    assert learner_notebooks.copy_new(notebooks, mine) == []
    (notebooks / "05_new.ipynb").write_text("fifth")
    assert learner_notebooks.copy_new(notebooks, mine) == ["05_new.ipynb: copied to my_notebooks/"]
    assert sorted(path.name for path in mine.glob("*.ipynb")) == ["00_start_here.ipynb", "04_shard.ipynb", "05_new.ipynb"]
    assert not list(mine.glob("*.partial"))


def test_a_changed_copy_stays_and_the_learner_is_told(course):
    notebooks, mine = course
    learner_notebooks.copy_new(notebooks, mine)
    (mine / "04_shard.ipynb").write_text("my own work")
    assert learner_notebooks.copy_new(notebooks, mine) == []
    (notebooks / "00_start_here.ipynb").write_text("first, mended")
    (notebooks / "04_shard.ipynb").write_text("fourth, mended")
    first, fourth = learner_notebooks.copy_new(notebooks, mine)
    assert "renewed" in first
    assert "make fresh NB=04" in fourth
    assert (mine / "00_start_here.ipynb").read_text() == "first, mended"
    assert (mine / "04_shard.ipynb").read_text() == "my own work"


def test_notebooks_of_unknown_origin_are_the_learners(course):
    notebooks, mine = course
    mine.mkdir()
    (mine / "04_shard.ipynb").write_text("put here by hand")
    (mine / learner_notebooks.RECORD).write_text("{ cut off")
    assert len(learner_notebooks.copy_new(notebooks, mine)) == 2
    assert (mine / "04_shard.ipynb").read_text() == "put here by hand"


@pytest.mark.parametrize("broken", [None, "{ cut off", "[]", "null"])
def test_without_a_record_untouched_copies_are_known_by_what_they_hold(course, broken):
    notebooks, mine = course
    learner_notebooks.copy_new(notebooks, mine)
    record = mine / learner_notebooks.RECORD
    record.unlink() if broken is None else record.write_text(broken)
    assert learner_notebooks.copy_new(notebooks, mine) == []
    (notebooks / "04_shard.ipynb").write_text("fourth, mended")
    assert learner_notebooks.copy_new(notebooks, mine) == ["04_shard.ipynb: renewed, the course has a newer one"]
    assert (mine / "04_shard.ipynb").read_text() == "fourth, mended"


def test_an_interrupt_leaves_the_old_record(course, monkeypatch):
    notebooks, mine = course
    learner_notebooks.copy_new(notebooks, mine)
    before = (mine / learner_notebooks.RECORD).read_text()
    (notebooks / "05_new.ipynb").write_text("fifth")
    written = Path.write_text

    def full(path, text, *arguments):
        written(path, text[:5])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        learner_notebooks.copy_new(notebooks, mine)
    assert (mine / learner_notebooks.RECORD).read_text() == before


def test_fresh_brings_a_notebook_back_and_keeps_the_learners_under_a_dated_name(course):
    notebooks, mine = course
    now = datetime(2026, 3, 1, 14, 5, 9)
    assert learner_notebooks.bring_back("04", notebooks, mine, now) == "my_notebooks/04_shard.ipynb is as the course has it"
    for work in ("one", "two"):
        (mine / "04_shard.ipynb").write_text(work)
        said = learner_notebooks.bring_back("04", notebooks, mine, now)
    assert said.endswith("yours is now 04_shard.2026-03-01-140509-2.ipynb")
    assert (mine / "04_shard.ipynb").read_text() == "fourth"
    assert (mine / "04_shard.2026-03-01-140509.ipynb").read_text() == "one"
    assert (mine / "04_shard.2026-03-01-140509-2.ipynb").read_text() == "two"


@pytest.mark.parametrize("prefix", ["", "07", "0"])
def test_fresh_needs_the_number_of_one_notebook(course, prefix):
    with pytest.raises(ValueError, match=f"NB={prefix} names [02] notebooks; right is the number of one: 00, 04"):
        learner_notebooks.bring_back(prefix, *course)


@pytest.mark.parametrize(
    ("environment", "system", "expected"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"WSL_DISTRO_NAME": "Debian"}, "linux", True),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "far away"}, "linux", False),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({}, "darwin", True),
    ],
)
def test_a_browser_opens_only_where_there_is_a_screen(environment, system, expected):
    assert lab.has_screen(environment, system) is expected


@pytest.fixture
def workshop(tmp_path):
    """A running workshop in folders of its own; gives (process, server, page, token)."""
    careless = tmp_path / "config"
    careless.mkdir()
    settings = {"ServerApp": {"ip": "0.0.0.0", "port": 1}, "IdentityProvider": {"token": ""}}
    (careless / "jupyter_server_config.json").write_text(json.dumps(settings))
    own = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a port in use: the server finds another
        command = [
            sys.executable,
            str(ROOT / "tools" / "lab.py"),
            "--port",
            str(taken.getsockname()[1]),
            "--folder",
            str(tmp_path / "mine"),
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, **own, "CI": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        found = next(filter(None, map(try_lab.ADDRESS.search, process.stdout)))
    yield process, *found.groups()
    assert try_lab.stop(process) == []


async def execute(server, token, code):
    """Run code in a new kernel of the server, over its websocket as a browser does; what it printed."""
    headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
    kernel = json.loads(await asyncio.to_thread(post, f"{server}/api/kernels", headers))["id"]
    socket_address = f"{server.replace('http', 'ws', 1)}/api/kernels/{kernel}/channels"
    connection = await websocket_connect(HTTPRequest(socket_address, headers=headers, request_timeout=60))
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "s", "username": "", "version": "5.3"}
    content = {"code": code, "silent": False}
    await connection.write_message(
        json.dumps({"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell", "buffers": []})
    )
    while True:
        message = json.loads(await connection.read_message())
        if message["msg_type"] in ("stream", "error"):
            connection.close()
            return message["content"]["text"] if message["msg_type"] == "stream" else message["content"]["evalue"]


def post(url, headers):
    return ask(url, headers, data=b'{"path": ""}')


def ask(url, headers, data=None):
    import urllib.request

    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        return reply.read()


def test_the_workshop_answers_its_learner_alone(workshop, tmp_path):
    process, server, page, token = workshop
    expected = sorted(path.name for path in learner_notebooks.NOTEBOOKS.glob("*.ipynb"))
    assert try_lab.try_server(server, page, token) == expected
    assert len(token) >= 32, "the person's own empty token does not rule"
    assert token not in " ".join(psutil.Process(process.pid).cmdline()), "other users can read command lines"
    answer = ask(f"{server}/lab/api/settings/@jupyterlab/apputils-extension:notification", {"Authorization": f"token {token}"})
    if Path(sys.prefix).is_relative_to(ROOT):
        assert json.loads(answer)["schema"]["properties"]["fetchNews"]["default"] == "false", "nobody is asked about news"
    output = asyncio.run(asyncio.wait_for(execute(server, token, "import helpers, os; print(os.getcwd(), helpers.__name__)"), 90))
    assert output.split() == [str(tmp_path / "mine"), "helpers"]
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = {
        connection.laddr.ip
        for member in family
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_trying_the_lab_tells_when_it_does_not_open(monkeypatch, capsys, tmp_path):
    (tmp_path / "Makefile").write_text("lab:\n\t@echo no such thing\n")
    monkeypatch.setattr(try_lab, "ROOT", tmp_path)
    assert try_lab.main() == 1
    assert "ended without opening the workshop" in capsys.readouterr().out
