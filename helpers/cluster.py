"""Templates for real clusters in `data/templates/cluster`: filled with one's numbers, checked, their launch line taken out.

`render("slurm.sbatch", nodes=4, ranks_per_node=8, …)` replaces each `{{field}}` and nothing else; `problems` checks the
result with `bash -n`, with torchrun's own parser, and against the fields of the Kubernetes API that the template uses.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["fields", "launch_line", "problems", "render", "templates"]

TEMPLATES = Path(__file__).parents[1] / "data" / "templates" / "cluster"
_FIELD = re.compile(r"\{\{(\w+)\}\}")
_NUMBERS = {
    "nodes", "least_nodes", "ranks_per_node", "restarts", "port", "serve_port", "minutes", "seconds", "wait",
    "ranks", "replicas", "tensor_parallel", "batch_size", "max_length", "max_num_batched_tokens",
}  # fmt: skip
_PROGRAMS = ("torchrun", "vllm")
_TEXT = re.compile(r"[\w./:@-]+")  # what needs no quotes in shell and YAML
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_DEVICES = re.compile(r"\d+(,\d+)*")
# Kubernetes API v1.32, the fields used here: type, or the one value that is right, or the fields below; [x] is a list of x.
_METADATA = {"name": str}
_FIELDS: dict[str, Any] = {
    "Service": {
        "apiVersion": "v1", "kind": "Service", "metadata": _METADATA,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": bool, "selector": {"job-name": str}},
    },
    "Job": {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": _METADATA,
        "spec": {
            "completions": int, "parallelism": int, "completionMode": "Indexed", "backoffLimit": int,
            "activeDeadlineSeconds": int,
            "template": {"spec": {
                "subdomain": str, "restartPolicy": "Never",
                "containers": [{
                    "name": str, "image": str, "command": [str], "args": [str],
                    "env": [{"name": str, "value?": str, "valueFrom?": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "resources": {"limits": {"nvidia.com/gpu": int}},
                    "volumeMounts": [{"name": str, "mountPath": str}],
                }],
                "volumes": [{
                    "name": str, "persistentVolumeClaim?": {"claimName": str}, "emptyDir?": {"medium": "Memory"},
                }],
            }},
        },
    },
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
        value = values[field]
        if field in _NUMBERS and (type(value) is not int or value < (field != "restarts")):
            raise ValueError(f"{field} is {value!r}; it must be a whole number of at least {int(field != 'restarts')}")
        if field == "devices" and not (isinstance(value, str) and _DEVICES.fullmatch(value)):
            raise ValueError(f'devices is {value!r}; it must be numbers of GPUs with commas between them, such as "0,1"')
        if field not in {*_NUMBERS, "devices"} and not (isinstance(value, str) and _TEXT.fullmatch(value)):
            raise ValueError(f"{field} is {value!r}; it must be of letters, digits and . / : @ _ - (no spaces, no quotes)")
        if field in ("name", "claim") and not _LABEL.fullmatch(value):
            raise ValueError(
                f"{field} is {value!r}; hosts are called by it: small letters, digits and -, at most 63, a letter first"
            )
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
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        line = line.strip().removeprefix("exec ")
        if line.startswith(tuple(f"{program} " for program in _PROGRAMS)):
            return line
    raise ValueError(f"no line starts {' or '.join(_PROGRAMS)}")


def problems(text: str) -> list[str]:
    """What is wrong with a rendered template, each as a sentence; an empty list where nothing is."""
    found = unfilled(text)
    if text.startswith("#!"):
        scripts = [text, *re.findall(r"bash -euc '\n(.*?)\n'", text, re.DOTALL)]
        sizes = {int(number) for number in re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)}
        ranks = {int(number) for number in re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", text, re.MULTILINE)}
    else:
        try:
            pages = {page.get("kind"): page for page in yaml.safe_load_all(text)}
        except (yaml.YAMLError, AttributeError) as error:
            return [*found, f"not YAML: {error}"]
        for kind, wanted in _FIELDS.items():
            found += _differs(pages[kind], wanted, kind) if kind in pages else [f"no {kind}"]
        if found:
            return found
        job = pages["Job"]["spec"]
        pod = job["template"]["spec"]
        scripts, sizes = pod["containers"][0]["args"], {job["completions"], job["parallelism"]}
        ranks = {pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]}
        if not pages["Service"]["metadata"]["name"] == pod["subdomain"] == pages["Job"]["metadata"]["name"]:
            found.append("Service, subdomain and Job have different names: no pod would find pod 0")
    found += [problem for script in scripts for problem in bash_problems(script)]
    try:
        return found + _launches(launch_line(scripts[-1]), sizes, ranks)
    except ValueError as error:
        return [*found, str(error)]


def _launches(line: str, sizes: set[int], ranks: set[int]) -> list[str]:
    """What is wrong with a launch line, alone and beside the hosts and GPUs that the template asks the cluster for."""
    words = shlex.split(line)
    if words[0] != "torchrun":
        return []
    from torch.distributed.run import get_args_parser

    try:
        asked = get_args_parser().parse_args(words[1:])
    except SystemExit:
        return [f"torchrun does not take: {line}"]
    least, most = (int(number) for number in asked.nnodes.split(":"))
    found = [] if least <= most else [f"--nnodes {asked.nnodes}: at least {least} hosts, but at most {most}"]
    if sizes != {most}:
        found.append(f"the cluster is asked for {sorted(sizes)} hosts, torchrun waits for {most}")
    if ranks != {int(asked.nproc_per_node)}:
        found.append(f"a host is asked for {sorted(ranks)} GPUs, torchrun starts {asked.nproc_per_node} ranks on it")
    return found


def _differs(value: Any, wanted: Any, where: str) -> list[str]:
    """Where `value` has not the fields, types and values of `wanted`; names with a `?` may be missing."""
    if isinstance(wanted, Mapping):
        if not isinstance(value, Mapping):
            return [f"{where} is {value!r}; it must have the fields {', '.join(wanted)}"]
        known = {name.rstrip("?"): inner for name, inner in wanted.items()}
        found = [f"{where} has no {name}" for name in wanted if not name.endswith("?") and name not in value]
        found += [f"{where}.{name} is not known here" for name in value if name not in known]
        return found + [each for name in known if name in value for each in _differs(value[name], known[name], f"{where}.{name}")]
    if isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            return [f"{where} is {value!r}; it must be a list"]
        return [each for number, item in enumerate(value) for each in _differs(item, wanted[0], f"{where}[{number}]")]
    right = type(value) is wanted if isinstance(wanted, type) else value == wanted
    return [] if right else [f"{where} is {value!r}; it must be {wanted.__name__ if isinstance(wanted, type) else repr(wanted)}"]
