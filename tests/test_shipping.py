"""Functions and values on their way between notebook and ranks, in one process or in a fresh interpreter."""

import enum
import functools
import io
import linecache
import pickle
import subprocess
import sys
import threading
import types

import pytest

from helpers.launching import shipping


def test_a_call_survives_the_way():
    base = 3

    def job(a, *, b):
        return base + a + b

    fn, args, kwargs = shipping.loads(shipping.dumps(job, (1,), {"b": 2}))
    assert fn(*args, **kwargs) == 6


@pytest.mark.usefixtures("cell_5")
def test_a_job_may_say_config_beside_torch_distributed():
    import torch.distributed.config  # a module of a class of its own, which cloudpickle takes along because of the name

    code = "import torch.distributed as dist\ndef job(model):\n    return dist.is_initialized(), model.config\n"
    fn, _, _ = shipping.loads(shipping.dumps(in_a_cell(code)["job"], (), {}))
    assert fn(types.SimpleNamespace(config=7)) == (torch.distributed.is_initialized(), 7)


def in_a_cell(code, name="/tmp/ipykernel_123/456.py"):
    """What `code` defines, as IPython compiles a cell: with its lines known to tracebacks under a name with a process id."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    return namespace


@pytest.fixture
def cell_5(monkeypatch):
    monkeypatch.setattr(shipping, "cell_name", lambda name: "<cell 5>" if name == "/tmp/ipykernel_123/456.py" else name)


@pytest.mark.usefixtures("cell_5")
def test_code_keeps_the_name_and_the_lines_of_its_cell():
    code = "def outer():\n    def inner(x):\n        return 1 / x\n    return [inner(x) for x in [0]]\n"
    data = shipping.dumps(in_a_cell(code)["outer"], (), {})
    linecache.cache.pop("<cell 5>", None)
    fn, _, _ = shipping.loads(data)
    assert fn.__code__.co_filename == "<cell 5>"
    assert b"ipykernel_123" not in data
    with pytest.raises(ZeroDivisionError) as info:
        fn()
    files = [entry.path for entry in info.traceback]
    assert [str(path) for path in files[1:]][-1].endswith("<cell 5>")
    assert linecache.getline("<cell 5>", 3) == "        return 1 / x\n"


def test_outside_a_notebook_files_keep_their_names():
    assert shipping.cell_name(__file__) == __file__
    fn, _, _ = shipping.loads(shipping.dumps(lambda: 1, (), {}))
    assert fn.__code__.co_filename == __file__


FRESH = """
import sys, pickle
from helpers.launching import shipping
fn, args, kwargs = shipping.loads(sys.stdin.buffer.read())
value = fn(*args, **kwargs)
shipping.dump_value(value, sys.stdout.buffer)
"""


def elsewhere(fn, *args):
    """The value of a call in a fresh interpreter, shipped there and back."""
    data = shipping.dumps(fn, args, {})
    return pickle.loads(subprocess.run([sys.executable, "-c", FRESH], input=data, capture_output=True, check=True).stdout)


CLASSES = """
import enum, dataclasses
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Point:
    x: int
    made = 0
    def moved(self):
        Point.made += 1
        return Point(self.x + STEP)
class Sub(Point):
    def moved(self):
        return super().moved()
STEP = 10
def job(point):
    import pickle
    copied = pickle.loads(pickle.dumps(point))
    class Here(Point):
        pass
    return copied.moved(), Sub(1), Colour.RED, Here(3)
"""


def test_classes_of_the_notebook_come_back_as_themselves_and_new_ones_by_value():
    cell = in_a_cell(CLASSES)
    point, moved_by = cell["Point"], cell["Point"].moved
    moved, sub, colour, here = elsewhere(cell["job"], point(1))
    assert type(moved) is point
    assert type(sub) is cell["Sub"]
    assert colour is cell["Colour"].RED
    assert type(here).__bases__ == (point,)
    assert (moved.x, here.x) == (11, 3)
    assert point.moved is moved_by
    assert point.made == 0
    cell["STEP"] = 100
    assert moved.moved().x == 111, "its methods are those of the notebook, which sees its own variables"


def test_functions_come_back_by_value():
    fn = elsewhere(in_a_cell("def job():\n    k = 3\n    return lambda x: x + k")["job"])
    assert fn(1) == 4


def culprit(fn, *args, **kwargs):
    with pytest.raises(TypeError) as info:
        shipping.dumps(fn, args, kwargs)
    return str(info.value)


def test_the_innermost_culprit_is_named():
    lock = threading.Lock()

    def job(first, *rest, **more):
        return first

    assert culprit(job, lock).startswith("the argument 'first' (a lock) cannot be shipped to the ranks: cannot pickle")
    assert culprit(job, 1, 2, [3, lock]).startswith("the argument 'rest', item 1, item 1 (a lock)")
    assert culprit(job, 1, key={"a": lock}).startswith("the argument 'more', key 'key', key 'a' (a lock)")
    assert culprit(job, [[[[[lock]]]]]).startswith("the argument 'first', item 0, item 0, item 0 (a list)")
    assert culprit(functools.partial(job, first=lock)).startswith("an argument of the partial job, item 0 (a lock)")
    with open(__file__) as file:
        assert "open file belongs to the process" in culprit(job, file)


def test_variables_are_found_through_every_function_that_uses_them():
    cell = in_a_cell(
        "import threading\nLOCK = threading.Lock()\n"
        "def used():\n    return [LOCK for _ in 'a']\n"
        "def job():\n    return used()\n"
        "def looks_at_itself():\n    return looks_at_itself, LOCK\n"
    )
    assert culprit(cell["job"]).startswith("the global variable 'LOCK' that used uses (a lock)")
    assert culprit(cell["looks_at_itself"]).startswith("the global variable 'LOCK' that looks_at_itself uses (a lock)")


def test_defaults_of_parameters_and_attributes_of_classes_are_named():
    some = (number for number in range(3))
    assert culprit(lambda a=some: 1).startswith("the default of the parameter 'a' of <lambda> (a generator)")
    cell = in_a_cell(
        "import threading\n"
        "class Counter:\n"
        "    def up(self):\n        Counter.count += 1\n"
        "    count = 0\n"
        "    lock = threading.Lock()\n"
        "def job():\n    return Counter().up()\n"
        "def calls(*, again=0):\n    return called\n"
        "def called():\n    return calls, Counter.lock\n"
        "def made():\n    return Counter()\n"
    )
    lock = "the global variable 'Counter' that {} uses, attribute 'lock' (a lock)"
    assert culprit(cell["job"]).startswith(lock.format("job"))
    assert culprit(cell["calls"]).startswith(lock.format("called"))
    assert culprit(lambda counter: counter, cell["made"]()).startswith(
        "the class of the argument 'counter', attribute 'lock' (a lock)"
    )


def test_memory_files_are_shipped():
    fn, args, _ = shipping.loads(shipping.dumps(lambda f: f.read(), (io.StringIO("text"),), {}))
    assert fn(*args) == "text"


def test_names_for_people():
    class Callable:
        def __call__(self):
            pass

    assert shipping.name_of(functools.partial(functools.partial(len))) == "len"
    assert shipping.name_of(Callable()) == "Callable"
    assert shipping.name_of(lambda: 0) == "<lambda>"


def test_an_error_of_writing_that_is_not_about_room_is_not_hidden(tmp_path):
    def write(file):
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        shipping.write_where_room([str(tmp_path), str(tmp_path)], "value0", write)
    assert list(tmp_path.iterdir()) == []


class Mode(enum.Enum):
    ON = 1


def test_what_is_importable_is_shipped_by_name():
    assert len(pickle.dumps(shipping.loads(shipping.dumps(len, (Mode.ON,), {})))) < 300
