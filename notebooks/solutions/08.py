"""Notebook 08: answers, hints, checks, and wrong answers with the message each gets."""

import tempfile

import torch
import torch.distributed as dist
from accelerate import infer_auto_device_map, init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers import launch, models, offload
from helpers.exercises import Exercise, Wrong

RANKS = 3  # in the check of 08.4: not a number that the notebook shows
SIZE, ROWS = 24, 5
ROOM, LAYER = 8 * 2**20, 3_016_704  # bytes; a layer of tiny-ERNIE


def check_placement(answer):
    if not isinstance(answer, dict):
        raise Wrong(f'Your answer is {answer!r}; a placement is a dictionary such as {{"model.layers.0-1": "cpu", …}}.')
    model, _ = models.load("tiny-ernie")
    if problems := offload.problems(model, answer):
        raise Wrong(f"This placement cannot be used: {' '.join(map(repr, problems))}")
    held = offload.tiers(model, answer)
    if set(held) - {"cpu", "disk"}:
        raise Wrong(f'Your tiers are {", ".join(held)}; here they are "cpu" and "disk".')
    kept, away = held.get("cpu", 0), held.get("disk", 0)
    if kept > ROOM:
        raise Wrong(f"{kept / 2**20:.1f} MiB stay in memory, and 8 are allowed: another layer has to go to the disk.")
    if away and kept + LAYER <= ROOM:
        raise Wrong(f"Only {kept / 2**20:.1f} of 8 MiB are used: another layer of 2.9 MiB fits, and saves reading it each token.")
    ids = torch.tensor([[1, 20, 30, 40]])
    with tempfile.TemporaryDirectory() as folder:
        loaded = offload.load(models.folder("tiny-ernie"), answer, folder)
        if not torch.equal(loaded(ids).logits, model(ids).logits):
            raise Wrong("The model loaded by your placement gives other logits.")
    return f"{kept / 2**20:.1f} MiB in memory, {away / 2**20:.1f} MiB read for each token, and the same logits."


def token_seconds(layers, read, compute):
    return read + (layers - 1) * max(read, compute) + compute  # the first read and the last computation overlap with nothing


def check_token(answer):
    for layers, read, compute in [(8, 1.0, 3.0), (8, 3.0, 1.0), (1, 2.0, 5.0), (24, 0.5, 0.5)]:
        said = answer(layers, read, compute)
        if isinstance(said, bool) or not isinstance(said, int | float):
            raise Wrong(f"For {layers} layers your function returns {said!r}; it should return seconds, a number.")
        arrived = starts = finished = 0.0  # the reader starts on a layer when the one before begins to compute
        for _ in range(layers):
            arrived = max(arrived, starts) + read
            starts = max(arrived, finished)
            finished = starts + compute
        if abs(said - finished) > 1e-9:
            told = (
                f"{layers} layers, {read:g} s to read one, {compute:g} s to compute it: {finished:g} s, and you say {said:g} s."
            )
            if abs(said - layers * (read + compute)) < 1e-9:
                raise Wrong(f"{told} That is without overlap: while a layer computes, the next one is read.")
            if abs(said - layers * max(read, compute)) < 1e-9:
                raise Wrong(f"{told} The slower of the two counts for each layer but the ends: nothing computes during the first "
                            f"read, and nothing is read during the last computation.")  # fmt: skip
            raise Wrong(f"{told} Draw two rows, reading and computing, and shift one by a layer.")
    return "With the reader one layer ahead only the slower of reading and computing counts, and the ends."


def no_overlap(layers, read, compute):
    return layers * (read + compute)


def only_the_slower(layers, read, compute):
    return layers * max(read, compute)


def only_reading(layers, read, compute):
    return layers * read


def layers_on_device(room, others, layer, layers):
    if others + layers * layer <= room:
        return layers
    return max(0, (room - others - layer) // layer)


def check_layers(answer):
    for count in (6, 9):
        shape = LlamaConfig(
            hidden_size=64, num_hidden_layers=count, intermediate_size=128, num_attention_heads=2, vocab_size=1024
        )
        shape.tie_word_embeddings = True
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(shape)
        model.tie_weights()
        layer = sum(each.nbytes for each in model.model.layers[0].parameters())
        others = model.model.embed_tokens.weight.nbytes
        for layers_of_room in (2.5, 4.5, count + 0.5):
            room = int(others + layers_of_room * layer)
            spread = infer_auto_device_map(
                model, {"cpu": room}, no_split_module_classes=list(model._no_split_modules), clean_result=False
            )
            real = sum(spread.get(f"model.layers.{n}", spread.get("model.layers", "disk")) == "cpu" for n in range(count))
            real = count if all(place == "cpu" for place in spread.values()) else real
            said = answer(room, others, layer, count)
            told = f"room {room:,} B, others {others:,} B, {count} layers of {layer:,} B: accelerate places {real}, you {said!r}."
            if isinstance(said, bool) or not isinstance(said, int | float) or said != int(said):
                raise Wrong(f"{told} Return a whole number.")
            if said == real:
                continue
            if real < count and said == (room - others) // layer:
                raise Wrong(f"{told} Not all layers fit, so room for one more stays free: an offloaded layer has to come in.")
            if real == count and said == count - 1:
                raise Wrong(f"{told} All fit: nothing is offloaded, so nothing has to come in and no room is kept free.")
            if said == room // layer or said == room // layer - 1:
                raise Wrong(f"{told} The embedding takes its bytes first.")
            raise Wrong(told)
    return "accelerate places as many: whole layers, with room for one more while any is offloaded."


def no_reserve(room, others, layer, layers):
    return min(layers, (room - others) // layer)


def always_reserve(room, others, layer, layers):
    return min(layers, (room - others) // layer) - 1


def forgot_the_others(room, others, layer, layers):
    return layers if layers * layer <= room else room // layer - 1


def shared_layer(read, hidden):
    size = hidden.shape[-1]
    weight = read() if dist.get_rank() == 0 else torch.empty(size, size)
    dist.broadcast(weight, src=0)
    return hidden @ weight.T


def check_shared(answer):
    def job():
        reads = []

        def read():
            reads.append(dist.get_rank())
            return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4))

        hidden = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))
        weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4))
        found = answer(read, hidden)
        shape = tuple(getattr(found, "shape", ()))
        return len(reads), shape, shape == (ROWS, SIZE) and torch.allclose(found, hidden @ weight.T, atol=1e-5)

    run = launch(job, ranks=RANKS, backend="gloo", timeout=20)
    reads = [result[0] for result in run.results]
    if sum(reads) > 1:
        raise Wrong(f"The disk was read {sum(reads)} times, by rank: {reads}. Only rank 0 may call read(), once.")
    if shapes := [result[1] for result in run.results if result[1] != (ROWS, SIZE)]:
        raise Wrong(f"A rank returns shape {shapes[0]}; it should be that of its hidden, {(ROWS, SIZE)}.")
    if wrong := [rank for rank, result in enumerate(run.results) if not result[2]]:
        raise Wrong(f"On ranks {wrong} the result is not hidden @ weight.T with the weight that rank 0 read: does it reach them?")
    ops = [(c.op, c.bytes) for c in run.collectives if c.rank == 1]
    if len(ops) != 1 or ops[0][0] != "broadcast":
        raise Wrong(
            f"The values are right, but rank 1 took part in {', '.join(f'{op} of {size:,} B' for op, size in ops) or 'nothing'}: "
            f"one rank has what all need, and that is one broadcast of {4 * SIZE * SIZE:,} B."
        )
    return f"One read, one broadcast of {ops[0][1]:,} B, and each rank computes its own rows."


def everyone_reads(read, hidden):
    return hidden @ read().T


def sum_of_zeros(read, hidden):
    size = hidden.shape[-1]
    weight = read() if dist.get_rank() == 0 else torch.zeros(size, size)
    dist.all_reduce(weight)
    return hidden @ weight.T


def never_sent(read, hidden):
    size = hidden.shape[-1]
    weight = read() if dist.get_rank() == 0 else torch.zeros(size, size)
    return hidden @ weight.T


def not_transposed(read, hidden):
    size = hidden.shape[-1]
    weight = read() if dist.get_rank() == 0 else torch.empty(size, size)
    dist.broadcast(weight, src=0)
    return hidden @ weight


EXERCISES = [
    Exercise(
        "08.1",
        "a placement within 8 MiB",
        answer={
            "model.embed_tokens": "cpu",
            "model.layers.0-1": "cpu",
            "model.layers.2-3": "disk",
            "model.norm": "cpu",
            "lm_head": "cpu",
        },
        hints=[
            "Every module needs a tier: embedding, four layers, norm, head. Head and embedding share one weight, and one tier.",
            "1 MiB + 2 × 2.9 MiB is under 8 MiB, and a third layer is too much. Which two does not matter.",
        ],
        check=check_placement,
        wrong=[
            (
                {"model.embed_tokens": "cpu", "model.layers.0-1": "cpu", "model.layers.2-3": "disk", "model.norm": "cpu"},
                "has no tier",
            ),
            (
                {
                    "model.embed_tokens": "cpu",
                    "model.layers.0-2": "cpu",
                    "model.layers.3": "disk",
                    "model.norm": "cpu",
                    "lm_head": "cpu",
                },
                "another layer has to go",
            ),
            (
                {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"},
                "another layer of 2.9 MiB fits",
            ),
            (
                {
                    "model.embed_tokens": "cpu",
                    "model.layers.0-1": "cpu",
                    "model.layers.2-3": "disk",
                    "model.norm": "cpu",
                    "lm_head": "disk",
                },
                "shares its weight",
            ),
            ({"model.layers.0-4": "cpu"}, "goes beyond the last"),
        ],
    ),
    Exercise(
        "08.2",
        "a token's time when the next layer is read ahead",
        answer=token_seconds,
        hints=[
            "Two rows on paper: the reader and the computing device. What does each do while the other is at layer 1?",
            "Between the first read and the last computation stand layers − 1 steps, each as long as the slower of the two.",
        ],
        check=check_token,
        wrong=[(no_overlap, "without overlap"), (only_the_slower, "but the ends"), (only_reading, "Draw two rows")],
    ),
    Exercise(
        "08.3",
        "layers that accelerate keeps on a device",
        answer=layers_on_device,
        hints=[
            "First the case that all fit: then nothing is offloaded.",
            "Else room for one layer more stays free: take it off the room before you divide. // rounds down.",
        ],
        check=check_layers,
        wrong=[
            (no_reserve, "room for one more stays free"),
            (always_reserve, "All fit"),
            (forgot_the_others, "takes its bytes first"),
        ],
    ),
    Exercise(
        "08.4",
        "one rank reads a layer for all",
        answer=shared_layer,
        hints=[
            "Ranks other than 0 need an empty tensor of the same shape to receive into.",
            "dist.broadcast(weight, src=0) fills it.",
        ],
        check=check_shared,
        wrong=[
            (everyone_reads, "was read 3 times"),
            (sum_of_zeros, "that is one broadcast"),
            (never_sent, "does it reach them"),
            (not_transposed, "is not hidden @ weight.T"),
        ],
    ),
]
