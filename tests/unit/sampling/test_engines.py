import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pos2distill.config import FakeSection, ModelSection, Runtime
from pos2distill.models.load import load_model
from pos2distill.records import Tokens
from pos2distill.sampling.engines import build_engine
from pos2distill.sampling.engines.fake import FakeEngine
from pos2distill.sampling.engines.hf import HfEngine, SeededGumbel
from pos2distill.sampling.engines.protocol import Completion, Engine, EngineDied, Failure, SamplingParams

NEVER = (299,)  # a token of the vocabulary that the prompts below do not lead to


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> ModelSection:
    return ModelSection(path=tiny_model_path, dtype="float32", engine="hf")


@pytest.fixture(scope="module")
def engine(model: ModelSection) -> HfEngine:
    return HfEngine(model)


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    random = np.random.default_rng(3)
    return [random.integers(5, 250, length).astype(np.int32) for length in (4, 31, 12)]


def ask(engine: Engine, prompts: list[Tokens], params: SamplingParams, seeds: list[int]) -> list[Any]:
    return asyncio.run(engine.generate(prompts, params, seeds))


def greedy(tokens: int, stop_ids: tuple[int, ...] = NEVER) -> SamplingParams:
    return SamplingParams(0.0, 1.0, tokens, stop_ids)


def sampled(tokens: int = 12, temperature: float = 1.0, top_p: float = 0.95) -> SamplingParams:
    return SamplingParams(temperature, top_p, tokens, NEVER)


def naive_greedy(model: ModelSection, prompt: Tokens, tokens: int) -> list[int]:
    """One forward over everything for each token: no cache, no padding."""
    lm, ids = load_model(model), prompt.tolist()
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(lm(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_the_plain_loop(model: ModelSection, engine: HfEngine, prompts: list[Tokens]) -> None:
    completions = ask(engine, prompts, greedy(10), [0, 0, 0])
    assert [each.token_ids.tolist() for each in completions] == [naive_greedy(model, prompt, 10) for prompt in prompts]
    assert all(each.token_ids.dtype == np.int32 for each in completions)


def test_a_sample_does_not_depend_on_its_batch(engine: HfEngine, prompts: list[Tokens]) -> None:
    seeds = [11, 2**63 - 1, 5]
    together = [each.token_ids.tolist() for each in ask(engine, prompts, sampled(), seeds)]
    backwards = [each.token_ids.tolist() for each in ask(engine, prompts[::-1], sampled(), seeds[::-1])]
    alone = [
        ask(engine, [prompt], sampled(), [seed])[0].token_ids.tolist()
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone == backwards[::-1]


def test_other_seeds_give_other_samples(engine: HfEngine, prompts: list[Tokens]) -> None:
    completions = ask(engine, [prompts[0]] * 4, sampled(), [1, 2, 3, 1])
    first, second, third, again = (tuple(each.token_ids.tolist()) for each in completions)
    assert len({first, second, third}) == 3
    assert again == first


def test_a_narrow_nucleus_is_greedy(engine: HfEngine, prompts: list[Tokens]) -> None:
    narrow = ask(engine, prompts, sampled(top_p=1e-6), [1, 2, 3])
    plain = ask(engine, prompts, greedy(12), [0, 0, 0])
    assert [each.token_ids.tolist() for each in narrow] == [each.token_ids.tolist() for each in plain]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_model(
    model: ModelSection, engine: HfEngine, prompts: list[Tokens], temperature: float
) -> None:
    """The first token of 2000 samples against softmax(logits / temperature)."""
    with torch.no_grad():
        logits = load_model(model)(torch.tensor([prompts[0].tolist()])).logits[0, -1]
    expected = (logits / temperature).softmax(-1).numpy()
    params = sampled(1, temperature=temperature, top_p=1.0)
    completions = ask(engine, [prompts[0]] * 2000, params, list(range(2000)))
    drawn = np.bincount([int(each.token_ids[0]) for each in completions], minlength=300) / 2000
    likely = np.argsort(expected)[-5:]
    sigma = np.sqrt(expected * (1 - expected) / 2000)
    assert (np.abs(drawn - expected)[likely] < 4 * sigma[likely]).all()


def test_gumbel_noise_draws_from_softmax() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    rows = 6000
    scores = SeededGumbel(range(rows))(torch.empty(0), probabilities.log().repeat(rows, 1))
    drawn = scores.argmax(-1).bincount(minlength=3) / rows
    sigma = (probabilities * (1 - probabilities) / rows).sqrt()
    assert ((drawn - probabilities).abs() < 4 * sigma).all()


def test_gumbel_noise_never_draws_what_the_nucleus_removed() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(200, 1)
    assert SeededGumbel(range(200))(torch.empty(0), scores).argmax(-1).tolist() == [1] * 200


def test_finish_reasons(model: ModelSection, engine: HfEngine, prompts: list[Tokens]) -> None:
    """One row stops early and the other goes on; a stop token ends a response and is part of it."""
    said = [naive_greedy(model, prompt, 10) for prompt in prompts[:2]]
    stop = next(token for token in said[0] if token not in said[1])
    first, second = ask(engine, prompts[:2], greedy(10, (stop, *NEVER)), [0, 0])
    assert first == Completion(first.token_ids, "stop")
    assert first.token_ids.tolist() == said[0][: said[0].index(stop) + 1]
    assert (second.token_ids.tolist(), second.finish_reason) == (said[1], "length")


@pytest.mark.parametrize("params", [greedy(9), sampled(9, temperature=0.5, top_p=0.3)], ids=["greedy", "sampled"])
def test_the_likeliest_tokens_are_the_models_own(
    model: ModelSection, engine: HfEngine, prompts: list[Tokens], params: SamplingParams
) -> None:
    """Before temperature and top-p, at every position, in a batch of prompts of different lengths."""
    results = ask(engine, prompts, replace(params, stored_top_k=5), [1, 2, 3])
    plain = ask(engine, prompts, params, [1, 2, 3])
    lm = load_model(model)
    for prompt, reply, other in zip(prompts, results, plain, strict=True):
        assert reply.token_ids.tolist() == other.token_ids.tolist()
        assert other.top is None
        ids = torch.tensor([[*prompt.tolist(), *reply.token_ids.tolist()]])
        with torch.no_grad():
            logits_SV = lm(ids).logits[0, len(prompt) - 1 : -1]
        expected_SK, ids_SK = logits_SV.log_softmax(-1).topk(5)
        assert reply.top.ids_SK.tolist() == ids_SK.tolist()
        assert (reply.top.ids_SK.dtype, reply.top.logprobs_SK.dtype) == (np.int32, np.float32)
        np.testing.assert_allclose(reply.top.logprobs_SK, expected_SK.numpy(), rtol=0, atol=1e-5)


def test_a_response_that_stops_early_has_no_likeliest_tokens_behind_its_end(
    model: ModelSection, engine: HfEngine, prompts: list[Tokens]
) -> None:
    said = [naive_greedy(model, prompt, 10) for prompt in prompts[:2]]
    stop = next(token for token in said[0] if token not in said[1])
    results = ask(engine, prompts[:2], replace(greedy(10, (stop, *NEVER)), stored_top_k=2), [0, 0])
    assert len(results[0].token_ids) < 10
    assert [reply.top.ids_SK.shape for reply in results] == [(len(reply.token_ids), 2) for reply in results]


def test_one_bad_prompt_fails_alone(engine: HfEngine, prompts: list[Tokens]) -> None:
    """A token that the vocabulary lacks; the others get what they would have got without it."""
    bad = np.asarray([5, 100_000], np.int32)
    results = ask(engine, [prompts[0], bad, *prompts[1:]], sampled(), [1, 2, 3, 4])
    assert results[1] == Failure("IndexError: index out of range in self")
    good = ask(engine, prompts, sampled(), [1, 3, 4])
    assert [results[row].token_ids.tolist() for row in (0, 2, 3)] == [each.token_ids.tolist() for each in good]


def test_a_batch_too_large_for_the_memory_is_asked_one_by_one(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(engine, prompts, sampled(), [1, 2, 3])
    generate = engine._generate

    def small(prompts: list[Tokens], *rest: Any) -> list[Completion]:
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate(prompts, *rest)

    monkeypatch.setattr(engine, "_generate", small)
    alone = ask(engine, prompts, sampled(), [1, 2, 3])
    assert [each.token_ids.tolist() for each in alone] == [each.token_ids.tolist() for each in whole]


def test_a_bug_is_no_failure(engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_generate", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(engine, prompts, sampled(), [1, 2, 3])


def test_a_failure_tells_the_cause_in_one_line() -> None:
    assert Failure.of(ValueError("too long\nby 3")) == Failure("ValueError: too long")
    assert Failure.of(RuntimeError()) == Failure("RuntimeError")
    outer = RuntimeError()
    outer.__cause__ = KeyError("x")
    assert Failure.of(outer) == Failure("KeyError: 'x'")


def test_the_fake_engine_fails_at_the_same_seeds_every_time() -> None:
    engine = FakeEngine(FakeSection(fail_every=3))
    prompts = [np.arange(5, dtype=np.int32)] * 7
    results = ask(engine, prompts, greedy(3), list(range(7)))
    assert [isinstance(reply, Failure) for reply in results] == [True, False, False, True, False, False, True]
    assert results[0] == Failure("the fake engine fails at every seed that 3 divides")


def test_the_fake_engine_dies_and_stays_dead() -> None:
    engine = FakeEngine(FakeSection(die_at_call=2))
    prompts = [np.arange(5, dtype=np.int32)]
    assert len(ask(engine, prompts, greedy(3), [0])) == 1
    for _ in range(2):
        with pytest.raises(EngineDied, match="the fake engine ends at call 2"):
            ask(engine, prompts, greedy(3), [0])


def test_the_fake_engine_replies_with_the_end_of_the_prompt() -> None:
    engine = FakeEngine(FakeSection(reply_tokens=3))
    prompts = [np.arange(10, 20, dtype=np.int32), np.arange(5, dtype=np.int32)]
    results = ask(engine, prompts, greedy(100, (7, 8)), [0, 0])
    assert [reply.token_ids.tolist() for reply in results] == [[17, 18, 19, 7], [2, 3, 4, 7]]
    assert {reply.finish_reason for reply in results} == {"stop"}


@pytest.mark.parametrize(("limit", "expected"), [(3, [18, 19, 7]), (2, [19, 7]), (1, [7])])
def test_the_fake_engine_keeps_to_max_new_tokens(limit: int, expected: list[int]) -> None:
    (reply,) = ask(FakeEngine(FakeSection()), [np.arange(10, 20, dtype=np.int32)], greedy(limit, (7,)), [0])
    assert reply.token_ids.tolist() == expected


def test_the_fake_engine_knows_no_token_better_than_another() -> None:
    engine = FakeEngine(FakeSection(reply_tokens=2))
    (reply,) = ask(engine, [np.arange(5, dtype=np.int32)], replace(greedy(100), stored_top_k=3), [0])
    assert reply.top.ids_SK.tolist() == [[0, 1, 2]] * 3
    np.testing.assert_allclose(np.exp(reply.top.logprobs_SK), np.full((3, 3), 0.25), rtol=1e-6)


def test_calls_of_the_fake_engine_overlap() -> None:
    engine = FakeEngine(FakeSection(delay_s=0.2))

    async def ask_five() -> None:
        await asyncio.gather(*(engine.generate([np.arange(5, dtype=np.int32)], greedy(3), [0]) for _ in range(5)))

    start = time.monotonic()
    asyncio.run(ask_five())
    assert 0.2 <= time.monotonic() - start < 0.8


def test_the_engine_is_the_one_named(model: ModelSection) -> None:
    assert isinstance(build_engine(model, Runtime(), threads=1, device="cpu"), HfEngine)
    fake = model.model_copy(update={"engine": "fake"})
    built = build_engine(fake, Runtime(fake=FakeSection(reply_tokens=2)), threads=1, device="cpu")
    assert isinstance(built, FakeEngine)
    assert built.settings.reply_tokens == 2
    built.shutdown()
