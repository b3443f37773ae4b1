import asyncio
import json
import selectors
import shutil
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from pos2distill.config import FakeSection, ModelSection, Runtime
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.records import Tokens
from pos2distill.sampling.engines import build_engine
from pos2distill.sampling.engines.fake import FakeEngine
from pos2distill.sampling.engines.hf import HfEngine, SeededGumbel, group_by_length, group_by_rope
from pos2distill.sampling.engines.protocol import Completion, Engine, EngineDied, Failure, SamplingParams
from pos2distill.sampling.engines.vllm import VllmClasses, VllmEngine, _reason, _start_error
from scripts.model_families import save_tiny
from tests.support.engines import hf_engine

NEVER = (299,)  # a token that the model never generates after the prompts below


@pytest.fixture(scope="module")
def model(tiny_model_path: str) -> ModelSection:
    return ModelSection(path=tiny_model_path, dtype="float32", engine="hf")


@pytest.fixture(scope="module")
def engine(model: ModelSection) -> HfEngine:
    return hf_engine(model)


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    random = np.random.default_rng(3)
    return [random.integers(5, 250, length).astype(np.int32) for length in (4, 31, 12)]


def generate(engine: Engine, prompts: list[Tokens], params: SamplingParams, seeds: list[int]) -> list[Any]:
    return asyncio.run(engine.generate(prompts, params, seeds))


def greedy(tokens: int, stop_ids: tuple[int, ...] = NEVER) -> SamplingParams:
    return SamplingParams(0.0, 1.0, tokens, stop_ids)


def sampled(tokens: int = 12, temperature: float = 1.0, top_p: float = 0.95) -> SamplingParams:
    return SamplingParams(temperature, top_p, tokens, NEVER)


def naive_greedy(model: ModelSection, prompt: Tokens, tokens: int) -> list[int]:
    """One forward pass over the whole sequence for each token: no cache, no padding."""
    lm, ids = load_model(model), prompt.tolist()
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(lm(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_hf_engine_greedy_equals_the_plain_loop(model: ModelSection, engine: HfEngine, prompts: list[Tokens]) -> None:
    completions = generate(engine, prompts, greedy(10), [0, 0, 0])
    assert [each.token_ids.tolist() for each in completions] == [naive_greedy(model, prompt, 10) for prompt in prompts]
    assert all(each.token_ids.dtype == np.int32 for each in completions)


def test_hf_engine_samples_do_not_depend_on_the_batch(engine: HfEngine, prompts: list[Tokens]) -> None:
    seeds = [11, 2**63 - 1, 5]
    together = [each.token_ids.tolist() for each in generate(engine, prompts, sampled(), seeds)]
    backwards = [each.token_ids.tolist() for each in generate(engine, prompts[::-1], sampled(), seeds[::-1])]
    alone = [
        generate(engine, [prompt], sampled(), [seed])[0].token_ids.tolist()
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone == backwards[::-1]


def test_hf_engine_samples_depend_on_the_seed(engine: HfEngine, prompts: list[Tokens]) -> None:
    completions = generate(engine, [prompts[0]] * 4, sampled(), [1, 2, 3, 1])
    first, second, third, again = (tuple(each.token_ids.tolist()) for each in completions)
    assert len({first, second, third}) == 3
    assert again == first


def test_hf_engine_with_tiny_top_p_is_greedy(engine: HfEngine, prompts: list[Tokens]) -> None:
    narrow = generate(engine, prompts, sampled(top_p=1e-6), [1, 2, 3])
    plain = generate(engine, prompts, greedy(12), [0, 0, 0])
    assert [each.token_ids.tolist() for each in narrow] == [each.token_ids.tolist() for each in plain]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_hf_engine_samples_follow_the_models_distribution(
    model: ModelSection, engine: HfEngine, prompts: list[Tokens], temperature: float
) -> None:
    """The first token of 2000 samples against softmax(logits / temperature)."""
    with torch.no_grad():
        logits = load_model(model)(torch.tensor([prompts[0].tolist()])).logits[0, -1]
    expected = (logits / temperature).softmax(-1).numpy()
    params = sampled(1, temperature=temperature, top_p=1.0)
    completions = generate(engine, [prompts[0]] * 2000, params, list(range(2000)))
    drawn = np.bincount([int(each.token_ids[0]) for each in completions], minlength=300) / 2000
    likely = np.argsort(expected)[-5:]
    sigma = np.sqrt(expected * (1 - expected) / 2000)
    assert (np.abs(drawn - expected)[likely] < 4 * sigma[likely]).all()


def test_seeded_gumbel_samples_from_softmax() -> None:
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    rows = 6000
    scores = SeededGumbel(range(rows))(torch.empty(0), probabilities.log().repeat(rows, 1))
    drawn = scores.argmax(-1).bincount(minlength=3) / rows
    sigma = (probabilities * (1 - probabilities) / rows).sqrt()
    assert ((drawn - probabilities).abs() < 4 * sigma).all()


def test_seeded_gumbel_never_samples_a_removed_token() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(200, 1)
    assert SeededGumbel(range(200))(torch.empty(0), scores).argmax(-1).tolist() == [1] * 200


def test_hf_engine_finish_reasons(model: ModelSection, engine: HfEngine, prompts: list[Tokens]) -> None:
    """One row stops early and the other continues; a stop token ends a response and is part of it."""
    texts = [naive_greedy(model, prompt, 10) for prompt in prompts[:2]]
    stop = next(token for token in texts[0] if token not in texts[1])
    first, second = generate(engine, prompts[:2], greedy(10, (stop, *NEVER)), [0, 0])
    assert first == Completion(first.token_ids, "stop")
    assert first.token_ids.tolist() == texts[0][: texts[0].index(stop) + 1]
    assert (second.token_ids.tolist(), second.finish_reason) == (texts[1], "length")


@pytest.mark.parametrize("params", [greedy(9), sampled(9, temperature=0.5, top_p=0.3)], ids=["greedy", "sampled"])
def test_top_k_recorder_equals_the_models_top_k(
    model: ModelSection, engine: HfEngine, prompts: list[Tokens], params: SamplingParams
) -> None:
    """Before temperature and top-p, at every position, in a batch of prompts of different lengths."""
    results = generate(engine, prompts, replace(params, stored_top_k=5), [1, 2, 3])
    plain = generate(engine, prompts, params, [1, 2, 3])
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


def test_top_k_recorder_ends_with_the_response(model: ModelSection, engine: HfEngine, prompts: list[Tokens]) -> None:
    texts = [naive_greedy(model, prompt, 10) for prompt in prompts[:2]]
    stop = next(token for token in texts[0] if token not in texts[1])
    results = generate(engine, prompts[:2], replace(greedy(10, (stop, *NEVER)), stored_top_k=2), [0, 0])
    assert len(results[0].token_ids) < 10
    assert [reply.top.ids_SK.shape for reply in results] == [(len(reply.token_ids), 2) for reply in results]


def test_hf_engine_fails_only_the_invalid_prompt(engine: HfEngine, prompts: list[Tokens]) -> None:
    """One prompt has a token outside the vocabulary; the others get the same responses as without it."""
    bad = np.asarray([5, 100_000], np.int32)
    results = generate(engine, [prompts[0], bad, *prompts[1:]], sampled(), [1, 2, 3, 4])
    assert results[1] == Failure("IndexError: index out of range in self")
    good = generate(engine, prompts, sampled(), [1, 3, 4])
    assert [results[row].token_ids.tolist() for row in (0, 2, 3)] == [each.token_ids.tolist() for each in good]


@pytest.mark.parametrize(
    ("lengths", "min_saving", "groups"),
    [
        ([], 1, []),
        ([7], 1, [[0]]),
        ([5, 5, 5], 1, [[0, 1, 2]]),
        # Together, 3 and 1 are padded by 7 and 9; apart from the prompts of 10, by 0 and 2: 14 are saved.
        ([10, 3, 10, 1], 14, [[3, 1], [2, 0]]),
        ([10, 3, 10, 1], 15, [[3, 1, 0, 2]]),
        # These 2 are saved by a group of its own for each.
        ([10, 3, 10, 1], 2, [[3], [1], [0, 2]]),
    ],
)
def test_prompts_group_by_length_are_grouped(lengths: list[int], min_saving: int, groups: list[list[int]]) -> None:
    found = group_by_length(lengths, min_saving)
    assert [sorted(group) for group in found] == [sorted(group) for group in groups]


def test_hf_engine_generates_short_prompts_apart_from_long_ones(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 prompts of 4 tokens and 3 of 300: two groups, and each prompt has the response that it has alone."""
    random = np.random.default_rng(5)
    long = [random.integers(5, 250, 300).astype(np.int32) for _ in range(3)]
    mixed = [*[prompts[0]] * 50, *long, *[prompts[0]] * 50]
    groups = []
    generate_batch = engine._generate

    def note(prompts: list[Tokens], *rest: Any) -> list[Completion]:
        groups.append({len(prompt) for prompt in prompts})
        return generate_batch(prompts, *rest)

    monkeypatch.setattr(engine, "_generate", note)
    results = generate(engine, mixed, sampled(), list(range(103)))
    assert groups == [{4}, {300}]
    for row in (0, 51, 102):
        (alone,) = generate(engine, [mixed[row]], sampled(), [row])
        assert results[row].token_ids.tolist() == alone.token_ids.tolist()


def test_hf_engine_ignores_the_models_own_sampling_settings(
    tiny_model_path: str, tmp_path: Path, prompts: list[Tokens], engine: HfEngine
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    own = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2}
    (folder / "generation_config.json").write_text(json.dumps(own))
    penalized = hf_engine(ModelSection(path=str(folder), dtype="float32", engine="hf"))
    expected = [each.token_ids.tolist() for each in generate(engine, prompts, greedy(12), [0, 0, 0])]
    assert [each.token_ids.tolist() for each in generate(penalized, prompts, greedy(12), [0, 0, 0])] == expected


def test_group_by_rope_separates_prompts_at_the_length_at_which_frequencies_change() -> None:
    """With 8 new tokens and a change beyond 64: 56 tokens stay within, 65 are beyond from the start."""
    assert group_by_rope([56, 65, 57, 10, 64, 100], 8, 64) == [[0, 3], [1, 5], [2], [4]]
    assert group_by_rope([70], 8, 64) == [[0]]
    assert group_by_rope([56, 65], 8, None) == [[0, 1]]


def test_hf_engine_answers_each_prompt_with_its_own_frequencies_of_longrope(tmp_path: Path) -> None:
    """Prompts on both sides of the length at which they change, and one that crosses it, in one batch."""
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [40.0] * 4}
    engine = hf_engine(save_tiny("llama", tmp_path, rope_parameters=longrope | factors))
    random = np.random.default_rng(5)
    prompts = [random.integers(5, 250, length).astype(np.int32) for length in (9, 60, 100, 12, 90)]
    together = generate(engine, prompts, greedy(8), list(range(5)))
    alone = [generate(engine, [prompt], greedy(8), [0])[0] for prompt in prompts]
    assert [each.token_ids.tolist() for each in together] == [each.token_ids.tolist() for each in alone]


def test_hf_engine_splits_a_batch_that_is_out_of_memory(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six prompts where two fit: in halves of halves, and not one by one."""
    six, seeds = [*prompts, *prompts], [1, 2, 3, 4, 5, 6]
    whole = generate(engine, six, sampled(), seeds)
    generate_batch = engine._generate
    sizes = []

    def fit_two_prompts(prompts: list[Tokens], *rest: Any) -> list[Completion]:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return generate_batch(prompts, *rest)

    monkeypatch.setattr(engine, "_generate", fit_two_prompts)
    halved = generate(engine, six, sampled(), seeds)
    assert sizes == [6, 3, 1, 2, 3, 1, 2]
    assert [each.token_ids.tolist() for each in halved] == [each.token_ids.tolist() for each in whole]


def test_hf_engine_divides_a_batch_for_which_the_driver_has_no_memory(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch's own allocator is not asked, its error is that of a device."""
    generate_batch = engine._generate

    def fit_one_prompt(prompts: list[Tokens], *rest: Any) -> list[Completion]:
        if len(prompts) > 1:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return generate_batch(prompts, *rest)

    monkeypatch.setattr(engine, "_generate", fit_one_prompt)
    assert [type(each) for each in generate(engine, prompts, sampled(), [1, 2, 3])] == 3 * [Completion]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), torch.AcceleratorError("CUDA error: out of memory")]
)
def test_hf_engine_stores_no_failure_of_a_prompt_for_which_memory_is_too_small(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A failed sample is not asked for again, so that the memory of a GPU would choose what is trained on."""

    def fit_nothing(*arguments: Any) -> list[Completion]:
        raise error

    monkeypatch.setattr(engine, "_generate", fit_nothing)
    tokens = len(prompts[0])
    message = rf"^the sampler has too little memory for one prompt of {tokens} tokens; give it a larger GPU, or one of"
    with pytest.raises(UserError, match=message):
        generate(engine, prompts, sampled(), [1, 2, 3])


def test_hf_engine_dies_with_its_device(
    engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further batch would fail too, and failed samples are not asked for again."""
    calls = []

    def lose_the_device(prompts: list[Tokens], *rest: Any) -> list[Completion]:
        calls.append(len(prompts))
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(engine, "_generate", lose_the_device)
    message = r"^the device failed \(AcceleratorError: CUDA error: an illegal .*\); run the same command again$"
    with pytest.raises(EngineDied, match=message):
        generate(engine, prompts, sampled(), [1, 2, 3])
    assert calls == [3]


def test_hf_engine_does_not_hide_bugs(engine: HfEngine, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_generate", lambda *rest: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(engine, prompts, sampled(), [1, 2, 3])


def test_failure_of_has_the_cause_in_one_line() -> None:
    assert Failure.of(ValueError("too long\nby 3")) == Failure("ValueError: too long")
    assert Failure.of(RuntimeError()) == Failure("RuntimeError")
    outer = RuntimeError()
    outer.__cause__ = KeyError("x")
    assert Failure.of(outer) == Failure("KeyError: 'x'")


def test_fake_engine_fails_at_multiples_of_fail_every() -> None:
    engine = FakeEngine(FakeSection(fail_every=3))
    prompts = [np.arange(5, dtype=np.int32)] * 7
    results = generate(engine, prompts, greedy(3), list(range(7)))
    assert [isinstance(reply, Failure) for reply in results] == [True, False, False, True, False, False, True]
    assert results[0] == Failure("the fake engine fails at every seed that 3 divides")


def test_fake_engine_dies_and_stays_dead() -> None:
    engine = FakeEngine(FakeSection(die_at_call=2))
    prompts = [np.arange(5, dtype=np.int32)]
    assert len(generate(engine, prompts, greedy(3), [0])) == 1
    for _ in range(2):
        with pytest.raises(EngineDied, match="the fake engine ends at call 2"):
            generate(engine, prompts, greedy(3), [0])


def test_fake_engine_responds_with_the_end_of_the_prompt() -> None:
    engine = FakeEngine(FakeSection(reply_tokens=3))
    prompts = [np.arange(10, 20, dtype=np.int32), np.arange(5, dtype=np.int32)]
    results = generate(engine, prompts, greedy(100, (7, 8)), [0, 0])
    assert [reply.token_ids.tolist() for reply in results] == [[17, 18, 19, 7], [2, 3, 4, 7]]
    assert {reply.finish_reason for reply in results} == {"stop"}


@pytest.mark.parametrize(("limit", "expected"), [(3, [18, 19, 7]), (2, [19, 7]), (1, [7])])
def test_fake_engine_respects_max_new_tokens(limit: int, expected: list[int]) -> None:
    (reply,) = generate(FakeEngine(FakeSection()), [np.arange(10, 20, dtype=np.int32)], greedy(limit, (7,)), [0])
    assert reply.token_ids.tolist() == expected


def test_fake_engine_has_uniform_top_k() -> None:
    engine = FakeEngine(FakeSection(reply_tokens=2))
    (reply,) = generate(engine, [np.arange(5, dtype=np.int32)], replace(greedy(100), stored_top_k=3), [0])
    assert reply.top.ids_SK.tolist() == [[0, 1, 2]] * 3
    np.testing.assert_allclose(np.exp(reply.top.logprobs_SK), np.full((3, 3), 0.25), rtol=1e-6)


def test_fake_engine_calls_overlap() -> None:
    engine = FakeEngine(FakeSection(delay_s=60))

    async def start_five() -> None:
        prompt = np.arange(5, dtype=np.int32)
        calls = [asyncio.create_task(engine.generate([prompt], greedy(3), [0])) for _ in range(5)]
        await asyncio.sleep(0)  # each of them runs until it waits
        assert engine.calls == 5
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()

    asyncio.run(start_five())


def test_build_engine_builds_the_configured_engine(model: ModelSection) -> None:
    assert isinstance(build_engine(model, InferenceSection(), Runtime(), threads=1, device="cpu"), HfEngine)
    fake = model.model_copy(update={"engine": "fake"})
    built = build_engine(fake, InferenceSection(), Runtime(fake=FakeSection(reply_tokens=2)), threads=1, device="cpu")
    assert isinstance(built, FakeEngine)
    assert built.settings.reply_tokens == 2
    built.shutdown()


class RequestError(Exception):
    """Stands for vLLM's, of a prompt that it cannot use."""


class EngineError(Exception):
    """Stands for vLLM's, of whatever else goes wrong."""


VLLM_CLASSES = VllmClasses(
    params=SimpleNamespace,
    prompt=SimpleNamespace,
    output_kind=SimpleNamespace(FINAL_ONLY=1),
    request_errors=(RequestError,),
    engine_error=EngineError,
    dead_error=KeyError,
)


class StubbedVllm:
    """Counts the calls of vLLM's engine that change scales."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def collective_rpc(self, method: str, args: Any) -> None:
        self.calls.append((method, args))

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        return reset_connector


def vllm_engine(vllm: Any, *, scales: tuple[float, ...] = (), stall_s: float = 60.0) -> VllmEngine:
    """Our engine around a stand-in for vLLM's, as if that was built with these scales."""
    return VllmEngine(vllm, VLLM_CLASSES, scales=scales, stall_s=stall_s)


def test_vllm_engine_without_scales_refuses_to_change_them() -> None:
    """Its layers share one table of rotations, so all of them would get the last layer's scale."""
    scaled = replace(greedy(3), rope_scales=(1.0, 1.5))
    plain = vllm_engine(StubbedVllm())
    with pytest.raises(ValueError, match=r"^this engine was built without RoPE scales, .* build it with some$"):
        generate(plain, [], scaled, [])
    assert plain.engine.calls == []
    assert generate(plain, [], greedy(3), []) == []

    engine = vllm_engine(StubbedVllm(), scales=(1.0, 1.0))
    assert generate(engine, [], scaled, []) == []
    assert engine.engine.calls == [("set_rope_scales", ([1.0, 1.5],))]


@dataclass
class FailingVllm:
    """Answers after these faults, one for each request: an exception, or a finish reason."""

    faults: list[Any]

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        fault = self.faults.pop(0) if self.faults else "stop"
        if isinstance(fault, Exception):
            raise fault
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=fault, token_ids=[7, 2], logprobs=None)])


def failing_vllm_engine(*faults: Any) -> VllmEngine:
    return vllm_engine(FailingVllm(list(faults)))


def caused_by(cause: Exception) -> EngineError:
    error = EngineError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("fault", ["abort", "error", caused_by(RuntimeError("NCCL")), EngineError()])
def test_vllm_engine_asks_again_where_the_engine_failed(fault: Any, prompts: list[Tokens]) -> None:
    (result,) = generate(failing_vllm_engine(fault), prompts[:1], greedy(3), [0])
    assert isinstance(result, Completion)
    assert result.token_ids.tolist() == [7, 2]


def test_vllm_engine_dies_where_it_failed_twice(prompts: list[Tokens]) -> None:
    engine = failing_vllm_engine("abort", caused_by(RuntimeError("NCCL timed out")))
    message = r"^vLLM lost a request twice \(RuntimeError: NCCL timed out\); run the same command again$"
    with pytest.raises(EngineDied, match=message):
        generate(engine, prompts[:1], greedy(3), [0])


@pytest.mark.parametrize("fault", [RequestError("too long"), caused_by(RequestError("too long"))])
def test_vllm_engine_fails_a_prompt_that_it_cannot_use_at_once(fault: Exception, prompts: list[Tokens]) -> None:
    engine = failing_vllm_engine(fault)
    assert generate(engine, prompts[:1], greedy(3), [0]) == [Failure("RequestError: too long")]


class SkippingSelector(selectors.SelectSelector):
    """Lets an event loop's clock jump over the time that it would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            self.now += timeout or 0.0
        return ready


def run_without_waiting(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """As `asyncio.run`, on a clock of its own, so that a busy machine changes no duration."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(coroutine)


@dataclass
class SlowVllm:
    """Answers one prompt after another, each after this many seconds; `stuck` and all later ones never."""

    seconds: float
    stuck: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(self, *_: Any, request_id: str, **__: Any) -> AsyncIterator[Any]:
        async with self.turn:
            await asyncio.sleep(self.seconds if int(request_id) < self.stuck else 3600)
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="stop", token_ids=[7, 2], logprobs=None)])


def slow_vllm_engine(*, stuck: int) -> VllmEngine:
    return vllm_engine(SlowVllm(0.3, stuck), stall_s=1.2)


def test_vllm_engine_that_finishes_answers_may_take_as_long_as_it_needs(prompts: list[Tokens]) -> None:
    """Six answers take 1.8 s, and one must be finished every 1.2 s."""
    engine = slow_vllm_engine(stuck=6)
    results = run_without_waiting(engine.generate(prompts[:1] * 6, greedy(3), list(range(6))))
    assert [result.token_ids.tolist() for result in results] == [[7, 2]] * 6
    assert not engine._deadlines


def test_vllm_engine_that_finishes_no_answer_counts_as_dead(prompts: list[Tokens]) -> None:
    """Both calls that wait for it end, the second of which has no finished answer."""

    async def two_calls(engine: Any) -> list[Any]:
        calls = [engine.generate(prompts[:1] * 2, greedy(3), [0, 1]) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run_without_waiting(two_calls(slow_vllm_engine(stuck=1)))
    message = "vLLM finished no answer in 0.02 minutes (runtime.vllm.stall_minutes; raise it if answers take longer)"
    assert [(type(result), str(result)) for result in results] == [(EngineDied, message)] * 2


def test_start_error_names_processes_that_share_a_gpu(model: ModelSection) -> None:
    shared = "; if another process uses memory of the GPU, lower runtime.vllm.gpu_memory_utilization; POS2DISTILL_DEBUG"
    assert shared in _start_error(model, "cuda")
    assert "gpu_memory_utilization" not in _start_error(model, "cpu")


def test_reason_is_what_vllm_says_of_its_settings() -> None:
    class Settings(pydantic.BaseModel):
        heads: int
        seed: int = 0

        @pydantic.field_validator("heads")
        @classmethod
        def _even(cls, heads: int) -> int:
            raise ValueError("Total number of attention heads (9) must be divisible by tensor parallel size (2).")

    with pytest.raises(ValueError, match="1 validation error") as caught:
        Settings(heads=9)
    stated = "Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    assert _reason(caught.value) == f"heads: {stated}"
    with pytest.raises(ValueError, match="2 validation errors") as caught:
        Settings.model_validate({"heads": 9, "seed": "x"})
    parsing = "Input should be a valid integer, unable to parse string as an integer"
    assert _reason(caught.value) == f"heads: {stated}; seed: {parsing}"
    assert _reason(ValueError(f"{stated}\nmore")) == stated
    assert _reason(ValueError()) == "ValueError"
