"""One job as the kernel follows it: what each rank reported, and what is left of it at the end."""

import os
import pickle
import time
from typing import Any

from helpers import machine
from helpers.launching import panel, rank
from helpers.launching.engine import Engine, Interrupts
from helpers.launching.results import Log, Run
from helpers.measuring import journal

CANCEL_LIMIT = 1.0  # seconds for the warm process to end the ranks before it is ended itself
LARGEST_LOG = 1 << 30  # bytes one rank may print


class Job:
    """`states` holds, by rank, "joining", "running", "finished" or "ended"; the rest is what the warm process said, by rank."""

    def __init__(self, request: dict[str, Any], name: str, placement: machine.Placement, asked: float) -> None:
        self.request, self.name, self.placement, self.asked = request, name, placement, asked
        self.states = ["joining"] * request["ranks"]
        self.started: dict[int, float] = {}
        self.finished: dict[int, dict[str, Any]] = {}
        self.raised: dict[int, dict[str, Any]] = {}
        self.exits: dict[int, dict[str, Any]] = {}
        self.hung: dict[str, Any] | None = None
        self.printed_too_much: int | None = None
        self.unreadable: dict[int, str] = {}  # values of ranks that did not come back
        self.logs = [self.file("log", number) for number in range(request["ranks"])]
        for path in (*self.logs, *(self.file("stack", number) for number in range(request["ranks"]))):
            open(path, "x").close()
        self.display = panel.choose(self.logs, name)

    def file(self, kind: str, number: int) -> str:
        """Where rank `number` leaves its log, stack or records."""
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
            for message in engine.listen(0.05):
                if message["event"] == "done":
                    return
                self._note(message)
            if give_up is None and (interrupts.asked or self._prints_too_much()):
                engine.tell({"do": "cancel"})
                give_up = time.monotonic() + CANCEL_LIMIT
            if give_up is not None and time.monotonic() > give_up:
                engine.end()
                return
            self.display.update(self.states)

    def _note(self, message: dict[str, Any]) -> None:
        number: Any = message.get("rank")
        event = message["event"]
        if event == "started":
            self.states[number], self.started[number] = "running", message["time"]
        elif event == "finished":
            self.states[number], self.finished[number] = "finished", message
        elif event == "raised":
            self.raised[number] = message
        elif event == "hung":
            self.hung = message
        else:
            self.exits[number] = message
            if self.states[number] != "finished":
                self.states[number] = "ended"

    def _prints_too_much(self) -> bool:
        too_much = [number for number, path in enumerate(self.logs) if os.path.getsize(path) > LARGEST_LOG]
        self.printed_too_much = next(iter(too_much), None)
        return bool(too_much)

    def run(self) -> Run:
        """What there is to know, also of a job that failed."""
        ranks = range(self.request["ranks"])
        ends = {number: message["time"] for number, message in self.finished.items()}
        spans = [(self.started[number], ends.get(number)) if number in self.started else None for number in ranks]
        files = [(self.file("records", number), number) for number in ranks]
        recorded = [journal.read(path, number) for path, number in files if os.path.exists(path)]
        return Run(
            ranks=len(ranks),
            device=self.placement.device,
            backend=self.placement.backend,
            results=[self._value(number) for number in ranks],
            seconds=[ends[number] - self.started[number] if number in ends else None for number in ranks],
            startup_seconds=max(self.started.values(), default=time.perf_counter()) - self.asked,
            spans=spans,
            collectives=tuple(c for record in recorded for c in record.collectives),
            regions=tuple(region for record in recorded for region in record.regions),
            oversubscribed=self.placement.oversubscribed,
            machine=machine.describe().line + (f", as {len(self.request['hosts'])} hosts" if self.request["hosts"] else ""),
            name=self.name,
            problem=next((record.problem for record in recorded if record.problem), None),
            logs=[Log(path) for path in self.logs],
        )

    def _value(self, number: int) -> Any:
        if number not in self.finished:
            return None
        try:
            with open(self.finished[number]["value"], "rb") as file:
                return pickle.load(file)
        except Exception as error:
            self.unreadable[number] = f"{type(error).__name__}: {error}"
            return None
