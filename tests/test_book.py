"""The website: every notebook a page, figures with their alternative text, links that lead somewhere, nothing fetched."""

import base64
import re
from html.parser import HTMLParser

import book
import nbformat
import pytest
from notebook_files import course_notebooks, read

PIXEL = base64.b64encode(b"\x89PNG not really").decode()


def notebook_with(*outputs):
    cell = nbformat.v4.new_code_cell("1 + 1", id="sum", outputs=list(outputs))
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("See [next](01_x.ipynb)"), cell])


def test_a_figure_becomes_a_file_with_its_alternative_text(tmp_path):
    about = {"image/png": {"alt": 'Bars: 2 < 3 "quoted"', "width": 10, "height": 20}}
    output = nbformat.v4.new_output("display_data", {"image/png": PIXEL, "text/plain": "<Figure>"}, metadata=about)
    shown = book.page(notebook_with(output), "01_x", tmp_path).cells[1].outputs[0]
    assert (tmp_path / "01_x_sum_0.png").read_bytes() == base64.b64decode(PIXEL)
    assert 'alt="Bars: 2 &lt; 3 &quot;quoted&quot;"' in shown.data["text/html"]
    assert 'width="10" height="20"' in shown.data["text/html"]
    assert "image/png" not in shown.data


def test_sliders_become_a_sentence(tmp_path):
    output = nbformat.v4.new_output("display_data", {"text/plain": "Run this cell to move: ranks, mebibytes."})
    shown = book.page(notebook_with(output), "01_x", tmp_path).cells[1].outputs[0]
    assert "sliders move: ranks, mebibytes." in shown.data["text/html"]


@pytest.mark.parametrize(
    ("text", "on_the_site"),
    [
        ("[00](notebooks/00_start_here.ipynb)", "[00](00_start_here.ipynb)"),
        ("[part](00_start_here.ipynb#key-points)", "[part](00_start_here.ipynb#key-points)"),
        ("[LICENSE](LICENSE)", "LICENSE"),
        ("[gone](99_not_there.ipynb)", "gone"),
        ("![picture](data/pictures/timeline.png)", "![picture](_static/pictures/timeline.png)"),
        ("[PyTorch](https://pytorch.org)", "[PyTorch](https://pytorch.org)"),
        ("[below](#licence)", "[below](#licence)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(text, on_the_site):
    assert book.relinked(text) == on_the_site


class Page(HTMLParser):
    """What a page loads, links to, and shows without words."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.mute, self.ids = [], [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if "id" in found:
            self.ids.add(found["id"])
        if tag in ("script", "img") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical" and "href" in found:
            self.loads.append(found["href"])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img" and not found.get("alt"):
            self.mute.append(found.get("src"))


@pytest.mark.slow
def test_the_whole_site(tmp_path):
    """Built from the stored notebooks: no complaint, no load from elsewhere, no dead link, no figure without words."""
    pytest.importorskip("myst_nb", reason="`make book` installs what the site is built with")
    for _ in range(2):  # the second replaces the first
        assert book.build(tmp_path / "site") == []
    pages = {path.name: Page(path.read_text(encoding="utf-8")) for path in (tmp_path / "site").glob("*.html")}
    assert {path.with_suffix(".html").name for path in course_notebooks()} < pages.keys()
    for name, page in pages.items():
        assert [load for load in page.loads if re.match(r"(https?:)?//", load)] == [], name
        assert page.mute == [], name
        for link in page.links:
            if re.match(r"https?://|mailto:", link):
                continue
            target, _, anchor = link.partition("#")
            assert not target or (tmp_path / "site" / target).exists(), f"{name} links to {link}"
            if anchor and target.endswith(".html"):
                assert anchor in pages[target].ids, f"{name} links to {link}"
    figures = sum(
        "image/png" in output.get("data", {})
        for path in course_notebooks()
        for cell in read(path).cells
        for output in cell.get("outputs", [])
    )
    assert len(list((tmp_path / "site" / "_static" / "figures").glob("*.png"))) == figures > 0


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    site, beside = tmp_path / "site", tmp_path / "site_source"
    for folder in (site, beside):
        folder.mkdir()
        (folder / "mine.txt").write_text("keep")
    (complaint,) = book.build(site)
    assert "holds something that is no site" in complaint
    assert [path.read_text() for path in (site / "mine.txt", beside / "mine.txt")] == ["keep"] * 2
