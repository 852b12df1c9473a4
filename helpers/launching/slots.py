"""Many learners on one machine: a job holds a slot for each of its ranks, and waits in a queue for those that others hold.

GPUs are slots. Cores are where an instructor says how many: `WORKSHOP_CPU_SLOTS`, or a file `cpu_slots` in the folder of the
slots that belongs to root or to the folder's owner. The folder is `WORKSHOP_SLOTS_FOLDER`, or one that all users can reach.

A job's ticket is a file there, numbered in the order of asking. The kernel and the warm process both hold a shared lock (flock)
on it: a ticket that can be locked exclusively belongs to nobody who lives, so slots are free as soon as the last of the two, and
with it every rank, has gone. `filelock` has no such lock. The folder's own lock makes one change of the queue at a time. All
names are looked up in the opened folder, new files must be new and links are not followed: nobody is led to another file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import select
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
LONGEST_POLL = 1.0
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
    said, where = os.environ.get(CPU_VARIABLE, ""), CPU_VARIABLE
    file = folder() / "cpu_slots"
    if not said:
        try:
            about = file.lstat()
            if about.st_uid in (0, file.parent.stat().st_uid) and stat.S_ISREG(about.st_mode):
                said, where = file.read_text(encoding="utf-8").strip(), str(file)
        except OSError:
            return None
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
        with _opened() as place, _locked(place):
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
def held(wanted: Sequence[str], count: int, job: str, show: Callable[[str], object], wake: int) -> Iterator[Held]:
    """Hold `count` of the slots `wanted`, all at once, or all of them where there are fewer; wait for them first, in a queue.

    Arguments:
        show: called with who holds what, and the place in the queue, whenever that changed.
        wake: a descriptor that becomes readable when waiting shall end.

    Raises KeyboardInterrupt after `wake`, PermissionError where the folder cannot be used. Either leaves nothing behind.
    """
    if not wanted:
        yield Held()
        return
    need, began, shown = min(count, len(wanted)), time.monotonic(), ""
    with _opened(make=True) as place:
        content = {"pid": os.getpid(), "job": job, "choices": list(wanted), "held": []}
        mine, name = _draw(place, content)
        try:
            while True:
                slots, rivals = _turn(place, mine, name, content, need)
                if slots:
                    break
                queue = 1 + sum(not ticket.held for ticket in rivals)
                holding = "; ".join(str(ticket) for ticket in rivals if ticket.held) or "nobody"
                text = f"waiting for {need} of {len(wanted)} slots, place {queue} in the queue; held by {holding}"
                if text != shown:
                    show(shown := text)
                if select.select([wake], [], [], min(queue * POLL, LONGEST_POLL))[0]:
                    show("stopped while waiting for slots")
                    raise KeyboardInterrupt
            yield Held(slots, str(folder().absolute() / name), time.monotonic() - began)
        finally:
            with contextlib.suppress(FileNotFoundError):
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
def _opened(make: bool = False) -> Iterator[int]:
    """A descriptor of the folder, which is made for all users where that is asked for."""
    where, made = folder(), False
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                where.mkdir()
                made = True
        place = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _unusable(where, error) from None
    if made:
        os.fchmod(place, 0o1777)  # everybody adds files, each removes their own
    try:
        yield place
    finally:
        os.close(place)


def _unusable(where: Path, error: OSError) -> PermissionError:
    return PermissionError(
        f"slots are kept in {where}, and it cannot be used ({error.strerror}). It must be a folder, no link, in which all "
        f"users may write: mkdir -m 1777 {where}, or name another in {FOLDER_VARIABLE}"
    )


@contextlib.contextmanager
def _locked(place: int) -> Iterator[None]:
    fcntl.flock(place, fcntl.LOCK_EX)  # for a fraction of a millisecond
    try:
        yield
    finally:
        fcntl.flock(place, fcntl.LOCK_UN)


def _draw(place: int, content: dict[str, Any]) -> tuple[int, str]:
    """A new ticket at the end of the queue: its descriptor, which holds it, and its name."""
    with _locked(place):
        name = f"{max((int(name) for name in _names(place)), default=0) + 1:08d}"
        try:
            mine = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=place)
        except OSError as error:
            raise _unusable(folder(), error) from None
        os.fchmod(mine, 0o644)  # others read who holds what
        fcntl.flock(mine, fcntl.LOCK_SH)
        _write(mine, content)
    return mine, name


def _turn(place: int, mine: int, name: str, content: dict[str, Any], need: int) -> tuple[list[str], list[Ticket]]:
    """The slots of ticket `name`, none where it has to wait; and those who hold, or wait longer for, what it wants."""
    with _locked(place):
        others = [
            ticket for ticket in _living(place) if ticket.number != int(name) and set(ticket.choices) & set(content["choices"])
        ]
        rivals = [ticket for ticket in others if ticket.held or ticket.number < int(name)]
        taken = {slot for ticket in rivals for slot in ticket.held}
        free = [slot for slot in content["choices"] if slot not in taken][:need]
        if len(free) < need or not all(ticket.held for ticket in rivals):
            return [], rivals
        _write(mine, {**content, "held": free})
        return free, rivals


def _write(ticket: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    os.ftruncate(ticket, 0)
    os.pwrite(ticket, data, 0)


def _names(place: int) -> list[str]:
    return sorted(name for name in os.listdir(place) if len(name) == 8 and name.isascii() and name.isdigit())


def _living(place: int) -> list[Ticket]:
    """The tickets whose owners live; what the dead left is removed, where it may be."""
    return [ticket for name in _names(place) if (ticket := _look(place, name)) is not None]


def _look(place: int, name: str) -> Ticket | None:
    try:
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # another user's: it stays, and counts for nothing
            os.unlink(name, dir_fd=place)
    except BlockingIOError:
        with contextlib.suppress(Exception):  # whatever another user wrote there instead of a ticket
            content, about = json.loads(os.pread(found, LONGEST_TICKET, 0)), os.fstat(found)
            choices, held = (tuple(map(str, content[part])) for part in ("choices", "held"))
            pid, job = int(content["pid"]), str(content["job"])
            return Ticket(int(name), _user(about.st_uid), pid, job, choices, held, about.st_mtime)
    finally:
        os.close(found)
    return None


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
