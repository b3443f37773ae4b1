"""What do the three teachers cost, and how close is `topk` to the exact KL?

Two models: the built-in toy, with its own prompts; and a random Llama of 50 million parameters and 32,000 tokens whose
logits are scaled so that it is as uncertain as a model that does not know the answer. Run:

  python -m benchmarks.teacher.teacher [--device cuda] [--threads 2]

Shapes: T response tokens of an example, H hidden size, S sampled tokens, K most likely tokens of each, B rows of a
micro-batch.
"""

import argparse
import asyncio
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.circumstances import circumstances
from pos2distill.config import Study, TrainersSection
from pos2distill.config.load import load_recipe
from pos2distill.models.architecture import context_length
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.models.load import load_tokenizer
from pos2distill.models.packing import ResponseBatch
from pos2distill.records import Example, Tokens
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.sampling.teacher_encoder import TeacherEncoder
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import draw_trivial_slots
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.micro_batches import pack
from pos2distill.training.rows import Row, Sample
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.teachers import TeacherSource, build_teacher

EXAMPLES, BATCH = 12, 3  # examples in total, and of one training step
REPEATS = 3
KS = (1, 4, 16, 64, 128)
STORED_K = 64  # the k of the measured times
VOCABULARY, WIDTH, LAYERS, LOGIT_SPREAD = 32_000, 512, 4, 4.0
PROMPT, RESPONSE = 256, 16  # tokens with the random model

Prompts = list[list[Tokens]]
"""For each example the advantageous prompt, then the trivial ones."""

Batches = list[list[Row]]
"""The rows of each training step."""


def toy() -> tuple[Study, Prompts]:
    """The quickstart's study and its prompts."""
    study = load_recipe("quickstart").study
    documents, advantageous = study.data.documents, study.fixed_advantageous_slots(1)
    reserve = study.sampling.max_new_tokens
    build = PromptBuilder(load_tokenizer(study.model), "plain", max_length=context_length(study.model), reserve=reserve)
    prompts = []
    for example in load_split(study.data, documents=documents, seed=study.seed).train[:EXAMPLES]:
        trivial = draw_trivial_slots(
            example.example_id, documents=documents, advantageous=advantageous, k=study.method.k, seed=study.seed
        )
        prompts.append([build(example, documents, slots) for slots in (advantageous, *trivial)])
    return study, prompts


def random_model(folder: str) -> tuple[Study, Prompts]:
    """A random Llama in `folder`; a trivial prompt has the tokens of the advantageous one in another order."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    lm = LlamaForCausalLM(config)
    # The final norm makes the elements of a hidden state about 1, so the logits have this standard deviation.
    torch.nn.init.normal_(lm.lm_head.weight, std=LOGIT_SPREAD / WIDTH**0.5)
    lm.save_pretrained(folder)
    study = load_recipe("quickstart", [f"sampling.max_new_tokens={RESPONSE}"]).study
    study = study.model_copy(update={"model": study.model.model_copy(update={"path": folder})})
    random = np.random.default_rng(0)
    prompts = []
    for _ in range(EXAMPLES):
        tokens = random.integers(5, VOCABULARY, PROMPT).astype(np.int32)
        prompts.append([tokens, *(random.permutation(tokens) for _ in range(study.method.k))])
    return study, prompts


@dataclass(frozen=True)
class Sampled:
    """What happens before training.

    vocabulary: size of the model's vocabulary.
    ks: the values of k below it.
    seconds: seconds of each step before training, for all examples.
    tokens: number of tokens in all responses.
    hidden_bytes: bytes of all teacher states.
    batches: training rows with everything that any teacher stores; the most likely tokens are those for the largest k.
    """

    vocabulary: int
    ks: Sequence[int]
    seconds: dict[str, float]
    tokens: int
    hidden_bytes: int
    batches: Batches


def sample(study: Study, prompts: Prompts, stop_ids: tuple[int, ...], device: str, threads: int) -> Sampled:
    """Sample a response to each advantageous prompt, encode it, and build the training rows."""
    advantageous = [each[0] for each in prompts]
    engine = HfEngine(study.model, study.inference, threads=threads, device=device)
    vocabulary = int(engine.model.config.vocab_size)
    ks = [k for k in KS if k < vocabulary]
    params = SamplingParams(study.sampling.temperature, 1.0, study.sampling.max_new_tokens, stop_ids)

    def generate(stored_top_k: int) -> list[Any]:
        own_params = replace(params, stored_top_k=stored_top_k)
        return asyncio.run(engine.generate(advantageous, own_params, range(len(advantageous))))

    completions: list[Completion] = generate(max(ks))
    responses = [completion.token_ids for completion in completions]
    encoder = TeacherEncoder(study.model, alignment=study.method.alignment, threads=threads, device=device)
    seconds = {
        "sampling": timed(lambda: generate(0), device),
        f"sampling with {STORED_K} logprobs": timed(lambda: generate(STORED_K), device),
        "teacher stage": timed(lambda: encoder.encode(advantageous, responses), device),
    }
    rows_by_example = []
    hidden_bytes = 0
    states = encoder.encode(advantageous, responses)
    for number, (own_prompts, completion, hidden_TH) in enumerate(zip(prompts, completions, states, strict=True)):
        hidden = hidden_to_bytes(hidden_TH)
        hidden_bytes += len(hidden)
        rows_by_example.append(make_rows(number, own_prompts, completion, hidden, study))
    batches: Batches = []
    for start in range(0, EXAMPLES, BATCH):
        batch: list[Row] = []
        for rows in rows_by_example[start : start + BATCH]:
            batch += rows
        batches.append(batch)
    tokens = sum(len(response) for response in responses)
    return Sampled(vocabulary, ks, seconds, tokens, hidden_bytes, batches)


def make_rows(number: int, prompts: list[Tokens], completion: Completion, hidden: bytes, study: Study) -> list[Row]:
    """The rows of one example, with everything that any teacher stores."""
    assert completion.top is not None
    example = Example(str(number), "", (), ())
    ids_SK, logprobs_SK = completion.top.ids_SK, completion.top.logprobs_SK
    sample = Sample(example, (0,), prompts[0], completion.token_ids, hidden, study.model.dtype, ids_SK, logprobs_SK)
    return [Row(sample, (slot,), slot, prompt, completion.token_ids) for slot, prompt in enumerate(prompts)]


def measure(study: Study, prompts: Prompts, stop_ids: tuple[int, ...], device: str, threads: int) -> dict[str, Any]:
    """Sample once, then train with each teacher."""
    sampled = sample(study, prompts, stop_ids, device, threads)
    strategy = TorchStrategy(
        with_teacher(study, "resident"),
        TrainersSection(strategy="torch", threads=threads),
        torch.device(device),
        student_start=study.model,
    )
    steps = {}
    for name in ("cached", "resident"):
        steps[name] = step_times(with_teacher(study, name), strategy, sampled.batches, device)
    stored = with_top_k(sampled.batches, STORED_K)
    steps["topk"] = step_times(with_teacher(study, "topk", STORED_K), strategy, stored, device)

    exact = compute_losses(with_teacher(study, "cached"), strategy, sampled.batches)
    errors = {}
    bytes_per_token = {"cached": sampled.hidden_bytes / sampled.tokens}
    for k in sampled.ks:
        batches = with_top_k(sampled.batches, k)
        approximate = compute_losses(with_teacher(study, "topk", k), strategy, batches)
        errors[k] = compare(exact, approximate, batches)
        bytes_per_token[f"topk {k}"] = 8.0 * k  # an int32 and a float32 each
    ms_per_step = {}
    for name, times in steps.items():
        ms_per_step[name] = {part: 1000 * seconds for part, seconds in times.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in strategy.student.lm.parameters()),
        "vocabulary": sampled.vocabulary,
        "examples": EXAMPLES,
        "response_tokens": sampled.tokens,
        "ms_per_example": {name: 1000 * seconds / EXAMPLES for name, seconds in sampled.seconds.items()},
        "ms_per_step": ms_per_step,
        "bytes_per_token": bytes_per_token,
        "kl_nats": float(exact.kl.mean()),
        "topk": errors,
    }


def with_top_k(batches: Batches, k: int) -> Batches:
    """The batches with the k most likely tokens at each position, in the layout of the sample store."""
    shortened: Batches = []
    for batch in batches:
        # Rows of one sample must stay together, since prefixes are shared among the rows of a sample.
        cut_samples = {id(row.sample): _cut_sample(row.sample, k) for row in batch}
        shortened.append([replace(row, sample=cut_samples[id(row.sample)]) for row in batch])
    return shortened


def _cut_sample(sample: Sample, k: int) -> Sample:
    ids_SK, logprobs_SK = sample.top_ids, sample.top_logprobs
    assert ids_SK is not None
    assert logprobs_SK is not None
    top_ids = np.ascontiguousarray(ids_SK[:, :k]).reshape(-1)
    top_logprobs = np.ascontiguousarray(logprobs_SK[:, :k]).reshape(-1)
    return replace(sample, top_ids=top_ids, top_logprobs=top_logprobs)


def with_teacher(study: Study, teacher: str, k: int = 0) -> Study:
    """The study with another teacher."""
    return study.model_copy(update={"method": study.method.model_copy(update={"teacher": teacher, "teacher_topk": k})})


def step_times(study: Study, strategy: TorchStrategy, batches: Batches, device: str) -> dict[str, float]:
    """Median seconds of a step, and of the teacher's part of it, which comes before the student's pass."""
    teacher = _build_teacher(study, strategy)

    def run_teacher(rows: list[Row]) -> None:
        teacher(rows).to(strategy.device)

    def run_step(rows: list[Row], batch: ResponseBatch) -> None:
        strategy.backward(strategy.forward(batch, teacher(rows)).mean(), last=True)
        strategy.step(0.0)  # a rate of 0, so that all teachers see the same weights

    step_seconds, teacher_seconds = [], []
    for rows, batch in _packed(batches[:REPEATS], study):
        teacher_seconds.append(timed(functools.partial(run_teacher, rows), device))
        step_seconds.append(timed(functools.partial(run_step, rows, batch), device, repeats=1))
    return {"teacher": statistics.median(teacher_seconds), "step": statistics.median(step_seconds)}


def _build_teacher(study: Study, strategy: TorchStrategy) -> TeacherSource:
    teacher = build_teacher(study, strategy.base_states, strategy.device)
    assert teacher is not None
    return teacher


def _packed(batches: Batches, study: Study) -> Iterator[tuple[list[Row], ResponseBatch]]:
    for rows in batches:
        yield rows, pack(rows, study, epoch=0)


@dataclass(frozen=True)
class Losses:
    """kl: the KL of all rows, in nats. gradient: the gradient of their mean, all parameters concatenated, float64."""

    kl: Tensor
    gradient: Tensor


def compute_losses(study: Study, strategy: TorchStrategy, batches: Batches) -> Losses:
    """The KL of all rows, and the gradient of its mean."""
    teacher = _build_teacher(study, strategy)
    kls = []
    for rows, batch in _packed(batches, study):
        kl_B = strategy.forward(batch, teacher(rows))
        strategy.backward(kl_B.mean() / len(batches), last=False)
        kls.append(kl_B.detach().cpu())
    gradients = []
    for parameter in strategy.student.lm.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad.flatten().cpu())
    strategy.optimizer.zero_grad()
    return Losses(torch.cat(kls), torch.cat(gradients).double())


def compare(exact: Losses, approximate: Losses, batches: Batches) -> dict[str, float]:
    """Errors of the trivial rows' KL, the cosine of the gradients, and the probability of the k most likely tokens."""
    rows: list[Row] = []
    for batch in batches:
        rows += batch
    is_trivial = torch.tensor([row.slot_id > 0 for row in rows])
    error = (exact.kl - approximate.kl)[is_trivial]
    probability, tokens = 0.0, 0
    for row in rows:
        assert row.sample.top_logprobs is not None
        probability += float(np.exp(row.sample.top_logprobs).sum())
        tokens += len(row.response_ids)
    return {
        "probability_of_top_k": probability / tokens,
        "mean_error_nats": float(error.abs().mean()),
        "mean_error_ratio": float(error.sum() / exact.kl[is_trivial].sum()),
        "gradient_cosine": float(torch.cosine_similarity(exact.gradient, approximate.gradient, dim=0)),
    }


def timed(function: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def to_markdown(name: str, result: dict[str, Any]) -> str:
    """The tables of one model."""
    ms, size = result["ms_per_example"], result["bytes_per_token"]
    lines = [
        f"{name}: {result['parameters'] / 1e6:.1f} M parameters, {result['vocabulary']:,} tokens; "
        f"mean KL {result['kl_nats']:.3f} nats; sampling {ms['sampling']:.1f} ms per example",
        "",
        "| teacher | before training, ms per example | its part of a step, ms | a step, ms | bytes per token |",
        "|---|---|---|---|---|",
    ]
    before_training = {
        "cached": ms["teacher stage"],
        "resident": 0.0,
        "topk": ms[f"sampling with {STORED_K} logprobs"] - ms["sampling"],
    }
    stored_bytes = {"cached": size["cached"], "resident": 0, "topk": size[f"topk {STORED_K}"]}
    for teacher, step in result["ms_per_step"].items():
        lines.append(
            f"| {teacher} | {before_training[teacher]:.1f} | {step['teacher']:.1f} | {step['step']:.0f} | "
            f"{stored_bytes[teacher]:.0f} |"
        )
    lines += [
        "",
        "| k | probability of the k tokens | KL too small by, nats | relative | cosine of the gradients |",
        "|---|---|---|---|---|",
    ]
    for k, errors in result["topk"].items():
        lines.append(
            f"| {k} | {errors['probability_of_top_k']:.4f} | {errors['mean_error_nats']:.2e} | "
            f"{100 * errors['mean_error_ratio']:.2f} % | {errors['gradient_cosine']:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure both models, print the tables, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    device, threads = arguments.device, arguments.threads
    study, prompts = toy()
    stop_ids = tuple(stop_token_ids(study.model, load_tokenizer(study.model)))
    results = {"toy": measure(study, prompts, stop_ids, device, threads)}
    print(to_markdown("toy", results["toy"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        study, prompts = random_model(folder)
        results["random"] = measure(study, prompts, (VOCABULARY - 1,), device, threads)
    print("\n" + to_markdown("random", results["random"]))
    report = {**results, "threads": threads, **circumstances("torch", "transformers", device=device)}
    Path(__file__).with_name(f"teacher_{device}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
