"""Check the model in several sizes, or show what breaks without one of its mechanisms: see the package."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping

from bide_proofs import model
from bide_proofs.harness.command import parser_of
from bide_proofs.model import INVARIANTS, MORE_VERBS, Bounds, Explorer, Found, Rules

_ENDS = ("done", "retry", "dead")
SIZES: dict[str, Bounds] = {
    "three verbs each": Bounds(),
    "two requests astray": Bounds(verbs=(2, 1), loose=2),
    "every verb, ended tasks kept": Bounds(verbs=(2, 2), may=MORE_VERBS, verdicts=_ENDS, keep=1),
    "a lease shorter than the cap": Bounds(verbs=(2, 1), lease=1, cap=3),
    "a lease longer than the cap": Bounds(verbs=(2, 1), lease=3, cap=1),
}
"""The checks of the command, by name."""
_SMALL = Bounds(verbs=(1, 1), loose=0)
_NEEDS = {
    "new_life_new_id": Bounds(verbs=(2, 1), loose=0),
    "numbers_rise": Bounds(verbs=(2, 0)),
    "journal": Bounds(verbs=(1, 0)),
    "caps_from_sending": Bounds(verbs=(1, 1), loose=0, cap=1),
}
"""For defects that do not show in `_SMALL`, the smallest bounds in which they do."""


def defects(rules: Iterable[str] = Rules._fields) -> Iterator[tuple[str, Found]]:
    """Explore the model without each of its mechanisms in turn."""
    for rule in rules:
        right = Rules._field_defaults[rule]
        yield rule, Explorer(Rules(**{rule: not right}), _NEEDS.get(rule, _SMALL)).explore()


def main() -> int:
    """Run the command; return exit code 0 if nothing is broken, or if every requested defect was found."""
    parser = parser_of("bide_proofs.model", model.__doc__)
    parser.add_argument("--size", choices=tuple(SIZES), help="only this one; all without it")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--without", metavar="RULE", choices=(*Rules._fields, "each"), action="append",
        help="turn a mechanism off, or a defect on, and show the shortest way to what it breaks; `each`: one by one. "
        f"One of: {', '.join(Rules._fields)}",
    )  # fmt: skip
    given = parser.parse_args()
    if given.without:
        return _show_defects(Rules._fields if "each" in given.without else given.without, given.json)
    return _show_sizes({given.size: SIZES[given.size]} if given.size else SIZES, given.json)


def _show_sizes(sizes: Mapping[str, Bounds], as_json: bool) -> int:
    broken = False
    if not as_json:
        _say(*(f"  {invariant}" for invariant in INVARIANTS))
    for name, bounds in sizes.items():
        found = Explorer(Rules(), bounds).explore()
        broken |= bool(found.broken)
        in_words = (
            f"{name}: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}, "
            f"{found.seconds:.0f} s of processor time; at most {found.lateness} instants late, of {bounds.latest}; "
            f"{found.broken or 'nothing broken'}"
        )
        _show(found, {"size": name} if as_json else in_words)
    if not as_json:
        _say(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MB at most")
    return int(broken)


def _show_defects(rules: Iterable[str], as_json: bool) -> int:
    missed = False
    for rule, found in defects(rules):
        missed |= not found.broken
        in_words = f"{rule} {not Rules._field_defaults[rule]}: {found.broken or 'nothing was found'}"
        _show(found, {"without": rule} if as_json else in_words)
    return int(missed)


def _show(found: Found, what: dict[str, str] | str) -> None:
    """Print the result as one line of JSON that includes `what`, or as text with the path to it step by step."""
    if isinstance(what, dict):
        _say(json.dumps({**what, **found._asdict()}))
    else:
        _say(what, *(f"  {number:3} {step}" for number, step in enumerate(found.trace, 1)))


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
