"""Balanced placement over the ranks of several servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.integrations.spread import Seat, Spread


def seats(num: int, url: str = "u") -> list[Seat]:
    return [Seat(url, rank) for rank in range(num)]


def test_counts_are_even_and_long_ones_apart() -> None:
    placed = Spread(seats(2)).place([100, 1, 1, 100])
    assert sorted(seat.dp_rank for seat in placed) == [0, 0, 1, 1]
    assert placed[0] != placed[3]


def test_a_later_batch_fills_up_what_has_ended() -> None:
    spread = Spread(seats(2))
    first = spread.place([5.0, 5.0, 5.0, 5.0])
    for seat in [seat for seat in first if seat.dp_rank == 1]:
        spread.finish(seat, 5.0)
    assert [seat.dp_rank for seat in spread.place([1.0, 1.0])] == [1, 1]
    assert spread.counts == {Seat("u", 0): 2, Seat("u", 1): 2}


def test_a_seat_that_closed_takes_nothing_new_and_is_not_forgotten() -> None:
    spread = Spread(seats(2))
    placed = spread.place([1.0, 1.0])
    spread.open(seats(1))
    assert [seat.dp_rank for seat in spread.place([1.0] * 3)] == [0, 0, 0]
    for seat in placed:
        spread.finish(seat, 1.0)
    with pytest.raises(ValueError, match="never placed there"):
        spread.finish(Seat("u", 1), 1.0)


def test_no_seat_is_refused() -> None:
    with pytest.raises(ValueError, match="no seats"):
        Spread([])


@given(st.lists(st.floats(1, 1000), max_size=60), st.integers(1, 7), st.integers(1, 3))
def test_any_batch_is_even_within_one(tokens: list[float], num_ranks: int, num_servers: int) -> None:
    spread = Spread([seat for server in range(num_servers) for seat in seats(num_ranks, f"u{server}")])
    assert len(spread.place(tokens)) == len(tokens)
    counts = spread.counts.values()
    assert sum(counts) == len(tokens)
    assert max(counts) - min(counts) <= 1
