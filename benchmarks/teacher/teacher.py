"""What do the three teachers cost, and how near does `topk` come to the exact KL?

Two models: the built-in toy, with its own prompts; and a random Llama of 50 million parameters and 32,000 tokens, whose
logits are scaled to be as spread as those of a model that is unsure. Run:

  python -m benchmarks.teacher.teacher [--device cuda] [--threads 2]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.circumstances import circumstances
from pos2distill.config import Study, TrainersSection
from pos2distill.config.load import load_recipe
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.models.load import context_length, load_tokenizer
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.records import Example, Tokens
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.sampling.teacher_encoder import TeacherEncoder
from pos2distill.tasks.datasets import load_split
from pos2distill.tasks.permutations import draw_trivial_slots
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.rows import Row, Sample
from pos2distill.training.strategies.torch import TorchStrategy
from pos2distill.training.teachers import build_teacher

EXAMPLES, BATCH = 12, 3  # examples, and those of one training step
REPEATS = 3
KS = (1, 4, 16, 64, 128)
VOCABULARY, WIDTH, LAYERS, LOGIT_SPREAD = 32_000, 512, 4, 4.0
PROMPT, RESPONSE = 256, 16  # tokens, of the random model

Prompts = list[list[Tokens]]
"""Of each example the advantageous prompt, then the trivial ones."""


def toy() -> tuple[Study, Prompts]:
    """The quickstart's study and its prompts."""
    study = load_recipe("quickstart").study
    documents, advantageous = study.data.documents, study.advantageous(1)
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
    torch.nn.init.normal_(lm.lm_head.weight, std=LOGIT_SPREAD / WIDTH**0.5)  # the final norm gives states of size 1
    lm.save_pretrained(folder)
    study = load_recipe("quickstart", [f"sampling.max_new_tokens={RESPONSE}"]).study
    study = study.model_copy(update={"model": study.model.model_copy(update={"path": folder})})
    random = np.random.default_rng(0)
    prompts = []
    for _ in range(EXAMPLES):
        tokens = random.integers(5, VOCABULARY, PROMPT).astype(np.int32)
        prompts.append([tokens, *(random.permutation(tokens) for _ in range(study.method.k))])
    return study, prompts


def measure(study: Study, prompts: Prompts, stop_ids: tuple[int, ...], device: str, threads: int) -> dict[str, Any]:
    """Sample once, then train with each teacher."""
    advantageous = [each[0] for each in prompts]
    engine = HfEngine(study.model, threads=threads, device=device)
    params = SamplingParams(study.sampling.temperature, 1.0, study.sampling.max_new_tokens, stop_ids)
    vocabulary = int(engine.model.config.vocab_size)
    ks = [k for k in KS if k < vocabulary]

    def sample(stored_top_k: int) -> list[Any]:
        prompt_specs = replace(params, stored_top_k=stored_top_k)
        return asyncio.run(engine.generate(advantageous, prompt_specs, range(len(advantageous))))

    completions: list[Completion] = sample(max(ks))
    responses = [each.token_ids for each in completions]
    stage = TeacherEncoder(study.model, threads=threads, device=device)
    seconds = {
        "sampling": timed(lambda: sample(0), device),
        "sampling, telling 64 tokens": timed(lambda: sample(64), device),
        "teacher stage": timed(lambda: stage(advantageous, responses), device),
    }
    states = stage(advantageous, responses)
    rows = [
        rows_of(number, each, completion, hidden_to_bytes(hidden_TH), study)
        for number, (each, completion, hidden_TH) in enumerate(zip(prompts, completions, states, strict=True))
    ]
    strategy = TorchStrategy(
        with_teacher(study, "resident"), TrainersSection(strategy="torch", threads=threads), torch.device(device)
    )
    batches = [[row for example in rows[at : at + BATCH] for row in example] for at in range(0, EXAMPLES, BATCH)]
    steps = {name: step_times(with_teacher(study, name), strategy, batches, device) for name in ("cached", "resident")}
    told = {k: [[cut(row, k) for row in batch] for batch in batches] for k in ks}
    steps["topk"] = step_times(with_teacher(study, "topk", 64), strategy, told[64], device)
    tokens = sum(map(len, responses))
    exact = losses(with_teacher(study, "cached"), strategy, batches)
    return {
        "parameters": sum(parameter.numel() for parameter in strategy.student.lm.parameters()),
        "vocabulary": vocabulary,
        "examples": EXAMPLES,
        "response_tokens": tokens,
        "ms_an_example": {name: 1000 * value / EXAMPLES for name, value in seconds.items()},
        "ms_a_step": {name: {part: 1000 * value for part, value in each.items()} for name, each in steps.items()},
        "bytes_a_token": {
            "cached": sum(len(row[0].sample.hidden or b"") for row in rows) / tokens,
            **{f"topk {k}": 8.0 * k for k in ks},
        },
        "kl_nats": float(exact["kl"].mean()),
        "topk": {k: compare(exact, losses(with_teacher(study, "topk", k), strategy, told[k]), told[k]) for k in ks},
    }


def rows_of(number: int, prompts: list[Tokens], completion: Completion, hidden: bytes, study: Study) -> list[Row]:
    """The rows of one example, with all that any teacher stores."""
    assert completion.top is not None
    example = Example(str(number), "", (), ())
    ids, logprobs = completion.top.ids_SK, completion.top.logprobs_SK
    sample = Sample(example, prompts[0], completion.token_ids, hidden, study.model.dtype, ids, logprobs)
    return [Row(sample, (slot,), slot, prompt, completion.token_ids) for slot, prompt in enumerate(prompts)]


def cut(row: Row, k: int) -> Row:
    """With k tokens at each position, as the store holds them."""
    top_ids, top_logprobs = (each[:, :k].ravel() for each in (row.sample.top_ids, row.sample.top_logprobs))
    return replace(row, sample=replace(row.sample, top_ids=top_ids, top_logprobs=top_logprobs))


def with_teacher(study: Study, teacher: str, k: int = 0) -> Study:
    """The study with another teacher."""
    return study.model_copy(update={"method": study.method.model_copy(update={"teacher": teacher, "teacher_topk": k})})


def step_times(study: Study, strategy: TorchStrategy, batches: Sequence[list[Row]], device: str) -> dict[str, float]:
    """Seconds of a step, and of what comes before the student's pass in it: the teacher's own."""
    teacher = build_teacher(study, strategy.frozen_states, strategy.device)
    assert teacher is not None
    whole, own = [], []
    for rows in batches[:REPEATS]:
        batch = lay(rows)

        def step(rows: list[Row] = rows, batch: Any = batch) -> None:
            strategy.backward(strategy.forward(batch, teacher(rows)).mean(), last=True)
            strategy.step(0.0)  # the same weights for everyone

        own.append(timed(lambda rows=rows: teacher(rows).to(strategy.device), device))
        whole.append(timed(step, device, repeats=1))
    return {"teacher": statistics.median(own), "step": statistics.median(whole)}


def lay(rows: Sequence[Row]) -> ResponseBatch:
    """As the training loop does."""
    examples = [row.sample.example.example_id for row in rows]
    return collate([row.prompt_ids for row in rows], [row.response_ids for row in rows], group_ids=examples)


def losses(study: Study, strategy: TorchStrategy, batches: Sequence[list[Row]]) -> dict[str, Tensor]:
    """KL of each row, and the gradient of their mean."""
    teacher = build_teacher(study, strategy.frozen_states, strategy.device)
    assert teacher is not None
    kls = []
    for rows in batches:
        batch = lay(rows)
        kl_B = strategy.forward(batch, teacher(rows))
        strategy.backward(kl_B.mean() / len(batches), last=False)
        kls.append(kl_B.detach().cpu())
    parameters = strategy.student.lm.parameters()
    gradient = torch.cat([each.grad.flatten().cpu() for each in parameters if each.grad is not None]).double()
    strategy.optimizer.zero_grad()
    return {"kl": torch.cat(kls), "gradient": gradient}


def compare(exact: dict[str, Tensor], bound: dict[str, Tensor], batches: Sequence[list[Row]]) -> dict[str, float]:
    """Errors of the row KLs in nats and as a share, the gradient's direction, and the probability that is told."""
    trivial = torch.tensor([row.slot_id > 0 for rows in batches for row in rows])
    error = (exact["kl"] - bound["kl"])[trivial]
    told = np.concatenate([row.sample.top_logprobs for rows in batches for row in rows])
    tokens = sum(len(row.response_ids) for rows in batches for row in rows)
    return {
        "probability_told": float(np.exp(told).sum() / tokens),
        "mean_error_nats": float(error.abs().mean()),
        "mean_error_share": float(error.sum() / exact["kl"][trivial].sum()),
        "gradient_cosine": float(torch.cosine_similarity(exact["gradient"], bound["gradient"], dim=0)),
    }


def timed(work: Callable[[], Any], device: str, repeats: int = REPEATS) -> float:
    """Seconds of a call; the median of some."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def table(name: str, result: dict[str, Any]) -> str:
    """One model's results as Markdown."""
    ms = result["ms_an_example"]
    lines = [
        f"{name}: {result['parameters'] / 1e6:.1f} M parameters, {result['vocabulary']:,} tokens; "
        f"mean KL {result['kl_nats']:.3f} nats",
        "",
        "| teacher | before training, ms an example | its part of a step, ms | a step, ms | bytes a token |",
        "|---|---|---|---|---|",
    ]
    before = {
        "cached": ms["teacher stage"],
        "topk": ms["sampling, telling 64 tokens"] - ms["sampling"],
        "resident": 0.0,
    }
    size = {"cached": result["bytes_a_token"]["cached"], "topk": result["bytes_a_token"]["topk 64"], "resident": 0}
    for teacher, each in result["ms_a_step"].items():
        lines.append(
            f"| {teacher} | {before[teacher]:.1f} (sampling: {ms['sampling']:.1f}) | {each['teacher']:.1f} | "
            f"{each['step']:.0f} | {size[teacher]:.0f} |"
        )
    lines += [
        "",
        "| k | probability told | KL too small by, nats | share | cosine of the gradients |",
        "|---|---|---|---|---|",
    ]
    for k, each in result["topk"].items():
        lines.append(
            f"| {k} | {each['probability_told']:.4f} | {each['mean_error_nats']:.2e} | "
            f"{100 * each['mean_error_share']:.2f} % | {each['gradient_cosine']:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure both models, print the tables, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    device, threads = arguments.device, arguments.threads
    study, prompts = toy()
    stop_ids = tuple(stop_token_ids(study.model, load_tokenizer(study.model)))
    results = {"toy": measure(study, prompts, stop_ids, device, threads)}
    print(table("toy", results["toy"]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        study, prompts = random_model(folder)
        results["random"] = measure(study, prompts, (VOCABULARY - 1,), device, threads)
    print("\n" + table("random", results["random"]))
    report = {
        **results,
        "threads": threads,
        **circumstances("torch", "transformers", device=device),
    }
    Path(__file__).with_name(f"teacher_{device}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
