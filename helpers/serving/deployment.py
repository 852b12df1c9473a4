"""Templates for a server that stays: `data/templates/serving`, filled with one's values and checked before they are installed.

`render("vllm.service", model=…, devices="0,1", …)` replaces each `{{field}}` and nothing else. `problems` checks systemd units
(`systemd-analyze verify` where there is one), scripts (`bash -n`), the flags with the parsers of vLLM and of the course's server,
and that devices, ranks and ports agree.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers import cluster
from helpers.serving.settings import available

__all__ = ["fields", "problems", "render", "templates"]

TEMPLATES = cluster.TEMPLATES.with_name("serving")
_PARSE = (  # vLLM's own parser, in a process of its own: importing it takes long and changes the process
    "import sys; from vllm.entrypoints.launchers.cli_args import make_arg_parser; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])"
)
_SECTIONS = {"Unit": {"Description"}, "Service": {"ExecStart", "User", "WorkingDirectory"}, "Install": {"WantedBy"}}
_SERVERS = ("vllm.entrypoints.openai.api_server", "torch.distributed.run")


def templates() -> list[str]:
    """The names of the templates."""
    return cluster.templates(TEMPLATES)


def fields(name: str) -> list[str]:
    """What a template asks for. Raises ValueError for one that does not exist."""
    return cluster.fields(name, TEMPLATES)


def render(name: str, /, **values: Any) -> str:
    """The template with `values` in its fields; values that it does not ask for are left out, so one set serves all.

    Raises ValueError for a missing value, a number below 1, GPUs that are no list of numbers, or a text that would need quotes.
    """
    return cluster.render(name, TEMPLATES, **values)


def problems(*texts: str) -> list[str]:
    """What is wrong with rendered templates that belong together, each as a sentence; an empty list where nothing is.

    Flags of vLLM are checked where vLLM is installed, which takes as long as importing it.
    """
    found, ports = [], set()
    for text in texts:
        found += cluster.unfilled(text)
        found += cluster.bash_problems(text) if text.startswith("#!") else _unit(text)
        ports |= set(re.findall(r"(?:--port |127\.0\.0\.1:)(\d+)", text))
        try:
            words = _words(text)
        except ValueError as error:
            found.append(str(error))
            continue
        found += _command(words, text) if words else []
    if len(ports) > 1:
        found.append(f"different ports: {', '.join(sorted(ports))}")
    return found


def _words(text: str) -> list[str]:
    """The module that a template starts and its arguments; nothing where it starts no server."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    starts = [line for line in lines if line.startswith(("ExecStart=", "exec "))]
    if not starts:
        return []
    words = shlex.split(starts[0].partition("=")[2] if starts[0].startswith("ExecStart") else starts[0])
    if "-m" not in words or words[words.index("-m") + 1] not in _SERVERS:
        raise ValueError(f"the command starts neither of {', '.join(_SERVERS)}: {starts[0]}")
    return words[words.index("-m") + 1 :]


def _command(words: list[str], text: str) -> list[str]:
    """What is wrong with the flags, alone and beside the devices."""
    module, arguments = words[0], words[1:]
    if module == _SERVERS[0]:
        if not available():
            done = subprocess.run([sys.executable, "-c", _PARSE, *arguments], capture_output=True, text=True)
            if done.returncode:
                return [f"vLLM does not take this: {(done.stderr.strip().splitlines() or ['(it says nothing)'])[-1]}"]
        ranks = _value(arguments, "--tensor-parallel-size") * _value(arguments, "--data-parallel-size")
    else:
        from torch.distributed.run import get_args_parser

        from helpers import inference_server

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                asked = get_args_parser().parse_args(arguments)
                inference_server._options(asked.training_script_args)
        except SystemExit:
            return [f"the command line is not taken: {said.getvalue().strip().splitlines()[-1]}"]
        ranks = int(asked.nproc_per_node)
    devices = re.search(r"(?:CUDA_VISIBLE_DEVICES=|\"device=)([\d,]+)", text)
    count = len(set(devices[1].split(","))) if devices else 0
    return [] if count == ranks else [f"{count} GPUs are given to {ranks} ranks; each needs one of its own"]


def _value(arguments: list[str], flag: str) -> int:
    return int(arguments[arguments.index(flag) + 1]) if flag in arguments else 1


def _unit(text: str) -> list[str]:
    """What is wrong with a systemd unit as such."""
    section, keys, found = "", {name: set[str]() for name in _SECTIONS}, []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif line and not line.startswith(("#", ";")):
            key, sign, value = line.partition("=")
            if not sign or section not in keys:
                found.append(f"not a line of a unit: {line}")
            else:
                keys[section].add(key)
                if key == "ExecStart" and not value.startswith("/"):
                    found.append(f"ExecStart must begin with the whole path of a program: {value.split()[0]}")
    found += [f"[{name}] has no {key}" for name, wanted in _SECTIONS.items() for key in sorted(wanted - keys[name])]
    if found or not shutil.which("systemd-analyze"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checked.service"
        file.write_text(text, encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "checked.service" in line]
    elsewhere = ("is not executable", "Failed to resolve user", "Unit checked.service")  # true of the machine it is for
    return [
        f"systemd: {line.partition('checked.service')[2].lstrip(':')}"
        for line in lines
        if not any(each in line for each in elsewhere)
    ]
