import json

import numpy as np
import pytest

from pos2distill.evaluation.token_shift import Shift, summarize_shift

# Two slots, of which the first is the advantageous one; ten tokens with one spike, and four equal tokens.
SPIKE = Shift(
    kl_ST=np.array([[0.0] * 10, [0.1] * 9 + [1.1]]),
    agrees_ST=np.array([[True] * 10, [True] * 9 + [False]]),
    trivial_S=np.array([False, True]),
)
EVEN = Shift(
    kl_ST=np.array([[0.0] * 4, [0.05] * 4]),
    agrees_ST=np.ones((2, 4), bool),
    trivial_S=np.array([False, True]),
)


def test_summarize_shift_of_a_spike_by_hand() -> None:
    summary = summarize_shift([SPIKE, EVEN], seed=0)
    assert (summary["examples"], summary["response_tokens"]) == (2, 14)
    # (.9 + 1.1) / 10 = .2 and .05 nats per token.
    assert [each["value"] for each in summary["nats_by_slot"]] == pytest.approx([0, 0.125])
    assert summary["nats_per_token"]["value"] == pytest.approx(0.125)
    assert [each["value"] for each in summary["recovery_by_slot"]] == pytest.approx([1, 0.95])
    assert [each["value"] for each in summary["recovered_whole_by_slot"]] == pytest.approx([1, 0.5])
    assert summary["recovery"]["value"] == pytest.approx(0.95)
    # Of 2.2 nats: 1.1 + .05; the three largest 1.3 + .15; a tenth is one token of either.
    concentration = summary["concentration"]
    assert concentration["responses"] == 2
    assert concentration["top_1"]["value"] == concentration["top_10_percent"]["value"] == pytest.approx(1.15 / 2.2)
    assert concentration["top_3"]["value"] == pytest.approx(1.45 / 2.2)
    assert concentration["top_1"]["even"] == pytest.approx((2 / 10 + 0.2 / 4) / 2.2)
    assert (concentration["spike_ratio"]["quartile_1"], concentration["spike_ratio"]["quartile_3"]) == pytest.approx(
        (1, 11)
    )
    low, high = concentration["top_1"]["ci95"]
    assert low == pytest.approx(0.25)  # only the even response
    assert high == pytest.approx(0.55)  # only the spike
    # The fourth token is the last that both have.
    assert summary["nats_by_token"][1] == pytest.approx([0.075] * 4 + [0.1] * 5 + [1.1])
    json.dumps(summary, allow_nan=False)


def test_summarize_shift_leaves_out_the_advantageous_slot_of_each_example() -> None:
    other = Shift(EVEN.kl_ST[::-1], EVEN.agrees_ST, EVEN.trivial_S[::-1])
    assert summarize_shift([EVEN, other], seed=0)["nats_per_token"]["value"] == pytest.approx(0.05)


def test_summarize_shift_without_another_slot_or_any_shift() -> None:
    only = Shift(np.zeros((1, 3)), np.ones((1, 3), bool), np.array([False]))
    assert "concentration" not in summarize_shift([only], seed=0)
    unmoved = Shift(np.zeros((1, 3)), np.ones((1, 3), bool), np.array([True]))
    assert summarize_shift([unmoved], seed=0)["concentration"] == {"responses": 1}


def test_summarize_shift_spike_ratio_of_a_median_of_zero_is_none() -> None:
    spike = Shift(np.array([[0.0, 0.0, 0.3]]), np.ones((1, 3), bool), np.array([True]))
    assert summarize_shift([spike], seed=0)["concentration"]["spike_ratio"]["median"] is None


def test_summarize_shift_spike_ratio_leaves_out_responses_without_any_kl() -> None:
    equal = Shift(np.array([[0.2, 0.1, 0.1]]), np.ones((1, 3), bool), np.array([True]))
    nothing = Shift(np.zeros((1, 3)), np.ones((1, 3), bool), np.array([True]))
    found = summarize_shift([equal, nothing, nothing], seed=0)["concentration"]["spike_ratio"]
    assert found == {"quartile_1": 2.0, "median": 2.0, "quartile_3": 2.0}
