"""Processes that end with the one that started them, also where the kernel does not see to it."""

import os
import subprocess
import sys

import psutil
import pytest
from launch_support import running, wait_until

from helpers.launching import processes

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
CHILD = """
import os, sys, time
sys.platform = {platform!r}
from helpers.launching import processes
{follow}
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("platform", ["linux", "another system"])
def test_a_process_dies_with_its_parent(platform):
    if platform == "linux" != sys.platform:
        pytest.skip("asks Linux")
    code = CHILD.format(platform=platform, follow="processes.die_with(os.getppid())")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not running(child), "the child is gone")


def test_a_process_whose_parent_is_gone_already_does_not_begin():
    before = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True).stdout
    code = "import sys; from helpers.launching import processes; processes.{}; print('begun')"
    for follow in (f"die_with({int(before)})", f"when_dead({int(before)}, lambda: sys.exit(1))"):
        done = subprocess.run([sys.executable, "-c", code.format(follow)], capture_output=True)
        assert (done.returncode, done.stdout) == (1, b"")


def test_only_wanted_descriptors_stay_open():
    (kept, _), other = os.pipe(), os.pipe()

    def child():
        processes.keep_only(kept)
        os.fstat(kept)
        try:
            os.fstat(other[0])
        except OSError:
            return 7
        return 1

    pid = processes.fork(child)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    for descriptor in (kept, _, *other):
        os.close(descriptor)
