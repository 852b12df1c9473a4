import base64
import functools
import struct

import ipywidgets
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook
from notebook_files import course_notebooks, read
from publish import execute, settle

from helpers import plots, widgets


def scaling(ranks=1, efficient=True, shape="dense"):
    if ranks == 7:
        raise ZeroDivisionError("seven ranks do not divide")
    title = f"{ranks} ranks of a {shape} model"
    return plots.bars({"throughput": ranks * (1.0 if efficient else 0.5)}, unit="tokens/s", title=title, footer="")


def test_moving_a_control_draws_the_figure_anew():
    explorer = widgets.explore(scaling, ranks=(1, 8), efficient=True, shape=["dense", "sparse"])
    assert {name: type(control) for name, control in explorer.controls.items()} == {
        "ranks": ipywidgets.IntSlider,
        "efficient": ipywidgets.Checkbox,
        "shape": ipywidgets.Dropdown,
    }
    first = explorer.figure
    explorer.controls["ranks"].value = 8
    explorer.controls["shape"].value = "sparse"
    explorer.controls["efficient"].value = False
    assert explorer.figure is not first
    assert explorer.figure.get_suptitle() == "8 ranks of a sparse model"
    assert [bar.get_width() for bar in explorer.figure.axes[0].patches] == [4]


def test_a_widget_says_where_it_starts_and_keeps_its_own_description():
    start = ipywidgets.IntSlider(value=3, min=1, max=4, description="how many")
    explorer = widgets.explore(scaling, ranks=start, shape=["dense"])
    assert explorer.figure.get_suptitle() == "3 ranks of a dense model"
    assert [control.description for control in explorer.controls.values()] == ["how many", "shape"]


def test_an_error_while_moving_is_shown_and_goes_when_the_next_value_works():
    explorer = widgets.explore(scaling, ranks=(1, 8))
    before = explorer.figure
    explorer.controls["ranks"].value = 7
    assert explorer.problem.value == "ZeroDivisionError: seven ranks do not divide"
    assert explorer.figure is before
    explorer.controls["ranks"].value = 2
    assert explorer.problem.value == ""


def test_an_error_at_the_start_passes_through():
    with pytest.raises(ZeroDivisionError):
        widgets.explore(scaling, ranks=ipywidgets.IntSlider(value=7))


def test_what_is_no_control_or_no_figure_is_refused():
    with pytest.raises(TypeError, match=r"ranks=None is no control: give \(least, most, step\)"):
        widgets.explore(scaling, ranks=None)
    with pytest.raises(TypeError, match=r"<lambda>\(\{'x': 2\}\) returned 4; it must return a figure of helpers.plots"):
        widgets.explore(lambda x: x * x, x=(1, 3))


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook as it is published, outputs of a real kernel."""
    sources = [
        "import matplotlib.pyplot as plt\nfrom helpers import check, plots, widgets",
        "plots.compare(predicted=4_000, measured=4_000, unit='bytes')",
        """
def draw(ranks):
    return plots.bars({"a": ranks}, unit="", title=f"{ranks} ranks")

explorer = widgets.explore(draw, ranks=(1, 9))
explorer""",
        "explorer.controls['ranks'].value = 8",
        "check('00.1', ...)",
    ]
    notebook = new_notebook(cells=[new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(sources)])
    return execute(notebook, tmp_path_factory.mktemp("notebook"))


def test_a_figure_that_ends_a_cell_is_shown_once_with_its_finding_below(executed):
    picture, finding = executed.cells[1].outputs
    assert picture.output_type == "display_data"
    assert finding.text == "predicted 4,000 B, recorded 4,000 B: equal\n"
    width, height = struct.unpack(">II", base64.b64decode(picture.data["image/png"])[16:24])
    shown = picture.metadata["image/png"]
    assert (width, height) == pytest.approx((1.5 * shown["width"], 1.5 * shown["height"]), abs=2)


def test_the_alt_text_reaches_a_page_that_shows_it(executed):
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(settle(executed))
    assert 'alt="Bar chart: Prediction and measurement are equal. predicted 3.91 KiB; measured 3.91 KiB. measured on ' in page
    assert "No description has been provided" not in page


def test_a_moved_control_replaces_the_picture_and_the_saved_notebook_keeps_it_without_widgets(executed):
    picture, controls = executed.cells[2].outputs
    assert picture.data["text/plain"] == "<Figure: Bar chart: 8 ranks. a 8.>"
    assert "application/vnd.jupyter.widget-view+json" in controls.data
    saved = settle(executed).cells[2].outputs
    assert "image/png" in saved[0].data
    assert saved[0].metadata["image/png"]["alt"].startswith("Bar chart: 8 ranks")
    assert saved[1].data == {"text/plain": "Run this cell to move: ranks."}


def test_a_message_is_shown_as_text_and_page(executed):
    (message,) = executed.cells[4].outputs
    assert message.data["text/plain"].startswith("… 00.1 not answered yet.")
    assert message.data["text/html"].startswith("<p><b>… 00.1 not answered yet.</b>")


def test_the_planner_of_notebook_12_moves_model_machines_work_and_goal():
    notebook = next(read(path) for path in course_notebooks() if path.name.startswith("12"))
    sources = {cell.id: cell.source for cell in notebook.cells}
    names: dict = {}
    exec("from helpers import hardware, models, plots, predict, widgets\nfrom helpers.predict import Workload", names)
    exec(sources["plan"].split("\nh100")[0], names)
    exec(sources["planner"].replace("\nwidgets.", "\nexplorer = widgets."), names)
    explorer = names["explorer"]
    assert explorer.figure.get_suptitle().replace("\n", " ").startswith("Llama 8B, training on 8 × H100-SXM: ")
    explorer.controls["model"].value = "ERNIE 0.3B"
    explorer.controls["work"].value = "serving"
    assert explorer.problem.value == ""
    assert explorer.figure.get_suptitle().replace("\n", " ").startswith("ERNIE 0.3B, serving on 8 × H100-SXM: ")
    explorer.controls["model"].value = "Llama 8B"
    before = explorer.figure
    explorer.controls["gpu"].value = "T4"
    explorer.controls["gpus_per_node"].value = 1
    assert explorer.problem.value.startswith("LookupError: no layout fits: Left out: does not fit (1, for example 1 GPU")
    assert explorer.figure is not before or explorer.problem.value


def test_a_partial_that_draws_no_figure_is_named():
    with pytest.raises(TypeError, match=r"partial.*must return a figure"):
        widgets.explore(functools.partial(lambda x: x), x=[1])
