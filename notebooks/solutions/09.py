"""Notebook 09: answers, hints, checks, and wrong answers with the message each gets."""

import copy
import math

from helpers import models, predict
from helpers.exercises import Exercise, Wrong, as_number


def requests_at_once(config, kv_bytes, tokens, block, tp):
    each = predict.kv_bytes_per_token(config, precision="bf16", tp=tp)
    return kv_bytes // (each * block) // math.ceil(tokens / block)  # blocks in the cache, and blocks of a request


def check_requests(answer):
    tiny = models.config("tiny-ernie")
    large = copy.deepcopy(tiny)
    large.num_hidden_layers, large.num_key_value_heads, large.head_dim = 18, 4, 128
    cases = ((tiny, 2**20, 100, 16, 1), (large, 2**30, 2000, 16, 2), (large, 3 * 2**28, 2049, 128, 4), (tiny, 2**22, 900, 128, 4))
    for config, size, tokens, block, tp in cases:
        found, right = as_number(answer(config, size, tokens, block, tp)), requests_at_once(config, size, tokens, block, tp)
        each = predict.kv_bytes_per_token(config, precision="bf16", tp=tp)
        case = f"{size // 2**20} MiB, requests of {tokens} tokens, blocks of {block}, TP={tp}: your answer is {found}"
        if found is None or found != int(found):
            raise Wrong(f"{case}; a whole number of requests is asked for.")
        if found == right:
            continue
        if found == size // (each * tokens):
            raise Wrong(f"{case}, right if memory were handed out by single tokens. A request holds whole blocks: round up.")
        if found == size // (each * tp * block) // math.ceil(tokens / block):
            raise Wrong(f"{case}: too few. Each of the {tp} ranks has so many bytes, and keeps only its share of the KV heads.")
        heads = config.num_attention_heads / config.num_key_value_heads
        if found == int(size // (each * heads * block)) // math.ceil(tokens / block):
            raise Wrong(f"{case}, right if every attention head had its own keys and values. Only KV heads have.")
        if found == 2 * right or found == size // (each // 2 * block) // math.ceil(tokens / block):
            raise Wrong(f"{case}: twice too many. A token has a key and a value, and at least one whole KV head stays on a rank.")
        raise Wrong(f"{case}, {right} is right: blocks that fit into the cache, divided by the blocks of one request.")
    return "Four caches: whole blocks, KV heads only, at least one of them on each rank."


def by_single_tokens(config, kv_bytes, tokens, block, tp):
    return kv_bytes // (predict.kv_bytes_per_token(config, precision="bf16", tp=tp) * tokens)


def whole_cache_on_each_rank(config, kv_bytes, tokens, block, tp):
    each = tp * predict.kv_bytes_per_token(config, precision="bf16", tp=tp)
    return kv_bytes // (each * block) // math.ceil(tokens / block)


def every_head(config, kv_bytes, tokens, block, tp):
    groups = config.num_attention_heads // config.num_key_value_heads
    each = predict.kv_bytes_per_token(config, precision="bf16", tp=tp) * groups
    return kv_bytes // (each * block) // math.ceil(tokens / block)


def keys_only(config, kv_bytes, tokens, block, tp):
    each = predict.kv_bytes_per_token(config, precision="bf16", tp=tp) // 2
    return kv_bytes // (each * block) // math.ceil(tokens / block)


def layouts(heads, kv_heads, gpus):
    return [
        (tp, gpus // tp)
        for tp in range(1, gpus + 1)
        if gpus % tp == 0 and heads % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0
    ]


def check_layouts(answer):
    for heads, kv_heads, gpus in ((28, 4, 8), (16, 2, 8), (12, 3, 6), (28, 4, 6)):
        found, right = answer(heads, kv_heads, gpus), layouts(heads, kv_heads, gpus)
        case = f"{heads} heads, {kv_heads} KV heads, {gpus} GPUs"
        try:
            pairs = [tuple(int(number) for number in pair) for pair in found]
            assert all(len(pair) == 2 for pair in pairs)
        except (TypeError, ValueError, AssertionError):
            raise Wrong(f"{case}: a list of pairs (TP degree, replicas) is asked for; yours is {found!r}.") from None
        if len(pairs) != len(set(pairs)):
            raise Wrong(f"{case}: a pair stands twice in {pairs}.")
        for tp, replicas in pairs:
            if (tp, replicas) in right:
                continue
            if tp * replicas != gpus:
                raise Wrong(f"{case}: {tp} × {replicas} = {tp * replicas} GPUs; all {gpus} are to be used.")
            if heads % tp:
                raise Wrong(f"{case}: ({tp}, {replicas}) gives each rank {heads / tp:g} attention heads. Whole ones only.")
            raise Wrong(
                f"{case}: ({tp}, {replicas}): {kv_heads} KV heads can neither be divided among {tp} ranks nor copied evenly."
            )
        if lost := sorted(set(right) - set(pairs)):
            tp = lost[0][0]
            more = f": with more ranks than KV heads each is copied on {tp // kv_heads} ranks" if tp > kv_heads else ""
            raise Wrong(f"{case}: {lost[0]} is missing. It works{more}.")
    return "Four cases: whole heads on each rank, KV heads divided or copied evenly, all GPUs used."


def heads_only(heads, kv_heads, gpus):
    return [(tp, gpus // tp) for tp in range(1, gpus + 1) if gpus % tp == 0 and heads % tp == 0]


def never_copied(heads, kv_heads, gpus):
    return [(tp, gpus // tp) for tp in range(1, gpus + 1) if gpus % tp == 0 and heads % tp == 0 and kv_heads % tp == 0]


def some_gpus_idle(heads, kv_heads, gpus):
    return [(tp, gpus // tp) for tp in range(1, gpus + 1) if heads % tp == 0 and max(kv_heads, tp) % min(kv_heads, tp) == 0]


def degrees_only(heads, kv_heads, gpus):
    return [tp for tp, _ in layouts(heads, kv_heads, gpus)]


def batches(lengths, slots):
    left, waiting, running, steps = list(lengths), list(range(len(lengths))), [], []
    while running or waiting:
        while waiting and len(running) < slots:  # a free place is taken at once, first come, first served
            running.append(waiting.pop(0))
        steps.append(running)
        for number in running:
            left[number] -= 1
        running = [number for number in running if left[number]]
    return steps


def check_batches(answer):
    for lengths, slots in (([2, 5, 1, 1, 3], 2), ([4], 3), ([64 if number % 4 == 3 else 8 for number in range(40)], 16), ([], 4)):
        found, right = answer(list(lengths), slots), batches(lengths, slots)
        case = f"{len(lengths)} requests, {slots} at a time"
        if not isinstance(found, (list, tuple)) or not all(isinstance(step, (list, tuple, set)) for step in found):
            raise Wrong(f"{case}: a list is asked for that holds, for each step, the list of requests in it; yours is {found!r}.")
        steps, started, waits = [list(step) for step in found], [], list(range(len(lengths)))
        for place, step in enumerate(steps):
            if len(step) > slots:
                raise Wrong(f"{case}: step {place} has {len(step)} requests.")
            if len(set(step)) < len(step) or not set(step) <= set(range(len(lengths))):
                raise Wrong(f"{case}: step {place} is {step}; each request may stand in it once, by its number from 0.")
            new = [number for number in step if number not in started]
            if sorted(new) != waits[: len(new)]:
                raise Wrong(f"{case}: request {new[0]} begins in step {place} while {waits[0]} waits: first come, first served.")
            started, waits = started + new, waits[len(new) :]
            if len(step) < slots and waits:
                raise Wrong(
                    f"{case}: step {place} has {len(step)} requests, {slots - len(step)} places are free, and request {waits[0]} "
                    f"waits. A place that is free is taken in the very next step: that is what continuous batching means."
                )
        for number, length in enumerate(lengths):
            at = [place for place, step in enumerate(steps) if number in step]
            if len(at) != length:
                raise Wrong(f"{case}: request {number} stands in {len(at)} steps, and asked for {length} tokens, one a step.")
            if at[-1] - at[0] + 1 != length:
                raise Wrong(f"{case}: request {number} is interrupted: steps {at}.")
        assert list(map(set, steps)) == list(map(set, right)), "the rules leave one order"
    lengths = [64 if number % 4 == 3 else 8 for number in range(40)]
    static = sum(max(lengths[first : first + 16]) for first in range(0, 40, 16))
    return f"40 requests, 16 at a time: {len(batches(lengths, 16))} steps; static batches would take {static}."


def static_batches(lengths, slots):
    steps = []
    for first in range(0, len(lengths), slots):
        batch = range(first, min(first + slots, len(lengths)))
        for step in range(max(lengths[number] for number in batch)):
            steps.append([number for number in batch if lengths[number] > step])
    return steps


def all_at_once(lengths, slots):
    return [[number for number, length in enumerate(lengths) if length > step] for step in range(max(lengths, default=0))]


def shortest_first(lengths, slots):
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    return [[order[place] for place in step] for step in batches([lengths[number] for number in order], slots)]


def one_token_more(lengths, slots):
    return batches([length + 1 for length in lengths], slots)


def counts_only(lengths, slots):
    return [len(step) for step in batches(lengths, slots)]


def pays_after(extra, before, after):
    if extra <= 0:
        return 0
    return math.ceil(extra / (before - after)) if after < before else math.inf


def check_pays(answer):
    for extra, before, after in ((30, 0.02, 0.015), (12, 0.5, 0.25), (20, 0.03, 0.04), (20, 0.03, 0.03), (-2, 0.02, 0.01)):
        found, right = answer(extra, before, after), pays_after(extra, before, after)
        case = f"{extra} s more to start, {before} s a request before, {after} s after: your answer is {found!r}"
        if right == math.inf:
            if found != math.inf:
                raise Wrong(f"{case}. A request is not faster than before, so it never pays: math.inf.")
            continue
        number = as_number(found)
        if number is None:
            raise Wrong(f"{case}; a number is asked for.")
        if abs(number - right) <= 1:
            continue
        if right == 0:
            raise Wrong(f"{case}. The start was not even longer: it pays from the beginning, after 0 requests.")
        if abs(number - extra / before) <= 1 or abs(number - extra / after) <= 1:
            raise Wrong(f"{case}. That is how many requests fit into the longer start. What each of them *gains* pays it back.")
        raise Wrong(f"{case}; {right:,} is right: the longer start, divided by what each request gains.")
    return "It pays when the gains of all requests have made up for the longer start, and never where there is no gain."


def how_many_fit(extra, before, after):
    return 0 if extra <= 0 else math.inf if after >= before else extra / before


def always_pays(extra, before, after):
    return 0 if extra <= 0 else math.ceil(extra / abs(before - after)) if before != after else math.inf


def negative(extra, before, after):
    return math.ceil(extra / (before - after)) if after < before else math.inf


def check_latency(answer):
    number = as_number(answer)
    if number is None:
        raise Wrong(f"A number of seconds is asked for; yours is {answer!r}.")
    if abs(number - 0.025) < 1e-6:
        raise Wrong("1 / 40 s is the time between two answers. 8 requests are under way at any moment.")
    if abs(number - 5) < 1e-6:
        raise Wrong("40 / 8 is how many requests each client sends in a second. How long does one of them take?")
    if abs(number - 320) < 1e-6:
        raise Wrong("320 has the unit requests²/s. Clients, rate and latency hang together as clients = rate × latency.")
    if abs(number - 0.2) > 0.002:
        raise Wrong(
            f"You found {number}. Each client sends its next request when it has its answer; together they get 40 a second."
        )
    return "8 clients = 40 requests/s × 0.2 s: with more clients on a server at its limit, only the waiting grows."


EXERCISES = [
    Exercise(
        "09.1",
        "count the requests that fit into a KV cache",
        answer=requests_at_once,
        hints=[
            "predict.kv_bytes_per_token(config, precision=…, tp=…) is what one rank keeps for one token.",
            "Blocks in the cache: kv_bytes // (bytes of a token × block). A request holds math.ceil(tokens / block) of them.",
        ],
        check=check_requests,
        wrong=[
            (by_single_tokens, "whole blocks: round up"),
            (whole_cache_on_each_rank, "keeps only its share"),
            (every_head, "Only KV heads have"),
            (keys_only, "twice too many"),
        ],
    ),
    Exercise(
        "09.2",
        "list the ways to put a model on all GPUs of a machine",
        answer=layouts,
        hints=[
            "TP degree × replicas = GPUs; each rank has whole attention heads.",
            "The larger of KV heads and TP degree is a multiple of the smaller: KV heads are divided, or each is copied evenly.",
        ],
        check=check_layouts,
        wrong=[
            (heads_only, "neither be divided"),
            (never_copied, "each is copied on"),
            (some_gpus_idle, "are to be used"),
            (degrees_only, "list of pairs"),
        ],
    ),
    Exercise(
        "09.3",
        "batch continuously",
        answer=batches,
        hints=[
            "Keep three things: which requests wait, which run, and how many tokens each still wants.",
            "In every step: fill free places from those that wait, note who runs, count their tokens, let the finished leave.",
        ],
        check=check_batches,
        wrong=[
            (static_batches, "in the very next step"),
            (all_at_once, "step 0 has 5 requests"),
            (shortest_first, "first come, first served"),
            (one_token_more, "one a step"),
            (counts_only, "the list of requests in it"),
        ],
    ),
    Exercise(
        "09.4",
        "say when a longer start has paid",
        answer=pays_after,
        hints=["Each request gains before − after seconds.", "No gain: never, math.inf. No longer start: from the beginning, 0."],
        check=check_pays,
        wrong=[(how_many_fit, "fit into the longer start"), (always_pays, "it never pays"), (negative, "after 0 requests")],
    ),
    Exercise(
        "09.5",
        "find the latency in a closed loop",
        answer=0.2,
        hints=["All 8 clients wait for an answer at any moment.", "Clients = requests a second × seconds of a request."],
        check=check_latency,
        wrong=[(0.025, "between two answers"), (5, "each client sends"), (320, "clients = rate × latency"), (0.3, "You found")],
    ),
]
