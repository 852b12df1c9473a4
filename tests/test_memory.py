"""Memory instruments are exact: hand counts, autograd's own hooks and the profiler's allocations agree with them."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from helpers import launch
from helpers.measuring import memory

FLOAT = 4  # bytes
IN, HIDDEN, BATCH = 16, 32, 4
PARAMETERS = IN * HIDDEN + HIDDEN + HIDDEN * IN + IN
HIDDEN_BYTES = BATCH * HIDDEN * FLOAT
STEP_COUNTER = 4  # bytes that AdamW keeps for each parameter tensor


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, IN))


@pytest.fixture(scope="module")
def tiny():
    """The architecture of tiny-ernie with random weights: 3,279,104 parameters in 38 tensors."""
    from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

    torch.manual_seed(0)
    config = Ernie4_5Config(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=768,
        vocab_size=1024,
        tie_word_embeddings=True,
    )
    return Ernie4_5ForCausalLM(config).train()


TINY_PARAMETERS, TINY_TENSORS = 3_279_104, 38
IDS = torch.arange(4 * 128).reshape(4, 128)


def fresh_step(model):
    """A first AdamW step as two functions; the model has no gradients and the optimiser no state yet."""
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()

    return optimizer, step


def saved_bytes(model):
    """What saved-tensor hooks alone see in a forward pass, without parameters and token ids; each storage once."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    for tensor in (*model.parameters(), IDS):
        seen.pop(tensor.untyped_storage()._cdata, None)
    del loss
    return sum(storage.nbytes() for storage in seen.values())


def profiler_peak(work):
    """The most that `work` had allocated at one time, by the allocator's own events; scratch of operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


def test_a_small_step_is_the_hand_count():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with memory.track(model, optimizer) as use:
        model(torch.ones(BATCH, IN)).sum().backward()
        optimizer.step()
    assert use.parameters == PARAMETERS * FLOAT
    assert use.gradients == PARAMETERS * FLOAT
    assert use.optimizer_state == 2 * PARAMETERS * FLOAT + 4 * STEP_COUNTER
    assert use.activations == HIDDEN_BYTES  # the result of ReLU; the input is no activation
    assert use.recomputation == 0
    assert use.logits == 0
    assert sum(use.at_peak.values()) == use.peak
    assert use.other == use.at_peak["other"]
    assert use.allocated is None
    assert "MiB" in repr(use)


def test_a_second_step_begins_with_what_the_first_left():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(BATCH, IN)).sum().backward()
    optimizer.step()
    with memory.track(model, optimizer) as use:
        pass
    assert use.gradients == PARAMETERS * FLOAT
    assert use.optimizer_state == 2 * PARAMETERS * FLOAT + 4 * STEP_COUNTER
    assert use.peak == 4 * PARAMETERS * FLOAT + 4 * STEP_COUNTER


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_inputs_and_makes_the_rest_again(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([two_layers() for _ in range(3)])

        def forward(self, hidden):
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return hidden

    model = Blocks()
    with memory.track(model) as use:
        model(torch.ones(BATCH, IN, requires_grad=True)).sum().backward()
    assert use.activations == 2 * BATCH * IN * FLOAT  # the inputs of the second and third block; that of the first is given
    assert use.recomputation == HIDDEN_BYTES
    assert use.gradients == 3 * PARAMETERS * FLOAT


def test_activations_that_are_offloaded_are_not_on_the_device():
    model = two_layers()
    with memory.track(model, device="cuda") as elsewhere, torch.autograd.graph.save_on_cpu():
        model(torch.ones(BATCH, IN)).sum().backward()
    assert elsewhere.peak == 0
    with memory.track(model) as here, torch.autograd.graph.save_on_cpu():
        model(torch.ones(BATCH, IN)).sum().backward()
    assert here.activations >= HIDDEN_BYTES  # the copies that save_on_cpu makes


def test_memory_kept_after_an_error_is_measured_and_nothing_stays_behind():
    constructor, resize = torch.autograd.graph.saved_tensors_hooks.__init__, torch.UntypedStorage.resize_
    model = two_layers()
    with pytest.raises(KeyError), memory.track(model):
        raise KeyError("in the block")
    assert torch.autograd.graph.saved_tensors_hooks.__init__ is constructor
    assert torch.UntypedStorage.resize_ is resize
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_output_of_a_head_is_counted_as_logits():
    model = two_layers()
    with memory.track(model, head=model[2]) as use:
        model(torch.ones(BATCH, IN)).sum().backward()
    assert use.logits == BATCH * IN * FLOAT


# The model of the course -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_step_of_tiny_ernie(tiny, attention):
    tiny.set_attn_implementation(attention)
    expected = saved_bytes(tiny)
    optimizer, step = fresh_step(tiny)
    with memory.track(tiny, optimizer) as use:
        step()
    assert use.parameters == 4 * TINY_PARAMETERS
    assert use.gradients == 4 * TINY_PARAMETERS
    assert use.optimizer_state == 8 * TINY_PARAMETERS + STEP_COUNTER * TINY_TENSORS
    assert use.logits == IDS.numel() * 1024 * FLOAT
    assert use.activations == expected
    _, step = fresh_step(tiny)
    existed = 4 * TINY_PARAMETERS + IDS.nbytes
    assert use.peak == pytest.approx(profiler_peak(step) + existed, rel=0.002)  # the profiler sees operators' scratch as well


def test_checkpointed_tiny_ernie_keeps_the_input_of_each_layer(tiny):
    tiny.set_attn_implementation("sdpa")
    uses = []
    for enable in (tiny.gradient_checkpointing_disable, tiny.gradient_checkpointing_enable):
        enable()
        tiny.zero_grad(set_to_none=True)
        with memory.track(tiny) as use:
            tiny(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        uses.append(use)
    tiny.gradient_checkpointing_disable()
    whole, checkpointed = uses
    hidden = IDS.numel() * 256 * FLOAT
    kept = whole.activations - checkpointed.activations
    assert checkpointed.recomputation <= (kept + 4 * hidden) / 4  # one of four layers
    assert checkpointed.recomputation >= 0.9 * (kept + 4 * hidden) / 4  # which stops as soon as it has what backward needs
    assert checkpointed.peak < whole.peak


def test_a_shape_too_large_for_this_machine_is_measured_without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

    with FakeTensorMode():
        model = Ernie4_5ForCausalLM(Ernie4_5Config(num_hidden_layers=2))  # the width of ERNIE-4.5-0.3B
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.zeros(8, 2048, dtype=torch.long)
        with memory.track(model, optimizer) as use:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (use.parameters, use.gradients) == (4 * parameters, 4 * parameters)
    assert use.logits == 8 * 2048 * 103_424 * FLOAT


def test_kv_cache_is_exact(tiny):
    batch, prompt, new = 3, 10, 5
    prompts = torch.arange(batch * prompt).reshape(batch, prompt)
    with torch.no_grad(), memory.track(tiny) as use:
        tiny.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    expected = 2 * 4 * batch * 2 * (prompt + new - 1) * 32 * FLOAT  # keys and values, layers, kv heads, tokens, head size
    assert use.kv_cache == expected
    assert use.activations == 0


# In ranks ---------------------------------------------------------------------------------------------------------------


def test_sharded_models_hold_their_share():
    def job():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        from helpers.measuring import memory

        def measured(model):
            optimizer = torch.optim.AdamW(model.parameters())
            with memory.track(model, optimizer) as use:
                model(torch.ones(BATCH, IN)).sum().backward()
                optimizer.step()
            return use

        sharded = two_layers()
        fully_shard(sharded[0])
        fully_shard(sharded[2])
        fully_shard(sharded)
        mesh = init_device_mesh("cpu", (2,))
        split = parallelize_module(two_layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        copied = nn.parallel.DistributedDataParallel(two_layers())
        return measured(sharded), measured(split), measured(copied)

    for sharded, split, copied in launch(job, ranks=2).results:
        half = PARAMETERS * FLOAT // 2
        assert (sharded.parameters, sharded.gradients) == (half, half)
        assert sharded.optimizer_state == 2 * half + 4 * STEP_COUNTER
        assert sharded.activations == HIDDEN_BYTES
        held = half + IN * FLOAT // 2  # the bias of the row-wise layer is whole on both
        assert (split.parameters, split.gradients) == (held, held)
        assert split.optimizer_state == 2 * held + 4 * STEP_COUNTER
        assert split.activations == HIDDEN_BYTES // 2
        assert (copied.parameters, copied.gradients) == (2 * half, 2 * half)
        assert copied.other >= 2 * half  # DDP's buckets


def test_resident_memory_of_a_process_that_gives_back_what_it_frees():
    def job(size):
        import torch

        from helpers.measuring import memory

        torch.ones(size // 4)  # page tables and the like
        with memory.host() as use:
            first = torch.ones(size // 4)
            del first
            second = torch.ones(size // 8)
        return use, second.nbytes

    size = 64 * 2**20
    (use, kept), *_ = launch(job, size, ranks=1, env=memory.HOST_ENVIRONMENT).results
    assert use.note is None
    assert use.peak - use.before == pytest.approx(size, rel=0.03)
    assert use.after - use.before == pytest.approx(kept, rel=0.06)
    assert use.peak >= use.after


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, OSError(30, "Read-only file system")])
def test_resident_memory_is_told_where_its_peak_cannot_be_reset(monkeypatch, error):
    def refuse(path, text):
        raise error

    monkeypatch.setattr(Path, "write_text", refuse)
    with memory.host() as use:
        pass
    assert use.note == "this system does not let a process reset its peak: it is the peak since the process started"
    assert use.peak >= use.before


def test_resident_memory_says_what_spoils_it(monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    with memory.host() as use:
        assert use.peak is None
    assert "MALLOC_TRIM_THRESHOLD_" in use.note
    assert "env=memory.HOST_ENVIRONMENT" in use.note
    assert use.peak >= use.before
