"""Attention Buckets: the mixture by hand, and whole answers against models that have one base each."""

import asyncio
from typing import Any

import pytest
import torch

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.models.load import load_model
from pos2distill.models.rope.attention_buckets import MixBases
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import SamplingParams
from tests.support.engines import hf_engine
from tests.support.models import draw_tokens

PROMPTS = draw_tokens((30, 11, 24), seed=2)


def answers(engine: HfEngine, params: SamplingParams, seeds: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    results: list[Any] = asyncio.run(engine.generate(PROMPTS, params, seeds))
    return results


def test_mixture_by_hand() -> None:
    """Two bases: (0.8, 0.2) and (0.5, 0.5); the weights are the softmax of 0.8 and 0.5."""
    scores = torch.tensor([[0.8, 0.2], [0.5, 0.5]]).log()
    mixed = MixBases(2)(torch.zeros(2, 1), scores).exp()
    weight = 1 / (1 + torch.tensor(-0.3).exp())
    expected = weight * torch.tensor([0.8, 0.2]) + (1 - weight) * torch.tensor([0.5, 0.5])
    torch.testing.assert_close(mixed, torch.stack([expected, expected]))


def test_greedy_answers_are_those_of_models_with_one_base_each(tiny_model_path: str) -> None:
    """The same mixture, step by step, of models whose config has another base."""
    factors = (1.0, 3.0, 7.5)
    model = ModelSection(path=tiny_model_path, dtype="float32")
    models = []
    for factor in factors:
        lm: Any = load_model(model)
        parameters = lm.config.rope_parameters
        lm.config.rope_parameters = {**parameters, "rope_theta": parameters["rope_theta"] * factor}
        other = type(lm)(lm.config).eval()
        other.load_state_dict(lm.state_dict())
        models.append(other)
    buckets = InferenceSection(method="attention_buckets", bases=factors)
    ours = answers(hf_engine(model, buckets), SamplingParams(0.0, 1.0, 6, stop_ids=(2,), stored_top_k=3))
    plain = answers(hf_engine(model), SamplingParams(0.0, 1.0, 6, stop_ids=(2,)))
    for prompt, answer in zip(PROMPTS, ours, strict=True):
        ids = prompt.tolist()
        for step, token in enumerate(answer.token_ids.tolist()):
            with torch.no_grad():
                probabilities = torch.stack([lm(torch.tensor([ids])).logits[0, -1].softmax(-1) for lm in models])
            weights = probabilities.amax(-1).softmax(0)
            mixed = (weights[:, None] * probabilities).sum(0)
            assert token == int(mixed.argmax())
            torch.testing.assert_close(
                torch.from_numpy(answer.top.logprobs_SK[step]), mixed.log().topk(3).values, rtol=1e-4, atol=1e-4
            )
            ids.append(token)
    assert [a.token_ids.tolist() for a in ours] != [a.token_ids.tolist() for a in plain]


def test_sampled_answers_have_one_seed_for_all_bases(tiny_model_path: str) -> None:
    model = ModelSection(path=tiny_model_path, dtype="float32")
    params = SamplingParams(1.0, 0.9, 8, stop_ids=(2,))
    same = InferenceSection(method="attention_buckets", bases=(1.0, 1.0, 1.0))
    one = [answer.token_ids.tolist() for answer in answers(hf_engine(model), params)]
    assert [answer.token_ids.tolist() for answer in answers(hf_engine(model, same), params)] == one


@pytest.mark.parametrize("bases", [(1.0, 2.0)])
def test_rows_do_not_depend_on_their_batch(tiny_model_path: str, bases: tuple[float, ...]) -> None:
    engine = hf_engine(
        ModelSection(path=tiny_model_path, dtype="float32"), InferenceSection(method="attention_buckets", bases=bases)
    )
    params = SamplingParams(0.0, 1.0, 6, stop_ids=(2,))
    together = [answer.token_ids.tolist() for answer in answers(engine, params)]
    alone = [asyncio.run(engine.generate([prompt], params, [0])) for prompt in PROMPTS]
    assert together == [results[0].token_ids.tolist() for results in alone]  # type: ignore[union-attr]
