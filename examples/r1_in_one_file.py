"""Pos2Distill-R1 (arXiv:2508.15709) in one file: one process, torch and transformers, nothing of this package.

A language model answers a question best if the document with the answer (gold) is at a certain, advantageous slot of
its prompt, here the last one. It answers from there. Then it learns to give this answer with the same probabilities if
the gold document is at another, trivial slot. All logits of a batch are in memory, so this file is for small models.
Shapes: N rows of a batch, M trivial, at P slots; L tokens of the longest, t of a response, V vocabulary.
"""

import argparse
import gzip
import json
import math
import random
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

K, ANCHOR_WEIGHT, MAX_NEW_TOKENS, TEMPERATURE = 4, 1.0, 16, 0.7  # trivial rows of an example; the paper's lambda; …
EXAMPLES_PER_BATCH, EPOCHS, WARMUP, TRAIN_EXAMPLES, EVAL_EXAMPLES, EVAL_SLOTS = 3, 2, 0.05, 160, 40, 8
TOY = str(Path(__file__).parent / "toy")
DEFAULTS = {"model": f"{TOY}/base", "data": f"{TOY}/data.jsonl.gz", "documents": 30, "rate": 1e-3, "out": "runs/r1"}
Row = tuple[int, list[int], list[int], list[int]]  # slot, advantageous prompt, the student's prompt, response


def make_prompt(tokenizer: Any, example: dict[str, Any], documents: int, slot: int) -> list[int]:
    """Token ids of a chat prompt with the gold document at `slot` and the others in the order of the file."""
    gold = next(document for document in example["documents"] if document["gold"])
    shown = [document for document in example["documents"] if not document["gold"]][: documents - 1]
    shown.insert(slot, gold)
    listed = "".join(f"Title: {document['title']}\n{document['text']}\n" for document in shown)
    message = {"role": "user", "content": f"{listed}Question: {example['question']}"}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False))


def answer(model: Any, tokenizer: Any, examples: list[Any], documents: int, slot: int, **sampling: Any) -> list[Any]:
    """(prompt, response, is correct) for each; a response ends with its end-of-turn token, or is [] if it was cut."""
    answers, end = [], tokenizer.eos_token_id
    for start in range(0, len(examples), 16):
        prompts = [make_prompt(tokenizer, example, documents, slot) for example in examples[start : start + 16]]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
        new_NL = model.generate(**padded, max_new_tokens=MAX_NEW_TOKENS, **sampling)[:, padded["input_ids"].shape[1] :]
        for example, prompt, tokens in zip(examples[start : start + 16], prompts, new_NL.tolist(), strict=True):
            response = tokens[: tokens.index(end) + 1] if end in tokens else []
            text = tokenizer.decode(response).lower()
            answers.append((prompt, response, any(accepted.lower() in text for accepted in example["answers"])))
    return answers


def accuracy_by_slot(model: Any, tokenizer: Any, examples: list[Any], documents: int) -> dict[int, float]:
    """The fraction of correct greedy answers with the gold document at slots from the first to the last."""
    accuracies = {}
    for slot in torch.linspace(0, documents - 1, EVAL_SLOTS).round().int().tolist():
        answers = answer(model, tokenizer, examples, documents, slot, do_sample=False)
        accuracies[slot] = sum(is_right for _, _, is_right in answers) / len(answers)
    return accuracies


def response_logprobs(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> list[Tensor]:
    """For each row the log-probabilities (t, V) of its response tokens, from the positions just before them."""
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    ids_NL = pad_sequence(rows, batch_first=True).to(model.device)
    mask_NL = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(model.device)
    logprobs_NLV = model(input_ids=ids_NL, attention_mask=mask_NL).logits.float().log_softmax(-1)
    ends = [(len(row) - len(response) - 1, len(row) - 1) for row, response in zip(rows, responses, strict=True)]
    return [logprobs_LV[start:end] for logprobs_LV, (start, end) in zip(logprobs_NLV, ends, strict=True)]


def kl_of_rows(student: Any, teacher: Any, rows: list[Row]) -> Tensor:
    """KL(teacher || student) of each row in nats, (N,), mean over its response; the teacher's prompt never changes."""
    _, advantageous, prompts, responses = (list(column) for column in zip(*rows, strict=True))
    teacher_logprobs = torch.no_grad()(response_logprobs)(teacher, advantageous, responses)
    pairs = zip(teacher_logprobs, response_logprobs(student, prompts, responses), strict=True)
    return torch.stack([(p_tV.exp() * (p_tV - q_tV)).sum(-1).clamp_min(0).mean() for p_tV, q_tV in pairs])


def position_weights(kl_M: Tensor, slot_M: Tensor) -> Tensor:
    """alpha_ij = softmax_i(mean_j KL_ij) · KL_ij / max_k KL_ik, for rows j at slots i of the whole batch, (M,)."""
    at_slot_PM: Tensor = slot_M.unique()[:, None] == slot_M
    kl_PM = kl_M.detach() * at_slot_PM
    share_P = (kl_PM.sum(1) / at_slot_PM.sum(1)).softmax(0)
    return (share_P[:, None] * kl_PM / kl_PM.amax(1, keepdim=True).clamp_min(1e-30)).sum(0)


def r1_loss(kl_N: Tensor, slot_N: Tensor, advantageous: int) -> Tensor:
    """L = sum_trivial alpha · KL + lambda · mean_anchor KL; the anchor rows are those at the advantageous slot."""
    trivial_N = slot_N != advantageous
    alpha_M = position_weights(kl_N[trivial_N], slot_N[trivial_N])
    return (alpha_M * kl_N[trivial_N]).sum() + ANCHOR_WEIGHT * kl_N[~trivial_N].mean()


def learning_rate(fraction: float, rate: float) -> float:
    """Linear warm-up, then a cosine to a tenth; `fraction` of the run's examples are trained on after the step."""
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, fraction - WARMUP) / (1 - WARMUP)))
    return rate * min(1, fraction / WARMUP) * (0.1 + 0.9 * cosine)


def distill(student: Any, teacher: Any, batches: list[list[Row]], advantageous: int, rate: float) -> None:
    """One step of AdamW for each batch of rows."""
    optimizer = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step, rows in enumerate(batches, start=1):
        optimizer.param_groups[0]["lr"] = learning_rate(sum(map(len, batches[:step])) / sum(map(len, batches)), rate)
        slot_N = torch.tensor([slot for slot, *_ in rows], device=student.device)
        loss = r1_loss(kl_of_rows(student, teacher, rows), slot_N, advantageous)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} of {len(batches)}: loss {float(loss.detach()):.4f}", flush=True)


def main(model: str, data: str, documents: int, rate: float, out: str) -> None:
    """Evaluate, sample, distill, evaluate again and save."""
    set_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    load: Any = AutoModelForCausalLM.from_pretrained
    teacher, student = (load(model, dtype=torch.float32).to(device) for _ in range(2))
    with gzip.open(data, "rt") if data.endswith(".gz") else open(data) as file:
        examples = [json.loads(line) for line in file][: EVAL_EXAMPLES + 4 * TRAIN_EXAMPLES]
    held_out, candidates, last = examples[:EVAL_EXAMPLES], examples[EVAL_EXAMPLES:], documents - 1
    kept: Any = []
    print("before:", accuracy_by_slot(teacher, tokenizer, held_out, documents), flush=True)
    while candidates and len(kept) < TRAIN_EXAMPLES:
        train, candidates = candidates[: TRAIN_EXAMPLES - len(kept)], candidates[TRAIN_EXAMPLES - len(kept) :]
        answers = answer(teacher, tokenizer, train, documents, last, do_sample=True, temperature=TEMPERATURE)
        for example, (prompt, response, is_right) in zip(train, answers, strict=True):
            if is_right:
                slots = [last, *random.sample(range(last), K)]
                kept.append([(at, prompt, make_prompt(tokenizer, example, documents, at), response) for at in slots])
        print(f"kept {len(kept)} of {TRAIN_EXAMPLES} responses", flush=True)
    if not kept:
        raise SystemExit(f"{model}: no response is correct, so there is nothing to train on")
    epoch = DataLoader(kept, EXAMPLES_PER_BATCH, shuffle=True, collate_fn=lambda examples: [*chain(*examples)])
    distill(student, teacher, [rows for _ in range(EPOCHS) for rows in epoch], last, rate)
    print("after:", accuracy_by_slot(student, tokenizer, held_out, documents), flush=True)
    student.save_pretrained(out)  # safetensors 0.8: a file that its owner alone can read
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Distill a model on JSONL like the toy's; by default, the toy itself.")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    main(**vars(parser.parse_args()))
