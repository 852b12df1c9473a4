"""A function and its arguments become bytes that a rank can run, with the source lines of their cells; a value comes back.

cloudpickle ships by value what a notebook defines, but (since 3.1.2) it renames every code object's file, and a cell's own
file name holds the kernel's process id. Here each cell becomes `<cell 5>`, the same on every run, and its lines travel along.
"""

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

LEVELS = 3  # of containers in which a culprit is looked for
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
        raise TypeError(
            f"{_culprit(fn, args, kwargs)} cannot be shipped to the ranks: {error}. Ranks are other processes: give them plain "
            f"values, arrays or paths, and open files, locks, generators and connections inside the function."
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


def write_where_room(folders: Sequence[str], name: str, write: Callable[[BinaryIO], object]) -> str:
    """`write` the file `name` in the first folder whose file system has room; its path. Raises OSError where none has."""
    for path in [os.path.join(folder, name) for folder in folders]:
        try:
            with open(path, "wb") as file:
                write(file)
            return path
        except OSError as error:
            os.unlink(path)
            if error.errno not in FULL:
                raise
    raise OSError(errno.ENOSPC, f"no room for what is shipped between notebook and ranks in {' or '.join(folders)}")


def name_of(fn: Any) -> str:
    """What a person calls this function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _remember(sources: dict[str, list[str]]) -> None:
    for name, lines in sources.items():
        if lines and name.startswith("<"):
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _culprit(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What of a call does not pickle, arguments first."""
    try:
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # some built-in functions have no signature
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    for name, value in given.items():
        if found := culprit(f"the argument {name!r}", value):
            return found
    return culprit(name_of(fn), fn) or f"something that {name_of(fn)} refers to"


def culprit(where: str, value: Any) -> str:
    """Name and kind of the innermost part of `value`, which lies `where`, that does not pickle; empty where all does."""
    found = _innermost(where, value, LEVELS, set())
    return f"{found[0]} (a {type(found[1]).__name__})" if found else ""


def _innermost(where: str, value: Any, depth: int, seen: set[int]) -> tuple[str, Any] | None:
    try:
        _Pickler(io.BytesIO()).dump(value)
        return None
    except Exception:
        if isinstance(value, (types.FunctionType, type)):
            seen.add(id(value))  # it may refer to itself
            depth = LEVELS + 1
    parts = list(_parts(where, value)) if depth else []
    deeper = (_innermost(name, part, depth - 1, seen) for name, part in parts if id(part) not in seen)
    found = next(filter(None, deeper), None)
    return found or (None if any(id(part) in seen for _, part in parts) else (where, value))


def _parts(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` consists of or refers to, and where that lies."""
    if isinstance(value, types.FunctionType):
        used = {
            name: value.__globals__[name]
            for name in _internals._extract_code_globals(value.__code__)
            if name in value.__globals__
        }
        enclosed = inspect.getclosurevars(value).nonlocals
        for kind, variables in (("variable", enclosed), ("global variable", used)):
            yield from ((f"the {kind} {name!r} that {value.__name__} uses", part) for name, part in variables.items())
        for name, parameter in inspect.signature(value, follow_wrapped=False).parameters.items():
            yield f"the default of the parameter {name!r} of {value.__name__}", parameter.default
    elif isinstance(value, type):
        yield from ((f"{where}, attribute {name!r}", part) for name, part in _internals._class_getstate(value)[0].items())
    elif isinstance(value, functools.partial):
        yield f"an argument of the partial {name_of(value)}", (*value.args, *value.keywords.values())
        yield name_of(value), value.func
    elif isinstance(value, types.MethodType):
        yield from ((where, value.__func__), (where, value.__self__))
    elif isinstance(value, dict):
        yield from ((f"{where}, key {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set)):
        yield from ((f"{where}, item {index}", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
        yield from ((f"{where}, attribute {name!r}", part) for name, part in vars(value).items())
        yield f"the class of {where}", type(value)
