"""A notebook kernel of one's own: runs cells as a notebook does, and says how long the learner waited for each."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from .processes import descendants, end, gone_within, settle

ROOT = Path(__file__).parents[2]
START_LIMIT = 120.0  # seconds for a kernel to come up
ANSWER_LIMIT = 180.0  # seconds for a cell
LEAVE_LIMIT = 1.0  # seconds in which what a kernel started may leave by itself and tidy up


def environment_of_a_learner() -> dict[str, str]:
    """This process's variables, the project importable and this interpreter's programs first, as if it were activated."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # it changes kernels
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


@dataclass(frozen=True)
class Answer:
    """What a cell gave: `seconds` from sending it to its reply, what it printed or displayed, and its error, if any.

    `replied` is the time of the reply by `time.perf_counter`, which all processes of a machine share.
    """

    seconds: float
    replied: float
    text: str
    error: str = ""  # name of the exception
    message: str = ""


class Kernel:
    """`with Kernel() as kernel: kernel.run("1 + 1")`. On leaving, the kernel and all that it started are ended.

    It runs in an empty folder with `environment_of_a_learner` and the variables given.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment

    def __enter__(self) -> Kernel:
        self._folder = tempfile.mkdtemp(prefix="bench-kernel-")
        environment = {**environment_of_a_learner(), **self._environment}
        self._manager = KernelManager(connection_file=os.path.join(self._folder, "kernel.json"))
        self._manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
        with open(os.path.join(self._folder, "output"), "w") as output:
            self._manager.start_kernel(env=environment, cwd=self._folder, stdout=output, stderr=output)
        provisioner: Any = self._manager.provisioner
        self.process = psutil.Process(provisioner.process.pid)
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        try:
            self._client.wait_for_ready(timeout=START_LIMIT)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        left = self.kill()
        gone_within(left, LEAVE_LIMIT)
        end(left)
        self._manager.shutdown_kernel(now=True)
        self._client.stop_channels()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> list[psutil.Process]:
        """End the kernel without warning; returns the processes that it had started."""
        left = descendants(self.process.pid)
        os.kill(self.process.pid, signal.SIGKILL)  # a child of this process: its number is not given to another before its end
        return left

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def settle(self) -> None:
        """Wait until the kernel and what it started have nothing left to do in the background."""
        settle(self.process.pid)

    def run(self, cell: str, limit: float = ANSWER_LIMIT) -> Answer:
        """Execute a cell and wait for its reply. Raises TimeoutError after `limit` seconds; the kernel is of no use then."""
        return self.finish(self.begin(cell), limit)

    def check(self, cell: str, expected: str, limit: float = ANSWER_LIMIT) -> Answer:
        """Like `run`, and raises RuntimeError where the answer lacks the text `expected` or is an error."""
        answer = self.run(cell, limit)
        if answer.error or expected not in answer.text:
            said = f"{answer.error}: {answer.message}" if answer.error else repr(answer.text[-500:])
            raise RuntimeError(f"a cell was to answer {expected!r}; it answered {said}")
        return answer

    def begin(self, cell: str) -> tuple[str, float]:
        """Send a cell without waiting for it."""
        sent = time.perf_counter()
        return self._client.execute(cell, allow_stdin=False), sent

    def finish(self, begun: tuple[str, float], limit: float = ANSWER_LIMIT) -> Answer:
        """Wait for the reply to a cell that was begun."""
        message_id, sent = begun
        deadline = time.monotonic() + limit
        reply: dict[str, Any] | None = None
        idle, replied, text = False, 0.0, ""
        while reply is None or not idle:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {limit:g} s")
            message = self._next(left)
            if message is None or message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            if message["msg_type"] == "execute_reply":
                reply, replied = content, time.perf_counter()
            elif message["msg_type"] == "status":
                idle = content["execution_state"] == "idle"
            elif message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "")
        return Answer(replied - sent, replied, text, reply.get("ename", ""), reply.get("evalue", ""))

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """The next message, of replies before outputs, or None."""
        channels = (self._client.shell_channel, self._client.iopub_channel)
        poller = zmq.Poller()
        for channel in channels:
            poller.register(channel.socket, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * min(seconds, 0.25)) + 1))
        return next((channel.get_msg(timeout=0) for channel in channels if channel.socket in ready), None)
