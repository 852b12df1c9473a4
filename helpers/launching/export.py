"""`export_job`: the job of a cell as a script that torchrun starts, on one machine or many."""

import ast
import base64
import contextlib
import inspect
import io
import linecache
import os
import pickle
import symtable
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_OF_IPYTHON = {"exit", "quit", "open", "get_ipython"}  # names that it puts into every notebook
_NEEDED = ("import os", "import torch", "import torch.distributed as dist")
_MAIN = """

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["HELPERS_DEVICE"] = f"cuda:{{local_rank}}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local_rank)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    torch.manual_seed(0)
    result = {call}
    print(f"rank {{dist.get_rank()}} returned {{result!r}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def export_job(fn: Callable[..., Any], *args: Any, path: str | os.PathLike[str], **kwargs: Any) -> Path:
    """Write `fn(*args, **kwargs)` with all it uses from the notebook to the script `path`; returns the path.

    The script holds the source of `fn` and of the functions and classes it uses, the imports, and the values of variables.
    Start it with `torchrun --nproc-per-node 2 job.py`; each rank prints what its function returned.

    Raises TypeError for what has no source (a lambda, a built-in function) or cannot be written down, ValueError where two
    things of the notebook go by one name.
    """
    if not isinstance(fn, types.FunctionType) or fn.__name__ == "<lambda>":
        raise TypeError(f"export_job needs a function with a name and a source, not {fn!r}: write it with def")
    inspect.signature(fn).bind(*args, **kwargs)
    given = {f"argument_{name}": value for name, value in (*enumerate(args), *kwargs.items())}
    parts: dict[str, str] = {}
    for name, value in {fn.__name__: fn, **given}.items():
        _add(name, value, parts)
    call = ", ".join([f"argument_{i}" for i in range(len(args))] + [f"{name}=argument_{name}" for name in kwargs])
    imports = {part for part in parts.values() if part.startswith(("import ", "from "))}
    text = "\n".join([f'"""A notebook\'s job: torchrun --nproc-per-node 2 {Path(path).name}"""\n', *sorted(imports | {*_NEEDED})])
    for part in parts.values():  # in this order: what a definition needs stands above it
        if part not in imports:
            text += f"\n\n\n{part}" if part.startswith(("def ", "class ", "@")) else f"\n\n{part}"
    Path(path).write_text(f"{text}\n{_MAIN.format(call=f'{fn.__name__}({call})')}", encoding="utf-8")
    return Path(path)


def _add(name: str, value: Any, parts: dict[str, str]) -> None:
    """Add what `name` stands for, and before it all that its source refers to."""
    own = isinstance(value, (type, types.FunctionType)) and value.__module__ in (None, "__main__")
    text = _source(value) if own else _import(name, value) or _value(name, value)
    if name in parts:
        if parts[name] != text:
            raise ValueError(f"{name!r} stands for two different things in what the job uses; give one of them another name")
        return
    parts[name] = text  # it may refer to itself
    for used, found in _used(value, text) if own else _classes(value):
        _add(used, found, parts)
    parts[name] = parts.pop(name)  # behind what it needs


def _import(name: str, value: Any) -> str | None:
    """The statement that imports it under this name; None for what lives in the notebook."""
    if isinstance(value, types.ModuleType):
        parent, _, last = value.__name__.rpartition(".")
        if parent and last == name:
            return f"from {parent} import {last}"
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and value.__module__:
        return f"from {value.__module__} import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    return None


def _source(value: Any) -> str:
    if isinstance(value, type):
        return _class_source(value)
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise TypeError(f"{value!r} has no source that could be written into a script") from None


def _class_source(value: type) -> str:
    """The class statement; `inspect` does not find those of notebook cells, their methods know the cell."""
    for method in _functions(value):
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise TypeError(f"the source of class {value.__name__} was not found: a class needs a method of its own to be exported")


def _functions(value: Any) -> list[types.FunctionType]:
    """The function itself, or the methods of a class."""
    functions = vars(value).values() if isinstance(value, type) else [value]
    return [inspect.unwrap(function) for function in functions if isinstance(function, types.FunctionType)]


def _value(name: str, value: Any) -> str:
    text = repr(value)
    with contextlib.suppress(Exception):  # it is no literal
        if ast.literal_eval(text) == value:
            return f"{name} = {text}"
    try:
        data = base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:
        raise TypeError(f"{name!r} (a {type(value).__name__}) cannot be written into a script: {error}") from None
    return f"{name} = __import__('pickle').loads(__import__('base64').b64decode({data!r}))  # {type(value).__name__}"


def _used(value: Any, source: str) -> list[tuple[str, Any]]:
    """The globals and closure variables that a function or class of the notebook refers to, by name."""
    functions = _functions(value)
    namespace: dict[str, Any] = dict(functions[0].__globals__) if functions else {}
    for function in functions:
        namespace |= inspect.getclosurevars(function).nonlocals
    found = {name: namespace[name] for name in _free_names(symtable.symtable(source, "<job>", "exec")) if name in namespace}
    places = {name: f"{type(each).__module__} {getattr(each, '__module__', '')}" for name, each in found.items()}
    return [(name, found[name]) for name in found if not (name in _OF_IPYTHON and "IPython" in places[name])]


def _classes(value: Any) -> Iterable[tuple[str, Any]]:
    """The notebook's classes and functions, by name, that are needed to read the pickle of a value."""
    found: dict[str, Any] = {}

    class Noting(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
                found[obj.__name__] = obj
            return NotImplemented

    with contextlib.suppress(Exception):  # a module, or what is imported by its name, is no value
        Noting(io.BytesIO()).dump(value)
    return found.items()


def _free_names(table: symtable.SymbolTable) -> Iterator[str]:
    """What this scope and those within it take from outside: in bodies, defaults, decorators, bases, annotations."""
    names = (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    yield from (name for name in names if not (name.startswith("__") and name.endswith("__")))
    for inner in table.get_children():
        yield from _free_names(inner)
