"""Templates for servers that stay change nothing but the given values; units, scripts, flags, devices and ports are checked."""

import itertools
import re
import shlex
import subprocess

import pytest

from helpers import cluster, inference_server, serving
from helpers.serving import deployment
from helpers.serving.deployment import TEMPLATES, problems, render, templates

VALUES = {
    "name": "ernie", "model": "baidu/ERNIE-4.5-0.3B-PT", "model_folder": "/srv/models/ernie", "directory": "/srv/course",
    "user": "serving", "port": 8011, "devices": "0,1,2,3", "python": "/srv/course/.venv/bin/python",
    "image": "registry.example/vllm:0.32", "ranks": 4, "replicas": 2, "tensor_parallel": 2, "dtype": "auto", "batch_size": 16,
    "max_length": 2048, "max_num_batched_tokens": 4096, "seconds": 300,
}  # fmt: skip
COURSE = ["health_check.sh", "inference_server.service", "inference_server_container.sh"]
VLLM = ["vllm.service", "vllm_container.sh"]


@pytest.fixture
def without_vllm(monkeypatch):
    """vLLM's parser, whose import takes long, is left out."""
    monkeypatch.setattr(deployment, "available", lambda: "left out")


def test_there_is_a_unit_and_a_container_for_each_server_and_a_health_check():
    assert templates() == sorted(COURSE + VLLM)
    assert {field for name in templates() for field in cluster.fields(name, TEMPLATES)} == set(VALUES)


@pytest.mark.parametrize("name", templates())
def test_nothing_but_the_fields_changes(name, without_vllm):
    template = (TEMPLATES / name).read_text()
    fixed = re.split(r"\{\{\w+\}\}", template)
    given = [str(VALUES[field]) for field in re.findall(r"\{\{(\w+)\}\}", template)]
    rendered = render(name, **VALUES)
    assert rendered == "".join(part for pair in zip(fixed, [*given, ""], strict=True) for part in pair)
    assert problems(rendered) == []


def test_the_articles_command_line_stands_in_both_templates_of_the_own_server():
    for name, model in zip(COURSE[1:], (VALUES["model"], "/model"), strict=True):
        text = render(name, **VALUES).replace(" \\\n    ", " ").replace(" \\\n  ", " ")
        assert f"-m torch.distributed.run --nproc_per_node=4 helpers/inference_server.py --model_name {model} " in text
        assert " --batch_size 16 --max_length 2048 " in text
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in text or '"device=0,1,2,3"' in text


@pytest.mark.parametrize("name", [COURSE[2], VLLM[1]])
def test_a_container_reads_the_models_folder_and_serves_it_by_the_name_that_the_health_check_asks_for(name):
    words = shlex.split(render(name, **VALUES).replace("\\\n", "").partition("exec ")[2])
    after = dict(itertools.pairwise(words))
    assert after["--volume"] == "/srv/models/ernie:/model:ro"
    assert after.get("--model", after.get("--model_name")) == "/model"
    asked = re.search(r'"model": "([^"]+)"', render("health_check.sh", **VALUES))
    assert after.get("--served-model-name", after.get("--served_model_name")) == asked[1] == VALUES["model"]


def test_the_own_server_answers_to_the_name_it_is_given_or_to_its_models():
    line = ["--model_name", "/model"]
    assert inference_server.parse(line).served_model_name == "/model"
    assert inference_server.parse([*line, "--served-model-name", "ernie"]).served_model_name == "ernie"


@pytest.mark.slow
@pytest.mark.skipif(bool(serving.available()), reason=serving.available() or "vLLM is here")
def test_vllms_own_parser_takes_its_flags_and_says_what_it_does_not_take():
    assert problems(render("vllm.service", **VALUES)) == []
    found = problems(render("vllm_container.sh", **VALUES).replace("--tensor-parallel-size", "--tensor-size"))
    assert len(found) == 1
    assert found[0].startswith("vLLM does not take this: ")
    assert "unrecognized arguments: --tensor-size" in found[0]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("nginx.conf", VALUES, "there are health_check.sh, inference_server.service"),
        ("vllm.service", {"port": 1}, "also asks for devices, directory, dtype"),
        ("vllm.service", {**VALUES, "port": 0}, "port is 0; it must be a whole number of at least 1"),
        ("vllm.service", {**VALUES, "devices": "0;1"}, "devices is '0;1'; it must be numbers of GPUs"),
        ("vllm.service", {**VALUES, "model": "a b"}, "no spaces, no quotes"),
        ("vllm_container.sh", {**VALUES, "model_folder": "models/ernie"}, "a folder's whole path"),
        ("vllm_container.sh", {**VALUES, "name": "Ernie"}, "small letters, digits and -"),
    ],
)
def test_values_that_cannot_work_are_refused(name, values, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        render(name, **values)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("vllm.service", "User=serving", "User={{user}}", "{{user}} was not filled in"),
        ("vllm.service", "User=serving\n", "", "[Service] has no User"),
        ("vllm.service", "[Install]", "[Instal]", "[Install] has no WantedBy"),
        ("vllm.service", "Restart=on-failure", "Restart on failure", "Restart on failure"),
        ("vllm.service", "ExecStart=/srv/course/.venv/bin/python", "ExecStart=python", "whole path of a program: python"),
        ("vllm.service", "=0,1,2,3", "=0,1", "2 GPUs are given to 4 ranks"),
        ("vllm.service", "=0,1,2,3", "=0,1,2,2", "3 GPUs are given to 4 ranks"),
        ("vllm.service", "api_server", "batch", "the command starts neither of"),
        ("inference_server.service", "--nproc_per_node=4", "--nproc_per_node=8", "4 GPUs are given to 8 ranks"),
        ("inference_server.service", "--batch_size 16", "--batch_size 0", "batch_size is 0; it must be at least 1"),
        ("inference_server.service", "--batch_size", "--batches", "unrecognized arguments: --batches 16"),
        ("inference_server.service", "--nproc_per_node=4", "--ranks=4", "the command line is not taken"),
        ("inference_server_container.sh", '"device=0,1,2,3"', '"device=0"', "1 GPUs are given to 4 ranks"),
        ("vllm_container.sh", "set -eu", "if true; then", "bash: "),
        ("vllm_container.sh", "'curl", "curl", "bash: "),
        ("vllm_container.sh", "--gpus", "--gpu", "no option of docker's here: --gpu"),
        ("inference_server_container.sh", "--volume", "--vol", "no option of docker's here: --vol"),
        ("inference_server_container.sh", "ernie:/model:", "ernie:baidu/ERNIE-4.5-0.3B-PT:", "a whole path in the container"),
        ("vllm_container.sh", "/srv/models/ernie:", "models/ernie:", "needs a whole path here"),
        ("vllm_container.sh", "--model /model", "--model baidu/ERNIE-4.5-0.3B-PT", "the server is not told of /model"),
        ("health_check.sh", "esac", "end", "bash: "),
    ],
)
def test_what_is_wrong_is_said(name, old, new, says, without_vllm):
    text = render(name, **VALUES)
    assert old in text
    assert says in "\n".join(problems(text.replace(old, new)))


def test_ports_of_templates_that_belong_together_agree(without_vllm):
    unit, check = render("vllm.service", **VALUES), render("health_check.sh", **{**VALUES, "port": 8012})
    assert problems(unit, check) == ["different ports: 8011, 8012"]
    assert problems(unit, render("health_check.sh", **VALUES)) == []


@pytest.mark.skipif(not deployment.shutil.which("systemd-analyze"), reason="there is no systemd-analyze here")
def test_systemd_itself_judges_units(without_vllm):
    text = render("vllm.service", **VALUES)
    assert "kill mode specification, ignoring: both" in "\n".join(problems(text.replace("KillMode=mixed", "KillMode=both")))


def test_the_health_check_says_when_there_is_no_server():
    script = render("health_check.sh", model="tiny-ernie", port=1, seconds=1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "no healthy answer from http://127.0.0.1:1/health within 1 s\n")
