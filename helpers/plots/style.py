"""One look for all figures, and how a figure shows itself in a notebook.

Colours: M. Okabe and K. Ito, "Color Universal Design" (2008), in the order in which neighbours differ most.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

if TYPE_CHECKING:
    from helpers.launching.results import Run

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"
PALETTE = [BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW]
GREY, LIGHT = "#767676", "#D9D9D9"
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # the box of a text that a line may cross
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
DASHES: list[Any] = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
HATCHES = ["", "//", "..", "xx", "\\\\", "++", "oo"]
WIDTH = 7.0  # inches, 672 px on a page
PAGE_DPI, DRAWN_DPI = 96, 144  # drawn finer than shown, for sharp screens
_LOOK: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 10,
    "grid.color": "#E5E5E5",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a title may hold a $
}
_SCALES: dict[str, list[tuple[float, float, str]]] = {  # unit given -> (at least, factor, unit shown), largest first
    "bytes": [(2**30, 2**-30, "GiB"), (2**20, 2**-20, "MiB"), (2**10, 2**-10, "KiB"), (0, 1, "B")],
    "s": [(1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs")],
    "B/s": [(1e9, 1e-9, "GB/s"), (0, 1e-6, "MB/s")],
}


class Figure(MatplotlibFigure):
    """A figure with alt text (`alt`) and a one-line `finding`, printed under it when it is displayed.

    As the last expression of a cell it is shown once, as PNG. The alt text travels as IPython's own images carry theirs, as
    output metadata `{"image/png": {"alt": …}}`. nbconvert's classic pages have it; JupyterLab 4.6, nbconvert's lab pages and
    myst-nb 1.4 leave it out, so `finding` repeats what counts in words. A figure displays itself because a formatter that
    pyplot registers would otherwise drop the metadata.
    """

    alt = ""
    footer = ""
    finding = ""

    def png(self) -> bytes:
        """The drawn figure; the same bytes whenever the same figure is drawn with the same matplotlib."""
        buffer = io.BytesIO()
        with matplotlib.rc_context(_LOOK):
            self.savefig(buffer, format="png", dpi=DRAWN_DPI, facecolor="white", metadata={"Software": None})
        return buffer.getvalue()

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(data, metadata) by MIME type, as Jupyter displays them."""
        width, height = (round(inches * PAGE_DPI) for inches in self.get_size_inches())
        data = {"image/png": base64.b64encode(self.png()).decode(), "text/plain": repr(self)}
        return data, {"image/png": {"alt": f"{self.alt} {self.footer}".strip(), "width": width, "height": height}}

    def _ipython_display_(self) -> None:
        from IPython.display import display

        data, metadata = self.bundle()
        display(data, metadata=metadata, raw=True)
        if self.finding:
            print(self.finding)

    def __repr__(self) -> str:  # without the footer: the same on every machine where the figures are
        return f"<Figure: {self.alt}>"


def figure(
    title: str, height: float, *, alt: str, finding: str = "", footer: str | None = None, columns: int = 1
) -> tuple[Figure, Any]:
    """(figure, axes) of this height in inches with its title; `finding` is printed under it, by default the title.

    `footer` stands under the axes: None says which machine was measured, "" leaves it out, anything else is taken as it is.
    With `columns` there are as many axes side by side, which share their rows.
    """
    footer = measured_on() if footer is None else footer
    with matplotlib.rc_context(_LOOK):
        made = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(h_pad=0.08))
        FigureCanvasAgg(made)
        made.alt, made.footer, made.finding = alt, footer, finding or title
        made.suptitle(textwrap.fill(title, 72), x=0.01, ha="left", fontsize=11, fontweight="bold")
        made.supxlabel("\n".join(textwrap.wrap(footer, 110)), x=0.01, ha="left", fontsize=8, color=GREY)
        return made, made.subplots(1, columns, sharey=True)


def look(number: int) -> tuple[str, str]:
    """(colour, hatch) of the area with this number."""
    return PALETTE[number % 7], HATCHES[number % 7]


def patches(looks: Mapping[str, tuple[str, str]]) -> list[Patch]:
    """The handles of a legend for areas: by name, colour and hatch."""
    return [Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name) for name, (color, hatch) in looks.items()]


def legend_above(axes: Any, columns: int, **options: Any) -> None:
    """The legend between title and axes, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=columns, fontsize=9, frameon=False, **options)


def stacked_bar(
    axes: Any, place: float, parts: Mapping[str, float], looks: Mapping[str, tuple[str, str]], factor: float, height: float
) -> float:
    """Draw the parts end to end as one horizontal bar, each times `factor`; returns their sum."""
    end = 0.0
    for name, value in parts.items():
        color, hatch = looks[name]
        axes.barh(place, value * factor, height, left=end * factor, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        end += value
    return end


def box(axes: Any, corner: tuple[float, float], width: float, height: float, text: str, size: float, **look: Any) -> Any:
    """A rectangle from `corner` on, with text in its middle, which is returned."""
    axes.add_patch(Rectangle(corner, width, height, **look))
    middle = corner[0] + width / 2, corner[1] + height / 2
    return axes.annotate(text, middle, ha="center", va="center", fontsize=size)


def rank_rows(axes: Any, count: int, middle: float = 0, **options: Any) -> None:
    """The names of ranks beside their rows; `middle` is how far below its number a row has its middle."""
    axes.set_yticks([rank + middle for rank in range(count)], [f"rank {rank}" for rank in range(count)], **options)


def boxes_only(axes: Any) -> None:
    """Nothing but what is drawn and the labels of its rows: no frame, no grid, no marks at the labels."""
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)


def measured_on(run: Run | None = None) -> str:
    """The footer: the machine of a run and how it was used, or this machine where no run is given."""
    if run is None:
        from helpers import machine

        return f"measured on {machine.describe().line}"
    crowded = "; timings oversubscribed: more ranks than cores" if run.oversubscribed else ""
    return f"measured on {run.machine}; {run.ranks} rank{'s' * (run.ranks != 1)}, {run.device}, {run.backend}{crowded}"


def scale(values: Iterable[float], unit: str) -> tuple[float, str]:
    """(factor, unit to show) for the largest of `values`: bytes in B … GiB, s in µs … s, B/s in MB/s or GB/s, others as given."""
    top = max((abs(value) for value in values), default=0)
    return next(((factor, shown) for least, factor, shown in _SCALES.get(unit, []) if top >= least), (1, unit))


def amount(value: float, unit: str, exact: bool = False) -> str:
    """A value with its unit for people: "12.5 MiB", "3.2 ms", "1.2 GB/s"; `exact` writes bytes and counts out: "13,116,416 B"."""
    if exact and unit not in ("s", "B/s") and value == int(value):
        return f"{int(value):,} {'B' if unit == 'bytes' else unit}".strip()
    factor, shown = scale([value], unit)
    number = value * factor
    text = f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:.3g}"
    return f"{text} {shown}".strip()
