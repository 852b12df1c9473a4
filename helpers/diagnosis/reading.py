"""Reads a log of any size in bounded memory: where the signs of known faults first stand, and which rank printed them."""

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.diagnosis.catalogue import Fault, faults

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
_BARE = re.compile(r"(?: pid=\d+\))?\s?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception))$")  # that of a plain `assert`
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
    line: int  # its number, counted from 1
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
        order = [fault.id for fault in faults()]

        def key(sighting: Sighting) -> tuple[int, int, int]:
            fault = sighting.fault
            return fault.weight, sighting.line if fault.says == "cause" else 0, order.index(fault.id)

        return min(self.sightings.values(), key=key, default=None)


def read(source: str | Path) -> Reading:
    """Search a text, or the file at a path. Colours, carriage returns and bytes that are no UTF-8 do not matter.

    Raises OSError where the file cannot be read.
    """
    reading, before = Reading(), ""
    for block, following in itertools.pairwise(itertools.chain(_blocks(source), [""])):
        _search(reading, before, block, last=not following)
        reading.blank = reading.blank and not block.strip()
        reading.lines += block.count("\n") + (not following and not block.endswith("\n"))  # the last may have no end
        before = block[-LONGEST:]
    return reading


def _blocks(source: str | Path) -> Iterator[str]:
    """The text in pieces of whole lines, as far as lines are not endless, without colours."""
    raw = io.BytesIO(source.encode(errors="replace")) if isinstance(source, str) else io.FileIO(source)
    with io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file:
        while piece := file.read(BLOCK) + file.readline(LONGEST):
            yield _ANSI.sub("", piece)


def _search(reading: Reading, before: str, block: str, last: bool) -> None:
    """Note what the block holds; signs of several lines may begin in `before`."""
    text, seen = before + block, len(before)

    def line_at(position: int) -> str:
        end = text.find("\n", position)
        return text[text.rfind("\n", 0, position) + 1 : end if end >= 0 else len(text)]

    for fault in faults():
        for fixed, pattern in fault.searches:
            if fixed not in text or (pattern.pattern.endswith(r"\Z") and not last):
                continue
            matches = [match for match in pattern.finditer(text) if match.end() > seen and _is_sign(match)]
            if not matches:
                continue
            number = reading.lines + text.count("\n", seen, matches[0].start()) + 1
            sighting = reading.sightings.setdefault(fault.id, Sighting(fault, number))
            sighting.line = min(sighting.line, number)
            sighting.count += len(matches)
            shown = _short(line_at(matches[0].end() - 1))
            if len(sighting.texts) < MOST_LINES and not any(shown in other or other in shown for other in sighting.texts):
                sighting.texts.append(shown)
            for match in matches if len(sighting.ranks) < MOST_RANKS else ():
                rank = rank_of(line_at(match.start()))
                sighting.ranks.update([] if rank is None else [rank])
    for line in block.splitlines():
        if "Error: " in line or "Exception: " in line or line.endswith(("Error", "Exception")):
            _note_exception(reading, line)
    if reading.failed_rank is None and "Root Cause" in text and (summary := _FAILED_RANK.search(text)):
        reading.failed_rank = int(summary[1])
    if not reading.trouble:
        first = min((at for word in _TROUBLE if (at := text.find(word, seen)) >= 0), default=-1)
        reading.trouble = _short(line_at(first)) if first >= 0 else ""


def _is_sign(match: re.Match[str]) -> bool:
    """Whether memory, where a pattern names what was `wanted` and lay `unused`, would have been enough in one piece."""
    if "unused" not in match.re.groupindex:
        return True
    wanted, unused = (float(number) * _MIB[unit] for number, unit in _SIZE.findall(f"{match['wanted']} {match['unused']}"))
    return unused >= wanted


def _note_exception(reading: Reading, line: str) -> None:
    """Keep each rank's first exception, unless it is what a rank says when another one has failed."""
    rank, prefix = rank_of(line), _RANK.match(line)
    match = _EXCEPTION.search(line) or _BARE.match(line, prefix.end() if prefix else 0)
    if match is None or rank in reading.exceptions or len(reading.exceptions) >= MOST_RANKS or "ChildFailedError" in line:
        return
    consequences = [search for fault in faults() if fault.says == "consequence" for search in fault.searches]
    if not any(fixed in line and pattern.search(line) for fixed, pattern in consequences):
        reading.exceptions[rank] = _short(line[match.start(1) :])


def rank_of(line: str) -> int | None:
    """Which rank a log says the line is from: "[rank1]:", "[default1]:", "1: ", "(Worker_TP1 …" or "rank 1"."""
    match = _RANK.match(line)
    return int(next(number for number in match.groups() if number)) if match else None


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
