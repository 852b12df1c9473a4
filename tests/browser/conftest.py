import os
import shutil

import pytest
from notebook_files import ROOT, write
from notebook_source import to_notebook

STOP = """# %% id="setup"
import os
import time

import torch.distributed as dist
from helpers import launch

# %% id="long"
def wait_long():
    print("rank process", os.getpid(), flush=True)
    while True:
        dist.barrier()
        time.sleep(0.1)


launch(wait_long, ranks=2, timeout=3600)

# %% id="after"
launch(lambda: dist.get_rank() + 40, ranks=2).results
"""


@pytest.fixture(scope="session")
def executable():
    """Chromium; without it the tests are skipped, in CI they fail."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no Chromium here: install it, on Debian by `apt install chromium`"
        )
    return found


@pytest.fixture(scope="session")
def playwright(executable):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def lab(executable, tmp_path_factory):
    """JupyterLab on copies of the course's notebooks and one of the tests' own."""
    from workshop import workshop

    course = tmp_path_factory.mktemp("course")
    for beside in ("data", "helpers"):  # cells name files by ../helpers/…
        (course / beside).symlink_to(ROOT / beside)
    folder = course / "my_notebooks"
    folder.mkdir()
    write(folder / "stop.ipynb", to_notebook(STOP))
    with workshop(folder, tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture
def notebook(playwright, executable, lab, tmp_path):
    """A page to open a notebook in; it must end without errors and requests to anywhere else."""
    from workshop import chromium

    with chromium(playwright, executable, tmp_path / "profile", lab) as opened:
        yield opened
        opened.page.screenshot(path=tmp_path / "end.png")
        assert opened.outside == []
        assert opened.problems == []
