"""What the commands print: curves, comparisons, stages and their counts."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pos2distill.evaluation.chains import STEPS
from pos2distill.evaluation.formatting import format_estimate, format_gap, format_value
from pos2distill.evaluation.references import REFERENCES
from pos2distill.evaluation.report import Comparison, verdict
from pos2distill.evaluation.result import Evaluation
from pos2distill.evaluation.scores import Curve, format_slots
from pos2distill.evaluation.sweep import SweepRow
from pos2distill.evaluation.verdict import describe_curve
from pos2distill.store.artifacts import Manifest

_BAR_WIDTH = 18


def print_comparison(comparison: Comparison) -> None:
    """Print two curves of the same prompts, one line for each position, and what they say."""
    before, after = comparison.before, comparison.after
    print(f"\naccuracy by position of the gold document among {before.documents}, {before.examples} examples each")
    print("position  before                   after")
    for slot, old, new in zip(before.slots, before.accuracy_by_slot, after.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {old:.2f} {_bar(old)}  {new:.2f} {_bar(new)}")
    for group, old in before.by_group.items():
        shown = format_estimate(old, before.by_group_ci95[group])
        print(f"{group:>12}  {shown:<20} {format_estimate(after.by_group[group], after.by_group_ci95[group])}")
    print(f"    mean  {format_estimate(before.mean, before.ci95):<25}{format_estimate(after.mean, after.ci95)}")
    print(f"     GAP  {format_estimate(before.gap, before.gap_ci95):<25}{format_estimate(after.gap, after.gap_ci95)}")
    corrected = f"corrected {format_value(before.gap_corrected)}"
    print(f"          {corrected:<25}corrected {format_value(after.gap_corrected)}")
    for name, reference in (comparison.references or {}).items():
        base, distilled = reference["base"], reference["distilled"]
        shown = format_estimate(base["accuracy"], base["ci95"])
        print(f"          {shown:<25}{format_estimate(distilled['accuracy'], distilled['ci95'])} {REFERENCES[name]}")
    print()
    print(f"{textwrap.fill(verdict(comparison), 100)}\n")


def print_sweep(rows: Sequence[SweepRow]) -> None:
    """Print the means and GAPs of every setting on the task that was trained on, before and after training."""
    width = max(len("setting"), *(len(row.label) for row in rows))
    print(f"\n{'setting':<{width}}  mean before  after  difference               GAP before  after")
    for row in rows:
        task = next(iter(row.tasks.values()))
        before, after, change = task.before, task.after, task.difference
        difference = f"{change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
        means = f"{before.mean.value:>11.3f}  {after.mean.value:>5.3f}"
        print(f"{row.label:<{width}}  {means}  {difference:<23}  {before.gap.value:>10.3f}  {after.gap.value:>5.3f}")
    print()


def print_curve(label: str, curve: Curve) -> None:
    """Print one curve, one line for each position."""
    print(f"\n{label}: {curve.documents} documents, {curve.examples} examples at each position")
    for slot, accuracy in zip(curve.slots, curve.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {accuracy:.2f} {_bar(accuracy)}")
    for group, accuracy in curve.by_group.items():
        print(f"{group:>12}  {format_estimate(accuracy, curve.by_group_ci95[group])}")
    print(f"    mean  {format_estimate(curve.mean, curve.ci95)}, F1 {curve.f1:.3f}")
    print(f"     GAP  {format_gap(curve.gap, curve.gap_ci95, curve.gap_corrected)}")
    if curve.broken_by_order:
        print(f"  orders  of distractors break {max(curve.broken_by_order):.2f} of the questions at the worst position")
    print(describe_curve(curve))


def print_analysis(model: str, analysis: Mapping[str, Any]) -> None:
    """Print the main figures of an analysis, one a line."""
    print(f"\n{model}: at positions other than the advantageous one, 95 % intervals over questions")
    shift = analysis["token_shift"]
    if "nats_per_token" in shift:
        print(f"  token shift          {_estimate(shift['nats_per_token'])} nats per token")
        print(f"  tokens recovered     {_estimate(shift['recovery'])}")
        top = shift["concentration"].get("top_10_percent")
        if top:
            print(f"  in 10 % of tokens    {_estimate(top)} of the shift (even: {top['even']:.2f})")
    thoughts = analysis["thought_shift"]
    for step, ratio in thoughts.get("overall", {}).items():
        if step in STEPS:
            print(f"  {f'failed step {step}':<19}  {_estimate(ratio)}")
    wrong = analysis["wrong_answers"]
    print(f"  wrong answers        {wrong['wrong']}, of which {wrong['one_document']} are in one other document")
    for name in ("token_shift", "attention", "thought_shift"):
        reason = analysis[name].get("skipped")
        if reason:
            print(f"  {name.replace('_', ' '):<19}  not available: {reason}")


def _estimate(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["ci95"]
    return f"{estimate['value']:.3g} [{low:.3g}, {high:.3g}]"


def print_evaluation(name: str, evaluation: Evaluation) -> None:
    """Print a model's curve, the accuracy to expect from a retriever and without positions, and its tokens' cost."""
    print_curve(name, evaluation.curve)
    expected = evaluation.expected
    if expected is not None:
        shown = format_estimate(expected["accuracy"], expected["ci95"])
        print(f"expected    {shown} with the gold document ranked as evaluation.retriever_ranks says")
    for kind, reference in (evaluation.references or {}).items():
        print(f"reference   {format_estimate(reference['accuracy'], reference['ci95'])} {REFERENCES[kind]}")
    counts = evaluation.counts
    # A server may not report them.
    if "prompt_tokens" in counts and "answer_tokens" in counts:
        cost = "" if evaluation.cost is None else f", cost {evaluation.cost:.2f}"
        print(f"tokens      {counts['prompt_tokens']} of prompts, {counts['answer_tokens']} of answers{cost}")


def print_paths(**paths: str) -> None:
    """Print names of results and the paths at which they are stored."""
    for name, path in paths.items():
        print(f"{name:<10}  {path}")


def summarize_manifest(manifest: Manifest) -> str:
    """The result of a stage in a line: the scales that it found, the slots that it chose, or its counts."""
    details = manifest.details
    # Only the stages `search scales` and `choose slot` have these details, which say more than their counts.
    if "scales" in details:
        scales = details["scales"]
        first, best = details["unscaled"]["fitness"], details["fitness"]
        return f"scales {min(scales):g} to {max(scales):g}, fitness {best:.3f} (unscaled {first:.3f})"
    if "slots" in details:
        low, high = details["ci95"]
        position = format_slots(tuple(details["slots"]))
        documents = details["curve"]["documents"]
        return f"position {position} of {documents} documents, {details['accuracy']:.2f} [{low:.2f}, {high:.2f}]"
    return format_counts(manifest.counts)


def format_counts(counts: Mapping[str, int]) -> str:
    """The counts of a stage's manifest."""
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def format_settings(settings: dict[str, Any]) -> str:
    """The settings of one study of a sweep."""
    return "".join(f", {name}={value}" for name, value in settings.items())


def _bar(fraction: float) -> str:
    filled = round(fraction * _BAR_WIDTH)
    full, empty = "█·" if _shows("█·") else "#."
    return full * filled + empty * (_BAR_WIDTH - filled)


def _shows(characters: str) -> bool:
    """Whether the terminal's encoding has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
