"""GPU figures: complete, in consistent units, each with a source; an unknown name is answered with the nearest ones."""

import dataclasses
import re
import subprocess
import sys

import pytest

from helpers import hardware


@pytest.mark.parametrize("name", hardware.names())
def test_every_figure_has_a_source_and_plausible_units(name):
    gpu = hardware.gpu(name)
    figures = {field.name for field in dataclasses.fields(gpu)} - {"name", "sources"}
    given = {figure for figure in figures if getattr(gpu, figure) is not None}
    assert set(gpu.sources) == given
    for figure in given:
        assert re.search(r", \d{4}\b", gpu.sources[figure])
    # a unit mixed up (TB for GB, bits for bytes, both directions for one) leaves these ranges
    assert 14 <= gpu.memory_gb <= 200
    assert 250 <= gpu.memory_bandwidth_gb_per_s <= 8_000
    assert 15 <= gpu.pcie_gb_per_s <= 64
    assert 60 <= gpu.fp16_tflops <= 2_500


@pytest.mark.parametrize("name", hardware.names())
def test_nothing_measured_exceeds_what_is_specified(name):
    gpu = hardware.gpu(name)
    for measured, specified in (
        (gpu.matmul_bf16_tflops, gpu.bf16_tflops),
        (gpu.peer_copy_gb_per_s, gpu.nvlink_gb_per_s),
        (gpu.all_reduce_bus_gb_per_s, gpu.nvlink_gb_per_s),
        (gpu.host_to_device_gb_per_s, gpu.pcie_gb_per_s),
        (gpu.weight_streaming_gb_per_s, gpu.memory_bandwidth_gb_per_s),
    ):
        assert measured is None or measured < specified
    assert gpu.memory_bytes <= gpu.memory_gb * 10**9 * 1.075  # a GB card may hold as many GiB, never more


def test_spelling_of_a_name_does_not_matter():
    assert hardware.gpu("h100 sxm") == hardware.gpu("H100-SXM")
    assert hardware.gpu("rtx4090").name == "RTX-4090"


def test_gpus_without_bf16_say_so():
    assert hardware.gpu("T4").bf16_tflops is None
    assert hardware.gpu("V100-16-SXM2").bf16_tflops is None


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(KeyError, match="H100-SXM"):
        hardware.gpu("H100-PCIe")
    with pytest.raises(KeyError, match=r"hardware\.names"):
        hardware.gpu("abacus")


def test_importing_loads_no_torch():
    code = "import sys, helpers.hardware, helpers.predict; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
