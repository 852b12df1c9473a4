"""Tests that need an NVIDIA GPU. Without one, or without a torch that can use it, they skip and say why."""

from pathlib import Path

import pytest

from helpers import machine

HERE = Path(__file__).parent


def why_not() -> str:
    """What is missing for these tests; empty where they can run."""
    if not machine.gpus():
        return "no NVIDIA GPU here, or it is hidden (WORKSHOP_DEVICE, CUDA_VISIBLE_DEVICES)"
    return "" if machine.torch_cuda() else "there is a GPU, but the installed torch is a CPU build"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
