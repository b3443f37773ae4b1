import pytest

from pipelines.scaled_config import render_scales_card
from pos2distill.config import ModelSection


@pytest.mark.parametrize(
    ("settings", "is_hub_name", "title", "served"),
    [
        ({"path": "/home/me/models/small"}, False, "# small with RoPE", "vllm serve MODEL --hf-overrides"),
        ({"path": "s3://key@bucket/small/"}, False, "# small with RoPE", "vllm serve MODEL --hf-overrides"),
        ({"path": "me/small"}, True, "# me/small with RoPE", "vllm serve me/small --hf-overrides"),
        (
            {"path": "me/small", "revision": "f00d"},
            True,
            "# me/small with RoPE",
            "vllm serve me/small --revision f00d --hf-overrides",
        ),
    ],
)
def test_render_scales_card_names_the_model_and_no_path(
    settings: dict[str, str], is_hub_name: bool, title: str, served: str
) -> None:
    card = render_scales_card(ModelSection(**settings), [1.0, 1.5], searched=True, is_hub_name=is_hub_name)
    assert "as a search found them" in card
    assert card.startswith(title)
    assert f"""{served} '{{"pos2distill_rope_scales": [1.0, 1.5]}}'""" in card
    assert "/home" not in card
    assert "bucket" not in card
