"""A short part of bench/soak_membership.py."""

import pytest
from server import Server
from soak import soak

from flexfloor.membership.client import DriverClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_random_rollouts_are_those_of_the_static_group(server: Server, client: DriverClient) -> None:
    result = soak(server, client, num_rollouts=6, seed=1)
    assert result.num_hangs == 0, result.mismatches
    assert result.num_identical == result.num_rollouts == 6, result.mismatches
    assert result.num_operations > 0
