"""Names the learner's line behind a call. Needs no torch: ranks and the kernel both use it."""

import itertools
import linecache
import os
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

_LEARNER_NAMES = ("<cell ", "<stdin>", "<string>", "<ipython-input", "<dynamic-code>")
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "torchinductor_")
_LIBRARY_FOLDERS = tuple(
    str(folder) + os.sep
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1])
    for folder in (path, Path(path).resolve())  # code names its file as it was found, through links or not
)
_OWN_FOLDERS = _LIBRARY_FOLDERS[-2:]  # of `helpers`
_FRAMES = 6  # from the innermost of the learner's outward, that are looked at for its callers
_LONGEST_LINE = 120  # characters of source text that are kept


def describe_line(filename: str, line: int) -> str:
    """Return ``"cell 5, line 7: dist.all_reduce(x)"`` for a cell shipped as ``<cell 5>``, ``"job.py, line 7: …"`` for a file.

    The text of the line comes from `linecache` and is left out where that has none.
    """
    name = filename[1:-1] if filename.startswith("<") else os.path.basename(filename)
    text = linecache.getline(filename, line).split("  #")[0].strip()  # without the comment at its end
    if len(text) > _LONGEST_LINE:
        text = text[: _LONGEST_LINE - 1] + "…"
    return f"{name}, line {line}: {text}" if text else f"{name}, line {line}"


@cache
def is_learner_file(filename: str) -> bool:
    """Say whether code with this file name is the learner's: not the standard library, an installed package or `helpers`."""
    if filename.startswith("<"):
        return filename.startswith(_LEARNER_NAMES)
    path = os.path.abspath(filename)
    return not (path.startswith(_LIBRARY_FOLDERS) or any(part in path for part in _LIBRARY_PARTS))


@cache
def _describe_place(filename: str, code: CodeType, line: int, instruction: int) -> str:
    """Describe the line; of one with two branches or statements, only the call that `instruction` makes."""
    described = describe_line(filename, line)  # codes of two cells may be equal
    if " else " in described or "; " in described:
        first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
        if first == last and (call := linecache.getline(filename, line).encode()[start:end].decode()):
            return f"{described.partition(': ')[0]}: {call}"
    return described


def learner_lines(frame: FrameType | None) -> list[str]:
    """Return the descriptions of the learner's lines at or outside `frame`: the innermost, where there is one, then its callers.

    To cost little, callers are sought in a few frames only, and not beyond one of `helpers`.
    """
    found: list[str] = []
    left = _FRAMES
    while frame is not None and left:
        filename = frame.f_code.co_filename
        if is_learner_file(filename):
            found.append(_describe_place(filename, frame.f_code, frame.f_lineno, frame.f_lasti))
        elif found and filename.startswith(_OWN_FOLDERS):
            break
        left -= bool(found)
        frame = frame.f_back
    return found
