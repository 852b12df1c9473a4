"""A server process is waited for, ends with its block or with its parent, and says why it did not start."""

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest
from launch_support import wait_until

from helpers.server_process import free_port, started

SERVE = """
import http.server, subprocess, sys, tempfile
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, tempfile.mkdtemp(), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
OWNER = """
import os, signal, sys
from helpers.server_process import started
with started([sys.executable, "-c", sys.argv[1], sys.argv[2]], "http://127.0.0.1:" + sys.argv[2], path="/"):
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_answers_in_the_block_and_nothing_is_left_after_it():
    port = free_port()
    with started([sys.executable, "-c", SERVE, str(port)], f"http://127.0.0.1:{port}", path="/") as server:
        assert httpx.get(server.url).status_code == 200
        assert server.returncode is None
        wait_until(lambda: "child" in server.log(), "the server has printed")
        _, child, folder = server.log().split()[:3]
        assert os.path.isdir(folder)
        child = int(child)
    assert not os.path.exists(folder), "torchrun, for one, leaves a temporary folder behind"
    assert server.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(server.pid)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


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
