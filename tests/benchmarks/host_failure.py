"""A training job on two hosts of which one fails: what the benchmark times and the test judges."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS, EVERY, FAILS_AFTER = 30, 5, 12  # steps in all, between checkpoints, done when the host fails
PATIENCE = 200.0  # seconds until a scenario has failed

JOB = f"""
import glob, os, sys, time
import torch, torch.distributed as dist
from torch import nn

folder = sys.argv[1]
record = os.open(f"{{folder}}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def say(*words):
    os.write(record, (" ".join(map(str, [time.time(), *words])) + "\\n").encode())

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = max([int(name[-7:-3]) for name in glob.glob(f"{{folder}}/step*.pt")], default=0)
if step:
    saved = torch.load(f"{{folder}}/step{{step:04}}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
if rank == 0:
    say("start", world, step)
try:
    while step < {STEPS}:
        batch = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        mine = batch[rank::world]
        loss = (model(mine) - mine[:, :4].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for tensor in [*(p.grad for p in model.parameters()), loss.detach()]:
            dist.all_reduce(tensor)
            tensor /= world
        optimizer.step()
        step += 1
        if rank == 0:
            say("step", step, loss.item())
            if step % {EVERY} == 0:
                torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, f"{{folder}}/new")
                os.replace(f"{{folder}}/new", f"{{folder}}/step{{step:04}}.pt")
        time.sleep(0.1)
except RuntimeError as error:
    say("lost", str(error).splitlines()[0])
    raise
dist.destroy_process_group()
"""


def command(*options: str) -> list[str]:
    """torchrun with 2 ranks a host."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]


def environment() -> dict[str, str]:
    """For an agent: ranks of one thread, and a fresh store for each start of the ranks."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(nodes: Any, host: int, folder: Path) -> subprocess.Popen[Any]:
    """torchrun's elastic agent on a host; what it and its ranks print is appended to `folder/log`."""
    settings = f"is_host={int(host == 0)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    options = ["--nnodes", "1:2", "--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-backend", "c10d"]
    options += ["--rdzv-id", "job", "--rdzv-endpoint", f"{nodes.hosts[0].address}:29500", "--rdzv-conf", settings]
    options += ["--local-addr", nodes.hosts[host].address, str(folder / "job.py"), str(folder)]
    with open(folder / "log", "a") as log:
        return nodes.popen(host, command(*options), stdout=log, stderr=subprocess.STDOUT, env=environment())


def events(folder: Path) -> Iterator[tuple[float, list[str]]]:
    """When a rank said it (seconds since 1970), and the words: a file of its own, for a log's writers cut each other's lines."""
    said = folder / "said"
    for line in said.read_text().splitlines() if said.exists() else []:
        first, rest = line.split(maxsplit=1)
        yield float(first), rest.split(maxsplit=2)


def run(folder: Path, replaced: bool) -> dict[str, Any]:
    """Let host 1 fail in mid-training, `replaced` at once or not at all, and wait for the end.

    Returns seconds from the failure to the survivors' first error ("noticed") and to the first step that is done again
    ("resumed"), the error's text, the resumed job's ranks and its first step, and all losses by start of the job.
    """
    from helpers.two_nodes import two_nodes

    (folder / "job.py").write_text(JOB)
    with two_nodes() as nodes:
        agents = [agent(nodes, host, folder) for host in (0, 1)]
        deadline = time.monotonic() + PATIENCE
        while not any(words[:2] == ["step", str(FAILS_AFTER)] for _, words in events(folder)):
            if time.monotonic() > deadline or agents[0].poll() is not None:
                raise TimeoutError(f"the job did not come so far: {(folder / 'log').read_text()[-3000:]}")
            time.sleep(0.05)
        failed = time.time()
        nodes.fail(1)
        agents[1].wait(PATIENCE)
        last = agent(nodes, 1, folder) if replaced else None
        code = agents[0].wait(PATIENCE)
        if last:
            code = code or last.wait(PATIENCE)
    said = list(events(folder))
    starts = [at for at, words in said if words[0] == "start"]
    lost = [(at, words[1:]) for at, words in said if words[0] == "lost"]
    if code or len(starts) != 2 or not lost:
        seen = f"ended with {code}, started {len(starts)} times and lost its peers {len(lost)} times"
        raise RuntimeError(f"the job {seen}: {(folder / 'log').read_text()[-6000:]}")
    noticed, error = lost[0]
    return {
        "noticed": noticed - failed,
        "resumed": next(at for at, words in said if words[0] == "step" and at > starts[1]) - failed,
        "error": " ".join(error),
        "starts": [(int(words[1]), int(words[2])) for _, words in said if words[0] == "start"],
        "losses": [
            {int(words[1]): float(words[2]) for at, words in said if words[0] == "step" and begin <= at < end}
            for begin, end in zip(starts, [*starts[1:], float("inf")], strict=True)
        ],
    }
