"""Notebook 10: answers, hints, checks, and wrong answers with the message each gets."""

import math
import os
import shlex
import tempfile

import torch
import torch.distributed as dist

from helpers import launch
from helpers.exercises import Exercise, Wrong


def start_on(host, hosts, ranks, head):
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-id job "
        f"--rdzv-endpoint {head}:29500 --rdzv-conf is_host={int(host == 0)} job.py"
    )


def check_start(answer):
    from torch.distributed.run import get_args_parser

    found = []
    for host in range(3):
        line = answer(host, 3, 4, "10.0.0.1")
        words = shlex.split(line) if isinstance(line, str) else None
        if not words or words[0] != "torchrun":
            raise Wrong(f"The function returns one line of shell that begins with torchrun; yours returned {line!r}.")
        try:
            found.append(get_args_parser().parse_args(words[1:]))
        except SystemExit:
            raise Wrong(f"torchrun does not take this line: {line}") from None
    first = found[0]
    if int(first.nproc_per_node) != 4 or first.nnodes != "3":
        raise Wrong(
            f"For 3 hosts of 4 ranks you have --nnodes {first.nnodes} --nproc-per-node {first.nproc_per_node}: --nnodes counts "
            f"hosts, --nproc-per-node the ranks on each of them."
        )
    if first.training_script != "job.py":
        raise Wrong(f"The script is job.py; yours starts {first.training_script!r}.")
    if len({(each.rdzv_endpoint, each.rdzv_id, each.rdzv_backend) for each in found}) > 1:
        raise Wrong("The hosts do not meet: endpoint, id and backend must be the same on all of them, the head's address.")
    if first.rdzv_backend != "c10d" or not first.rdzv_endpoint.startswith("10.0.0.1:"):
        raise Wrong(
            f"Hosts meet at --rdzv-endpoint {first.rdzv_endpoint or '(none)'} of backend {first.rdzv_backend}: it must be c10d "
            f"at the head's address and a port, 10.0.0.1:29500."
        )
    holds = [dict(part.split("=") for part in each.rdzv_conf.split(",") if "=" in part).get("is_host") for each in found]
    if holds != ["1", "0", "0"]:
        raise Wrong(f"is_host on hosts 0, 1, 2 is {holds}: exactly host 0 holds the store (1), the others connect to it (0).")
    return "Every host runs the same line but for is_host; which ranks it gets is settled when all have met."


def start_all_at_home(host, hosts, ranks, head):
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint 10.0.0.{host + 1}:29500 job.py"
    )


def start_counts_ranks(host, hosts, ranks, head):
    return start_on(host, hosts * ranks, ranks, head)


def start_without_holder(host, hosts, ranks, head):
    return start_on(host, hosts, ranks, head).replace("--rdzv-conf is_host=1", "").replace("--rdzv-conf is_host=0", "")


def start_with_a_list(host, hosts, ranks, head):
    return start_on(host, hosts, ranks, head).split()


def resume(model, path):
    saved = torch.load(path) if dist.get_rank() == 0 else {"step": 0}
    step = torch.tensor([saved["step"]])
    if dist.get_rank() == 0:
        model.load_state_dict(saved["model"])
    for tensor in [step, *(parameter.data for parameter in model.parameters())]:
        dist.broadcast(tensor, src=0)  # the other ranks get what rank 0 has read
    return step.item()


def check_resume(answer):
    sizes = (7, 5)

    def job(folder):
        rank, path = dist.get_rank(), os.path.join(folder, "checkpoint.pt")
        model = torch.nn.Linear(*sizes)
        if rank == 0:
            saved = {"model": {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}, "step": 40}
            torch.save(saved, path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(rank))
        step = answer(model, path if rank == 0 else path + ".not-on-this-host")
        return step, [parameter.detach().clone() for parameter in model.parameters()]

    with tempfile.TemporaryDirectory() as folder:
        run = launch(job, folder, ranks=3, backend="gloo", timeout=20)
    for rank, (step, parameters) in enumerate(run.results):
        if step != 40:
            raise Wrong(f"Rank {rank} returned {step!r}: the checkpoint was made after step 40, and every rank must go on there.")
        if not all(bool((parameter == 3).all()) for parameter in parameters):
            raise Wrong(
                f"Rank {rank} does not hold the checkpoint's parameters (all 3), but {parameters[0][0, 0].item():g}. "
                f"Ranks that start from different parameters never agree again, and no library notices."
            )
    ops = {c.op for c in run.collectives if c.bytes >= 4}
    if ops - {"broadcast", "barrier"}:
        raise Wrong(
            f"Right values, but with {', '.join(sorted(ops - {'broadcast', 'barrier'}))}: rank 0 has it all, broadcast it."
        )
    sent = sum(c.bytes for c in run.collectives if c.rank == 0 and c.op == "broadcast")
    return f"All ranks go on at step 40 with the same parameters; rank 0 broadcast {sent:,} B, the others read no file."


def resume_everywhere(model, path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    return saved["step"]


def resume_on_rank_0(model, path):
    if dist.get_rank() == 0:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
    return 40


def resume_without_step(model, path):
    step = 0
    if dist.get_rank() == 0:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return step


def resume_by_averaging(model, path):
    saved = torch.load(path) if dist.get_rank() == 0 else {"step": 0}
    step = torch.tensor([saved["step"]])
    if dist.get_rank() == 0:
        model.load_state_dict(saved["model"])
    for tensor in [step, *(parameter.data for parameter in model.parameters())]:
        if dist.get_rank():
            tensor.zero_()
        dist.all_reduce(tensor)
    return step.item()


def leaving_a_host(hosts, local, size):
    ranks = hosts * local
    return {"flat": 2 * (ranks - 1) / ranks * size, "hierarchical": local * 2 * (hosts - 1) / hosts * size / local}


def check_leaving(answer):
    for hosts, local, size in ((2, 4, 1000), (16, 8, 1 << 30), (3, 2, 600)):
        found = answer(hosts, local, size)
        if not isinstance(found, dict) or set(found) != {"flat", "hierarchical"}:
            raise Wrong(f'The function returns a dictionary {{"flat": bytes, "hierarchical": bytes}}; yours returned {found!r}.')
        right = leaving_a_host(hosts, local, size)
        where = f"{hosts} hosts of {local} ranks, {size:,} B"
        if math.isclose(found["flat"], local * right["flat"], rel_tol=1e-3):
            raise Wrong(
                f"{where}: you let all {local} ranks of a host send over the link. In a ring of ranks in order only the last "
                f"one of a host has its neighbour elsewhere: one step of the ring leaves the host."
            )
        if math.isclose(found["hierarchical"], right["hierarchical"] / local, rel_tol=1e-3):
            raise Wrong(f"{where}: that is one ring across hosts; there are {local}, one for each part, and all pass the link.")
        if math.isclose(found["hierarchical"], right["hierarchical"] * local, rel_tol=1e-3) and local > 1:
            raise Wrong(f"{where}: a ring across hosts carries a part, 1 / {local} of the bytes, not all of them.")
        for way in right:
            if not math.isclose(found[way], right[way], rel_tol=1e-3):
                raise Wrong(
                    f"{where}, {way}: {found[way]:,.0f} B is not it. Each of n ranks in a ring sends 2(n − 1)/n of its bytes: "
                    f"n is {hosts * local} in the flat ring, {hosts} across hosts."
                )
    return "Right. With 16 hosts the hierarchy saves 6 % of the bytes only; with 2 hosts of 4 ranks 43 %."


def leaving_by_all_ranks(hosts, local, size):
    right = leaving_a_host(hosts, local, size)
    return {**right, "flat": local * right["flat"]}


def leaving_one_ring(hosts, local, size):
    right = leaving_a_host(hosts, local, size)
    return {**right, "hierarchical": right["hierarchical"] / local}


def leaving_whole_parts(hosts, local, size):
    right = leaving_a_host(hosts, local, size)
    return {**right, "hierarchical": right["hierarchical"] * local}


def leaving_size(hosts, local, size):
    return {"flat": size, "hierarchical": size}


def check_shares(answer):
    if not isinstance(answer, dict) or set(answer) != {"strong", "weak"}:
        raise Wrong(
            f'The answer is a dictionary {{"strong": share, "weak": share}} with shares from 0 to 1; yours is {answer!r}.'
        )
    if any(not isinstance(share, (int, float)) or not 0 <= share <= 1 for share in answer.values()):
        raise Wrong("A share of linear is a number from 0 to 1: 0.5 is half the throughput that so many GPUs could have.")
    strong, weak = (1.6 / 16) / (1.6 / 16 + 0.15), 1.6 / (1.6 + 0.15)
    if math.isclose(answer["strong"], weak, abs_tol=0.005):
        raise Wrong("Strong scaling keeps the batch: each of 16 times as many GPUs computes 1.6 / 16 s, not 1.6 s.")
    if math.isclose(answer["weak"], strong, abs_tol=0.005):
        raise Wrong(
            "Weak scaling keeps each GPU's batch: it still computes 1.6 s a step. You have the figures the wrong way round."
        )
    for name, right in (("strong", strong), ("weak", weak)):
        if abs(answer[name] - right) > 0.005:
            raise Wrong(
                f"{name}: {answer[name]:.3g} is not it. The share is computing / (computing + exchange), at the new size."
            )
    return "The same exchange costs three fifths of a short step and a twelfth of a long one."


def check_interval(answer):
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(f"The answer is a number of seconds; yours is {answer!r}.")
    between = 50_000 * 3600 / 1024
    right = math.sqrt(2 * 60 * between)
    for wrong, message in {
        math.sqrt(2 * 60 * 50_000 * 3600): "That is right for one GPU. Of 1,024 some GPU fails 1,024 times as often.",
        right / 60: "That is in minutes; the answer is in seconds.",
        right / 3600: "That is in hours; the answer is in seconds.",
        math.sqrt(60 * between): "The factor 2 is missing: on average half an interval is lost.",
        between: "That is the time between failures: saving only so often loses half of all work.",
    }.items():
        if math.isclose(answer, wrong, rel_tol=0.02):
            raise Wrong(message)
    if not math.isclose(answer, right, rel_tol=0.02):
        raise Wrong(f"{answer:,.0f} s is not it: √(2 · seconds to save · seconds between failures of any of the 1,024).")
    return f"{right:,.0f} s, 77 minutes: with some GPU failing every two days."


EXERCISES = [
    Exercise(
        "10.1",
        "the line that starts a job on host i of n",
        answer=start_on,
        hints=[
            "--nnodes counts hosts, --nproc-per-node ranks on a host. All meet at the head's address.",
            "Only is_host differs: --rdzv-conf is_host=1 on host 0, is_host=0 elsewhere; f-strings put the numbers in.",
        ],
        check=check_start,
        wrong=[
            (start_all_at_home, "The hosts do not meet"),
            (start_counts_ranks, "--nnodes counts hosts"),
            (start_without_holder, "exactly host 0 holds the store"),
            (start_with_a_list, "one line of shell"),
        ],
    ),
    Exercise(
        "10.2",
        "resume where only rank 0 has the checkpoint",
        answer=resume,
        hints=[
            "Rank 0 reads; what do the others need, and which collective takes it from one rank to all?",
            "dist.broadcast(tensor, src=0) for the step (a tensor) and for each parameter's .data.",
        ],
        check=check_resume,
        wrong=[
            (resume_everywhere, "not-on-this-host"),
            (resume_on_rank_0, "does not hold the checkpoint's parameters"),
            (resume_without_step, "every rank must go on there"),
            (resume_by_averaging, "rank 0 has it all, broadcast it"),
        ],
    ),
    Exercise(
        "10.3",
        "bytes that leave a host, flat and hierarchical",
        answer=leaving_a_host,
        hints=[
            "A ring of n ranks: each sends 2(n − 1)/n of the bytes to the next one. How many of these steps leave a host?",
            "Flat: one. Hierarchical: as many rings as local ranks, over the hosts, each with its part of the bytes.",
        ],
        check=check_leaving,
        wrong=[
            (leaving_by_all_ranks, "one step of the ring leaves the host"),
            (leaving_one_ring, "one for each part"),
            (leaving_whole_parts, "carries a part"),
            (leaving_size, "is not it"),
        ],
    ),
    Exercise(
        "10.4",
        "strong and weak scaling with the same exchange",
        answer={"strong": 0.4, "weak": 0.914},
        hints=[
            "What does one GPU compute in a step after the change, in either case?",
            "Share = computing / (computing + exchange).",
        ],
        check=check_shares,
        wrong=[
            ({"strong": 0.914, "weak": 0.914}, "keeps the batch"),
            ({"strong": 0.4, "weak": 0.4}, "keeps each GPU's batch"),
            ({"strong": 40, "weak": 91.4}, "from 0 to 1"),
            ({"strong": 0.6, "weak": 0.914}, "strong: 0.6 is not it"),
        ],
    ),
    Exercise(
        "10.5",
        "how often to save a checkpoint on 1,024 GPUs",
        answer=4593,
        hints=["How long until any one of 1,024 GPUs fails?", "√(2 · 60 s · 50,000 h / 1,024), with hours made seconds."],
        check=check_interval,
        wrong=[
            (146969, "right for one GPU"),
            (76.5, "in minutes"),
            (3248, "factor 2"),
            (175781, "time between failures"),
            (1000, "is not it"),
        ],
    ),
]
