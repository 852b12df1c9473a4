"""The repository keeps its promises: one list of versions, documented commands, pinned names, floors, nobody's own folders."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import count_lines
import pytest
import yaml
from setuptools import find_packages

import helpers

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Other people's notebooks rely on these: a name leaves or changes its meaning only with a new major version.
PUBLIC = {
    "check",
    "claims",
    "corpus",
    "data_parallel",
    "diagnose",
    "diagnosis",
    "equivalence",
    "exercises",
    "export_job",
    "flight_recorder",
    "grouping",
    "hardware",
    "hint",
    "launch",
    "LaunchError",
    "launching",
    "load_generator",
    "machine",
    "measuring",
    "models",
    "offload",
    "pipeline",
    "plots",
    "predict",
    "progress",
    "RankDied",
    "RankFailed",
    "RanksHung",
    "Run",
    "server_process",
    "serving",
    "shard_plan",
    "solution",
    "verdict",
    "widgets",
}
PUBLIC_OF_MODULES = {
    "helpers.machine": {
        "Gpu",
        "Machine",
        "Placement",
        "cores",
        "describe",
        "device",
        "gpus",
        "memory",
        "placement",
        "torch_cuda",
    },
    "helpers.preflight": {"Check", "checks", "main"},
    "helpers.serving": {
        "Facts",
        "Server",
        "ServingFailed",
        "Settings",
        "available",
        "check",
        "kv_cache_tokens",
        "serve",
    },
    "helpers.launching": {"LaunchError", "RankDied", "RankFailed", "RanksHung", "Run", "launch"},
}
FLOORS = [
    {"machine", "hardware", "record"},
    {"launching", "measuring", "models"},
    {"predict"},
    {
        "batching",
        "calibration",
        "data_parallel",
        "inference_server",
        "load_generator",
        "server_process",
        "shard_plan",
        "pipeline",
        "grouping",
        "topology",
        "offload",
        "serving",
        "two_nodes",
    },
    {"equivalence", "diagnosis", "flight_recorder", "claims", "exercises"},
    {"plots", "widgets"},
]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def modules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages([str(ROOT / "helpers")], "helpers.")]


def targets() -> dict[str, str]:
    """Targets of the Makefile that people call, with their one line of help."""
    return dict(re.findall(r"^([a-z-]+):.*?## (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_conda_installs_what_pyproject_lists():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, by_pip = conda["dependencies"]
    assert python == f"python{PYPROJECT['project']['requires-python']}"
    assert pip == "pip"
    assert by_pip == {"pip": ["-e .[dev]"]}
    assert "dev" in PYPROJECT["project"]["optional-dependencies"]


def test_every_package_is_installed():
    """Folders with modules in them are packages: one without __init__.py would be left out of an installation."""
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "helpers").rglob("*.py")}
    assert set(find_packages(str(ROOT), **PYPROJECT["tool"]["setuptools"]["packages"]["find"])) == found


def test_every_command_is_explained_and_every_command_mentioned_exists():
    wanted = {"lab", "test", "notebooks", "book", "bench", "check", "doctor", "gpu-check", "fresh", "clean"}
    assert wanted <= set(targets())
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, meaning in targets().items():
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", shown, re.MULTILINE)
    phony = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    assert set(targets()) <= phony
    for path in (path for path in tracked() if path.suffix in (".md", ".py", ".yml")):
        for line in path.read_text().splitlines():
            mentioned = re.findall(r"`make ([a-z-]+)", line) + re.findall(r"^    make ([a-z-]+)", line)
            assert set(mentioned) <= phony, f"{path.name}: {line}"


def test_the_readme_leads_with_both_commands():
    readme = (ROOT / "README.md").read_text()
    assert "make lab" in readme
    assert "make test" in readme


def test_ci_calls_what_people_call():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert any(".ci/run" in step for step in steps)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
    script = (ROOT / ".ci" / "run").read_text()
    assert "try_lab.py" in script
    assert re.search(r"^make test$", script, re.MULTILINE)


def test_no_file_names_one_machines_folders_or_a_registrys_host():
    hosts = [
        ".".join(parts)
        for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch"), ("registry", "npmjs"), ("deb", "debian"))
    ]
    strange = re.compile(rf"(?<![\w.<])(?:/home/|/root/|/Users/|{re.escape(str(ROOT))}/)[\w.]|" + "|".join(map(re.escape, hosts)))
    found = []
    for path in tracked():
        if path.suffix in (".py", ".md", ".ipynb", ".toml", ".yml", ".yaml", ".csv", ".json", ".sh", ".cfg", "") and path != Path(
            __file__
        ):
            text = path.read_text(errors="replace")
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in strange.finditer(text)]
    assert found == []


def test_public_names_stay():
    assert set(helpers.__all__) >= PUBLIC
    assert set(helpers.__all__) - PUBLIC <= {name.split(".")[1] for name in modules()}
    assert dir(helpers) == helpers.__all__
    for name, wanted in PUBLIC_OF_MODULES.items():
        assert set(importlib.import_module(name).__all__) == wanted


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"helpers has no 'launhc'; it has .*launch"):
        _ = helpers.launhc


@pytest.mark.parametrize("name", ["helpers", *modules()])
def test_lists_of_public_names_are_sorted_and_true(name):
    source = (
        (ROOT / name.replace(".", "/") / "__init__.py")
        if (ROOT / name.replace(".", "/")).is_dir()
        else ROOT / f"{name.replace('.', '/')}.py"
    )
    if "__all__" not in source.read_text():
        return
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda public: (not public.isupper(), not public[0].isupper(), public)
    )
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert missing == []


def test_importing_helpers_loads_nothing_heavy():
    code = "import sys, helpers; print(sorted({'torch', 'numpy', 'matplotlib', 'transformers', 'psutil'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "[]"


def imports(path: Path) -> set[str]:
    """Modules of helpers that a file imports when it runs (not for type checking alone), by their first name below helpers."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    not_run = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in not_run:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "helpers":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("helpers.")}
    return found


def test_modules_import_from_floors_below_and_never_in_circles():
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    below: dict[str, set[str]] = {}
    for path in (ROOT / "helpers").rglob("*.py"):
        unit = path.relative_to(ROOT / "helpers").parts[0].removesuffix(".py")
        if unit != "__init__":
            below.setdefault(unit, set()).update(imports(path) - {unit})
    upward = [
        f"{unit} imports {name}"
        for unit, names in below.items()
        for name in names
        if unit in floor_of and floor_of.get(name, 0) > floor_of[unit]
    ]
    assert upward == []
    while leaves := [unit for unit in below if not below[unit] & set(below)]:
        for unit in leaves:
            del below[unit]
    assert below == {}, "these import each other in a circle"


def test_lines_of_code_are_counted_without_blanks_comments_and_docstrings():
    module = '"""Module.\n\nMore.\n"""\n\n# comment\n'
    string = 'x = """a\nb"""  # two lines of code\n\n\n'
    function = 'def f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert count_lines.code_lines(module) == 0
    assert count_lines.code_lines(string) == 2
    assert count_lines.code_lines(module + string + function) == 6


def test_gpu_tests_skip_with_a_reason_where_there_is_none():
    environment = {**os.environ, "WORKSHOP_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
    assert "no NVIDIA GPU here, or it is hidden" in done.stdout
    assert re.search(r"^\d+ skipped", done.stdout, re.MULTILINE)


def test_what_needs_a_gpu_lies_where_the_gpu_check_looks():
    """`make test` leaves the mark `gpu` out, and tools/gpu_check.py runs tests/gpu: elsewhere no command would run it."""
    marked = [
        path.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu"
    ]
    assert set(marked) == {"gpu"}
    assert '"tests/gpu"' in (ROOT / "tools" / "gpu_check.py").read_text()
