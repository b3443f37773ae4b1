"""Replace settings such as `auto` by results of earlier stages: slots, RoPE scales, a distilled model."""

from collections.abc import Mapping

from pos2distill.config import Study
from pos2distill.store.checkpoint_layout import model_url

from .stage import Input


def resolve_auto_settings(study: Study, inputs: Mapping[str, Input]) -> Study:
    """The study with the advantageous slots that were chosen (`slot`) and the RoPE scales that were found (`scales`).

    Unchanged where a stage has no such input.
    """
    if "slot" in inputs:
        slots = inputs["slot"].details("slots")["slots"]
        study = study.replace(method=study.method.replace(advantageous_slot=slots))
    if "scales" in inputs:
        scales = inputs["scales"].details("scales")["scales"]
        study = study.replace(
            inference=study.inference.replace(method="lpes", scales=scales),
            model=study.model.replace(rope_scales=scales),
        )
    return study


def with_distilled(study: Study, inputs: Mapping[str, Input]) -> Study:
    """The study with the model of an earlier stage `distill`: the input `checkpoint`, or `student` of an earlier round.

    Unchanged where a stage has no such input.
    """
    distilled = inputs.get("checkpoint") or inputs.get("student")
    return study if distilled is None else with_model(study, model_url(distilled.artifact))


def with_model(study: Study, path: str) -> Study:
    """The study with another model folder of the same kind."""
    # A revision belongs to a hub name, and the new path is a folder.
    return study.replace(model=study.model.replace(path=path, revision=None))
