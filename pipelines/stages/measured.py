"""What earlier stages measured of the model, put in the place of the settings that ask for it."""

from collections.abc import Mapping

from pos2distill.config import Section, Study
from pos2distill.config.fields import replace_section

from .stage import Input


def with_measured(study: Study, inputs: Mapping[str, Input]) -> Study:
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


def _replace(section: Section, **values: object) -> Section:
    """The section with other values, validated."""
    return type(section).model_validate({**section.model_dump(mode="json"), **values})
