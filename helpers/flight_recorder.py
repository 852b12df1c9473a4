"""Read what PyTorch's flight recorder left of a job that hung: what each rank completed and waits in, where ranks first differ.

Dumps are the files that `TORCH_NCCL_DUMP_ON_TIMEOUT=1` (with `TORCH_FR_BUFFER_SIZE=2000`) writes, one a rank; or what
`_dump_nccl_trace()`, `_dump_fr_trace()` or `_dump_fr_trace_json()` of `torch._C._distributed_c10d` returns, written to a file. A
pickle holds plain containers, and nothing else is read from it: one that asks for a class or function is refused.
Whether two entries match, and from where on ring buffers can be compared, is left to `torch.distributed.flight_recorder`.
"""

import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from helpers.measuring.sources import describe_line, is_learner_file

# what torch and `Entry` read later
_KEYS = ("record_id", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes")


class _Plain(pickle.Unpickler):
    """Builds numbers, texts and containers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"this pickle asks for {module}.{name}: a dump of the flight recorder holds plain containers, not read")


@dataclass(frozen=True)
class Entry:
    """One collective, send or receive as one rank recorded it; `raw` holds all that was."""

    group: str  # name, and description where there is one: "0 (default_pg)"
    sequence: int  # counted within the group, sends and receives apart
    op: str  # "all_reduce", "send 0->1"
    done: bool
    source: str | None  # "train.py, line 31: dist.all_reduce(x)": the innermost line that is not a library's
    raw: Mapping[str, Any]

    def __str__(self) -> str:
        payload = f"{' '.join(map(str, self.raw['input_sizes']))} {'/'.join(sorted(set(self.raw['input_dtypes'])))}".strip()
        return ", ".join(filter(None, [f"{self.op} {self.sequence} of group {self.group}", payload, self.source]))


@dataclass(frozen=True, repr=False)
class Summary:
    """By rank the `last` that completed and what is `waiting`; `difference` tells the first place where ranks differ, or None."""

    last: dict[int, Entry | None]
    waiting: dict[int, tuple[Entry, ...]]
    missing: tuple[int, ...]  # ranks of known groups that left no dump
    difference: str | None

    def __repr__(self) -> str:
        lines = []
        for rank, last in self.last.items():
            waits = "; ".join(map(str, self.waiting[rank][:3])) or "nothing"
            lines.append(f"rank {rank} waits in {waits}; last completed: {last or 'nothing'}")
        lines += [f"no dump of rank {rank}" for rank in self.missing]
        return "\n".join([*lines, f"first difference: {self.difference or 'none, ranks issued the same'}"])


def read(files: Iterable[str | os.PathLike[str]]) -> Summary:
    """Summarise the dumps of a job's ranks, a file each, whose name ends in the rank, as torch writes it.

    Raises ValueError for what is no dump, for pickles that hold more than plain containers, and where names do not give each dump
    a rank of its own; FileNotFoundError.
    """
    paths = sorted(map(Path, files))
    names = [re.search(r"(\d+)(\.[A-Za-z]\w*)?$", path.name) for path in paths]
    dumps = {int(name[1]): path for name, path in zip(names, paths, strict=True) if name}
    if not dumps or len(dumps) < len(paths):
        raise ValueError(f"there must be one dump of each rank, named by it: trace_0 …; these are {[p.name for p in paths]}")
    loaded = {rank: _load(dumps[rank]) for rank in sorted(dumps)}
    entries = {rank: own for rank, (own, _) in loaded.items()}
    groups = _groups(entries) | {name: group for _, stated in loaded.values() for name, group in stated.items() if group}
    return Summary(
        {rank: next((each for each in reversed(own) if each.done), None) for rank, own in entries.items()},
        {rank: tuple(each for each in own if not each.done) for rank, own in entries.items()},
        tuple(sorted(set().union(*groups.values()) - set(entries))),
        _first_difference(entries, groups),
    )


def _load(path: Path) -> tuple[list[Entry], dict[str, set[int]]]:
    """What one rank issued, and the ranks of each group, as far as the recorder says them."""
    content = path.read_bytes()
    try:
        dump = json.loads(content) if content.lstrip().startswith(b"{") else _Plain(io.BytesIO(content)).load()
        if not isinstance(dump, dict) or not {"version", "pg_config"} <= set(dump):
            raise ValueError(f'a dump has a "version" and a "pg_config"; this {type(dump).__name__} has not')
        stated = {name: set(json.loads(group["ranks"] or "[]")) for name, group in dump["pg_config"].items()}
        return [_entry(raw) for raw in dump.get("entries", [])], stated  # the JSON of a recorder that saw nothing has none
    except Exception as error:  # other bytes, unpickled, raise anything
        raise ValueError(f"{path.name} cannot be read as a flight recorder's dump, pickle or JSON: {error!r}") from None


def _entry(raw: dict[str, Any]) -> Entry:
    name, about = raw["process_group"]
    itemgetter(*_KEYS)(raw)  # raises KeyError
    frames = [each for each in raw.get("frames", []) if is_learner_file(each["filename"])]
    return Entry(
        f"{name} ({about})" if about not in ("", "undefined") else name,
        (raw["collective_seq_id"], raw["p2p_seq_id"])[raw["is_p2p"]],
        raw["profiling_name"].partition(":")[2],
        bool(raw["retired"]) or raw["state"] == "completed",
        describe_line(frames[0]["filename"], frames[0]["line"]) if frames else None,
        raw,
    )


def _groups(entries: dict[int, list[Entry]]) -> dict[str, set[int]]:
    """Ranks by a group's name, as far as they used it; of the default group all. Gloo's recorder does not say which they are."""
    found: dict[str, set[int]] = {}
    for rank, own in entries.items():
        for name, about in (each.raw["process_group"] for each in own):
            found.setdefault(name, set()).update(entries if about == "default_pg" else {rank})
    return found


def _first_difference(entries: dict[int, list[Entry]], groups: dict[str, set[int]]) -> str | None:
    from torch.distributed.flight_recorder.components.utils import align_trace_from_beginning

    aligned = align_trace_from_beginning({rank: [each.raw for each in own] for rank, own in entries.items()})
    issued: dict[tuple[str, int], dict[int, Entry]] = {}
    for rank, raws in aligned.items():
        for each in (_entry(raw) for raw in raws if not raw["is_p2p"]):
            issued.setdefault((each.raw["process_group"][0], each.sequence), {})[rank] = each
    for (name, _), by_rank in sorted(issued.items(), key=lambda item: min(e.raw["time_created_ns"] for e in item[1].values())):
        (first, one), *others = by_rank.items()
        for rank, each in others:
            if why := _mismatch(one.raw, each.raw, groups[name]):
                return f"rank {first}: {one}; rank {rank}: {each} ({why})"
        absent = sorted(groups[name] & set(entries) - set(by_rank))
        if absent and not all(each.done for each in by_rank.values()):
            return f"rank {first}: {one}; not issued on {', '.join(map(str, absent))}"
    return None


def _mismatch(one: Any, other: Any, ranks: set[int]) -> str:
    """Why two entries do not belong to one collective, in torch's words; "" where they do, however far each has got."""
    from torch.distributed.flight_recorder.components.types import MatchState, Op

    apart = (MatchState.COLLECTIVE_TYPE_MISMATCH, MatchState.SIZE_OR_SYNTAX_MISMATCH, MatchState.COLLECTIVE_DTYPE_MISMATCH)
    try:
        verdict = Op(one, {"": ranks}, "").match(Op(other, {"": ranks}, ""))
    except (AssertionError, IndexError):  # an operation that torch's analysis does not know
        return "" if one["profiling_name"] == other["profiling_name"] else "other operations"
    return str(verdict.culprit) if verdict.state in apart else ""
