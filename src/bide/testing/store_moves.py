"""The moves of the game of two stores, as Hypothesis draws them; `store_machine` makes them."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from bide.core.instants import Millis
from bide.core.records import OnConflict, Ref, State

TOPICS, KEYS, GROUPS = ("a", "b"), ("k", "l", "m", "n"), (None, "g", "h")
REFS = [Ref(topic, key) for topic, key in product(TOPICS, KEYS)]

refs = st.sampled_from(REFS)
offsets = st.sampled_from([0, 1, 2, 3, 5, 10, 60, 100, 1_000, 65_536, 2**32 + 1, -1, -10, -(2**33)])
dues = st.tuples(st.booleans(), offsets)
keeps = st.sampled_from([None, 0, 3, 50, 1_000])
pasts = st.sampled_from([None, None, -1, -1, -1, -2, -3])
"""Which token of a task: none, its newest, or one from before."""
new_tasks = st.tuples(
    refs, dues, st.sampled_from(GROUPS), st.sampled_from([None, None, 5, 1_000]), st.sampled_from(OnConflict),
    st.sampled_from([b"", b"\x00\xff", b"{}"]),
)  # fmt: skip
changes = st.tuples(st.sampled_from(["move", "move", "cancel", "redrive"]), refs, dues, keeps, pasts)
verdicts = st.sampled_from(["done", "done", "again", "retry", "retry", "defer", "dead", "dead"])
settlements = st.tuples(st.integers(0, 7), verdicts, dues, keeps, st.sampled_from([None, "", "it failed"]))
ranges = st.one_of(st.none(), st.sampled_from([-10, 0, 1, 5, 100, 2**32]))
filters = st.tuples(
    st.sampled_from([None, *TOPICS]), st.sampled_from([None, *State]), st.sampled_from(GROUPS), ranges, ranges
)


Offset = tuple[bool, Millis]
"""From now; true: said relatively."""
AskedTask = tuple[Ref, Offset, str | None, Millis | None, OnConflict, bytes]
AskedChange = tuple[str, Ref, Offset, Millis | None, int | None]
AskedOutcome = tuple[int, str, Offset, Millis | None, str | None]
AskedFilter = tuple[str | None, State | None, str | None, Millis | None, Millis | None]
