"""Templates for clusters change nothing but the given numbers, are checked, and what they run was run on two hosts."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from helpers.cluster import TEMPLATES, fields, launch_line, problems, render, templates
from helpers.two_nodes import available, two_nodes

VALUES = {
    "name": "train-7", "nodes": 2, "least_nodes": 1, "ranks_per_node": 2, "restarts": 3, "port": 29511, "serve_port": 8011,
    "minutes": 90, "seconds": 5400, "wait": 2, "image": "registry.example/train:1", "claim": "checkpoints", "script": "job.py",
    "model": "baidu/ERNIE-4.5-0.3B-PT",
}  # fmt: skip
TRAINING = ["kubernetes.yaml", "slurm.sbatch"]
JOB = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
told = f"sum {int(total)} of {dist.get_world_size()} on {os.environ['GLOO_SOCKET_IFNAME']}\\n"
os.write(1, told.encode())  # at once: ranks share the pipe
dist.destroy_process_group()
"""
on_two_hosts = pytest.mark.skipif(not available()[0], reason=f"needs two hosts: {available()[1]}")


@pytest.mark.parametrize("name", templates())
def test_nothing_but_the_fields_changes(name):
    template = (TEMPLATES / name).read_text()
    rendered = render(name, **VALUES)
    assert set(fields(name)) <= set(VALUES)
    fixed = re.split(r"\{\{\w+\}\}", template)
    given = [str(VALUES[field]) for field in re.findall(r"\{\{(\w+)\}\}", template)]
    assert rendered == "".join(part for pair in zip(fixed, [*given, ""], strict=True) for part in pair)
    assert problems(rendered) == []
    more = render(name, **{**VALUES, "nodes": 16, "ranks_per_node": 8})
    assert problems(more) == []
    changed = [(a, b) for a, b in zip(rendered.splitlines(), more.splitlines(), strict=True) if a != b]
    assert changed
    assert all(re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b) for a, b in changed)


def test_every_field_is_known():
    assert {field for name in templates() for field in fields(name)} == set(VALUES)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("lsf.sh", VALUES, "there are kubernetes.yaml, ray_vllm.sh, slurm.sbatch"),
        ("slurm.sbatch", {"nodes": 2}, "also asks for least_nodes, minutes, name"),
        ("slurm.sbatch", {**VALUES, "nodes": 0}, "nodes is 0; it must be a whole number of at least 1"),
        ("slurm.sbatch", {**VALUES, "nodes": "two"}, "nodes is 'two'"),
        ("slurm.sbatch", {**VALUES, "nodes": True}, "nodes is True"),
        ("slurm.sbatch", {**VALUES, "restarts": -1}, "at least 0"),
        ("slurm.sbatch", {**VALUES, "script": "job.py; rm -r ~"}, "no spaces, no quotes"),
        ("kubernetes.yaml", {**VALUES, "name": "My_Job"}, "small letters, digits and -"),
        ("kubernetes.yaml", {**VALUES, "claim": "-c"}, "a letter first"),
    ],
)
def test_values_that_cannot_work_are_refused(name, values, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        render(name, **values)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("slurm.sbatch", "--nodes=2", "--nodes={{nodes}}", "{{nodes}} was not filled in"),
        ("slurm.sbatch", "set -eu", "if true; then", "bash: "),
        ("slurm.sbatch", "--nodes=2", "--nodes=3", "asked for [3] hosts, torchrun waits for 2"),
        ("slurm.sbatch", "--gpus-per-node=2", "--gpus-per-node=8", "asked for [8] GPUs, torchrun starts 2 ranks"),
        ("slurm.sbatch", "#SBATCH --exclusive\n", "", "sbatch is asked for one core"),
        ("slurm.sbatch", ' --cpus-per-task="$SLURM_CPUS_ON_NODE"', "", "srun gives torchrun one core"),
        ("slurm.sbatch", "--nproc-per-node 2", "--nproc-per-host 2", "torchrun does not take"),
        ("slurm.sbatch", "--nnodes 1:2", "--nnodes 3:2", "at least 3 hosts, but at most 2"),
        ("slurm.sbatch", "--nnodes 1:2", "--nnodes=3", "asked for [2] hosts, torchrun waits for 3"),
        ("slurm.sbatch", "--nnodes 1:2", "--nnodes $SLURM_NNODES", "--nnodes $SLURM_NNODES --nproc-per-node 2: write numbers"),
        ("slurm.sbatch", "--nnodes 1:2", "--nnodes 0", "--nnodes 0 --nproc-per-node 2: write numbers"),
        ("slurm.sbatch", "--nproc-per-node 2", "--nproc-per-node gpu", "--nproc-per-node gpu: write numbers"),
        ("slurm.sbatch", "torchrun", "python", "no line starts torchrun or vllm"),
        ("ray_vllm.sh", "done", "end", "bash: "),
        ("ray_vllm.sh", "--tensor-parallel-size", "--tensor-paralel-size", "vllm serve does not take --tensor-paralel-size"),
        ("ray_vllm.sh", "--tensor-parallel-size 2", "--tensor-parallel-size 16", "16 × 2 GPUs, the script waits for 2 hosts"),
        ("ray_vllm.sh", "ray start --head", "ray begin --head", "there is no command 'ray begin'"),
        ("ray_vllm.sh", "exec ray start --address", "exec ray start --adress", "ray start does not take --adress"),
        ("ray_vllm.sh", "< 2)", "< 7)", "waits for 7 hosts of 2"),
        ("ray_vllm.sh", "--num-gpus 2 --block", "--num-gpus 1 --block", "told of 1, 2 GPUs"),
        ("kubernetes.yaml", "kind: Job", "kind: Deployment", "no Job"),
        ("kubernetes.yaml", "completions: 2", "completions: two", "Job.spec.completions: 'two' is not of type 'integer'"),
        ("kubernetes.yaml", "completions: 2", "completion: 2", "Job.spec: 'completions' is a required property"),
        ("kubernetes.yaml", "completions: 2", "completion: 2", "('completion' was unexpected)"),
        ("kubernetes.yaml", "parallelism: 2", "parallelism: 1", "asked for [1, 2] hosts"),
        ("kubernetes.yaml", "completionMode: Indexed", "completionMode: NonIndexed", "'Indexed' was expected"),
        ("kubernetes.yaml", "subdomain: train-7", "subdomain: other", "no pod would find pod 0"),
        ("kubernetes.yaml", "      containers:", "     containers:", "not YAML"),
        ("kubernetes.yaml", "command: [\"bash\", \"-euc\"]", "command: bash", "command: 'bash' is not of type 'array'"),
        ("kubernetes.yaml", "clusterIP: None", "clusterIP: null", "Service.spec.clusterIP: 'None' was expected"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(name, old, new, says):
    text = render(name, **VALUES)
    assert old in text
    assert says in "\n".join(problems(text.replace(old, new)))


def test_one_number_of_hosts_is_the_least_and_the_most():
    assert problems(render("slurm.sbatch", **VALUES).replace("--nnodes 1:2", "--nnodes=2")) == []


def test_both_clusters_run_the_same_line():
    lines = {launch_line(render(name, **VALUES)) for name in TRAINING}
    assert len(lines) == 1
    assert lines.pop().startswith("torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 ")


def stand_in(folder, name, text):
    program = folder / name
    program.write_text(text)
    program.chmod(0o755)


@on_two_hosts
@pytest.mark.parametrize("name", TRAINING)
def test_what_a_template_runs_on_each_host_runs(name, tmp_path):
    """The whole Slurm script with stand-ins for scontrol and srun; of the Kubernetes job, its container's command."""
    text = render(name, **VALUES)
    stand_in(tmp_path, "torchrun", f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tmp_path / "job.py").write_text(JOB)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment, found_first = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, ["env", f"PATH={path}"]
    with two_nodes() as nodes:
        head = nodes.hosts[0].address
        if name == "slurm.sbatch":
            stand_in(tmp_path, "scontrol", f'#!/bin/sh\n[ "$*" = "show hostnames list" ] && echo {head}\n')
            stand_in(
                tmp_path,
                "srun",
                '#!/bin/sh\nenv > exported\necho "$3" > cores\nshift 3\nfor word; do printf "%s\\0" "$word"; done > step\n',
            )
            given = {**environment, "SLURM_JOB_NODELIST": "list", "SLURM_CPUS_ON_NODE": "96"}
            subprocess.run(["bash"], input=text, text=True, check=True, cwd=tmp_path, env=given)
            assert (tmp_path / "cores").read_text() == "--cpus-per-task=96\n"
            exported = (tmp_path / "exported").read_text().splitlines()  # what srun hands on to the hosts
            assert {f"HEAD={head}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(exported)
            command = (tmp_path / "step").read_text().split("\0")[:-1]
            own = [{"SLURM_NODEID": str(host.number), "SLURMD_NODENAME": host.address} for host in nodes.hosts]
            common = {"HEAD": head, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        else:
            container = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]
            command = [*container["command"], *container["args"]]
            common = {each["name"]: each.get("value") for each in container["env"] if each["name"] != "HERE"}
            assert common["HEAD"] == "train-7-0.train-7"
            common["HEAD"] = head  # what the cluster's DNS would answer
            own = [{"JOB_COMPLETION_INDEX": str(host.number), "HERE": host.address} for host in nodes.hosts]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents = [
            nodes.popen(host, [*found_first, *command], cwd=tmp_path, env={**environment, **common, **own[host]}, **pipes)
            for host in (0, 1)
        ]
        told = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    for host, said in enumerate(told):
        assert said.count(f"sum 10 of 4 on link{host}") == 2


@on_two_hosts
def test_vllm_is_started_once_and_only_when_all_hosts_are_there(tmp_path):
    """With stand-ins for ray and vllm, which say how they were called; their arguments are those of the documentation."""
    text = render("ray_vllm.sh", **VALUES)
    note = 'echo "$(basename "$0") $* [$VLLM_HOST_IP]" >> said\n'
    stand_in(tmp_path, "ray", f"#!/bin/sh\n{note}")
    stand_in(tmp_path, "vllm", f"#!/bin/sh\n{note}")
    (tmp_path / "ray.py").write_text(
        "def init(address):\n    assert address == 'auto'\n"
        "def nodes():\n    return [{'Alive': True} for line in open('said') if line.startswith('ray start')]\n"
    )
    (tmp_path / "python3").symlink_to(sys.executable)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found_first = ["env", f"PATH={tmp_path}{os.pathsep}{os.environ['PATH']}"]
    with two_nodes() as nodes:
        addresses = [host.address for host in nodes.hosts]
        for host in (1, 0):
            given = {**environment, "HEAD": addresses[0], "HERE": addresses[host], "IS_HEAD": str(int(host == 0))}
            nodes.run(host, [*found_first, "bash", "-c", text], cwd=tmp_path, env=given, check=True, timeout=60)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:2] == [
        f"ray start --address {addresses[0]}:29511 --node-ip-address {addresses[1]} --num-gpus 2 --block [{addresses[1]}]",
        f"ray start --head --port 29511 --node-ip-address {addresses[0]} --num-gpus 2 [{addresses[0]}]",
    ]
    served = launch_line(text).replace("$HERE", addresses[0])
    assert said[2:] == [" ".join(shlex.split(served)) + f" [{addresses[0]}]"]
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2 --distributed-executor-backend ray" in served
