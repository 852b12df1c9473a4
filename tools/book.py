"""Build the course as a website: every notebook as stored, with its outputs. Nothing is executed and nothing fetched.

    python tools/book.py              # into build/book/html; open index.html, no server needed
    python tools/book.py --into DIR   # elsewhere

Sphinx with myst-nb and the book theme make the pages; what is ours is what they lack: the alternative text of each figure, which
travels as output metadata, and a front page that is the README.
"""

import argparse
import base64
import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from notebook_files import NOTEBOOKS, ROOT, course_notebooks, read

GUIDES = [NOTEBOOKS / "INSTRUCTOR.md", ROOT / "CONTRIBUTING.md"]  # pages beside the notebooks
KEPT_WARNINGS = re.compile(r"(WARNING|ERROR|CRITICAL)")

CONFIGURATION = """
project = "Parallelism, Measured"
author = "the project's authors"
html_show_copyright = False
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "commonmark"
myst_heading_anchors = 4
myst_enable_extensions = []
suppress_warnings = ["misc.highlighting_failure", "myst.header"]
templates_path = []
exclude_patterns = []
html_theme = "sphinx_book_theme"
html_title = "Parallelism, Measured"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": True,
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "navigation_with_keys": False,
}
"""

STYLE = """
img.measured { max-width: 100%; height: auto; background: white; border-radius: 4px; }
div.cell_output { overflow-x: auto; }
div.cell_output pre { white-space: pre-wrap; }
div.cell_input pre { font-size: 80%; }
article table { display: block; max-width: 100%; overflow-x: auto; }
article code, article a { overflow-wrap: anywhere; }
article code span.pre { white-space: normal; }
.bd-main .bd-content .bd-article-container { max-width: 72em; }
div.widget-note { font-style: italic; border-left: 3px solid #888; padding-left: .8em; }
"""


def build(into: Path) -> list[str]:
    """Write the site to `into` and return what was wrong, empty where all is well.

    An earlier site in `into` is replaced once the new one is whole; a folder that holds anything else is left as it is.
    """
    if into.exists() and any(into.iterdir()) and not (into / ".buildinfo").exists():
        return [f"{into} holds something that is no site of this course: name a new or an empty folder"]
    with tempfile.TemporaryDirectory() as folder:
        code, complaints = _built(Path(folder, "source"), Path(folder, "site"))
        if not code:
            shutil.rmtree(into, ignore_errors=True)
            shutil.copytree(Path(folder, "site"), into, dirs_exist_ok=True)  # `into` may be a mount point, which stays
    return complaints


def _built(source: Path, into: Path) -> tuple[int, list[str]]:
    """Sphinx's exit code and complaints, for pages in the new folder `into` made of what is written to `source`."""
    figures = source / "_static" / "figures"
    figures.mkdir(parents=True)
    (source / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
    (source / "_static" / "course.css").write_text(STYLE, encoding="utf-8")
    names = []
    for path in course_notebooks():
        nbformat.write(page(read(path), path.stem, figures), source / path.name)
        names.append(path.stem)
    guides = [path for path in GUIDES if path.exists()]
    for path in guides:
        (source / path.name).write_text(relinked(path.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(ROOT / "data" / "pictures", source / "_static" / "pictures")
    front = relinked((ROOT / "README.md").read_text(encoding="utf-8"))
    contents = [("Notebooks", names), ("Guides", [path.stem for path in guides])]
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in contents
        if pages
    ]
    (source / "index.md").write_text("\n".join([front, *trees]), encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", str(source / ".doctrees"), str(source), str(into)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    code, said = done.returncode, done.stdout + done.stderr
    complaints = [line for line in said.splitlines() if KEPT_WARNINGS.search(line)]
    if code and not complaints:
        complaints = [f"Sphinx ended with exit code {code}: {said[-2000:]}"]
    return code, complaints


def page(notebook: NotebookNode, name: str, figures: Path) -> NotebookNode:
    """The notebook as a page: figures become files with their alternative text, sliders a sentence that says where they move."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source)
            continue
        for number, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            if "image/png" in data:
                output.data = NotebookNode({"text/html": as_file(output, figures / f"{name}_{cell.id}_{number}.png")})
                output.metadata = NotebookNode()
            elif str(data.get("text/plain", "")).startswith("Run this cell to move:"):
                note = html.escape(data["text/plain"].removeprefix("Run this cell to move:").strip())
                output.data = NotebookNode({"text/html": f'<div class="widget-note">In the notebook, sliders move: {note}</div>'})
    return notebook


def as_file(output: NotebookNode, path: Path) -> str:
    """Write the figure of an output to `path`; return the HTML that shows it, its alternative text and size included."""
    path.write_bytes(base64.b64decode(output.data["image/png"]))
    about = output.metadata.get("image/png", {})
    size = "".join(f' {side}="{about[side]}"' for side in ("width", "height") if side in about)
    alt = html.escape(about.get("alt") or output.data.get("text/plain", "figure"))
    return f'<img class="measured" src="_static/figures/{path.name}" alt="{alt}"{size} loading="lazy">'


def relinked(text: str) -> str:
    """Links of the repository as links of the site, where pages stand side by side; links to other files become plain text."""
    text = text.replace("](data/pictures/", "](_static/pictures/").replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")
    text = re.sub(r"\]\((?:\.\./)?notebooks/([\w.-]+(?:#[^)]*)?)\)", r"](\1)", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|_static/)([^)#]+)(#[^)]*)?\)", _kept_if_page, text)


def _kept_if_page(link: re.Match[str]) -> str:
    target = link[2]
    known = ((NOTEBOOKS / target).exists() and target.endswith(".ipynb")) or target in {
        path.name for path in GUIDES if path.exists()
    }
    return link[0] if known else link[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into", type=Path, default=ROOT / "build" / "book" / "html", help="folder of the site (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    complaints = build(options.into.resolve())
    print(
        "\n".join(complaints)
        or f"The course stands in {options.into}: open index.html in any browser, no server and no network needed."
    )
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
