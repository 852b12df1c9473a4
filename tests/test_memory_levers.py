"""The jobs of notebook 07 at another size than it shows: bytes as predicted, losses and gradients, no model in the kernel."""

import math

import pytest
import transformers
from notebook_files import course_notebooks, read

from helpers import launch, models

ROWS, TOKENS = 4, 40
QUARTER = "1 sequence"  # the lever that changes what is computed
EXACT = ("parameters", "gradients", "optimizer_state", "logits")


@pytest.fixture(scope="module")
def cells():
    """The sources of the notebook's code cells by id."""
    path = next(path for path in course_notebooks() if path.name.startswith("07"))
    return {cell.id: cell.source for cell in read(path).cells if cell.cell_type == "code"}


@pytest.fixture(scope="module")
def notebook(cells):
    """What the notebook defines, of other sizes; in this process no model may be built."""
    names = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", lambda *_, **__: pytest.fail("the kernel loads a model"))
        patch.setattr(transformers.PreTrainedModel, "__init__", lambda *_, **__: pytest.fail("the kernel builds a model"))
        for id in ("setup", "job", "multiplications", "measured", "own-levers", "eight-bit", "levers", "bytes"):
            source = (
                cells[id].replace("launch(", "run_smaller(").replace("plots.stacked(", "dict(").replace("range(3)", "range(1)")
            )
            names |= {"run_smaller": launch}
            exec(source, names)
            if id == "setup":
                names |= {"BATCH": ROWS, "LENGTH": TOKENS, "SHAPE": names["predict"].architecture(names["config"])}
        yield names


def test_every_lever_takes_the_bytes_that_are_predicted(notebook):
    assert len(notebook["found"]) == 9
    for name, each in notebook["found"].items():
        said, real = notebook["bytes_predicted"](name), each["use"]
        assert {key: getattr(real, key) for key in EXACT} == {key: said[key] for key in EXACT}, name
        assert real.activations == pytest.approx(said["activations"], rel=0.1), name
        assert (each["error"] < 1e-5) is (name not in (QUARTER, "BF16 autocast")), name
        assert (max(map(abs, each["gradients"])) < 1e-3) is (name not in (QUARTER, "BF16 autocast")), name
    assert notebook["found"]["BF16 autocast"]["error"] < 0.02


def test_bf16_rounds_much_only_where_gradients_nearly_cancel(cells, notebook):
    """What the notebook says of its trained model, and of one with fresh weights, at its own size."""
    fresh = "for p in model.parameters():\n        p.ndim > 1 and torch.nn.init.normal_(p, std=0.02)\n    return model.train(),"
    assert cells["job"].count("return model.train(),") == 1
    off = []
    try:
        notebook["LENGTH"] = 192
        for job in (cells["job"], cells["job"].replace("return model.train(),", fresh)):
            exec(job, notebook)
            rounded = {"precision": notebook["torch"].bfloat16}
            off.append(launch(notebook["measured"], {}, rounded, ROWS, ranks=1, timeout=120).results[0]["gradients"][0])
    finally:
        notebook["LENGTH"] = TOKENS
        exec(cells["job"], notebook)
    assert abs(off[1]) < 0.01 < 0.05 < abs(off[0])


def test_levers_cut_what_they_are_for(notebook):
    plain, found = notebook["plain"]["use"], {name: each["use"] for name, each in notebook["found"].items()}
    assert found["4 micro-batches"].activations == found[QUARTER].activations < 0.3 * plain.activations
    assert found["full checkpointing"].activations < 0.2 * plain.activations
    assert found["selective checkpointing"].activations < found["eager attention"].activations
    assert found["8-bit AdamW"].optimizer_state < 0.26 * plain.optimizer_state
    assert found["chunked loss"].logits * 7 < plain.logits
    assert found["BF16 autocast"].parameters == plain.parameters


def test_shards_of_every_stage_are_equal_to_the_byte_padding_included(cells, notebook):
    ranks = 3  # divides neither 1,024 nor 256 rows
    exec(cells["zero"], notebook)
    exec(cells["zero-compare"], notebook)
    runs = notebook["stages"]
    shapes = runs[0].results[0]["shapes"]
    whole, part = (notebook["shard"](shapes, count) for count in (1, ranks))
    assert whole == notebook["plain"]["use"].parameters
    assert part > whole / ranks
    last = sum(max(0, shape[0] - (ranks - 1) * -(-shape[0] // ranks)) * math.prod(shape[1:]) * 4 for shape in shapes)
    for stage, run in runs.items():
        held = part if stage else whole
        for rank, result in enumerate(run.results):
            own = last if stage and rank == ranks - 1 else held  # the last rank's moments have no padding
            assert result["use"].parameters == held
            assert result["gradients"][0] == (whole if stage < 2 else own)
            assert result["gradients"][-1] == own
            assert result["use"].optimizer_state == 2 * own + 4 * len(shapes)
            assert result["loss"] == pytest.approx(runs[0].results[0]["loss"], rel=1e-5)
        squares = sum(result["squares"] for result in run.results[: None if stage else 1])
        assert squares == pytest.approx(runs[0].results[0]["squares"], rel=1e-3)
    reduced = [sum(c.op == "reduce_scatter" and c.rank == 0 for c in run.collectives) for run in runs.values()]
    assert reduced == [0, 5, 10, 10]  # four layers and the rest, once a step or once a micro-batch


def test_int8_weights_take_a_byte_each(cells, notebook):
    exec(cells["int8"], notebook)
    exec(cells["int8-run"].replace("plots.compare(", "dict("), notebook)
    assert notebook["int8_bytes"] == notebook["fp32_bytes"] - 3 * notebook["weights"] + 4 * notebook["outputs"]
    assert notebook["error"] < 0.05


def test_the_explorer_names_the_category_that_is_the_trouble(cells, notebook):
    exec(cells["explorer"].split("\n\n\n")[0], notebook)
    exec(cells["explorer"].split("\n\n\n")[1].split("\n\nwidgets")[0], notebook)
    assert "fits into H100-SXM" in notebook["fits"]().get_suptitle()
    small = notebook["fits"](gpu="T4").get_suptitle().replace("\n", " ")
    assert "too much for T4; the trouble is activations" in small
    states = notebook["fits"](gpu="T4", checkpointing="full", sequence=512, dp=1, zero=0).get_suptitle().replace("\n", " ")
    assert "the trouble is optimizer state" in states
