"""Claims on trial: `verdict` notes what a run found about a claim, `page` lists all claims with their state on this machine.

The claims stand in `data/claims.yaml`; verdicts go to the learner's record, each with the machine it was found on.
"""

import difflib
import json
import re
from dataclasses import dataclass
from numbers import Number
from typing import Any

from helpers import machine, record

OUTCOMES = {"holds": "✔", "holds only if": "◐", "fails": "✘", "undecided": "?", "not testable here": "–"}  # outcome -> mark
NEEDS_REASON = {"holds only if": "the condition", "not testable here": "why"}
NOT_RUN = "not run here"
_SHOWN = re.compile(rf"^\S ([A-Z]\d+) ({'|'.join(sorted(OUTCOMES, key=len, reverse=True))}): ")  # how a verdict's card begins


@dataclass(frozen=True)
class Claim:
    """What an article says, in our words; `notebooks` are the numbers of those that put it on trial."""

    id: str
    article: str
    claim: str
    notebooks: tuple[str, ...]


def load() -> dict[str, Claim]:
    """All claims by id, in the order of `data/claims.yaml`."""
    data = record.data("claims")
    return {id: Claim(id, data["articles"][id[0]], row["claim"], tuple(row["notebooks"])) for id, row in data["claims"].items()}


def verdict(claim_id: str, outcome: str, measured: Any = None, expected: Any = None, reason: str = "") -> None:
    """Show and note what this machine's run says about a claim.

    `outcome` is "holds", "holds only if" (`reason` names the condition), "fails", "undecided" (the spread of the measurement
    crosses the threshold) or "not testable here" (`reason` says why). `measured` and `expected` are numbers or short texts with
    their units; every outcome but "not testable here" needs `measured`.

    Raises ValueError for an unknown claim or outcome, and where the outcome lacks what it needs.
    """
    claim = _claim(claim_id)
    if outcome not in OUTCOMES:
        raise ValueError(f"outcome is {outcome!r}; it must be one of {', '.join(map(repr, OUTCOMES))}")
    needs = f"a verdict {outcome!r} on {claim_id} needs"
    if measured is None and outcome != "not testable here":
        raise ValueError(f'{needs} measured=, the figure it rests on; without one: "not testable here"')
    if not reason and outcome in NEEDS_REASON:
        raise ValueError(f"{needs} reason=: {NEEDS_REASON[outcome]}")
    figures = {"measured": _text(measured), "expected": _text(expected)}
    record.note("claim", claim_id, outcome=outcome, **figures, reason=reason, machine=machine.describe().line)
    title = f"{OUTCOMES[outcome]} {claim_id} {outcome}"
    found = _found({**figures, "reason": reason, "outcome": outcome})
    markup = f"<p><b>{title}:</b> <q>{record.markup(claim.claim)}</q><br>{record.markup(found)}</p>"
    record.Card(f"{title}: {claim.claim}\n  {found}", markup).show()


def states() -> dict[str, dict[str, str]]:
    """This machine's latest verdict on each claim that has one: outcome, measured, expected, reason."""
    here = machine.describe().line
    return {note["name"]: note for note in record.notes("claim") if note["machine"] == here}


def published() -> dict[str, dict[str, str]]:
    """The verdicts that stand in the outputs of the course's notebooks: {"E3": {"03": "holds"}}, the last one of a notebook."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((record.ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            if match := _SHOWN.match("".join(output.get("data", {}).get("text/plain", ""))):
                found.setdefault(match[1], {})[file.name[:2]] = match[2]
    return found


def page() -> None:
    """Show every claim with its state on this machine; a claim without a verdict reads "not run here".

    Beside it stand the notebooks that try it, each with what it found on the machine on which the course was published.
    """
    found, known = states(), published()
    rows = []
    for claim in load().values():
        state = found.get(claim.id)
        outcome = f"{OUTCOMES[state['outcome']]} {state['outcome']}" if state else NOT_RUN
        there = known.get(claim.id, {})
        tried = ", ".join(f"{each}: {there.get(each, 'no verdict')}" for each in sorted({*claim.notebooks, *there}))
        rows.append((claim.id, outcome, _found(state) if state else "", tried, claim.claim))
    title = f"{len(found)} of {len(rows)} claims tried on {machine.describe().line}"
    names = ("claim", "state", "what was found", "as published, by notebook", "what the article says")
    text = "\n".join(
        f"{id:<4} {outcome:<20} published {tried}\n     {claim}" + f"\n     {found}" * bool(found)
        for id, outcome, found, tried, claim in rows
    )
    unbroken = [(id, outcome.replace(" ", "\N{NO-BREAK SPACE}"), *others) for id, outcome, *others in rows]
    record.Card(f"{title}\n{text}", f"<p><b>{record.markup(title)}</b></p>{record.table(unbroken, names)}").show()


def _claim(claim_id: str) -> Claim:
    claims = load()
    if claim_id not in claims:
        near = difflib.get_close_matches(str(claim_id).upper(), claims, n=3, cutoff=0.3) or list(claims)
        raise ValueError(f"there is no claim {claim_id!r}; nearest: {', '.join(near)}")
    return claims[claim_id]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, Number):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _found(facts: dict[str, str]) -> str:
    """ "measured 1.93, expected 2: three more cores"; "…; only if there are more cores" """
    figures = ", ".join(f"{name} {facts[name]}" for name in ("measured", "expected") if facts[name])
    joint = "; only if " if facts["outcome"] == "holds only if" else ": "
    return joint.join(part for part in (figures, facts["reason"]) if part)
