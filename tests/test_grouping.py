"""Layouts name the groups that torch makes, problems are seen before a run, and link matrices are read or refused."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from helpers import grouping, launch, plots
from helpers.grouping import layout, topology

MATRICES = yaml.safe_load((Path(__file__).parent / "data" / "topologies.yaml").read_text(encoding="utf-8"))
PAIRS = MATRICES["two NVLink pairs on one socket"]["text"]
SHAPE = SimpleNamespace(
    model_type="llama", num_hidden_layers=4, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=768, vocab_size=1024, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
ORDERS = st.permutations(["pp", "dp", "tp"])
SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, ORDERS)
def test_groups_of_each_axis_share_the_ranks_out(pp, dp, tp, order):
    made = layout(pp * dp * tp, pp=pp, tp=tp, order=order)
    assert len({tuple(made.coordinates(rank).items()) for rank in range(made.world)}) == made.world
    for axis in made.order:
        groups = made.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(made.world))
        assert {len(group) for group in groups} == {made.sizes[axis]}
        for group in groups:
            assert [made.coordinates(rank)[axis] for rank in group] == list(range(made.sizes[axis]))
    inner = made.groups(made.order[-1])
    assert all(group == tuple(range(group[0], group[0] + len(group))) for group in inner)


@pytest.mark.parametrize("order", [("pp", "dp", "tp"), ("pp", "tp", "dp")])
def test_groups_are_those_of_torchs_mesh(order):
    made = layout(4, tp=2, order=order)

    def groups_of_this_rank():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", tuple(made.sizes[axis] for axis in order[1:]), mesh_dim_names=tuple(order[1:]))
        return {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in order[1:]}

    for rank, groups in enumerate(launch(groups_of_this_rank, ranks=4, backend="gloo").results):
        assert groups == {axis: next(group for group in made.groups(axis) if rank in group) for axis in order[1:]}


def test_tensor_parallelism_inside_hosts_and_across():
    inside = layout(8, tp=4, ranks_per_node=4)
    assert inside.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert inside.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (inside.crossing("tp"), len(inside.crossing("dp"))) == ((), 4)
    assert inside.problems() == []
    assert "tp groups [0, 1, 2, 3], [4, 5, 6, 7]: each on one host" in repr(inside)
    across = layout(8, tp=4, ranks_per_node=4, order=("pp", "tp", "dp"))
    order, crosses = across.problems()
    assert "a TP group is [0, 2, 4, 6]" in order
    assert "hosts [0, 1]" in crosses
    assert "one of 1, 2, 4 for 4 ranks per node" in crosses
    assert "TP crosses hosts" in layout(8, tp=8, ranks_per_node=4).problems()[0]


def test_bytes_that_leave_a_host_go_round_rings():
    inside = layout(8, tp=4, ranks_per_node=4)
    assert inside.leaving("tp", "all_reduce", 1000) == 0
    assert inside.leaving("dp", "all_reduce", 1000) == 4 * 1000  # four rings of two ranks, each sends 2·1/2 of the payload
    assert layout(4, ranks_per_node=2).leaving("dp", "all_reduce", 1000) == 1500  # one ring of four: one step each way
    reverse = layout(4, tp=2, ranks_per_node=2, order=("pp", "tp", "dp"))
    assert reverse.leaving("tp", "all_gather", 1000) == 2 * 500
    with pytest.raises(ValueError, match="not go round a ring"):
        inside.leaving("dp", "broadcast", 1000)
    with pytest.raises(ValueError, match="nonsense"):
        inside.leaving("tp", "nonsense", 1000)  # also where no group crosses


def test_a_models_heads_and_layers_limit_the_axes():
    assert layout(8, tp=2, pp=4).problems(SHAPE) == []
    heads = layout(8, tp=4).problems(SHAPE)
    assert len(heads) == 1
    assert "2 key-value heads" in heads[0]
    assert "Right: tp one of 1, 2," in heads[0]
    assert "8 stages for 4 layers" in layout(8, pp=8).problems(SHAPE)[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 3}, r"3 · 1 = 3, which does not divide the 8 ranks.*tp one of 1, 2, 4, 8"),
        ({"tp": 4, "dp": 4}, r"4 · 4 · 1 = 16, but there are 8 ranks: right is dp=2"),
        ({"tp": 2, "ranks_per_node": 3}, "must divide 8"),
        ({"order": ("dp", "tp")}, "must be the axes pp, dp, tp"),
        ({"tp": 0}, "tp is 0; it must be a whole number, at least 1"),
        ({"dp": 0}, "dp is 0"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"tp": 2.0}, "tp is 2.0"),
        ({"tp": "2"}, "tp is '2'"),
        ({"order": "pp dp tp"}, "order is 'pp dp tp'; it must be the axes pp, dp, tp"),
        ({"order": None}, "order is None"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        layout(8, **options)
    with pytest.raises(ValueError, match="no axis 'cp'"):
        layout(8).groups("cp")
    for rank in (8, -1, 1.5):
        with pytest.raises(IndexError, match="ranks 0 to 7"):
            layout(8).coordinates(rank)
        with pytest.raises(IndexError, match="ranks 0 to 7"):
            layout(8).host(rank)


def test_the_figure_says_which_groups_cross():
    figure = plots.placement(layout(8, tp=4, ranks_per_node=4), layout(8, tp=4, ranks_per_node=4, order=("pp", "tp", "dp")))
    assert "tp groups [0, 2, 4, 6], [1, 3, 5, 7]: 2 of 2 cross hosts" in figure.alt
    assert figure.finding == "Groups that cross hosts: dp, tp"
    assert plots.placement(layout(4, tp=2)).finding == "No group crosses hosts"


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_becomes_islands_and_a_proposal(name):
    expected = MATRICES[name]
    found = topology(expected["text"])
    assert found.islands() == tuple(map(tuple, expected["islands"]))
    best = next(each for each in found.propose() if each.recommended)
    assert (best.tp, best.visible_devices) == (expected["recommended"], expected["visible"])
    for gpu, card in expected.get("nearest", {}).items():
        assert found.nearest_nics()[gpu] == tuple(card)
    for each in found.propose():
        assert sorted(gpu for group in each.groups for gpu in group) == list(found.gpus)
        assert {len(group) for group in each.groups} == {each.tp}
        assert math.prod((each.tp, len(each.groups))) == len(found.gpus)


def test_groups_grow_with_the_distance_allowed():
    sockets = topology(MATRICES["PCIe switches under two sockets"]["text"])
    assert [(each.tp, each.link) for each in sockets.propose()] == [(8, "SYS"), (4, "NODE"), (2, "PIX"), (1, "")]
    assert "island [6, 7]: PIX (one PCIe switch)" in repr(sockets)


def test_a_model_leaves_out_sizes_that_cut_its_heads():
    switch = topology(MATRICES["8 GPUs on NVSwitch, 4 network cards"]["text"])
    assert [each.tp for each in switch.propose(SHAPE)] == [2, 1]
    assert switch.link(5, "NIC2") == switch.link("NIC2", 5) == "PIX"


def test_pairs_with_more_links_are_joined_first():
    mesh = topology(MATRICES["8 GPUs in a hybrid cube mesh, cards by name"]["text"])
    pairs = next(each for each in mesh.propose() if each.tp == 2)
    assert pairs.groups == ((0, 3), (1, 2), (4, 7), (5, 6))
    assert pairs.link == "NV2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no header line"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", "no header line"),
        ("GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-2)\n" + PAIRS, "slices of a GPU"),
        (PAIRS.replace("GPU2\tNODE\tNODE\t X \tNV4\t0-31\t0\t\tN/A\n", ""), "no row for GPU2"),
        (PAIRS.replace("GPU2\tNODE\tNODE\t X \tNV4\t0-31\t0\t\tN/A", "GPU2\tNODE\tNODE"), "GPU2 has the end of the line"),
        (PAIRS.replace("GPU2\tNODE\tNODE\t X \tNV4", "GPU2\tNODE\tNODE\t X \tNV2"), "GPU2 to GPU3 is NV2, GPU3 to GPU2 is NV4"),
        (PAIRS.replace("GPU2\tNODE\tNODE\t X ", "GPU2\tNODE\tNODE\tNV4"), "X on the diagonal"),
        (PAIRS.replace("NODE", "NOED"), "GPU0 has NOED where a link was expected"),
        (" \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n", "GPU0 has GNS where a link was expected.*topo -p2p"),
    ],
)
def test_a_broken_table_is_refused_with_the_reason(text, says):
    with pytest.raises(ValueError, match=says):
        topology(text)


@pytest.mark.parametrize(
    "pasted",
    [
        PAIRS.replace("\n", "\r\n"),
        PAIRS.replace("\n", "\n\n"),
        "\ufeff" + PAIRS,
        "\x1b]0;user@node\x07\x1b[?2004l\r\x1b[K" + PAIRS.replace("NV4", "\x1b[32mNV4\x1b(B\x1b[m"),
    ],
)
def test_what_terminals_and_editors_add_is_passed_over(pasted):
    assert topology(pasted).islands() == ((0, 1), (2, 3))


def test_what_is_no_text_and_no_device_is_said():
    with pytest.raises(TypeError, match="bytes"):
        topology(PAIRS.encode())
    with pytest.raises(ValueError, match=r"no link of 0 and 9: the GPUs are \(0, 1, 2, 3\)"):
        topology(PAIRS).link(0, 9)


def test_this_machine_is_asked_where_no_text_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pass the text"):
        topology()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1 $2\" = 'topo -m' ] && /bin/cat <<'END'\n{PAIRS}\nEND\n")
    program.chmod(0o755)
    assert grouping.topology().islands() == ((0, 1), (2, 3))
