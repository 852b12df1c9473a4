"""What is run and how it is spread: `Workload`, `Layout`, and the facts about number formats and training codes they name."""

from dataclasses import dataclass

from helpers.predict.architecture import FACTS

__all__ = ["IMPLEMENTATIONS", "PRECISIONS", "Implementation", "Layout", "Precision", "Workload", "divisors"]


@dataclass(frozen=True)
class Precision:
    """Bytes of an element in the arithmetic and, for each parameter, of its weight, gradient, FP32 master and one Adam moment."""

    compute: int
    weight: int
    gradient: int
    master: int
    moment: int


PRECISIONS = {name: Precision(**sizes) for name, sizes in FACTS["precisions"].items()}


@dataclass(frozen=True)
class Implementation:
    """What a training or serving code keeps beyond the arithmetic, as read from its source.

    fused: norm and rotary embedding are one kernel each that keeps its input, not each intermediate of Python expressions.
    vocabulary_parallel: embedding, output matrix, logits and loss are split over tensor-parallel ranks.
    keeps_gathered: with sequence parallelism, the gathered inputs of column-wise layers stay until backward.
    copies_attention_output: batch and sequence are swapped after attention, one more copy where the batch exceeds 1.
    expands_keys: keys and values are repeated to the number of query heads before attention.
    saves_some_products: selective checkpointing keeps every second matrix product and the attention output.
    gradient_copy: bytes a parameter of 16-bit gradients that exist beside the accumulators.
    sharded_gradient_copy: the same in the optimiser's shard.
    reduce_bucket: bytes of a standing communication buffer.
    spare_buffers: micro-batches that a pipeline stage has room for beyond those in flight.
    standing_gradients: gradient buffers exist from the start, not from the first backward pass on.
    overlaps: gradients are summed over data-parallel ranks beside the backward pass, layers are gathered ahead.
    splits_messages: tensor-parallel ranks each send a part of what a pipeline stage hands on; the next stage gathers it.
    stages_by_cost: pipeline stages are cut so that multiplications are even, the output matrix counted.
    """

    fused: bool = True
    vocabulary_parallel: bool = True
    keeps_gathered: bool = False
    copies_attention_output: bool = False
    expands_keys: bool = False
    saves_some_products: bool = False
    gradient_copy: int = 0
    sharded_gradient_copy: int = 0
    reduce_bucket: int = 0
    spare_buffers: int = 0
    standing_gradients: bool = False
    overlaps: bool = False
    splits_messages: bool = False
    stages_by_cost: bool = False


IMPLEMENTATIONS = {name: Implementation(**traits) for name, traits in FACTS["implementations"].items()}


@dataclass(frozen=True)
class Workload:
    """What one data-parallel rank works on.

    batch: sequences in one forward pass (the micro-batch); for a vLLM server its `max_num_seqs`.
    sequence: tokens of each; in inference those of the prompt.
    micro_batches: forward passes per optimiser step.
    checkpointing: "none", "selective" (attention is recomputed; torchtitan: every second matrix product), "full" (layer inputs).
    new_tokens: generated after the prompt; 0 is one forward pass over the prompt that returns logits for all its tokens.
    batched_tokens: tokens in one forward pass of a server where that is not batch × sequence (vLLM's max_num_batched_tokens).
    """

    batch: int
    sequence: int
    training: bool = True
    micro_batches: int = 1
    precision: str = "fp32"
    attention: str = "sdpa"  # or "eager", which holds the matrix of scores
    checkpointing: str = "none"
    optimizer: str = "adamw"  # "adamw8bit", "sgd", "momentum"
    new_tokens: int = 0
    batched_tokens: int | None = None
    implementation: str = "transformers"

    def __post_init__(self) -> None:
        among("precision", self.precision, PRECISIONS)
        among("attention", self.attention, ("sdpa", "eager"))
        among("checkpointing", self.checkpointing, ("none", "selective", "full"))
        among("optimizer", self.optimizer, ("adamw", "adamw8bit", "sgd", "momentum"))
        among("implementation", self.implementation, IMPLEMENTATIONS)
        _positive(self, "batch", "sequence", "micro_batches", *["batched_tokens"] * (self.batched_tokens is not None))
        if self.new_tokens < 0:
            raise ValueError(f"new_tokens is {self.new_tokens}: it must not be below 0")
        if self.training and self.precision == "int8":
            raise ValueError("int8 is a precision of weights for inference: gradients need a float format to train in")


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: data (dp), tensor (tp), pipeline (pp), context (cp) parallelism, the ZeRO stage over dp × cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0  # 1 shards optimiser states, 2 gradients too, 3 (FSDP2) parameters too
    sequence_parallel: bool = False  # activations between tensor-parallel regions are split along the sequence
    schedule: str = "1f1b"  # or "gpipe"

    def __post_init__(self) -> None:
        _positive(self, "dp", "tp", "pp", "cp")
        among("zero", self.zero, (0, 1, 2, 3))
        among("schedule", self.schedule, ("1f1b", "gpipe"))

    @property
    def ranks(self) -> int:
        """All ranks of the layout."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that ZeRO divides states over."""
        return self.dp * self.cp


def divisors(number: int) -> list[int]:
    """The whole numbers that divide `number`, from 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def among(what: str, value: object, choices: object) -> None:
    """Raise ValueError, with the choices, where `value` is none of them."""
    if value not in choices:  # type: ignore[operator]
        raise ValueError(f"{what} {value!r}: choose one of {', '.join(map(str, choices))}")  # type: ignore[call-overload]


def _positive(record: object, *names: str) -> None:
    for name in names:
        if getattr(record, name) < 1:
            raise ValueError(f"{name} is {getattr(record, name)}: it must be at least 1")
