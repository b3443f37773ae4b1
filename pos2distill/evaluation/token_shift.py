"""Token shift and recovery: how a model's next-token distributions change when the gold documents move.

All models read the same response R, the base model's answer at the advantageous slot, and are compared with that
model there, p:

    KL_t = KL(p(. | P_adv, R_<t) || q(. | P_slot, R_<t))   nats, at each response token t

The base model at another slot shows the shift; the distilled model at that slot shows what is left of it.
Source: arXiv:2508.15709, "token-shifting" and its figures of KL by token. The paper gives no formula for how few tokens
carry the shift; the fractions here are ours.

Shapes: E examples, S slots, T tokens of one response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pos2distill.evaluation.statistics import fraction_interval, ratio_interval
from pos2distill.records import Bools, Floats

RESAMPLES = 2000
SHOWN_TOKENS = 64  # length of `nats_by_token`

# (name, at least so many tokens, or this fraction of a response, rounded up)
_TOPS = (("top_1", 1, 0.0), ("top_3", 3, 0.0), ("top_10_percent", 1, 0.1))


@dataclass(frozen=True, slots=True)
class Shift:
    """The passes over one example's response.

    Attributes:
        kl_ST: nats.
        agrees_ST: whether the most likely token is the base model's at the advantageous slot.
        trivial_S: whether the slot is not the advantageous one.
    """

    kl_ST: Floats
    agrees_ST: Bools
    trivial_S: Bools


def summarize_shift(shifts: Sequence[Shift], *, seed: int) -> dict[str, Any]:
    """The figures of `token_shift` in analysis.json, with 95 % intervals over examples.

    Args:
        shifts: one for each example, at least one; all at the same slots.
    """
    mean_ES = np.stack([shift.kl_ST.mean(1) for shift in shifts])
    agrees_ES = np.stack([shift.agrees_ST.mean(1) for shift in shifts])
    whole_ES = np.stack([shift.agrees_ST.all(1) for shift in shifts]).astype(float)
    trivial_ES = np.stack([shift.trivial_S for shift in shifts])
    tokens = round(np.mean([shift.kl_ST.shape[1] for shift in shifts]))
    summary: dict[str, Any] = {
        "examples": len(shifts),
        "response_tokens": sum(shift.kl_ST.shape[1] for shift in shifts),
        "nats_by_slot": [estimate_mean(mean_E, seed) for mean_E in mean_ES.T],
        "recovery_by_slot": [_estimate_fraction(agrees_E, tokens, seed) for agrees_E in agrees_ES.T],
        "recovered_whole_by_slot": [_estimate_fraction(whole_E, 1, seed) for whole_E in whole_ES.T],
        "nats_by_token": _by_token([shift.kl_ST for shift in shifts]),
    }
    has_trivial_E = trivial_ES.any(1)
    if has_trivial_E.any():
        kept = [shift for shift in shifts if shift.trivial_S.any()]
        summary["nats_per_token"] = estimate_mean(_row_means(mean_ES, trivial_ES), seed)
        summary["recovery"] = _estimate_fraction(_row_means(agrees_ES, trivial_ES), tokens * len(trivial_ES.T), seed)
        summary["concentration"] = _concentration(kept, seed)
    return summary


def estimate_mean(value_E: Floats, seed: int) -> dict[str, Any]:
    """A mean over examples of values >= 0, with its interval."""
    return _estimate_ratio(value_E, np.ones(len(value_E)), seed)


def _estimate_fraction(value_E: Floats, tokens: int, seed: int) -> dict[str, Any]:
    """The mean of fractions of `tokens` tokens each, with its interval over examples."""
    interval = fraction_interval(value_E, np.ones(len(value_E)), answers=tokens, bootstrap_samples=RESAMPLES, seed=seed)
    return {"value": float(value_E.mean()), "ci95": list(interval)}


def _row_means(value_ES: Floats, trivial_ES: Bools) -> Floats:
    """(E,) each example's mean over its trivial slots, of the examples that have some."""
    kept_E = trivial_ES.any(1)
    means_E: Floats = np.where(trivial_ES, value_ES, 0.0)[kept_E].sum(1) / trivial_ES[kept_E].sum(1)
    return means_E


def _concentration(shifts: Sequence[Shift], seed: int) -> dict[str, Any]:
    """The fraction of all KL at trivial slots that is in the few largest tokens of each response.

    `even` is the same fraction if all tokens of a response had equal KL: short responses have few tokens to spread
    over.
    """
    total_E = np.array([shift.kl_ST[shift.trivial_S].sum() for shift in shifts])
    figures: dict[str, Any] = {"responses": int(sum(shift.trivial_S.sum() for shift in shifts))}
    if not total_E.any():
        return figures
    for name, fewest, fraction in _TOPS:
        count_E = [max(fewest, math.ceil(fraction * shift.kl_ST.shape[1])) for shift in shifts]
        top_E = np.array([_top_sum(shift, count) for shift, count in zip(shifts, count_E, strict=True)])
        tokens_E = np.array([shift.kl_ST.shape[1] for shift in shifts])
        even_E = total_E * np.minimum(1.0, np.array(count_E) / tokens_E)
        figures[name] = {**_estimate_ratio(top_E, total_E, seed), "even": float(even_E.sum() / total_E.sum())}
    figures["spike_ratio"] = _spike_ratio(shifts)
    return figures


def _top_sum(shift: Shift, count: int) -> float:
    """The sum of the `count` largest tokens of each trivial response, over these responses."""
    sorted_ST = np.sort(shift.kl_ST[shift.trivial_S], axis=1)
    return float(sorted_ST[:, -count:].sum())


def _estimate_ratio(part_E: Floats, total_E: Floats, seed: int) -> dict[str, Any]:
    """A ratio of sums over examples, with its interval: responses with more KL count more."""
    interval = ratio_interval(part_E, total_E, bootstrap_samples=RESAMPLES, seed=seed)
    return {"value": float(part_E.sum() / total_E.sum()), "ci95": list(interval)}


def _spike_ratio(shifts: Sequence[Shift]) -> dict[str, float | None]:
    """Largest KL of a response divided by its median KL: quartiles over responses; None where the median is 0.

    Responses without any KL have no such ratio and are left out; None if all are.
    """
    ratios: list[float] = []
    for shift in shifts:
        for kl_T in shift.kl_ST[shift.trivial_S]:
            if not kl_T.any():
                continue
            median = float(np.median(kl_T))
            ratios.append(float(kl_T.max()) / median if median > 0 else math.inf)
    names = ("quartile_1", "median", "quartile_3")
    if not ratios:
        return dict.fromkeys(names)
    # A quartile is one of the ratios, because a mean with infinity would be infinite.
    quartiles = np.percentile(ratios, [25, 50, 75], method="nearest").tolist()
    finite = [value if math.isfinite(value) else None for value in quartiles]
    return dict(zip(names, finite, strict=True))


def _by_token(kls: Sequence[Floats]) -> list[list[float]]:
    """[slot][token] mean KL of the first tokens of a response, over the responses that are long enough."""
    longest = min(SHOWN_TOKENS, max(kl_ST.shape[1] for kl_ST in kls))
    columns = []
    for token in range(longest):
        columns.append(np.mean([kl_ST[:, token] for kl_ST in kls if kl_ST.shape[1] > token], axis=0))
    rows: list[list[float]] = np.stack(columns, 1).tolist()
    return rows
