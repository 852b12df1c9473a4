"""The texts that run a planned layout: a torchrun line, a config file of accelerate, a vLLM command.

Options are those of torch 2.13's torchrun, accelerate 1.15 (its config file and `ParallelismConfig`) and vLLM 0.32;
tests/test_planning.py gives each text to the program's own parser.
"""

import yaml

from helpers.predict.layout import Layout, Workload

__all__ = ["accelerate", "torchrun", "vllm"]


def torchrun(layout: Layout, workload: Workload, script: str, each_host: int, offload: bool = False) -> str:
    """The line that every host runs, `each_host` ranks on each; the script is told the layout as options of its own.

    With several hosts `HEAD` is the address of the first one and `IS_HEAD` 1 there, 0 elsewhere.
    """
    hosts, meeting = layout.ranks // each_host, "--standalone"
    if hosts > 1:
        meeting = '--rdzv-backend c10d --rdzv-id job --rdzv-endpoint "$HEAD:29500" --rdzv-conf "is_host=$IS_HEAD"'
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {each_host} {meeting} {script} "
        f"--dp {layout.dp} --tp {layout.tp} --pp {layout.pp} --zero {layout.zero} "
        f"--micro-batch {workload.batch} --micro-batches {workload.micro_batches} --checkpointing {workload.checkpointing} "
        f"--offload {'optimizer' if offload else 'none'} --precision {workload.precision}"
    )


def accelerate(layout: Layout, workload: Workload, each_host: int, offload: bool = False) -> str:
    """The YAML file for `accelerate launch --config_file`, or "" for what accelerate does not run.

    That is pipelines, and tensor parallelism without shards over data-parallel ranks. ZeRO 2 and 3 are FSDP2 (gathered weights
    kept or freed after the forward pass), ZeRO 1 and an optimiser on the CPU are DeepSpeed's. With several hosts each runs the
    command, HEAD in the file replaced by the first one's address and `machine_rank` by its own number, or by
    `--main_process_ip` and `--machine_rank`.
    """
    if layout.pp > 1 or (layout.tp > 1 and (layout.zero < 2 or offload)):
        return ""
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if layout.ranks == 1 else "MULTI_GPU",
        "mixed_precision": {"fp32": "no", "fp16": "fp16"}.get(workload.precision, "bf16"),
        "num_machines": layout.ranks // each_host,
        "num_processes": layout.ranks,
        "rdzv_backend": "static" if layout.ranks == each_host else "c10d",
        "machine_rank": 0,
    }
    if layout.ranks > each_host:
        found |= {"main_process_ip": "HEAD", "main_process_port": 29500}
    if layout.zero == 1 or offload:
        found["distributed_type"] = "DEEPSPEED"
        found["deepspeed_config"] = {
            "deepspeed_multinode_launcher": "standard",
            "zero_stage": max(layout.zero, 1),
            "gradient_accumulation_steps": workload.micro_batches,
            "offload_optimizer_device": "cpu" if offload else "none",
            "offload_param_device": "none",
        }
    elif layout.zero:
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": workload.checkpointing == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": layout.dp,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": 1,
        }
    return yaml.safe_dump(found, sort_keys=False)


def vllm(layout: Layout, workload: Workload, model: str, share: float, each_host: int) -> str:
    """The `vllm serve` command that every host runs: tensor parallelism in each replica, `share` of a GPU's memory for vLLM.

    With several hosts each is a server of its own with its replicas, and a load balancer stands before them.
    """
    dtype = {"fp32": "float32", "fp16": "float16"}.get(workload.precision, "bfloat16")
    batched = f" --max-num-batched-tokens {workload.batched_tokens}" if workload.batched_tokens else ""
    return (
        f"vllm serve {model} --tensor-parallel-size {layout.tp} "
        f"--data-parallel-size {min(layout.dp, each_host // layout.tp)} --dtype {dtype} "
        f"--max-model-len {workload.sequence + workload.new_tokens} --max-num-seqs {workload.batch} "
        f"--gpu-memory-utilization {share:g}{batched}"
    )
