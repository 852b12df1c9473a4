"""Make the shipped model: python tools/train_tiny_ernie.py [--folder data/tiny_ernie] [--steps 3000]

Builds the tokenizer from the grammar's vocabulary, trains tiny-ERNIE on sentences of the grammar, and writes both to a folder.
Seeds and the number of threads are fixed: on one machine and version of PyTorch two runs give the same weights. About 0.15 s a
step on two idle cores; threads that wait for each other make it many times slower on busy ones.
Every few steps it prints the distance from the floor: model's minus grammar's nats per token on sentences it is not trained on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import likelihood
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from helpers import corpus

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": corpus.END, "unk_token": "<unk>"}  # ids 0, 1, 2, 3
VOCABULARY = 1024  # a power of two, so that a vocabulary split over 2, 4 or 8 ranks comes out even; unused entries fill it up
ROW = 64  # tokens in a training row, several sentences each
SENTENCES = 64  # sentences in a step
HELD_OUT = 1000  # sentences that the distance from the floor is measured on
TRAINING_SEEDS = 1_000_000_000  # seeds above this one are trained on: sentences of every smaller seed are held out
PEAK_LEARNING_RATE = 2e-3

CONFIG = Ernie4_5Config(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,  # as in ERNIE-4.5-0.3B: the limit of tensor parallelism is met with 4 ranks
    head_dim=32,
    intermediate_size=768,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; `<s>` is put before each text, so that an encoded text is a prompt the model can continue."""
    words = [*SPECIAL.values(), *likelihood.vocabulary()]
    words += [f"<unused_{number}>" for number in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **SPECIAL, padding_side="left", model_max_length=CONFIG.max_position_embeddings
    )


def packed_rows(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sentences side by side in rows: token ids, labels, positions, each (rows, ROW). Positions begin at 0 in each sentence.

    A sentence sees only itself (`visible` below), so that rows hold hardly any padding and each sentence is learnt as if alone.
    """
    rows: list[list[list[int]]] = []
    for ids in tokenizer([f"{text} {tokenizer.eos_token}" for text in texts]).input_ids:
        place = next((row for row in rows if sum(map(len, row)) + len(ids) <= ROW), None)
        rows.append([ids[:ROW]]) if place is None else place.append(ids)
    inputs = torch.full((len(rows), ROW), tokenizer.pad_token_id)
    labels, positions = torch.full_like(inputs, corpus.IGNORED), torch.zeros_like(inputs)
    for number, row in enumerate(rows):
        start = 0
        for ids in row:
            span = slice(start, start + len(ids))
            inputs[number, span], positions[number, span] = torch.tensor(ids), torch.arange(len(ids))
            labels[number, start : start + len(ids) - 1] = torch.tensor(ids[1:])  # what the next token is
            start += len(ids)
    return inputs, labels, positions


def visible(positions: torch.Tensor) -> torch.Tensor:
    """(rows, 1, ROW, ROW) mask: each position sees itself and the earlier ones of its own sentence."""
    sentence = (positions == 0).cumsum(dim=1)
    same = sentence[:, :, None] == sentence[:, None, :]
    return (same & torch.ones(ROW, ROW, dtype=torch.bool).tril())[:, None]


def mean_loss(model: Ernie4_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Nats per token, end of sentence included, over all tokens of these sentences."""
    inputs, labels, positions = packed_rows(tokenizer, texts)
    logits = model(input_ids=inputs, attention_mask=visible(positions), position_ids=positions, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=corpus.IGNORED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent / "data" / "tiny_ernie")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(0)
    tokenizer, model = make_tokenizer(), Ernie4_5ForCausalLM(CONFIG)
    held_out = corpus.sentences(HELD_OUT, seed=0)
    floor = likelihood.nll(held_out)
    print(
        f"{model.num_parameters():,} parameters; floor {floor:.4f} nats per token on {len(held_out)} held-out sentences",
        flush=True,
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=options.steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        loss = mean_loss(model, tokenizer, corpus.sentences(SENTENCES, seed=TRAINING_SEEDS + step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 250 == 0 or step in (50, options.steps):
            with torch.inference_mode():
                distance = mean_loss(model, tokenizer, held_out).item() - floor
            print(f"step {step}: distance from the floor {distance:.4f}, {time.monotonic() - started:.0f} s", flush=True)

    disable_progress_bar()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(options.folder)  # safetensors, FP32
    tokenizer.save_pretrained(options.folder)
    print(f"written to {options.folder}")


if __name__ == "__main__":
    main()
