"""What the commands print: curves, comparisons, stages and their counts."""

from typing import Any

from pos2distill.evaluation.scores import Curve, format_slots
from pos2distill.store.artifacts import Manifest

_BAR_WIDTH = 18


def print_comparison(before: Curve, after: Curve) -> None:
    """Two curves of the same prompts, one line for each position."""
    print(f"\naccuracy by position of the gold document among {before.documents}, {before.examples} examples each")
    print("position  before                   after")
    for slot, old, new in zip(before.slots, before.accuracy_by_slot, after.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {old:.2f} {_bar(old)}  {new:.2f} {_bar(new)}")
    for group, old in before.by_group.items():
        print(f"{group:>12}  {old:.3f}                {after.by_group[group]:.3f}")
    print(f"    mean  {before.mean:.3f}                    {after.mean:.3f}")
    print(f"     GAP  {before.gap:.3f}                    {after.gap:.3f}\n")


def print_curve(label: str, curve: Curve) -> None:
    """One curve, one line for each position."""
    print(f"\n{label}: {curve.documents} documents, {curve.examples} examples at each position")
    for slot, accuracy in zip(curve.slots, curve.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {accuracy:.2f} {_bar(accuracy)}")
    for group, accuracy in curve.by_group.items():
        print(f"{group:>12}  {accuracy:.3f}")
    low, high = curve.ci95
    print(f"    mean  {curve.mean:.3f} [{low:.3f}, {high:.3f}], GAP {curve.gap:.3f}, F1 {curve.f1:.3f}")


def print_paths(checkpoint: str, storage: str) -> None:
    """Where the results are."""
    print(f"checkpoint  {checkpoint}")
    print(f"report      {storage}/report/index.html")


def summarise_manifest(manifest: Manifest) -> str:
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
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in manifest.counts.items())


def format_settings(settings: dict[str, Any]) -> str:
    """The settings of one study of a sweep."""
    return "".join(f", {name}={value}" for name, value in settings.items())


def _bar(fraction: float) -> str:
    filled = round(fraction * _BAR_WIDTH)
    return "█" * filled + "·" * (_BAR_WIDTH - filled)
