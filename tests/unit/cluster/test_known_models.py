import pytest

from cluster.known_models import KNOWN_MODELS, known_model
from pos2distill.config.load import load_recipe
from pos2distill.config.read import recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_known_model_has_every_model_of_the_hub_in_a_recipe(name: str) -> None:
    path = load_recipe(name).study.model.path
    is_local = path.startswith(("/", "runs/"))  # a folder that a script of the project makes
    assert is_local or known_model(path) is not None


@pytest.mark.parametrize("path", ["Qwen/Qwen1.5-7B-Chat", "gs://bucket/Qwen1.5-7B-Chat/", "Qwen1.5-7B-Chat"])
def test_known_model_is_found_by_the_last_part_of_its_path(path: str) -> None:
    assert known_model(path) is KNOWN_MODELS["Qwen1.5-7B-Chat"]


def test_known_model_is_none_for_a_model_of_another_name() -> None:
    assert known_model("Qwen/Qwen1.5-7B") is None


def test_known_models_have_as_many_parameters_as_their_shape_suggests() -> None:
    """With the width's usual proportions, layers and width give about the number of parameters."""
    for model in KNOWN_MODELS.values():
        assert 8 < model.parameters / (model.layers * model.width**2) < 25
