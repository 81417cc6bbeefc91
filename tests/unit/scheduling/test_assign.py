"""Ways to deal sorted responses to ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexfloor.scheduling import assign


def test_serpentine_goes_there_and_back() -> None:
    assert assign.serpentine(8, 3).tolist() == [0, 1, 2, 2, 1, 0, 0, 1]


def test_level_gives_the_longest_of_a_row_to_the_emptiest_rank() -> None:
    # One giant: serpentine would put 40 beside 5, level leaves the giant's rank the least of each row.
    assert assign.level(np.array([100.0, 40, 30, 20, 10, 5]), 2).tolist() == [0, 1, 1, 0, 1, 0]


def test_tiers_put_the_longest_on_the_first_ranks() -> None:
    ranks = assign.tiers(12, (2, 2, 4), (1.0, 1.0, 2.0))
    assert ranks.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 7, 6]


def test_tier_widths_add_up_to_the_sizes() -> None:
    assert assign.tier_widths((8, 4, 2)) == (2, 2, 4)
    assert assign.tier_widths((5,)) == (5,)


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.floats(1, 1000), max_size=40), num_ranks=st.integers(1, 7))
def test_counts_are_even_to_within_one(tokens: list[float], num_ranks: int) -> None:
    falling = np.array(sorted(tokens, reverse=True))
    for ranks in (assign.serpentine(len(tokens), num_ranks), assign.level(falling, num_ranks)):
        counts = np.bincount(ranks, minlength=num_ranks)
        assert len(counts) == num_ranks
        assert counts.max() - counts.min() <= 1


@settings(max_examples=60, deadline=None)
@given(
    num_responses=st.integers(0, 60),
    tiers=st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 10)), min_size=1, max_size=5),
)
def test_tiers_place_each_on_its_tier_in_order(num_responses: int, tiers: list[tuple[int, float]]) -> None:
    widths = [width for width, _ in tiers]
    ranks = assign.tiers(num_responses, widths, [share for _, share in tiers])
    tier_of_rank = np.repeat(np.arange(len(widths)), widths)
    assert np.all(np.diff(tier_of_rank[ranks]) >= 0)
    for tier, (_, share) in enumerate(tiers):
        want = share / sum(share for _, share in tiers) * num_responses
        assert (tier_of_rank[ranks] == tier).sum() == pytest.approx(want, abs=1.001)
