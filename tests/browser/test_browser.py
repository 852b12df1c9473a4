"""What a learner sees in JupyterLab: notebooks that Run All from top to bottom, a figure that moves, a job that stops.

Each test leaves screenshots in its temporary folder; `make walk` runs every notebook and puts them at hand in build/walk.
"""

import os
import re

import psutil
import pytest
from notebook_files import ROOT
from playwright.sync_api import expect
from workshop import SECONDS

expect.set_options(timeout=SECONDS * 1000)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SECONDS)]


def run_all(notebook, name):
    """Open a notebook without its stored outputs and run it whole: every cell, no error, nothing on standard error."""
    notebook.open(name)
    notebook.command("editmenu:clear-all")
    expect(notebook.page.locator(".jp-OutputArea-output")).to_have_count(0)
    notebook.command("notebook:run-all-cells")
    notebook.wait_idle()
    for kind in ("error", "stderr"):
        assert notebook.page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']").all_inner_texts() == []
    cut_off = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.innerText)"
    assert notebook.page.locator(".jp-CodeCell .cm-scroller").evaluate_all(cut_off) == []  # long lines of code are wrapped
    counts = notebook.counts()
    assert counts == list(range(1, len(counts) + 1))


def chosen():
    """Two notebooks of the middle; every one where WORKSHOP_WALK is set (`make walk`)."""
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    return names if os.environ.get("WORKSHOP_WALK") else [name for name in names if name[:2] in ("04", "05")]


@pytest.mark.parametrize("name", chosen())
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, name):
    run_all(notebook, name)
    assert notebook.pictures(tmp_path) > 5
    figures = notebook.page.locator(".jp-OutputArea-output img")
    assert figures.count() >= 3
    for figure in figures.all():
        assert figure.evaluate("figure => figure.naturalWidth") > 300


def test_notebook_00_runs_and_shows_everything(notebook, tmp_path):
    run_all(notebook, "00_start_here.ipynb")
    notebook.picture("first-job", tmp_path)

    expect(notebook.output("first-job").locator("table")).to_contain_text("rank")  # the run, as a panel
    expect(notebook.output("first-job")).to_contain_text("I am rank 1 of 2")
    expect(notebook.output("sum-compare")).to_contain_text("every rank holds [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]")
    expect(notebook.output("failure")).to_contain_text("RankFailed")
    for picture in notebook.page.locator(".jp-OutputArea-output img").all():
        assert picture.evaluate("picture => picture.naturalWidth") > 300
    assert notebook.page.locator(".jp-OutputArea-output img").count() >= 3

    explorer = notebook.output("wire")
    handle, picture, number = (
        explorer.locator(".noUi-handle").first,
        explorer.locator("img"),
        explorer.locator(".widget-readout").first,
    )
    notebook.picture("wire", tmp_path)
    before, shown = number.inner_text(), picture.get_attribute("src")
    handle.focus()
    notebook.page.keyboard.press("ArrowRight")
    expect(number).not_to_have_text(before)
    expect(picture).not_to_have_attribute("src", shown)
    notebook.picture("wire", tmp_path, "moved")


def test_stop_ends_the_ranks_of_a_running_job(notebook, tmp_path):
    notebook.open("stop.ipynb")
    notebook.begin("notebook:run-all-cells")
    panel = notebook.output("long").locator(".helpers-panel")
    expect(panel).to_have_text(re.compile(r"(rank process \d+.*){2}", re.DOTALL))
    expect(panel).to_contain_text("running")
    notebook.picture("long", tmp_path, "running")
    ranks = [psutil.Process(int(pid)) for pid in re.findall(r"rank process (\d+)", panel.inner_text())]
    assert all(rank.is_running() for rank in ranks)

    notebook.page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    gone, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    assert (len(gone), alive) == (2, [])
    expect(notebook.output("long")).to_contain_text("KeyboardInterrupt")
    notebook.wait_idle()
    notebook.picture("long", tmp_path, "stopped")

    notebook.select("after")
    notebook.command("notebook:run-cell")
    expect(notebook.output("after")).to_contain_text("[40, 41]")
