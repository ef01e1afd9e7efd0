"""The chunked list against a plain sorted one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bide.stores.sorted_chunks import SortedChunks

entries = st.tuples(st.sampled_from("abc"), st.integers(0, 9))
bounds = st.one_of(st.just(()), st.tuples(st.sampled_from("abcd")), entries)


@settings(max_examples=40)
@given(st.sets(entries, min_size=8), st.lists(st.tuples(st.booleans(), entries), min_size=20, max_size=60), bounds)
def test_it_is_a_sorted_list(
    first: set[tuple[str, int]], changes: list[tuple[bool, tuple[str, int]]], bound: tuple[str, int]
) -> None:
    chunks = SortedChunks(first, longest=4)
    plain = sorted(first)
    for adding, entry in changes:
        there = entry in plain
        if adding and not there:
            chunks.add(entry)
            insort(plain, entry)
        elif not adding:
            assert chunks.discard(entry) is there
            if there:
                plain.remove(entry)
        assert list(chunks.after(())) == plain
        assert len(chunks) == len(plain)
        assert list(chunks.after(bound)) == plain[bisect_right(plain, bound) :]
        assert chunks.rank(bound) == bisect_left(plain, bound)


@pytest.mark.parametrize("step", [1, -1, 7919])
def test_no_chunk_grows_too_long(step: int) -> None:
    chunks: SortedChunks[tuple[int]] = SortedChunks(longest=16)
    for number in range(2_000):
        chunks.add((number * step % 10_007,))
    assert max(map(len, chunks._chunks)) <= 16
    assert len(chunks._chunks) < 2_000 // 4
    assert list(chunks.after(())) == sorted((number * step % 10_007,) for number in range(2_000))


def test_an_empty_one_has_no_chunk() -> None:
    chunks = SortedChunks([("a",)])
    assert chunks.discard(("a",))
    assert not chunks.discard(("a",))
    assert (len(chunks), chunks._chunks, chunks._lasts) == (0, [], [])
    assert list(chunks.after(())) == []


def test_what_lies_behind_a_last_entry_that_was_taken_out_is_found_and_missed_rightly() -> None:
    chunks = SortedChunks([(number,) for number in range(8)], longest=4)
    assert chunks.discard((1,))
    assert not chunks.discard((1,))
    assert not chunks.discard((99,))
    chunks.add((1,))
    assert list(chunks.after((0,))) == [(number,) for number in range(1, 8)]
