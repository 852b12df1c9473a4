"""The shipped model is what it claims to be, and every way in which loading can fail says what would be right."""

import http.server
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import likelihood
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from helpers import corpus, machine, model_files, models

TINY = model_files.TINY_FOLDER
ERNIE_PARAMETERS = 103_424 * 1024 + 18 * (2 * 1024 * 2048 + 2 * 1024 * 256 + 3 * 1024 * 3072 + 2 * 1024) + 1024


@pytest.fixture(scope="module")
def tiny():
    return models.load("tiny-ernie")


@pytest.fixture
def copy(tmp_path):
    """A copy of tiny-ERNIE's folder to break."""
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No setting, cache or network of the person who runs the tests has a say."""
    for name in ("WORKSHOP_MODEL", "WORKSHOP_MODELS_FOLDER", "WORKSHOP_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens


def rewrite_config(folder: Path, **changes: object) -> None:
    page = json.loads((folder / "config.json").read_text())
    page.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in page.items() if value is not None}))


# tiny-ERNIE


def test_tiny_ernie_has_the_shape_that_the_notebooks_count_with(tiny):
    model, tokenizer = tiny
    assert models.parameter_count("tiny-ernie") == 3_279_104 == sum(p.numel() for p in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(list(model.parameters())) == 38
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert (len(tokenizer), model.config.vocab_size, model.config.num_key_value_heads) == (1024, 1024, 2)


def test_tiny_ernie_is_small_enough_for_a_repository():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 16_000_000
    assert {file.suffix for file in TINY.iterdir()} == {".json", ".safetensors"}


def model_nll(model, ids, labels) -> tuple[float, int]:
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item(), int((labels[:, 1:] != -100).sum())


def test_tiny_ernie_sits_on_the_floor(tiny):
    """Within 0.01 nats per token of the lowest loss there is, on sentences it was not trained on."""
    model, tokenizer = tiny
    texts = corpus.sentences(600, seed=99)
    loss, tokens = model_nll(model, *corpus.batch(tokenizer, 600, seed=99))
    assert tokens == sum(len(text.split()) + 1 for text in texts)
    assert abs(loss - likelihood.nll(texts)) <= 0.01


def test_loss_of_a_batch_is_nats_per_token(tiny):
    model, tokenizer = tiny
    ids, labels = corpus.batch(tokenizer, 20, seed=8)
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=labels).loss.item()
    assert loss == pytest.approx(model_nll(model, ids, labels)[0], abs=1e-5)


def test_what_tiny_ernie_writes_are_sentences(tiny):
    model, tokenizer = tiny
    prompts = torch.full((600, 1), tokenizer.bos_token_id)
    torch.manual_seed(0)
    with torch.inference_mode():
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=64)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert sum(map(likelihood.parses, texts)) >= 0.95 * len(texts)
    assert len(set(texts)) > 450


def test_prompts_of_unequal_length_in_a_batch_go_on_as_they_do_alone(tiny):
    model, tokenizer = tiny
    prompts = ["the", "today the old teacher", "many children whom Anna sees"]
    with torch.inference_mode():
        together = model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), max_new_tokens=24)
        alone = [model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=24)[0] for prompt in prompts]
    texts = tokenizer.batch_decode(together, skip_special_tokens=True)
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in alone]
    assert all(text.startswith(prompt) and likelihood.parses(text) for text, prompt in zip(texts, prompts, strict=True))


def test_padding_on_the_right_leaves_a_sentence_alone(tiny):
    model, tokenizer = tiny
    ids, _ = corpus.batch(tokenizer, 8, seed=21)
    with torch.inference_mode():
        together = model(input_ids=ids).logits
        for row in range(len(ids)):
            length = int((ids[row] != tokenizer.pad_token_id).sum())
            alone = model(input_ids=ids[row : row + 1, :length]).logits[0]
            assert torch.allclose(together[row, :length], alone, atol=1e-4)


def test_tokenizer_and_text_are_the_same_thing(tiny):
    _, tokenizer = tiny
    text = corpus.sentences(1, seed=5)[0]
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("the zebra").input_ids[-1] == tokenizer.unk_token_id
    assert all(tokenizer.convert_tokens_to_ids(word) > 3 for word in likelihood.vocabulary())


# the script that made it


@pytest.fixture(scope="module")
def script():
    file = Path(__file__).parent.parent / "tools" / "train_tiny_ernie.py"
    spec = importlib.util.spec_from_file_location("train_tiny_ernie", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_what_is_shipped(script, tmp_path):
    script.make_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((TINY / name).read_text())
    shipped, made = models.config("tiny-ernie").to_dict(), script.CONFIG.to_dict()
    for key in ("architectures", "dtype", "transformers_version", "_name_or_path"):  # written when a model is saved
        shipped.pop(key, None), made.pop(key, None)
    assert shipped == made


def test_sentences_side_by_side_in_a_row_are_learnt_as_if_alone(script, tiny):
    model, tokenizer = tiny
    texts = corpus.sentences(40, seed=17)
    inputs, labels, _ = script.packed_rows(tokenizer, texts)
    assert len(inputs) < 20
    assert int((labels != -100).sum()) == sum(len(text.split()) + 1 for text in texts)
    with torch.inference_mode():
        packed = script.mean_loss(model, tokenizer, texts).item()
    assert packed == pytest.approx(model_nll(model, *corpus.batch(tokenizer, 40, seed=17))[0], abs=1e-5)


def test_training_twice_gives_the_same_weights(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "SENTENCES", 4)
    monkeypatch.setattr(script, "HELD_OUT", 10)
    threads = torch.get_num_threads()
    made = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        monkeypatch.setattr(sys, "argv", ["train_tiny_ernie.py", "--steps", "3", "--folder", str(folder)])
        script.main()
        made.append(models.load(str(folder))[0].state_dict())
    torch.set_num_threads(threads)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
    initial, _ = models.load("tiny-ernie", weights="random", seed=0)
    assert not torch.equal(made[0]["lm_head.weight"], initial.state_dict()["lm_head.weight"])


# the same call gives the same weights


def test_loading_is_deterministic_and_leaves_the_random_state_alone(tiny):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again, _ = models.load("tiny-ernie")
    drawn, _ = models.load("tiny-ernie", weights="random", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    stored = load_file(TINY / "model.safetensors")
    for (name, one), other in zip(tiny[0].named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, stored[name])
    torch.manual_seed(6)
    drawn_again, _ = models.load("tiny-ernie", weights="random", seed=1)
    drawn_otherwise, _ = models.load("tiny-ernie", weights="random", seed=2)
    assert torch.equal(drawn.lm_head.weight, drawn_again.lm_head.weight)
    assert not torch.equal(drawn.lm_head.weight, drawn_otherwise.lm_head.weight)
    assert not drawn.training


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", torch.bfloat16), (torch.float64, torch.float64), (None, torch.float32)]
)
def test_dtype_is_of_all_parameters(weights, dtype, expected):
    model, _ = models.load("tiny-ernie", weights=weights, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_device_is_where_the_parameters_go():
    model, _ = models.load("tiny-ernie", device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_loading_writes_nothing_and_shows_progress_to_others_later():
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from helpers import models\n"
        "models.load('tiny-ernie'); models.load('tiny-ernie', weights='random')\n"
        "from transformers.utils import logging; assert logging.is_progress_bar_enabled()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# the 0.3B shape


def test_the_shape_of_ernie_needs_no_file():
    assert models.parameter_count("ernie-0.3b") == ERNIE_PARAMETERS == 360_748_032
    config = models.config("ernie-0.3b")
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads, config.head_dim) == (18, 1024, 2, 128)
    assert models.parameter_count(config) == ERNIE_PARAMETERS


def test_random_weights_of_any_size_come_with_a_tokenizer(monkeypatch):
    small = models.config("ernie-0.3b")
    small.num_hidden_layers, small.vocab_size = 1, 2048
    monkeypatch.setattr("transformers.Ernie4_5Config", lambda: small)
    model, tokenizer = models.load("ernie-0.3b", weights="random", dtype="bfloat16")
    assert model.num_parameters() == models.parameter_count(small)
    with torch.inference_mode():
        assert model(**tokenizer("the dog sleeps", return_tensors="pt")).logits.shape == (1, 4, 2048)


# names and places


def test_default_is_tiny_ernie_on_a_cpu_and_the_environment_decides(monkeypatch, copy):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    assert models.default_name() == "tiny-ernie"
    assert models.folder() == TINY
    monkeypatch.setenv("WORKSHOP_MODEL", str(copy))
    assert models.default_name() == str(copy)
    assert models.folder() == copy
    assert models.load()[0].config.hidden_size == models.config().hidden_size == 256


def test_default_is_ernie_only_where_a_gpu_and_whole_weights_are(monkeypatch, copy, tmp_path):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cuda:0"))
    assert models.default_name() == "tiny-ernie"
    monkeypatch.setenv("WORKSHOP_MODELS_FOLDER", str(tmp_path))
    ernie = copy.rename(tmp_path / "ERNIE-4.5-0.3B-PT")
    assert models.default_name() == "ernie-0.3b"
    (ernie / "model.safetensors").unlink()
    assert models.default_name() == "tiny-ernie"


@pytest.mark.parametrize("inside", ["ERNIE-4.5-0.3B-PT", "baidu/ERNIE-4.5-0.3B-PT"])
def test_the_models_folder_comes_first(monkeypatch, copy, tmp_path, inside):
    monkeypatch.setenv("WORKSHOP_MODELS_FOLDER", str(tmp_path / "shelf"))
    (tmp_path / "shelf" / inside).parent.mkdir(parents=True)
    place = copy.rename(tmp_path / "shelf" / inside)
    assert models.folder("ernie-0.3b") == place
    assert models.load("ernie-0.3b")[0].num_parameters() == 3_279_104
    (place / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="lacks a tokenizer"):  # not fetched elsewhere: somebody meant this folder
        models.folder("ernie-0.3b")


def put_into_cache(cache: Path, repository: str, source: Path) -> Path:
    entry = cache / f"models--{repository.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0123abcd")
    return Path(shutil.copytree(source, entry / "snapshots" / "0123abcd"))


def test_the_hub_cache_comes_second(tmp_path):
    place = put_into_cache(tmp_path / "cache", "somebody/small", TINY)
    assert models.folder("somebody/small") == place
    assert models.parameter_count("somebody/small") == 3_279_104
    (place / "model.safetensors").unlink()
    assert models.config("somebody/small").hidden_size == 256  # needs no weights
    with pytest.raises(ConnectionError, match=r"copy in the hub cache is incomplete .*lacks model\.safetensors"):
        models.load("somebody/small")


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that has `somebody/small`, whose files are `hub.files`; it notes what is fetched."""

    class Hub(http.server.BaseHTTPRequestHandler):
        files: ClassVar = {file.name: file.read_bytes() for file in TINY.iterdir()} | {
            "README.md": b"hello",
            "sub/model.safetensors": b"",
        }
        fetched: ClassVar[list[str]] = []

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            place = self.path.partition("?")[0].removeprefix("/")
            name = place.removeprefix("somebody/small/resolve/main/")
            if place == "api/models/somebody/small":
                listing = {"id": "somebody/small", "sha": "0123abcd", "siblings": [{"rfilename": name} for name in self.files]}
                self.answer(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
            elif name in self.files:
                if self.command == "GET":
                    self.fetched.append(name)
                self.answer(200, self.files[name], {"ETag": f'"{abs(hash(name)):x}"', "X-Repo-Commit": "0123abcd"})
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def answer(self, status, body, headers):
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        yield Hub
        server.shutdown()
        thread.join()


def test_the_hub_comes_last_and_gives_what_is_needed(hub, tmp_path):
    assert models.config("somebody/small").hidden_size == 256
    assert hub.fetched == ["config.json"]
    model, _ = models.load("somebody/small")
    assert model.num_parameters() == 3_279_104
    assert sorted(hub.fetched) == sorted(file.name for file in TINY.iterdir())  # each once; no README, no folder inside
    assert models.folder("somebody/small").is_relative_to(tmp_path / "cache")


def test_pickles_on_the_hub_are_refused_before_they_are_fetched(hub):
    hub.files = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"\x80"}
    with pytest.raises(ValueError, match=r"somebody/small on the hub are not safetensors but pytorch_model\.bin"):
        models.load("somebody/small")
    assert hub.fetched == []


def test_a_model_the_hub_does_not_have(hub):
    with pytest.raises(ValueError, match="the hub has no model somebody/other"):
        models.load("somebody/other")


# errors that help


def test_hub_out_of_reach():
    with pytest.raises(ConnectionError) as caught:
        models.load("ernie-0.3b")
    message = str(caught.value)
    for part in ("baidu/ERNIE-4.5-0.3B-PT", "hub does not answer", "WORKSHOP_MODELS_FOLDER", 'weights="random"', '"tiny-ernie"'):
        assert part in message


def test_offline_mode_counts_as_out_of_reach(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="offline mode is enabled"):
        models.config("somebody/small")


@pytest.mark.parametrize("name", ["tiny-ernei", "gpt2", "./no/such/folder", "a/b/c", "/tmp/../nowhere"])
def test_a_name_that_means_nothing(name):
    with pytest.raises(ValueError, match=f'no model is called {name!r}: use "tiny-ernie", "ernie-0.3b"'):
        models.load(name)


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "model.safetensors"),
        ("tokenizer.json", "a tokenizer (tokenizer.json"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(copy, gone, named):
    (copy / gone).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        models.load(str(copy))
    assert f"{copy} is incomplete: it lacks {named}" in str(caught.value)


def split_weights(folder: Path) -> list[Path]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sorted(folder.glob("*.safetensors"))


def test_weights_in_several_files(copy, tiny):
    files = split_weights(copy)
    model, _ = models.load(str(copy))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), tiny[0].parameters(), strict=True))
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"names 2 files, of which it lacks model-00002-of-00002\.safetensors"):
        models.load(str(copy))


def test_weights_that_are_no_safetensors(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"not safetensors but pytorch_model\.bin: pickle files, which can run code"):
        models.load(str(copy))


def test_weights_that_are_cut_off_or_only_a_pointer(copy):
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    with pytest.raises(
        ValueError, match=rf"\({len(whole) - 1000:,} bytes\) is cut off or not a safetensors file.*not fully covered"
    ):
        models.load(str(copy))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 13120488\n")
    with pytest.raises(ValueError, match=r"not a safetensors file, perhaps a pointer of Git LFS .*\(git lfs pull"):
        models.load(str(copy))


def test_remote_code_is_wanted_and_not_run(copy):
    rewrite_config(copy, model_type="strange", auto_map={"AutoModelForCausalLM": "modeling_strange.Strange"})
    (copy / "modeling_strange.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ValueError, match=r"needs code that came with it \(modeling_strange\.Strange\).*is not run here"):
        models.load(str(copy))


def test_remote_code_that_is_not_needed_is_left_alone(copy):
    rewrite_config(copy, architectures=["Ernie4_5_ForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (copy / "modeling_own.py").write_text("raise SystemExit('this ran')")
    assert type(models.load(str(copy))[0]).__module__ == "transformers.models.ernie4_5.modeling_ernie4_5"


@pytest.mark.parametrize("kind", ["strange", None])
def test_unknown_architecture(copy, kind):
    rewrite_config(copy, model_type=kind)
    with pytest.raises(ValueError, match=f"says model_type {kind!r}, an architecture that transformers .* does not know"):
        models.load(str(copy))


@pytest.mark.parametrize(("kind", "named"), [("t5", "T5ForConditionalGeneration"), ("bert", "BertForMaskedLM")])
def test_not_a_causal_language_model(copy, kind, named):
    (copy / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [named]}))
    for asked in (models.load, models.config):
        with pytest.raises(ValueError, match=f"{named}, which is no causal language model"):
            asked(str(copy))


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_too_little_memory_is_said_before_anything_is_loaded(monkeypatch, weights):
    memory = psutil.virtual_memory()._replace(available=4 * 3_279_104 - 1)  # one byte less than the parameters take
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # is not reached
    with pytest.raises(MemoryError, match=r"parameters of tiny-ernie in .* take 0\.01 GiB, and the CPU has 0\.01 GiB free"):
        models.load("tiny-ernie", weights=weights)


def test_memory_is_counted_in_the_dtype_asked_for(monkeypatch):
    memory = psutil.virtual_memory()._replace(available=2 * 3_279_104)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert models.load("tiny-ernie", dtype="bfloat16")[0].num_parameters() == 3_279_104  # 6.6 MB fit, 13.1 MB would not


def test_options_without_meaning():
    with pytest.raises(ValueError, match=r'weights is \'zero\'; it must be "pretrained" or "random"'):
        models.load("tiny-ernie", weights="zero")
    for dtype in ("int8", torch.int8, "nonsense"):
        with pytest.raises(ValueError, match="floating-point dtype"):
            models.load("tiny-ernie", dtype=dtype)


def test_the_gpu_must_have_room_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**34))  # bytes free, bytes in all
    config = models.config("tiny-ernie")
    with pytest.raises(MemoryError, match=r"take 0\.01 GiB, and cuda has 0\.00 GiB free"):
        models._check_memory(config, torch.float32, "tiny-ernie", torch.device("cuda"))
    models._check_memory(config, torch.float32, "tiny-ernie", torch.device("cpu"))
