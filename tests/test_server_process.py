"""A server process is waited for, ends with its block or with its parent, and says why it did not start."""

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest
from launch_support import running, wait_until

from helpers.server_process import NotReady, free_port, started

SERVE = """
import http.server, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, tempfile.mkdtemp(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
STUBBORN = """
import http.server, os, pathlib, signal, subprocess, sys, tempfile
signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = pathlib.Path(tempfile.mkdtemp(prefix="stubborn-server-that-shares-memory-")).name
pathlib.Path("/dev/shm", name + "-0").touch()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(name, os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
OWNER = """
import os, signal, sys
from helpers.server_process import started
with started([sys.executable, "-c", sys.argv[1], sys.argv[2]], "http://127.0.0.1:" + sys.argv[2], path="/"):
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_answers_in_the_block_and_nothing_is_left_after_it(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: what is on this machine needs no proxy
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    port = free_port()
    with started([sys.executable, "-c", SERVE, str(port)], f"http://127.0.0.1:{port}", path="/") as server:
        assert httpx.get(server.url, trust_env=False).status_code == 200
        assert server.returncode is None
        wait_until(lambda: "child" in server.log(), "the server has printed")
        _, child, folder = server.log().split()[:3]
        assert os.path.isdir(folder)
        child = int(child)
        for pid in (server.pid, child):
            assert os.getsid(pid) == os.getsid(0), "a session of its own takes the cores from its clients"
            assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C would reach it"
    assert not os.path.exists(folder), "torchrun, for one, leaves a temporary folder behind"
    assert server.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(server.pid)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)


def test_a_server_that_ends_or_stays_silent_is_an_error_with_its_log():
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(RuntimeError, match=r"ended before it answered \(exit code 1\):\nno such model"),
        started(command, "http://x"),
    ):
        pass
    sleeper = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RuntimeError, match=r"did not answer within 0.5 s"), started(sleeper, url, timeout=0.5):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="a process hears of its parent's death on Linux only")
def test_it_ends_when_its_owner_is_killed(tmp_path):
    port = free_port()
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}  # what a killed process leaves
    owner = subprocess.Popen([sys.executable, "-c", OWNER, SERVE, str(port)], stdout=subprocess.PIPE, text=True, env=surroundings)
    with owner:
        assert owner.stdout.readline() == "up\n"
        assert owner.wait(60) == -signal.SIGKILL

    def silent():
        try:
            return not httpx.get(f"http://127.0.0.1:{port}", timeout=5)
        except httpx.TransportError:
            return True

    wait_until(silent, "the server has ended")


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is looked for where Linux has it")
def test_a_server_that_does_not_end_is_killed_with_its_group_when_its_owner_is(tmp_path):
    port = free_port()
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, STUBBORN, str(port)], stdout=subprocess.PIPE, text=True, env=surroundings
    )
    with owner:
        assert owner.stdout.readline() == "up\n"
        log = next(tmp_path.glob("server-*/log")).read_text()
        name, pid = log.split()[0], int(log.split()[1])
        assert os.path.exists(f"/dev/shm/{name}-0")
        family = [psutil.Process(pid), *psutil.Process(pid).children()]
        assert len(family) == 2
        assert owner.wait(60) == -signal.SIGKILL
    wait_until(lambda: not any(running(process) for process in family), "the server and its child are gone")
    wait_until(lambda: list(tmp_path.iterdir()) == [], "its folder is gone")
    assert not os.path.exists(f"/dev/shm/{name}-0"), "what is called after a file of its folder goes too"


def test_what_watches_a_start_may_end_it():
    sleeper = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]

    def watch(server):
        if "loading" in server.log():
            raise NotReady("it has loaded long enough", server.log())

    with (
        pytest.raises(NotReady, match="long enough:\nloading") as failure,
        started(sleeper, f"http://127.0.0.1:{free_port()}", watch=watch),
    ):
        pass
    assert failure.value.log == "loading\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a server ends with a guard that was killed on Linux only")
def test_a_server_does_not_outlive_a_guard_that_was_killed():
    port = free_port()
    script = f"import os; print('server', os.getpid(), flush=True); {SERVE.strip().splitlines()[0]}\n" + SERVE
    with started([sys.executable, "-c", script, str(port)], f"http://127.0.0.1:{port}", path="/") as server:
        wait_until(lambda: "child" in server.log(), "the server has printed")
        words = server.log().split()
        itself, child = (psutil.Process(int(words[words.index(name) + 1])) for name in ("server", "child"))
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not running(itself), "the server has ended with its guard")
    child.kill()  # what a server starts must look after itself then


def test_any_exit_code_is_told():
    command = [sys.executable, "-c", "import sys; sys.exit(255)"]
    with pytest.raises(NotReady, match=r"\(exit code 255\)"), started(command, "http://x"):
        pass
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"]
    with pytest.raises(NotReady, match=r"\(SIGABRT\)"), started(command, "http://x"):
        pass
