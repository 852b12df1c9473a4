"""One job as the kernel follows it: what each rank reported, and what is left of it at the end."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

from helpers import machine
from helpers.launching import panel, rank, shipping
from helpers.launching.engine import Engine, Interrupts
from helpers.launching.results import Log, Run
from helpers.measuring import collectives as recorder

CANCEL_LIMIT = 1.5  # seconds for the warm process to end the ranks before it is ended itself
LARGEST_LOG = 1 << 30  # bytes one rank may print


class Job:
    """`states` holds, by rank, "joining", "running", "finished" or "ended"; `exits` and `hung` what the warm process said."""

    def __init__(self, request: dict[str, Any], name: str, placement: machine.Placement, asked: float) -> None:
        count = request["ranks"]
        self.request, self.name, self.placement, self.asked = request, name, placement, asked
        self.states = ["joining"] * count
        self.started: list[float | None] = [None] * count
        self.ended: list[float | None] = [None] * count
        self.exits: dict[int, dict[str, Any]] = {}
        self.hung: dict[str, Any] | None = None
        self.printed_too_much: int | None = None
        self.unreadable: dict[int, str] = {}  # values of ranks that did not come back
        self._begun = False
        self.display = panel.choose([self.file("log", r) for r in range(count)], name)

    def file(self, kind: str, number: int) -> str:
        """Where rank `number` left its log, stack, error or records."""
        return rank.file_of(self.request, kind, number)

    def follow(self, engine: Engine, interrupts: Interrupts) -> None:
        """Until the warm process says that every rank has left, or an interrupt has ended them."""
        try:
            engine.tell(self.request)
            self._listen(engine, interrupts)
        except BaseException:
            engine.end()  # whatever went wrong here, no rank outlives it
            raise

    def _listen(self, engine: Engine, interrupts: Interrupts) -> None:
        give_up: float | None = None
        while True:
            for message in engine.listen(interrupts.wake, 0.05):
                if message["run"] != self.request["run"]:
                    continue
                if message["event"] == "done":
                    return
                self._note(message)
            if interrupts.asked:
                interrupts.seen()
            if give_up is None and (interrupts.asked or self._prints_too_much()):
                engine.tell({"do": "cancel", "run": self.request["run"]})
                give_up = time.monotonic() + CANCEL_LIMIT
            if give_up is not None and time.monotonic() > give_up:
                if self._begun:
                    engine.end()
                return  # one that still imports will find the request cancelled
            self.display.update(self.states)

    def _note(self, message: dict[str, Any]) -> None:
        number: Any = message.get("rank")
        event = message["event"]
        if event == "pids":
            self._begun = True
        elif event == "started":
            self.states[number], self.started[number] = "running", message["time"]
        elif event == "finished":
            self.states[number], self.ended[number] = "finished", message["time"]
        elif event == "exited":
            self.exits[number] = message
            if self.states[number] != "finished":
                self.states[number] = "ended"
        elif event == "hung":
            self.hung = message

    def _prints_too_much(self) -> bool:
        for number in range(self.request["ranks"]):
            path = self.file("log", number)
            if os.path.exists(path) and os.path.getsize(path) > LARGEST_LOG:
                self.printed_too_much = number
        return self.printed_too_much is not None

    def run(self) -> Run:
        """What there is to know, also of a job that failed."""
        count = self.request["ranks"]
        recorded = [recorder.read(self.file("records", r), r) for r in range(count) if os.path.exists(self.file("records", r))]
        begun = [time for time in self.started if time is not None]
        spans = [None if start is None else (start, end) for start, end in zip(self.started, self.ended, strict=True)]
        return Run(
            ranks=count,
            device=self.placement.device,
            backend=self.placement.backend,
            results=[self._value(number) for number in range(count)],
            seconds=[None if span is None or span[1] is None else span[1] - span[0] for span in spans],
            startup_seconds=max(begun, default=time.perf_counter()) - self.asked,
            spans=spans,
            collectives=tuple(c for record in recorded for c in record.collectives),
            regions=tuple(region for record in recorded for region in record.regions),
            oversubscribed=self.placement.oversubscribed,
            machine=machine.describe().line + (f", as {len(self.request['hosts'])} hosts" if self.request["hosts"] else ""),
            name=self.name,
            problem=next((record.problem for record in recorded if record.problem), None),
            logs=[Log(self.file("log", number)) for number in range(count)],
        )

    def _value(self, number: int) -> Any:
        if self.states[number] != "finished":
            return None
        try:
            with open(shipping.find((self.request["memory"], self.request["folder"]), f"value{number}"), "rb") as file:
                return pickle.load(file)
        except Exception as error:
            self.unreadable[number] = f"{type(error).__name__}: {error}"
            return None
