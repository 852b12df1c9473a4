"""Many learners on one machine: a job holds a slot for each of its ranks, and waits in a queue for those that others hold.

GPUs are slots. Cores are where an instructor says how many: `WORKSHOP_CPU_SLOTS`, or a file `cpu_slots` in the folder of the
slots that belongs to root or to the folder's owner. The folder is `WORKSHOP_SLOTS_FOLDER`, or one that all users can reach.

A job's ticket is a file there, numbered in the order of asking. The kernel and the warm process both hold a shared lock (flock)
on it: a ticket that can be locked exclusively belongs to nobody who lives, so slots are free as soon as the last of the two, and
with it every rank, has gone. `filelock` has no such lock. The folder's own lock makes one change of the queue at a time. All
names are looked up in the opened folder, new files must be new and links are not followed: nobody is led to another file.
"""

import contextlib
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import machine

FOLDER_VARIABLE, CPU_VARIABLE = "WORKSHOP_SLOTS_FOLDER", "WORKSHOP_CPU_SLOTS"
COMMON = Path("/tmp/parallelism-measured-slots")  # not in TMPDIR, of which each user may have another
POLL = 0.05  # seconds until the first in the queue looks again; the n-th waits n times as long
LONGEST_POLL = 0.5
LONGEST_TICKET = 1 << 16  # bytes of one that are read
LONGEST_SHOWN = 200  # characters


@dataclass(frozen=True)
class Ticket:
    """One job of somebody who lives: it holds `held`, or waits where that is empty, `since` (seconds of the epoch)."""

    number: int
    user: str
    pid: int
    job: str
    choices: tuple[str, ...]  # slots that would do
    held: tuple[str, ...]
    since: float

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        text = f"{self.user} (process {self.pid}, {self.job}, since {since}): {', '.join(self.held) or 'waiting'}"
        return "".join(letter for letter in text if letter.isprintable())[:LONGEST_SHOWN]


def folder() -> Path:
    """Where the slots of this machine are kept; it may not exist yet."""
    return Path(os.environ.get(FOLDER_VARIABLE) or COMMON)


def cpu_slots() -> int | None:
    """How many ranks may run on the CPU at a time, over all users; None where nobody has set a limit.

    Raises ValueError for a setting that is no whole number of at least 1.
    """
    said, where, file = os.environ.get(CPU_VARIABLE, ""), CPU_VARIABLE, folder() / "cpu_slots"
    with contextlib.suppress(OSError):
        about = file.lstat()
        if not said and about.st_uid in (0, file.parent.stat().st_uid) and stat.S_ISREG(about.st_mode):
            said, where = file.read_text(encoding="utf-8").strip(), str(file)
    if said and not (said.isascii() and said.isdigit() and int(said)):
        raise ValueError(f"{where} is {said!r}; it must be a whole number of at least 1, or not set where nobody shall wait")
    return int(said) if said else None


def choices(device: str) -> list[str]:
    """The slots that a rank on `device` ("cpu" or "cuda") may take; empty where no rank waits."""
    if device == "cuda":
        return [gpu.uuid for gpu in machine.gpus()]
    return [f"core {number}" for number in range(cpu_slots() or 0)]


def tickets() -> list[Ticket]:
    """Who holds and who waits, in the order of asking; empty where slots were never used."""
    try:
        with _queue() as place:
            return _living(place)
    except OSError:
        return []


@dataclass
class Held:
    """What a job has: `slots` by rank, the `path` of its ticket (empty where nobody waits), and the `waited` seconds."""

    slots: list[str] = field(default_factory=list)
    path: str = ""
    waited: float = 0.0


@contextlib.contextmanager
def held(
    wanted: Sequence[str], count: int, job: str, show: Callable[[str], object], stopped: Callable[[], bool]
) -> Iterator[Held]:
    """Hold `count` of the slots `wanted`, all at once, or all of them where there are fewer; wait for them first, in a queue.

    Arguments:
        show: called with who holds what, and the place in the queue, whenever that changed.
        stopped: asked whether waiting shall end.

    Raises KeyboardInterrupt when it shall, PermissionError where the folder cannot be used. Either leaves nothing behind.
    """
    if not wanted:
        yield Held()
        return
    need, began, shown = min(count, len(wanted)), time.monotonic(), ""
    content = {"pid": os.getpid(), "job": job, "choices": list(wanted), "held": []}
    with _queue(make=True) as place:
        number = max(map(int, _names(place)), default=0) + 1
        name = f"{number:08d}"
        mine = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, dir_fd=place)
        os.fchmod(mine, 0o644)  # others read who holds what
        fcntl.flock(mine, fcntl.LOCK_SH)
        _write(mine, content)
    try:
        while True:
            with _queue() as place:
                others = [each for each in _living(place) if each.number != number and not set(wanted).isdisjoint(each.choices)]
                rivals = [each for each in others if each.held or each.number < number]
                taken = {slot for each in rivals for slot in each.held}
                free = [slot for slot in wanted if slot not in taken][:need]
                if len(free) == need and all(each.held for each in rivals):
                    _write(mine, {**content, "held": free})
                    break
            queue = 1 + sum(not each.held for each in rivals)
            holding = "; ".join(str(each) for each in rivals if each.held) or "nobody"
            text = f"waiting for {need} of {len(wanted)} slots, place {queue} in the queue; held by {holding}"
            if text != shown:
                show(shown := text)
            time.sleep(min(queue * POLL, LONGEST_POLL))
            if stopped():
                show("stopped while waiting for slots")
                raise KeyboardInterrupt
        yield Held(free, str(folder().absolute() / name), time.monotonic() - began)
    finally:
        with contextlib.suppress(OSError), _queue() as place:
            os.unlink(name, dir_fd=place)
        os.close(mine)


def hold_too(path: str) -> int | None:
    """Hold another process's ticket as well, until the descriptor returned is closed; None where there is no ticket."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor
    return None


@contextlib.contextmanager
def _queue(make: bool = False) -> Iterator[int]:
    """A descriptor of the folder, which nobody else changes meanwhile; `make` it for all users if it is not there.

    Raises PermissionError where it cannot be used, also in the block.
    """
    where, place = folder(), -1
    try:
        made = make and not where.is_dir()
        if made:
            where.mkdir(exist_ok=True)
        place = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if made and os.fstat(place).st_uid == os.getuid():  # else somebody was faster
            os.fchmod(place, 0o1777)  # everybody adds files, each removes their own
        fcntl.flock(place, fcntl.LOCK_EX)  # for a fraction of a millisecond
        yield place
    except OSError as error:
        raise PermissionError(
            f"slots are kept in {where}, and it cannot be used ({error.strerror}). It must be a folder, no link, in which all "
            f"users may write: mkdir -m 1777 {where}, or name another in {FOLDER_VARIABLE}"
        ) from None
    finally:
        if place >= 0:
            os.close(place)


def _write(ticket: int, content: dict[str, Any]) -> None:
    os.ftruncate(ticket, 0)
    os.pwrite(ticket, json.dumps(content).encode(), 0)


def _names(place: int) -> list[str]:
    return sorted(name for name in os.listdir(place) if len(name) == 8 and name.isascii() and name.isdigit())


def _living(place: int) -> list[Ticket]:
    """The tickets whose owners live, in order; what the dead left is removed, where it may be."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)

    living = []
    for name in _names(place):
        with contextlib.suppress(Exception), open(name, "rb", opener=opener) as file:  # whatever others put there instead
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=place)  # not another user's: it stays, and counts for nothing
            except BlockingIOError:
                content, about = json.loads(file.read(LONGEST_TICKET)), os.fstat(file.fileno())
                choices, held = (tuple(map(str, content[part])) for part in ("choices", "held"))
                pid, job = int(content["pid"]), str(content["job"])
                living.append(Ticket(int(name), _user(about.st_uid), pid, job, choices, held, about.st_mtime))
    return living


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
