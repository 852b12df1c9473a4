"""`export_job`: the job of a cell as a script that torchrun starts, on one machine or many."""

from __future__ import annotations

import ast
import base64
import builtins
import dis
import inspect
import linecache
import os
import pickle
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MAIN = """

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["HELPERS_DEVICE"] = f"cuda:{{local_rank}}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local_rank)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
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
    parts: dict[str, str] = {}
    _add(fn.__name__, fn, parts)
    given = {f"argument_{i}": value for i, value in enumerate(args)} | {
        f"argument_{name}": value for name, value in kwargs.items()
    }
    for name, value in given.items():
        _add(name, value, parts)
    call = ", ".join([f"argument_{i}" for i in range(len(args))] + [f"{name}=argument_{name}" for name in kwargs])
    imports = sorted({part for part in parts.values() if part.startswith(("import ", "from "))} | set(_NEEDED))
    text = f'"""A notebook\'s job: torchrun --nproc-per-node 2 {Path(path).name}"""\n\n' + "\n".join(imports) + "\n"
    before = ""
    for part in parts.values():  # in this order: what a definition needs stands above it
        if not part.startswith(("import ", "from ")):
            alone = part.startswith(("def ", "class ", "@")), before.startswith(("def ", "class ", "@"))
            text += ("\n\n" if any(alone) else "\n" if not before else "") + part + "\n"
            before = part
    Path(path).write_text(text + _MAIN.format(call=f"{fn.__name__}({call})"), encoding="utf-8")
    return Path(path)


_NEEDED = ("import os", "import torch", "import torch.distributed as dist")


def _add(name: str, value: Any, parts: dict[str, str]) -> None:
    """Add what `name` stands for, and before it all that its source refers to."""
    if isinstance(value, types.ModuleType):
        plain = f"import {value.__name__}"
        parent, _, last = value.__name__.rpartition(".")
        if name == value.__name__.partition(".")[0]:
            return _write(name, plain, parts)
        return _write(name, f"from {parent} import {last}" if parent and last == name else f"{plain} as {name}", parts)
    module = getattr(value, "__module__", None)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and module not in (None, "__main__"):
        own = value.__name__
        return _write(name, f"from {module} import {own}" + (f" as {name}" if own != name else ""), parts)
    if not isinstance(value, (type, types.FunctionType)):
        if type(value).__module__ == "__main__":
            _add(type(value).__name__, type(value), parts)
        return _write(name, _value(name, value), parts)
    if name in parts:
        return _write(name, _source(value), parts)
    parts[name] = ""  # it may refer to itself
    for used, found in _used(value):
        _add(used, found, parts)
    del parts[name]
    return _write(name, _source(value), parts)


def _source(value: Any) -> str:
    if isinstance(value, type):
        return _class_source(value)
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise TypeError(f"{value!r} has no source that could be written into a script") from None


def _class_source(value: type) -> str:
    """The class statement; `inspect` does not find those of notebook cells, their methods know the cell."""
    for method in filter(_is_function, vars(value).values()):
        text = "".join(linecache.getlines(method.__code__.co_filename))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise TypeError(f"the source of class {value.__name__} was not found: a class needs a method of its own to be exported")


def _write(name: str, text: str, parts: dict[str, str]) -> None:
    if parts.get(name) not in (None, "", text):
        raise ValueError(f"{name!r} stands for two different things in what the job uses; give one of them another name")
    parts.setdefault(name, text)


def _value(name: str, value: Any) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return f"{name} = {text}"
    except (ValueError, SyntaxError, TypeError, MemoryError):
        pass
    try:
        data = base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:
        raise TypeError(f"{name!r} (a {type(value).__name__}) cannot be written into a script: {error}") from None
    return f"{name} = __import__('pickle').loads(__import__('base64').b64decode({data!r}))  # {type(value).__name__}"


def _used(value: Any) -> Iterator[tuple[str, Any]]:
    """The globals and closure variables that a function or class of the notebook refers to, by name."""
    functions = [value] if isinstance(value, types.FunctionType) else list(filter(_is_function, vars(value).values()))
    functions = [inspect.unwrap(function) for function in functions]
    namespace: dict[str, Any] = dict(functions[0].__globals__ if functions else vars(sys.modules[value.__module__]))
    for function in functions:
        namespace.update(inspect.getclosurevars(function).nonlocals)
    names = [name for function in functions for name in _names(function.__code__)]
    names += [node.id for node in _outside_bodies(ast.parse(_source(value)).body[0]) if isinstance(node, ast.Name)]
    for name in dict.fromkeys(names):
        if name in namespace and not hasattr(builtins, name):
            yield name, namespace[name]


def _outside_bodies(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated when the definition is: bases, decorators, defaults, annotations, statements of a class."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.FunctionDef) and child in node.body):
            yield from _outside_bodies(child)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _names(code: types.CodeType) -> list[str]:
    loads = (step for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    names = [*(step.argval for step in loads), *code.co_freevars]  # co_names has names of attributes too
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return list(dict.fromkeys(names))
