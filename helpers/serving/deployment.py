"""Templates for a server that stays: `data/templates/serving`, filled with one's values and checked before they are installed.

`render("vllm.service", model=…, devices="0,1", …)` replaces each `{{field}}` and nothing else. `problems` checks systemd units
(`systemd-analyze verify` where there is one), scripts (`bash -n`), docker's options, the flags with the parsers of vLLM and of
the course's server, and that devices, ranks, ports and a container's folders agree.
"""

import configparser
import contextlib
import io
import itertools
import math
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

__all__ = ["problems", "render", "templates"]

TEMPLATES = cluster.TEMPLATES.with_name("serving")
VLLM, COURSE = "vllm.entrypoints.openai.api_server", "torch.distributed.run"
_PARSE = (  # vLLM's own parser, in a process of its own: importing it takes long and changes the process
    "import sys; from vllm.entrypoints.launchers.cli_args import make_arg_parser; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])"
)
_NEEDED = ("Unit Description", "Service ExecStart", "Service User", "Service WorkingDirectory", "Install WantedBy")
# options of `docker run` that the templates use
_DOCKER = "--(rm|init|name|gpus|ipc|network|volume|env|health-cmd|health-start-period|stop-timeout|entrypoint)"
_ELSEWHERE = ("is not executable", "Failed to resolve user", "Unit checked.service")  # true of the machine it is for


def templates() -> list[str]:
    """The names of the templates."""
    return cluster.templates(TEMPLATES)


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
        joined = re.sub(r"\\\n\s*", "", text)
        wrong = cluster.bash_problems(text) if text.startswith("#!") else _unit(text, joined)
        found += [*cluster.unfilled(text), *wrong]
        ports |= set(re.findall(r"(?:--port |127\.0\.0\.1:)(\d+)", text))
        if start := re.search(r"^(?:ExecStart=|exec )(.*)", joined, re.MULTILINE):
            found += _command(start[1], text)
            if start[1].startswith("docker ") and not wrong:
                found += _container(shlex.split(start[1]))
    if len(ports) > 1:
        found.append(f"different ports: {', '.join(sorted(ports))}")
    return found


def _command(line: str, text: str) -> list[str]:
    """What is wrong with the flags of a server, alone and beside the devices."""
    _, _, after = line.partition(" -m ")
    module, *arguments = after.split() or [""]
    if module == VLLM:
        if not available():
            done = subprocess.run([sys.executable, "-c", _PARSE, *arguments], capture_output=True, text=True)
            if done.returncode:
                return [f"vLLM does not take this: {(done.stderr.strip().splitlines() or ['(it says nothing)'])[-1]}"]
        ranks = math.prod(map(int, re.findall(r"--(?:tensor|data)-parallel-size (\d+)", line)))
    elif module == COURSE:
        from torch.distributed.run import get_args_parser

        from helpers import inference_server

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                asked = get_args_parser().parse_args(arguments)
                inference_server.parse(asked.training_script_args)
        except SystemExit:
            return [f"the command line is not taken: {said.getvalue().strip().splitlines()[-1]}"]
        ranks = int(asked.nproc_per_node)
    else:
        return [f"the command starts neither of {VLLM}, {COURSE}: {line}"]
    devices = re.search(r"(?:CUDA_VISIBLE_DEVICES=|\"device=)([\d,]+)", text)
    count = len(set(devices[1].split(","))) if devices else 0
    return [] if count == ranks else [f"{count} GPUs are given to {ranks} ranks; each needs one of its own"]


def _container(words: list[str]) -> list[str]:
    """What is wrong with docker's options, which end where the server's (-m) begin; the model must lie in the container."""
    end = [*words, "-m"].index("-m")
    options, arguments = words[:end], words[end:]
    found = [f"no option of docker's here: {each}" for each in options if each[:1] == "-" and not re.fullmatch(_DOCKER, each)]
    for given in (value for option, value in itertools.pairwise(options) if option == "--volume"):
        here, _, there = given.removesuffix(":ro").partition(":")
        if not here.startswith("/") or not re.fullmatch("/[^:]+", there):
            found.append(f"--volume {given}: needs a whole path here and a whole path in the container: /srv/model:/model:ro")
        elif there not in arguments:
            found.append(f"the server is not told of {there}, where the container has {here}")
    return found


def _unit(text: str, joined: str) -> list[str]:
    """What is wrong with a systemd unit as such; `joined` has each of its lines whole."""
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=", comment_prefixes=("#", ";"))
    # keys keep their capitals
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    try:
        unit.read_string(joined)
    except configparser.Error as error:
        return [f"no unit of systemd: {' '.join(str(error).split())}"]
    found = [f"[{section}] has no {key}" for section, key in map(str.split, _NEEDED) if not unit.has_option(section, key)]
    program = unit.get("Service", "ExecStart", fallback="/").split()[0]
    if not program.startswith("/"):
        found.append(f"ExecStart must begin with the whole path of a program: {program}")
    if found or not shutil.which("systemd-analyze"):
        return found
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checked.service"
        file.write_text(text, encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    said = [line.partition("checked.service")[2].lstrip(":") for line in done.stderr.splitlines() if _is_about(line)]
    return [f"systemd: {each}" for each in said]


def _is_about(line: str) -> bool:
    """Whether a line of systemd's is about the unit, and not about the machine on which it is looked at."""
    return "checked.service" in line and not any(each in line for each in _ELSEWHERE)
