"""Try what a learner does first: `make lab` without a screen, until the workshop answers; then stop it as a terminal would.

    python3 tools/try_lab.py    # part of .ci/run; the standard library alone, for nothing is set up before

Exit code 0 where JupyterLab came up, answered with its token, refused without it, and left no process behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 30  # a first set-up downloads packages
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)(/\S*)\?token=(\w+)")


def answer(url, token=None):
    """The status and text a server answers with."""
    headers = {"Authorization": f"token {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy: this is loopback
    try:
        with direct.open(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, ""


class Wrong(Exception):
    """The workshop did not answer as it should."""


def expect(is_right, otherwise):
    if not is_right:
        raise Wrong(otherwise)


def try_server(server, page, token):
    """Ask the running workshop what a browser would; the names in its folder. Raises Wrong where an answer is not right."""
    status, text = answer(f"{server}{page}?token={token}")
    expect(status == 200 and "jupyter" in text.lower(), f"the workshop's page answered {status}")
    status, _ = answer(f"{server}/api/contents")
    expect(status == 403, f"without its token the server answered {status}, not 403")
    status, text = answer(f"{server}/api/contents", token)
    expect(status == 200, f"with its token the server answered {status}")
    return sorted(entry["name"] for entry in json.loads(text)["content"])


def members(group):
    """Processes of a process group that still run (Linux and macOS)."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return [pid for pid, owner, state in map(str.split, listed.splitlines()) if int(owner) == group and not state.startswith("Z")]


def stop(process, seconds=30):
    """End `make lab` with all it started; the processes that were left when the time was over, which are killed."""
    os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while members(process.pid) and time.monotonic() < end:
        time.sleep(0.2)
    left = members(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # reads what is left, closes the pipe, waits
    return left


def main():
    environment = dict(os.environ, CI="true")  # no browser
    process = subprocess.Popen(
        ["make", "lab"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    before = signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))  # ends the reading below
    signal.alarm(MINUTES * 60)
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            found = ADDRESS.search(line)
            if found:
                names = try_server(*found.groups())
                print(f"make lab: up and answering on 127.0.0.1; holds {', '.join(names) or 'no notebook yet'}", flush=True)
                break
        else:
            print("make lab ended without opening the workshop")
            return 1
    except (Wrong, OSError) as error:
        print(f"make lab: {error}")
        return 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        left = stop(process)
    print(f"make lab: stopped, {len(left)} processes left behind", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
