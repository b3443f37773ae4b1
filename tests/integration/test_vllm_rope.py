"""The tables of rotations in vLLM's own classes, and the entry point of its plugin. No engine is started."""

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.paths import PROJECT

pytestmark = pytest.mark.xdist_group("compute")

LAYERS = 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def vllm_rope() -> Any:
    """Imported here, because vLLM takes seconds to import."""
    from pos2distill.sampling.engines import vllm_rope

    return vllm_rope


@pytest.fixture(scope="module")
def configured() -> Iterator[None]:
    """The context that vLLM 0.32 builds its layers in."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def shared_embedding(rope: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The embedding that vLLM gives to all layers of equal settings."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(head_size=16, max_position=1024, is_neox_style=True, rope_parameters=rope, dtype=dtype)


def model_with(embedding: Any) -> Any:
    """As much of a model as has rotary embeddings, one for all of its layers."""
    layers = [SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=embedding)) for _ in range(LAYERS)]
    return SimpleNamespace(model=SimpleNamespace(layers=layers))


def tables(model: Any) -> list[Tensor]:
    return [layer.self_attn.rotary_emb.cos_sin_cache for layer in model.model.layers]


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3], ids=["plain", "llama 3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_scale_1_are_bit_equal_to_the_plain_ones(
    vllm_rope: Any, configured: None, rope: dict[str, Any], dtype: torch.dtype
) -> None:
    embedding = shared_embedding(rope, dtype)
    plain = embedding.cos_sin_cache.clone()
    model = model_with(embedding)
    vllm_rope._give_own_embeddings(model, LAYERS)
    vllm_rope.set_scales(model, (1.0, 1.5, 2.0))
    one, middle, two = tables(model)
    assert torch.equal(one, plain)
    assert one.dtype == dtype
    # Position 2 p at scale 2 is position p; and every layer has a table of its own.
    torch.testing.assert_close(two[::2], plain[:512], rtol=0, atol=0)
    assert not torch.equal(middle, plain)
    vllm_rope.set_scales(model, (1.0,) * LAYERS)
    assert all(torch.equal(table, plain) for table in tables(model))
    # The shared one, which other models of equal settings would get too, has not changed.
    assert torch.equal(embedding.cos_sin_cache, plain)


def test_set_scales_rejects_layers_that_share_an_embedding(vllm_rope: Any, configured: None) -> None:
    model = model_with(shared_embedding({"rope_type": "default", "rope_theta": 1e4}))
    before = tables(model)[0].clone()
    with pytest.raises(ValueError, match=r"its 3 layers share 1 rotary embeddings, since it was loaded without RoPE"):
        vllm_rope.set_scales(model, (1.0, 1.5, 2.0))
    assert torch.equal(tables(model)[0], before)


def test_give_own_embeddings_rejects_latent_attention(vllm_rope: Any, configured: None) -> None:
    model = model_with(shared_embedding({"rope_type": "default", "rope_theta": 1e4}))
    model.model.layers[1].self_attn.mla_attn = nn.Identity()
    with pytest.raises(ValueError, match="positions of latent attention cannot be scaled by layer in vLLM"):
        vllm_rope._give_own_embeddings(model, LAYERS)


def test_entry_point_of_the_plugin_is_declared_and_resolves(vllm_rope: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what vLLM calls in each of its processes: from then on, its loaders scale models that say so."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    group = "vllm.general_plugins"
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][group].items()
    assert name == "pos2distill"  # as docs/inference_methods.md says for VLLM_PLUGINS
    register = EntryPoint(name, value, group).load()
    assert register is vllm_rope.register

    def load_model(loader: Any, vllm_config: Any, model_config: Any) -> nn.Module:
        return nn.Identity()

    monkeypatch.setattr(BaseModelLoader, "load_model", load_model)
    register()
    once = BaseModelLoader.load_model
    assert once is not load_model
    register()
    assert BaseModelLoader.load_model is once
