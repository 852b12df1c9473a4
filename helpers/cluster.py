"""Templates for real clusters in `data/templates/cluster`: filled with one's numbers, checked, their launch line taken out.

`render("slurm.sbatch", nodes=4, ranks_per_node=8, …)` replaces each `{{field}}` and nothing else; `problems` checks the
result with `bash -n`, with torchrun's own parser, against the fields of the Kubernetes API that the template uses, and the
flags and numbers of Ray and vLLM against one another.
"""

import math
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from helpers import record

__all__ = ["fields", "launch_line", "problems", "render", "templates"]

TEMPLATES = record.ROOT / "data" / "templates" / "cluster"
_FIELD = re.compile(r"\{\{(\w+)\}\}")
_CORES = {  # Slurm gives a task one core by default, and since 22.05 srun does not take over what sbatch was asked for
    r"^#SBATCH (--exclusive\b|--cpus-per-(task|gpu)=|-c ?\d)": "sbatch is asked for one core: add --exclusive or --cpus-per-task",
    r"^srun .*(--cpus-per-(task|gpu)| -c ?\d)|SRUN_CPUS_PER_TASK=": "srun gives torchrun one core: it needs --cpus-per-task too",
}
_PROGRAMS = ("torchrun ", "vllm ")
_TAKES = {  # of what Ray and vLLM document, what a script may use
    "ray start": ("head", "address", "port", "node-ip-address", "num-gpus", "num-cpus", "block"),
    "vllm serve": (
        "tensor-parallel-size", "pipeline-parallel-size", "distributed-executor-backend", "host", "port", "dtype",
        "max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization",
    ),
}  # fmt: skip


def templates(place: Path = TEMPLATES) -> list[str]:
    """The names of the templates in a folder."""
    return sorted(file.name for file in place.iterdir())


def fields(name: str, place: Path = TEMPLATES) -> list[str]:
    """What a template asks for. Raises ValueError for one that does not exist."""
    if name not in templates(place):
        raise ValueError(f"there is no template {name!r}; there are {', '.join(templates(place))}")
    return sorted(set(_FIELD.findall((place / name).read_text(encoding="utf-8"))))


def render(name: str, place: Path = TEMPLATES, /, **values: Any) -> str:
    """The template with `values` in its fields; values that it does not ask for are left out, so one set serves all.

    Raises ValueError for a missing value, a number below 1 (restarts: 0), or a text that would need quotes.
    """
    asked = fields(name, place)
    if missing := [field for field in asked if field not in values]:
        raise ValueError(f"{name} also asks for {', '.join(missing)}; it takes {', '.join(asked)}")
    for field in asked:
        rule = next(rule for rule in record.data("cluster") if field in rule.get("fields", asked))
        value = values[field]
        if not (isinstance(value, int | str) and re.fullmatch(rule["pattern"], str(value))):
            raise ValueError(f"{field} is {value!r}; it must be {rule['must_be']}")
    return _FIELD.sub(lambda match: str(values[match[1]]), (place / name).read_text(encoding="utf-8"))


def unfilled(text: str) -> list[str]:
    """A sentence for each field that is still there."""
    return [f"{{{{{field}}}}} was not filled in" for field in sorted(set(_FIELD.findall(text)))]


def bash_problems(script: str) -> list[str]:
    """What `bash -n` says about a script."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    return [f"bash: {line}" for line in done.stderr.splitlines()]


def launch_line(text: str) -> str:
    """The command that a rendered template runs on each host (vLLM: on the first), on one line. Raises ValueError for none."""
    for line in _commands(text):
        if line.startswith(_PROGRAMS):
            return line
    raise ValueError("no line starts torchrun or vllm")


def _commands(text: str) -> list[str]:
    """The lines of a script, continued ones joined, without what stands before a command."""
    return [line.strip().removeprefix("exec ") for line in re.sub(r"\\\n\s*", "", text).splitlines()]


def problems(text: str) -> list[str]:
    """What is wrong with a rendered template, each as a sentence; an empty list where nothing is."""
    found, scripts = unfilled(text), [text]
    if text.startswith("#!"):
        scripts += re.findall(r"bash -euc '\n(.*?)\n'", text, re.DOTALL)
        sizes = re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
        ranks = re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", text, re.MULTILINE)
        if "#SBATCH" in text:
            found += [sentence for pattern, sentence in _CORES.items() if not re.search(pattern, text, re.MULTILINE)]
    else:
        try:
            pages = {page.get("kind"): page for page in yaml.safe_load_all(text)}
        except (yaml.YAMLError, AttributeError) as error:
            return [*found, f"not YAML: {error}"]
        found += _api_problems(pages)
        if found:
            return found
        job = pages["Job"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        scripts, sizes = container["args"], [job["completions"], job["parallelism"]]
        ranks = [container["resources"]["limits"]["nvidia.com/gpu"]]
        if not pages["Service"]["metadata"]["name"] == job["template"]["spec"]["subdomain"] == pages["Job"]["metadata"]["name"]:
            found.append("Service, subdomain and Job have different names: no pod would find pod 0")
    found += [problem for script in scripts for problem in bash_problems(script)]
    try:
        line = launch_line(scripts[-1])
        if line.startswith("vllm "):
            return found + _serves(scripts[-1])
        return found + _launches(line, {int(size) for size in sizes}, {int(count) for count in ranks})
    except ValueError as error:
        return [*found, str(error)]


def _api_problems(pages: Mapping[str, Any]) -> list[str]:
    """Where the pages of a Kubernetes file, by kind, are not as the API has them."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    found = []
    for kind, schema in record.data("kubernetes").items():
        if kind not in pages:
            found.append(f"no {kind}")
            continue
        errors = Draft202012Validator(schema).iter_errors(pages[kind])
        found += [f"{error.json_path.replace('$', kind, 1)}: {error.message}" for error in errors]
    return found


def _launches(line: str, sizes: set[int], ranks: set[int]) -> list[str]:
    """What is wrong with a launch line, alone and beside the hosts and GPUs that the template asks the cluster for."""
    from torch.distributed.run import get_args_parser

    try:
        asked = get_args_parser().parse_args(shlex.split(line)[1:])
    except SystemExit:
        return [f"torchrun does not take: {line}"]
    fewest, _, limit = asked.nnodes.partition(":")
    numbers = [fewest, limit or fewest, str(asked.nproc_per_node)]
    if not all(re.fullmatch(r"[1-9]\d*", number) for number in numbers):
        return [f"--nnodes {asked.nnodes} --nproc-per-node {asked.nproc_per_node}: write numbers, which can be compared here"]
    least, most, each = map(int, numbers)
    found = [] if least <= most else [f"--nnodes {asked.nnodes}: at least {least} hosts, but at most {most}"]
    if sizes != {most}:
        found.append(f"the cluster is asked for {sorted(sizes)} hosts, torchrun waits for {most}")
    if ranks != {each}:
        found.append(f"a host is asked for {sorted(ranks)} GPUs, torchrun starts {each} ranks on it")
    return found


def _serves(text: str) -> list[str]:
    """What is wrong with a script that starts Ray on each host and vLLM on the first."""
    found = []
    for words in (line.split() for line in _commands(text) if line.startswith(("ray ", "vllm "))):
        command, flags = " ".join(words[:2]), [word.partition("=")[0] for word in words if word.startswith("--")]
        if command not in _TAKES:
            found.append(f"there is no command {command!r}; the script needs {' and '.join(_TAKES)}")
        found += [f"{command} does not take {flag}" for flag in flags if flag[2:] not in _TAKES.get(command, [flag[2:]])]
    gpus, hosts = re.findall(r"--num-gpus[ =](\d+)", text), re.findall(r"Alive.*< (\d+)\)", text)
    parts = [int(number) for number in re.findall(r"--(?:tensor|pipeline)-parallel-size[ =](\d+)", text)]
    if len(set(gpus)) != 1 or len(hosts) != 1:
        found.append(f"Ray is told of {', '.join(gpus) or 'no'} GPUs and the script waits for {', '.join(hosts) or 'no'} hosts")
    elif math.prod(parts) != int(gpus[0]) * int(hosts[0]):
        found.append(f"vLLM takes {' × '.join(map(str, parts))} GPUs, the script waits for {hosts[0]} hosts of {gpus[0]}")
    return found
