"""`explore`: a figure whose inputs can be moved. The figure stands alone where no kernel runs."""

import inspect
from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display

from helpers.plots import Figure


class Explorer:
    """A figure and the controls that redraw it: `controls["ranks"].value = 4` does what moving the slider does.

    The figure is an output of its own, an ordinary PNG with alt text that stays in the saved notebook; the controls are a second
    output and replace the PNG in place. So nothing is lost where widgets are not shown, and nothing depends on Output widgets,
    which can stall an execution without a browser.
    """

    def __init__(self, draw: Callable[..., Figure], controls: dict[str, Any]) -> None:
        self.draw = draw
        self.controls = controls
        self.problem = ipywidgets.Label()  # what went wrong in the last redraw: a widget's own errors reach no one
        self._shown: Any = None
        self.figure = self._drawn()
        for control in controls.values():
            control.observe(self._moved, names="value")

    def _drawn(self) -> Figure:
        values = {name: control.value for name, control in self.controls.items()}
        figure = self.draw(**values)
        if not isinstance(figure, Figure):
            name = getattr(self.draw, "__name__", self.draw)
            raise TypeError(f"{name}({values}) returned {figure!r}; it must return a figure of helpers.plots")
        return figure

    def _moved(self, _: Any) -> None:
        try:
            self.figure = self._drawn()
            self.problem.value = ""
        except Exception as error:
            self.problem.value = f"{type(error).__name__}: {error}"
            return
        if self._shown is not None:
            data, metadata = self.figure.bundle()
            self._shown.update(data, raw=True, metadata=metadata)

    def _ipython_display_(self) -> None:
        data, metadata = self.figure.bundle()
        self._shown = display(data, raw=True, metadata=metadata, display_id=True)
        box = ipywidgets.VBox([*self.controls.values(), self.problem])
        view = box._repr_mimebundle_()["application/vnd.jupyter.widget-view+json"]
        text = f"Run this cell to move: {', '.join(self.controls)}."
        display({"application/vnd.jupyter.widget-view+json": view, "text/plain": text}, raw=True)


def explore(draw: Callable[..., Figure], **controls: Any) -> Explorer:
    """Let a reader move the inputs of `draw`, a function that takes them as keywords and returns a figure of `helpers.plots`.

    Each control is a widget, or as in `ipywidgets.interact`: `(least, most)` or `(least, most, step)` for a slider, a list for a
    menu, True or False for a box. It starts at the default that `draw` gives it; without one a slider in the middle, a menu at
    its first.

    Raises TypeError for a control that is none of these and for a `draw` that returns something else; what `draw` raises for the
    starting values passes through, later errors are shown under the controls.
    """
    made, inputs = {}, inspect.signature(draw).parameters
    for name, given in controls.items():
        start = inputs[name].default if name in inputs else inspect.Parameter.empty
        control = ipywidgets.interactive.widget_from_abbrev(given, start)
        if control is None:
            raise TypeError(f"{name}={given!r} is no control: give (least, most, step), a list, True or False, or a widget")
        control.description = control.description or name.replace("_", " ")
        control.style.description_width = "initial"  # the whole name, not as much as fits
        made[name] = control
    return Explorer(draw, made)
