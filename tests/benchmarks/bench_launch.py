"""Launch latency: from a call to the value of an all-reduce on every rank, beside other ways to start ranks."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .framework import Contender, DoesNotRun, Findings, Row, Timed, at_least, at_most, benchmark, interleaved, shown
from .kernels import ANSWER_LIMIT, Kernel, environment_of_a_learner

JOB = """
def job():
    import torch, torch.distributed as dist
    number = torch.ones(())
    dist.all_reduce(number)
    return number.item()
"""
SCRIPT = f"""import sys, torch.distributed as dist
{JOB}
dist.init_process_group('gloo')
sys.stdout.write(f'{{job()}}\\n')  # at once: print writes the end of the line apart, and lines of two ranks would mix
dist.destroy_process_group()
"""
FRESH = f"from helpers import launch\n{JOB}\nif __name__ == '__main__':\n    print(launch(job).results)\n"

OURS_CELL, OURS_ANSWER = "print(launch(job).results)", "[2.0, 2.0]"
OURS_FIRST = f"from helpers import launch\n{JOB}\n{OURS_CELL}"
TORCHRUNX_CELL = "print(torchrunx.Launcher(hostnames=['localhost'], workers_per_host=2, backend='gloo').run(job).results)"
TORCHRUNX_FIRST = f"import torchrunx\n{JOB}\n{TORCHRUNX_CELL}"
DEBUG_CELL = "debug_launcher(job)"
DEBUG_JOB = JOB.replace("    number", "    from accelerate import PartialState\n    PartialState()\n    number", 1)
DEBUG_FIRST = f"from accelerate import debug_launcher\n{DEBUG_JOB.replace('return number', 'print(number')})\n{DEBUG_CELL}"
NBDISTRIBUTED_FIRST = "%load_ext nbdistributed\n%dist_init -n 2"
NBDISTRIBUTED_CELL = "number = torch.ones(())\ndist.all_reduce(number)\nprint(number.item())"

OURS, TORCHRUN, TORCHRUNX = "helpers.launch", "torchrun --standalone", "torchrunx"
DEBUG, NBDISTRIBUTED = "accelerate debug_launcher", "nbdistributed"
FIRST, WARM = ", first in a fresh kernel", ", warm"
FRESH_PROCESS = f"{OURS}, fresh interpreter"
TRIVIAL, TRAINING = "all-reduce of a number", "training job"
DEADLOCK_LIMIT = 8  # seconds after which a rank that sits in a matmul shows its stack and exits


@benchmark
def latency(repeats: int) -> Findings:
    """Launch latency of 2 ranks, warm and first: every rank joined, all-reduced a number and returned it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as kernels:
        for name, text in (("torchrun.py", SCRIPT), ("fresh.py", FRESH)):
            Path(folder, name).write_text(text)
        torchrun = [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            "--nproc-per-node=2",
            f"{folder}/torchrun.py",
        ]
        warm: dict[str, Contender] = {
            OURS + WARM: _warm(kernels, OURS_FIRST, OURS_CELL, OURS_ANSWER),
            TORCHRUNX + WARM: _warm(kernels, TORCHRUNX_FIRST, TORCHRUNX_CELL, OURS_ANSWER),
            DEBUG + WARM: _warm(kernels, DEBUG_FIRST, DEBUG_CELL, "2.0"),
            NBDISTRIBUTED + WARM: _warm(kernels, NBDISTRIBUTED_FIRST, NBDISTRIBUTED_CELL, "Rank 1:\n  2.0"),
        }
        cold: dict[str, Contender] = {
            OURS + FIRST: lambda: _first(OURS_FIRST, OURS_CELL, OURS_ANSWER, OURS),
            TORCHRUNX + FIRST: lambda: _first(TORCHRUNX_FIRST, "", OURS_ANSWER, TORCHRUNX),
            DEBUG + FIRST: lambda: _first(DEBUG_FIRST, "", "2.0", DEBUG),
            FRESH_PROCESS: lambda: _process([sys.executable, f"{folder}/fresh.py"], OURS_ANSWER),
            TORCHRUN: lambda: _process(torchrun, "2.0\n2.0"),
        }
        timed = interleaved(warm | cold, repeats)
    ours, torchrun_median = timed[OURS + WARM].median, timed[TORCHRUN].median
    ratio = torchrun_median / ours
    return Findings(
        sorted(timed.rows(), key=lambda row: row.median if row.samples else float("inf")),
        [
            at_least("warm launch against torchrun --standalone", ratio, 20, "times as fast"),
            at_least("warm launch against torchrunx, warm", timed[TORCHRUNX + WARM].median / ours, 20, "times as fast"),
            at_least("warm launch against torchrunx, first", timed[TORCHRUNX + FIRST].median / ours, 20, "times as fast"),
            at_most(
                "first launch in a fresh kernel against torchrun", timed[OURS + FIRST].median / torchrun_median, 1, "× its time"
            ),
            at_most(
                "first launch in a fresh interpreter against torchrun",
                timed[FRESH_PROCESS].median / torchrun_median,
                1,
                "× its time",
            ),
        ],
        f"A warm launch of 2 ranks takes {ours * 1000:.0f} ms: torchrun takes {ratio:.0f} times as long",
        [
            "kernel rows: from sending the cell to its reply; torchrun and fresh interpreter: the whole command",
            "nbdistributed keeps its ranks, and what cells left in them; its first cell came after its ranks were up: one sent "
            "right after %dist_init is lost, and the notebook waits 30 s for it",
        ],
    )


def _warm(kernels: contextlib.ExitStack, first: str, cell: str, answer: str) -> Callable[[], float]:
    """A contender in a kernel of its own that has run the cell once and then come to rest."""
    try:
        kernel = kernels.enter_context(Kernel())
        if begun := kernel.run(first).error:
            raise DoesNotRun(begun)
        kernel.settle()
        kernel.check(cell, answer)
        kernel.settle()
    except (DoesNotRun, RuntimeError, TimeoutError) as error:
        reason = str(error)

        def missing() -> float:
            raise DoesNotRun(reason)

        return missing
    return lambda: kernel.check(cell, answer).seconds


def _first(first: str, again: str, answer: str, name: str) -> dict[str, float]:
    """The first cell of a fresh kernel, imports included, and, if given, a second cell at once."""
    with Kernel() as kernel:
        if "ModuleNotFoundError" in (found := kernel.run(first)).error:
            raise DoesNotRun(found.message)
        if found.error or answer not in found.text:
            raise RuntimeError(f"{name}: {found.error} {found.message} {found.text[-500:]}")
        measured = {name + FIRST: found.seconds}
        if again:
            measured[f"{name}, second, at once"] = kernel.check(again, answer).seconds
    return measured


def _process(command: list[str], answer: str) -> float:
    """Wall time of a command that prints `answer`."""
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment_of_a_learner(), capture_output=True, text=True, timeout=ANSWER_LIMIT)
    seconds = time.perf_counter() - begin
    if done.returncode or answer not in done.stdout:
        raise RuntimeError(f"{command[0]} gave {done.stdout!r} and said {done.stderr[-1000:]}")
    return seconds


@benchmark
def ranks(repeats: int) -> Findings:
    """Warm launches of 1 to 16 ranks, more than there are cores included."""
    counts = (1, 2, 4, 8, 16)
    with _ready() as kernel:
        cells = {
            f"{n} ranks" if n > 1 else "1 rank": (f"print(launch(job, ranks={n}).results)", str([float(n)] * n)) for n in counts
        }
        timed = interleaved({name: _timed_cell(kernel, *cell) for name, cell in cells.items()}, repeats)
    few, many = timed["2 ranks"].median, timed["16 ranks"].median
    return Findings(timed.rows(), finding=f"16 ranks start in {many * 1000:.0f} ms, 2 ranks in {few * 1000:.0f} ms")


@contextlib.contextmanager
def _ready() -> Iterator[Kernel]:
    """A kernel whose warm process has come to rest."""
    with Kernel() as kernel:
        kernel.check(OURS_FIRST, OURS_ANSWER)
        kernel.settle()
        yield kernel


def _timed_cell(kernel: Kernel, cell: str, answer: str) -> Callable[[], float]:
    return lambda: kernel.check(cell, answer).seconds


@benchmark
def after_a_matmul(repeats: int) -> Findings:
    """Why forking the kernel is unsafe: a launch whose ranks multiply matrices after the kernel has done so."""
    product = "(torch.ones(512, 512) @ torch.ones(512, 512)).sum()"
    rank = JOB.replace("torch.ones(())", product)
    guarded = (
        "def guarded_job():\n"
        "    import faulthandler\n"
        f"    faulthandler.dump_traceback_later({DEADLOCK_LIMIT}, exit=True)\n"
        "    from accelerate import PartialState\n"
        "    PartialState()\n"
        "    job()\n"
        "    faulthandler.cancel_dump_traceback_later()\n"
        "    print('every rank returned')\n"
    )
    with Kernel() as kernel:
        kernel.check(f"import torch\nfrom helpers import launch\n{rank}\nprint({product}.item() > 0)", "True")
        kernel.check("print(len(launch(job).results))", "2")
        kernel.settle()
        ours = interleaved({OURS + WARM: _timed_cell(kernel, "print(len(launch(job).results))", "2")}, repeats)
        rows, notes = ours.rows(), []
        kernel.check(f"from accelerate import debug_launcher\n{guarded}\nprint('ready')", "ready")
        answer = kernel.run("debug_launcher(guarded_job)", limit=DEADLOCK_LIMIT + 20)
        if answer.error:
            rows.append(
                Row(DEBUG + WARM, (), note=f"no answer within {DEADLOCK_LIMIT} s: its ranks sat in the matmul, then were ended")
            )
            notes.append("a fork of the kernel inherits a thread pool without its threads: the ranks wait for them for ever")
        else:
            rows.append(Row(DEBUG + WARM, (answer.seconds,), note="did not deadlock here (one thread only?)"))
    claims = [
        shown(
            "after a matmul in the kernel, ranks of helpers.launch multiply matrices", len(ours[OURS + WARM].samples) == repeats
        )
    ]
    return Findings(
        rows, claims, "Ranks forked from the kernel deadlock once it has multiplied; ranks of the warm process do not", notes
    )


IMPORT = (
    "import sys, time\nbegin = time.perf_counter()\nimport helpers\nprint(time.perf_counter() - begin, 'torch' in sys.modules)"
)


@benchmark
def imports(repeats: int) -> Findings:
    """`import helpers`, in a script and in a fresh kernel (where it starts the warm process)."""
    loaded: list[str] = []

    def seconds_and_torch(text: str) -> float:
        seconds, torch = text.split()
        loaded.append(torch)
        return float(seconds)

    def in_kernel() -> float:
        with Kernel() as kernel:
            return seconds_and_torch(kernel.check(IMPORT, "").text)

    def in_script() -> float:
        command = [sys.executable, "-c", IMPORT]
        done = subprocess.run(
            command, env=environment_of_a_learner(), capture_output=True, text=True, check=True, timeout=ANSWER_LIMIT
        )
        return seconds_and_torch(done.stdout)

    timed: Timed = interleaved({"in a script": in_script, "in a kernel": in_kernel}, repeats)
    claims = [at_most(f"import helpers {row.name}", row.median, 0.3, "s") for row in timed.rows()]
    claims.append(shown("import helpers leaves torch alone", set(loaded) == {"False"}))
    return Findings(
        timed.rows(), claims, f"import helpers takes {timed['in a kernel'].median * 1000:.0f} ms in a notebook kernel"
    )


TRAINING_JOB = """
def train():
    import importlib._bootstrap as loader, time
    begin, load, loading = time.perf_counter(), loader._find_and_load, [0, 0.0]
    def timed_load(*arguments):
        loading[0] += 1
        started = time.perf_counter()
        try:
            return load(*arguments)
        finally:
            loading[0] -= 1
            if not loading[0]:
                loading[1] += time.perf_counter() - started
    loader._find_and_load = timed_load

    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    for wrap in (DistributedDataParallel, fully_shard):
        model = wrap(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return loading[1], time.perf_counter() - begin
"""
TRAINING_CELL = "print(*max(launch(train).results))"


@benchmark
def training_job(repeats: int) -> Findings:
    """A job with DDP, FSDP2 and AdamW: what a warm launch of it pays for imports."""

    def launched(kernel: Kernel) -> dict[str, float]:
        answer = kernel.check(TRAINING_CELL, "")
        importing, inside = map(float, answer.text.split()[-2:])
        return {TRAINING: answer.seconds, f"{TRAINING}, inside the function": inside, f"{TRAINING}, importing": importing}

    with Kernel() as kernel:
        kernel.check(f"from helpers import launch\n{JOB}{TRAINING_JOB}\nprint('ready')", "ready")
        first = launched(kernel)
        kernel.settle()
        launched(kernel)
        timed = interleaved({TRIVIAL: _timed_cell(kernel, OURS_CELL, OURS_ANSWER), TRAINING: lambda: launched(kernel)}, repeats)
    inside, importing = timed[f"{TRAINING}, inside the function"], timed[f"{TRAINING}, importing"]
    outside = [wall - of_job for wall, of_job in zip(timed[TRAINING].samples, inside.samples, strict=True)]
    return Findings(
        timed.rows(),
        [
            at_most("importing within the job, warm", importing.median, 0.05, "s"),
            at_most(
                "all but its function, beyond a trivial launch", statistics.median(outside) - timed[TRIVIAL].median, 0.1, "s"
            ),
        ],
        f"A warm job with DDP, FSDP2 and AdamW imports for {importing.median * 1000:.1f} ms",
        ["launched at once in a fresh kernel: " + "; ".join(f"{name} {seconds:.2f} s" for name, seconds in first.items())],
    )
