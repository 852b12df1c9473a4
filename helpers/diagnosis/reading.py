"""Reads a log of any size in bounded memory: where the signs of known faults first stand, and which rank printed them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.diagnosis.catalogue import SAYS, Fault, faults

BLOCK = 1 << 20  # characters that are searched at a time
LONGEST = 1 << 13  # characters of an unfinished line that are waited for, and of the lines before that a block is searched with
SHOWN = 240  # characters of a line that are kept as evidence
MOST_LINES = 4  # that are kept of one fault
MOST_RANKS = 256  # that are told apart
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_RANK = re.compile(  # how torch, torchrun, srun, vLLM and launch say whose line it is
    r"\s*(?:\[(?:[a-z_]+)?(\d+)\]:|\[Rank (\d+)\]|(\d+): |rank (\d+)\b|\((?:Vllm)?Worker\w*?(?:TP|rank=|_)(\d+)(?!\d))"
)
_FAILED_RANK = re.compile(r"Root Cause \(first observed failure\):\s+(?:.*\n){1,4}?.*?\brank\s*: (\d+) \(local_rank: \d+\)")
_EXCEPTION = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)): (.+)$")
_TROUBLE = (
    *("Traceback (most recent call last)", " ERROR ", "ERROR:", "[ERROR]", "[E1", "Aborted", "core dumped", "terminate called"),
    *("FATAL", "Fatal ", "Segmentation fault", "error:", "Error: ", "Killed", "Exception: "),
)
_SIZE = re.compile(r"([\d.]+) ([KMG]iB)")
_MIB = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}


@dataclass
class Sighting:
    """Where a fault's sign first stands in a log, and which ranks printed it."""

    fault: Fault
    position: float = math.inf  # characters before it
    line: int = 0  # its number, counted from 1
    texts: list[str] = field(default_factory=list)  # some of its lines, the first first
    ranks: set[int] = field(default_factory=set)
    count: int = 0


@dataclass
class Reading:
    """What one pass over a log keeps of it."""

    lines: int = 0
    blank: bool = True
    sightings: dict[str, Sighting] = field(default_factory=dict)  # by the fault's id
    exceptions: dict[int | None, str] = field(default_factory=dict)  # by rank: its first, where no fault's sign of a consequence
    failed_rank: int | None = None  # whom torchrun's summary names
    trouble: str = ""  # the first line that says something went wrong, whatever it is

    @property
    def best(self) -> Sighting | None:
        """The cause that stands first; without one the symptom, else the consequence, that the catalogue names first."""
        order = {fault.id: number for number, fault in enumerate(faults())}

        def key(sighting: Sighting) -> tuple[int, float, int]:
            cause = sighting.fault.says == "cause"
            return SAYS.index(sighting.fault.says), sighting.position if cause else 0, order[sighting.fault.id]

        return min(self.sightings.values(), key=key, default=None)


def read(source: str | Path) -> Reading:
    """Search a text, or the file at a path. Colours, carriage returns and bytes that are no UTF-8 do not matter.

    Raises OSError where the file cannot be read.
    """
    reading, before, offset = Reading(), "", 0
    blocks = _blocks(source)
    block = next(blocks, "")
    while block:
        following = next(blocks, "")
        _search(reading, before, block, offset, not following)
        offset += len(block)
        reading.blank = reading.blank and not block.strip()
        reading.lines += block.count("\n")
        before, block = block[-LONGEST:], following
    return reading


def _blocks(source: str | Path) -> Iterator[str]:
    """The text in pieces of whole lines, as far as lines are not endless."""
    rest = ""
    for piece in _pieces(source):
        rest += piece
        end = max(rest.rfind("\n"), rest.rfind("\r")) + 1
        if not end and len(rest) > LONGEST:
            end = len(rest)
        if end:
            yield _plain(rest[:end])
            rest = rest[end:]
    if rest.strip():
        yield _plain(rest + "\n")


def _pieces(source: str | Path) -> Iterator[str]:
    if isinstance(source, str):
        yield from (source[start : start + BLOCK] for start in range(0, len(source), BLOCK))
        return
    with open(source, encoding="utf-8", errors="replace", newline="") as file:
        while piece := file.read(BLOCK):
            yield piece


def _plain(text: str) -> str:
    text = _ANSI.sub("", text) if "\x1b" in text else text
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _search(reading: Reading, before: str, block: str, offset: int, last: bool) -> None:
    """Note what the block holds; signs of several lines may begin in `before`."""
    text, seen = before + block, len(before)

    def line_at(position: int) -> str:
        return text[text.rfind("\n", 0, position) + 1 : (text.find("\n", position) + 1 or len(text) + 1) - 1]

    for fault in faults():
        for fixed, pattern in fault.searches:
            if fixed not in text or (pattern.pattern.endswith(r"\Z") and not last):
                continue
            matches = (match for match in pattern.finditer(text) if match.end() > seen and _FILTERS.get(fault.id, _any)(match))
            for number, match in enumerate(matches):
                position = offset + match.start() - seen
                sighting = reading.sightings.setdefault(fault.id, Sighting(fault))
                if position < sighting.position:
                    sighting.position = position
                    sighting.line = reading.lines + text.count("\n", seen, match.start()) + 1
                shown = _short(line_at(match.end() - 1)) if number == 0 and len(sighting.texts) < MOST_LINES else ""
                if shown and not any(shown in other or other in shown for other in sighting.texts):
                    sighting.texts.append(shown)
                sighting.count += 1
                rank = rank_of(line_at(match.start()))
                if rank is not None and len(sighting.ranks) < MOST_RANKS:
                    sighting.ranks.add(rank)
    _note_exceptions(reading, text, seen, line_at)
    if reading.failed_rank is None and "Root Cause" in text and (summary := _FAILED_RANK.search(text)):
        reading.failed_rank = int(summary[1])
    if not reading.trouble:
        first = min((at for word in _TROUBLE if (at := text.find(word, seen)) >= 0), default=-1)
        reading.trouble = _short(line_at(first)) if first >= 0 else ""


def _note_exceptions(reading: Reading, text: str, seen: int, line_at: Callable[[int], str]) -> None:
    for ending in ("Error: ", "Exception: "):
        at = text.find(ending, seen)
        while at >= 0:
            line = line_at(at)
            rank = rank_of(line)
            match = _EXCEPTION.search(line) if rank not in reading.exceptions and len(reading.exceptions) < MOST_RANKS else None
            if match and not _follows(line):
                reading.exceptions[rank] = _short(match[0])
            at = text.find("\n", at)
            at = text.find(ending, at) if at >= 0 else -1


def _follows(line: str) -> bool:
    """Whether the line is what a rank says when another one has failed."""
    return "ChildFailedError" in line or any(
        fixed in line and pattern.search(line)
        for fault in faults()
        if fault.says == "consequence"
        for fixed, pattern in fault.searches
    )


def rank_of(line: str) -> int | None:
    """Which rank a log says the line is from: "[rank1]:", "[default1]:", "1: ", "(Worker_TP1 …" or "rank 1"."""
    match = _RANK.match(line)
    return int(next(number for number in match.groups() if number)) if match else None


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _any(match: re.Match[str]) -> bool:
    return True


def _fragmented(match: re.Match[str]) -> bool:
    """Whether what lies reserved but unused would have been enough for the request."""
    wanted, unused = (float(number) * _MIB[unit] for number, unit in _SIZE.findall(match["wanted"] + " " + match["unused"]))
    return unused >= wanted


_FILTERS = {"cuda-fragmentation": _fragmented}  # fault -> what else a match must fulfil
