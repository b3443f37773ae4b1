"""The config of a model with RoPE scales, for others to use: the weights stay those of the model."""

from collections.abc import Sequence

from pos2distill.config import ModelSection
from pos2distill.evaluation.page import TEMPLATES
from pos2distill.literal_paths import last_part
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
    from pos2distill.models.architecture import load_config
    from pos2distill.models.rope.layer_scales import resolve_scales

    config = load_config(model)
    by_layer = list(resolve_scales(scales, config, model.path))
    setattr(config, CONFIG_KEY, by_layer)
    card = render_scales_card(model, by_layer, searched=searched, is_hub_name=is_hub_name(model.path))
    return {"config.json": config.to_json_string().encode(), "README.md": card.encode()}


def render_scales_card(model: ModelSection, scales: Sequence[float], *, searched: bool, is_hub_name: bool) -> str:
    """A README.md for the config of a model with RoPE scales: what it is and how to load it.

    Args:
        searched: whether a search found the scales; otherwise they were given.
        is_hub_name: whether the model's path is its name on the hub. Of another path or URL only the last part is
            shown: a card is published, and must not show the machine that made it.
    """
    served = f"{model.path} --revision {model.revision}" if model.revision else model.path
    return TEMPLATES.get_template("scaled_model.md.j2").render(
        model=model.path if is_hub_name else last_part(model.path),
        served=served if is_hub_name else "MODEL",
        scales=list(scales),
        searched=searched,
    )
