"""RoPE scales by layer in the real vLLM engine, against transformers."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from pos2distill.config import ModelSection, VllmSection
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.sampling.engines.vllm import VllmEngine
from tests.support.engines import hf_engine
from tests.support.models import POSITIONAL, build_model, draw_tokens

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compute")]

LAYERS = POSITIONAL["num_hidden_layers"]
SCALES = (1.0, 1.2, 1.6, 2.0)
OTHERS = (2.0, 1.0, 1.0, 1.3)
PROMPTS = draw_tokens(tuple(range(60, 160)), seed=0)
PARAMS = SamplingParams(0.0, 1.0, 8, stop_ids=(2,))

Answers = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: str) -> ModelSection:
    """A random model of four layers, whose weights are large enough that positions matter."""
    folder = tmp_path_factory.mktemp("scaled")
    build_model(LlamaConfig(**POSITIONAL)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(tiny_model_path) / name, folder)
    return ModelSection(path=str(folder), dtype="float32", max_length=256)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def answers(engine: Any, loop: asyncio.AbstractEventLoop, scales: tuple[float, ...] = ()) -> Answers:
    params = replace(PARAMS, rope_scales=scales)
    results = loop.run_until_complete(engine.generate(PROMPTS, params, [0] * len(PROMPTS)))
    return [result.token_ids.tolist() for result in results]


def agreement(one: Answers, other: Answers) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def with_scales(model: ModelSection, scales: tuple[float, ...]) -> ModelSection:
    return model.model_copy(update={"rope_scales": scales})


async def at_once(engine: Any, *calls: tuple[float, ...]) -> list[Answers]:
    """Nine prompts with each of the scales, in calls that overlap."""
    running = []
    for scales in calls:
        running.append(engine.generate(PROMPTS[:9], replace(PARAMS, rope_scales=scales), [0] * 9))
    return [[result.token_ids.tolist() for result in results] for results in await asyncio.gather(*running)]


def test_vllm_rotates_as_transformers_and_changes_scales_without_a_restart(
    model: ModelSection, loop: asyncio.AbstractEventLoop
) -> None:
    reference = hf_engine(with_scales(model, SCALES))
    expected = {scales: answers(reference, loop, scales) for scales in (SCALES, OTHERS)}
    plain = answers(hf_engine(model), loop)
    # Otherwise all that follows would hold for an engine that ignores scales.
    assert agreement(expected[SCALES], expected[OTHERS]) < 0.5
    assert agreement(expected[SCALES], plain) < 0.5

    engine = VllmEngine.start(with_scales(model, SCALES), VllmSection())
    try:
        assert agreement(answers(engine, loop), expected[SCALES]) >= 0.99
        assert agreement(answers(engine, loop, OTHERS), expected[OTHERS]) >= 0.99
        assert agreement(answers(engine, loop, SCALES), expected[SCALES]) >= 0.99
        for scales, overlapped in zip(
            (SCALES, OTHERS, SCALES), loop.run_until_complete(at_once(engine, SCALES, OTHERS, SCALES)), strict=True
        ):
            assert overlapped == expected[scales][:9]
        assert agreement(answers(engine, loop, (1.0,) * LAYERS), plain) >= 0.99
    finally:
        engine.shutdown()
    sockets = engine.engine.engine_core.resources  # vLLM 0.32: with an open one, collecting the engine would hang
    assert sockets.output_socket.closed
    assert sockets.input_socket.closed


def test_scale_1_gives_the_log_probabilities_of_the_plain_model_bit_for_bit(
    model: ModelSection, loop: asyncio.AbstractEventLoop
) -> None:
    params = replace(PARAMS, stored_top_k=5)
    found = []
    for each in (model, with_scales(model, (1.0,) * LAYERS)):
        engine = VllmEngine.start(each, VllmSection(enforce_eager=True))  # compiling takes a minute
        try:
            # One prompt at a time, so that both engines make the same batches.
            found.append([loop.run_until_complete(engine.generate([prompt], params, [0])) for prompt in PROMPTS[:20]])
        finally:
            engine.shutdown()
    for (plain,), (scaled,) in zip(*found, strict=True):
        assert isinstance(plain, Completion)
        assert isinstance(scaled, Completion)
        assert plain.top is not None
        assert scaled.top is not None
        np.testing.assert_array_equal(scaled.top.ids_SK, plain.top.ids_SK)
        np.testing.assert_array_equal(scaled.top.logprobs_SK, plain.top.logprobs_SK)
