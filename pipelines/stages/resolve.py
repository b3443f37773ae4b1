"""Settings that ask for a result of earlier stages, replaced by it: slots, scales, a distilled model."""

from collections.abc import Mapping

from pos2distill.config import Section, Study
from pos2distill.config.restrict import replace_section
from pos2distill.store.checkpoint_layout import model_url

from .stage import Input


def resolve_auto_settings(study: Study, inputs: Mapping[str, Input]) -> Study:
    """The study with the advantageous slots that were chosen (`slot`) and the RoPE scales that were found (`scales`).

    Unchanged where a stage has no such input.
    """
    if "slot" in inputs:
        slots = inputs["slot"].details("slots")["slots"]
        study = replace_section(study, method=_replace(study.method, advantageous_slot=slots))
    if "scales" in inputs:
        scales = inputs["scales"].details("scales")["scales"]
        study = replace_section(
            study,
            inference=_replace(study.inference, method="lpes", scales=scales),
            model=_replace(study.model, rope_scales=scales),
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
    raw = study.model.model_dump(mode="json")
    raw["path"] = path
    # A revision belongs to a hub name, and the new path is a folder.
    raw["revision"] = None
    model = type(study.model).model_validate(raw)
    return replace_section(study, model=model)


def _replace(section: Section, **values: object) -> Section:
    """The section with other values, validated."""
    return type(section).model_validate({**section.model_dump(mode="json"), **values})
