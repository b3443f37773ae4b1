"""The config of a model with RoPE scales, for others to use: the weights stay those of the model."""

from collections.abc import Sequence

from pos2distill.config import ModelSection
from pos2distill.evaluation.report import render_scales_card
from pos2distill.models.files import is_hub_name
from pos2distill.models.rope.curves import CONFIG_KEY

SCALED_CONFIG_FOLDER = "config"
"""The folder with the files, in the folder of the result that they belong to."""


def scaled_config_files(model: ModelSection, scales: Sequence[float], *, searched: bool) -> dict[str, bytes]:
    """`config.json` of the model with the scales, and a README.md that says how to load and serve it.

    Args:
        scales: one for each layer, or a single one for all.
        searched: whether a search found them; otherwise they were given.
    """
    # Imported here, so that commands which need no model start without torch.
    from pos2distill.models.load import load_config
    from pos2distill.models.rope.layer_scales import resolve_scales

    config = load_config(model)
    by_layer = list(resolve_scales(scales, config, model.path))
    setattr(config, CONFIG_KEY, by_layer)
    card = render_scales_card(model, by_layer, searched=searched, is_hub_name=is_hub_name(model.path))
    return {"config.json": config.to_json_string().encode(), "README.md": card.encode()}
