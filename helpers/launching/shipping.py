"""A function and its arguments become bytes that a rank can run, with the source lines of their cells.

cloudpickle ships by value what a notebook defines, but (since 3.1.2) it renames every code object's file, and a cell's own
file name holds the kernel's process id. Here each cell becomes `<cell 5>`, the same on every run, and its lines travel along.
"""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _internals


def cell_name(filename: str) -> str:
    """`<cell 5>` for the file name IPython gave the cell executed as number 5; any other name unchanged."""
    shell = _shell()
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return f"<cell {number}>" if number is not None else filename


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


class _Pickler(cloudpickle.Pickler):
    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file belongs to the process that opened it")  # cloudpickle would ship its content
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        name = cell_name(obj.co_filename)
        self.sources.setdefault(name, linecache.getlines(obj.co_filename))
        rebuild, arguments = _internals._code_reduce(obj)
        return rebuild, tuple(name if argument in ("<dynamic-code>", obj.co_filename) else argument for argument in arguments)


def dumps(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes. Raises TypeError that names the argument, global or closure variable that cannot be shipped."""
    pickler = _Pickler()
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        where, value = next(_culprits(fn, args, kwargs), (f"something that {_name(fn)} refers to", None))
        kind = f" (a {type(value).__name__})" if value is not None else ""
        raise TypeError(
            f"{where}{kind} cannot be shipped to the ranks: {error}. Ranks are other processes: give them plain values, arrays "
            f"or paths, and open files, locks, generators and connections inside the function."
        ) from None
    _remember(pickler.sources)
    return pickle.dumps((pickler.sources, pickler.buffer.getvalue()))


def loads(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call as it was shipped; its cells' lines are known to tracebacks from here on."""
    sources, call = pickle.loads(data)
    _remember(sources)
    return pickle.loads(call)


def _remember(sources: dict[str, list[str]]) -> None:
    for name, lines in sources.items():
        if lines and name.startswith("<"):
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _ships(value: Any) -> bool:
    try:
        _Pickler().dump(value)
    except Exception:
        return False
    return True


def _culprits(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(where, value) of the innermost things that do not pickle, arguments first."""
    try:
        names = list(inspect.signature(fn).bind(*args, **kwargs).arguments.items())
    except (TypeError, ValueError):
        names = [*((f"{i}", value) for i, value in enumerate(args)), *kwargs.items()]
    for name, value in names:
        yield from _inside(f"the argument {name!r}", value)
    yield from _inside_function(fn, set())


def _inside_function(fn: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(fn, types.FunctionType) or id(fn) in seen:
        return
    seen.add(id(fn))
    variables = inspect.getclosurevars(fn)
    for kind, found in (("the variable", variables.nonlocals), ("the global variable", variables.globals)):
        for name, value in found.items():
            if isinstance(value, types.FunctionType):
                yield from _inside_function(value, seen)
            else:
                yield from _inside(f"{kind} {name!r} that {fn.__name__} uses", value)


def _inside(where: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    if _ships(value):
        return
    children: list[tuple[str, Any]] = []
    if depth and isinstance(value, dict):
        children = [(f"{where}, key {key!r}", child) for key, child in value.items()]
    elif depth and isinstance(value, (list, tuple, set)):
        children = [(f"{where}, item {index}", child) for index, child in enumerate(value)]
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        children = [(f"{where}, attribute {name!r}", child) for name, child in vars(value).items()]
    for name, child in children:
        yield from _inside(name, child, depth - 1)
    yield where, value
