"""The shares of a benchmark's tokens that experts have."""

import numpy as np
import pytest

from experiments.bench.expert_shares import drawn_shares, expert_shares, routed


def test_the_others_share_equally_what_the_first_does_not_have():
    np.testing.assert_allclose(expert_shares(4, 0.7), [0.7, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(("experts", "share"), [(4, 0.0), (4, 1.0), (1, 0.5)])
def test_what_is_no_share_is_refused(experts, share):
    with pytest.raises(ValueError, match=f"share_of_first={share} of {experts} exp"):
        expert_shares(experts, share)


@pytest.mark.parametrize("shares", [np.full(4, 0.25), drawn_shares(4)])
def test_the_experts_get_their_shares_of_the_tokens(shares):
    rows = routed(1000, shares, 8)
    assert int(rows.group_sizes.sum()) == 1000
    np.testing.assert_allclose(rows.group_sizes, 1000 * shares, atol=1)
