"""Groups are handed out whole, once, in the order of the requests, and never with stale responses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_of import response, step_of

from flexfloor.driver.prompt_groups import PromptGroups
from flexfloor.errors import StaleWeightsError


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_group_comes_once_when_its_last_response_ends(
    num_prompts: int, size: int, random: object
) -> None:
    requests = step_of(num_prompts, size)
    order = list(requests)
    random.shuffle(order)  # type: ignore[attr-defined]
    groups, seen, handed_out = PromptGroups(requests, 3), [], []
    for request in order:
        seen.append(request.response_id)
        group = groups.add(response(request))
        names = [one.response_id for one in requests if one.prompt_id == request.prompt_id]
        if set(names) <= set(seen):
            assert group is not None
            assert [one.response_id for one in group] == names
            handed_out += names
        else:
            assert group is None
    assert sorted(handed_out) == sorted(one.response_id for one in requests)


def test_strangers_twins_and_other_weights_are_refused() -> None:
    requests = step_of(2, 2)
    groups = PromptGroups(requests, 3)
    first = response(requests[0])
    assert groups.add(first) is None
    with pytest.raises(ValueError, match="0/p0/0 has finished before"):
        groups.add(first)
    with pytest.raises(ValueError, match="0/p0/7 is not one of this step"):
        groups.add(replace(first, response_id="0/p0/7"))
    with pytest.raises(StaleWeightsError, match="0/p0/1 comes from weight_version 2; the step runs on 3"):
        groups.add(replace(response(requests[1]), weight_version=2))
    assert groups.add(response(requests[1])) is not None
