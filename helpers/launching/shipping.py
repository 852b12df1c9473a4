"""A function and its arguments become bytes that a rank can run, with the source lines of their cells; a value comes back.

cloudpickle ships by value what a notebook defines, but (since 3.1.2) it renames every code object's file, and a cell's own
file name holds the kernel's process id. Here each cell becomes `<cell 5>`, the same on every run, and its lines travel along.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import cloudpickle
from cloudpickle import cloudpickle as _internals

FULL = (errno.ENOSPC, errno.EDQUOT)
_shipped: dict[type, str] = {}  # in a rank: the notebook's classes that came with the call, by cloudpickle's name for them


def cell_name(filename: str) -> str:
    """`<cell 5>` for the file name IPython gave the cell executed as number 5; any other name unchanged."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(filename)
    return f"<cell {number}>" if number is not None else filename


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, list[str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file belongs to the process that opened it")  # cloudpickle would ship its content
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  # torch's settings: cloudpickle knows plain modules only
        if isinstance(obj, type) and obj in _shipped:
            return _same_class, (_shipped[obj],)  # by value it would replace the methods of the notebook's own
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        name = cell_name(obj.co_filename)
        self.sources.setdefault(name, linecache.getlines(obj.co_filename))
        rebuild, arguments = _internals._code_reduce(obj)
        return rebuild, tuple(name if argument in ("<dynamic-code>", obj.co_filename) else argument for argument in arguments)


def _same_class(tracked: str) -> type:
    return _internals._DYNAMIC_CLASS_TRACKER_BY_ID[tracked]


def dumps(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes. Raises TypeError that names the argument, global or closure variable that cannot be shipped."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        where, value = next(_culprits(fn, args, kwargs), (f"something that {name_of(fn)} refers to", None))
        kind = f" (a {type(value).__name__})" if value is not None else ""
        raise TypeError(
            f"{where}{kind} cannot be shipped to the ranks: {error}. Ranks are other processes: give them plain values, arrays "
            f"or paths, and open files, locks, generators and connections inside the function."
        ) from None
    _remember(pickler.sources)
    return pickle.dumps((pickler.sources, buffer.getvalue()))


def loads(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """In a rank: the call as it was shipped. From here on tracebacks know its cells' lines, and plain pickle its classes."""
    sources, call = pickle.loads(data)
    _remember(sources)
    loaded = pickle.loads(call)
    _shipped.update((c, name) for c, name in _internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.items() if isinstance(c, type))
    for shipped in _shipped:
        if shipped.__module__ == "__main__" and shipped.__qualname__ == shipped.__name__:
            setattr(sys.modules["__main__"], shipped.__name__, shipped)
    return loaded


def dump_value(value: Any, file: BinaryIO) -> None:
    """In a rank: write a value so that instances of the notebook's classes come back as such."""
    _Pickler(file).dump(value)


def write_where_room(folders: Sequence[str], name: str, write: Callable[[BinaryIO], object]) -> None:
    """`write` into the file `name` in the first folder whose file system has room. Raises OSError where none has."""
    for folder in folders:
        path = os.path.join(folder, name)
        try:
            with open(path, "wb") as file:
                write(file)
            return
        except OSError as error:
            os.unlink(path)
            if error.errno not in FULL:
                raise
    raise OSError(errno.ENOSPC, f"no room for what is shipped between notebook and ranks in {' or '.join(folders)}")


def find(folders: Sequence[str], name: str) -> str:
    """The path of what `write_where_room` wrote."""
    return next(path for folder in folders if os.path.exists(path := os.path.join(folder, name)))


def name_of(fn: Any) -> str:
    """What a person calls this function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _remember(sources: dict[str, list[str]]) -> None:
    for name, lines in sources.items():
        if lines and name.startswith("<"):
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _ships(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(value)
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
        yield from inside(f"the argument {name!r}", value)
    while isinstance(fn, functools.partial):
        yield from inside(f"an argument of the partial {name_of(fn)}", (*fn.args, *fn.keywords.values()))
        fn = fn.func
    yield from _inside_function(getattr(fn, "__func__", fn), set())
    if not isinstance(fn, types.FunctionType):
        yield from inside(name_of(fn), getattr(fn, "__self__", fn))


def _inside_function(fn: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if not isinstance(fn, types.FunctionType) or id(fn) in seen:
        return
    seen.add(id(fn))
    enclosed = inspect.getclosurevars(fn).nonlocals
    used = {name: fn.__globals__[name] for name in _internals._extract_code_globals(fn.__code__) if name in fn.__globals__}
    for kind, found in (("the variable", enclosed), ("the global variable", used)):
        for name, value in found.items():
            if isinstance(value, types.FunctionType):
                yield from _inside_function(value, seen)
            else:
                yield from inside(f"{kind} {name!r} that {fn.__name__} uses", value)


def inside(where: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """(where, value) of the innermost parts of `value` that do not pickle."""
    if _ships(value):
        return
    children: list[tuple[str, Any]] = []
    if depth and isinstance(value, dict):
        children = [(f"{where}, key {key!r}", child) for key, child in value.items()]
    elif depth and isinstance(value, (list, tuple, set)):
        children = [(f"{where}, item {index}", child) for index, child in enumerate(value)]
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        children = [(f"{where}, attribute {name!r}", child) for name, child in vars(value).items()]
    for name, child in children:
        yield from inside(name, child, depth - 1)
    yield where, value
