"""Training batches of the toy tasks, generated as tensors: thousands of new prompts a second.

A sequence is one context and a few questions about it, in the format of the chat template:
`<s> <|user|> documents question <|assistant|> response <|end|> <|user|> question <|assistant|> ...`
Several questions about a context cost little more than one, and each of them is a training signal.

Shapes: B sequences, D documents, P chains (D / 2), Q questions, H hops of a question (1 or 2), F fields of a fact (5),
W words of a template, T tokens of a sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from examples.toy.task import (
    ADJECTIVES,
    ANIMALS,
    ASSISTANT,
    BOS,
    CODE,
    CONCLUSION,
    DOCUMENT_BLOCK,
    END,
    FIELDS,
    MENTOR,
    NUMBERS,
    QUESTION_BLOCK,
    RESPONSE,
    TWO_HOP_QUESTION,
    TWO_HOP_VOCABULARY,
    USER,
)

# One-hop contexts and questions; one-hop questions about two-hop contexts; two-hop contexts and questions.
Kind = Literal["one hop", "mixed", "two hops"]

TOKEN_ID = {token: index for index, token in enumerate(TWO_HOP_VOCABULARY)}
FIRST_NUMBER_ID, LAST_NUMBER_ID = TOKEN_ID[NUMBERS[0]], TOKEN_ID[NUMBERS[-1]]
# A turn is a question, filled with the fact of its first hop, and the response, with one template for each hop.
ONE_HOP_TURN = (f"{QUESTION_BLOCK} {ASSISTANT}", (f"{RESPONSE} {END}",))
TWO_HOP_TURN = (f"Question: {TWO_HOP_QUESTION} {ASSISTANT}", (RESPONSE, f"{RESPONSE} {CONCLUSION} {END}"))


def _turn(kind: Kind) -> tuple[str, tuple[str, ...]]:
    return TWO_HOP_TURN if kind == "two hops" else ONE_HOP_TURN


def sequence_length(documents: int, questions: int, kind: Kind = "one hop") -> int:
    """Number of tokens in a sequence of `training_batch`."""
    question, responses = _turn(kind)
    turn = " ".join([USER, question, *responses])
    return 1 + documents * len(DOCUMENT_BLOCK.split()) + questions * len(turn.split())


def training_batch(
    sequences: int,
    documents: int,
    questions: int,
    *,
    copy_weight: float,
    generator: torch.Generator,
    kind: Kind = "one hop",
) -> tuple[Tensor, Tensor]:
    """Draw a batch. Questions are about documents at uniformly random slots, so the data teaches no position bias.

    Args:
        sequences: B.
        documents: D, at most 40; even unless the kind is one hop.
        questions: Q, about different documents, at most D; with two hops about different chains, at most D / 2.
        copy_weight: loss weight of a document's words that repeat its title. Learning to copy them is a step
            towards retrieval, and they are far more frequent than answers.
        generator: the only source of randomness.
        kind: the kind of contexts and questions.
    Returns: token ids (B, T) int64; loss weights (B, T) float32: 1 on responses and on the animal of a question,
        copy_weight on repeated words, 0 elsewhere. A question's adjective is in one title only, so its animal can be
        looked up: this is the easiest retrieval, and the model learns it first.
    """
    facts_BDF, asked_BQHF = _draw_context(sequences, documents, questions, kind, generator)
    question_template, response_templates = _turn(kind)
    bos_B1 = torch.full((sequences, 1), TOKEN_ID[BOS])
    user_B1 = torch.full((sequences, 1), TOKEN_ID[USER])
    documents_BT = write(DOCUMENT_BLOCK, facts_BDF).flatten(1)
    copied_W = torch.tensor(_repeats(DOCUMENT_BLOCK)) * copy_weight
    animal_W = torch.tensor([float(word == "{animal}") for word in question_template.split()])

    tokens = [bos_B1, user_B1, documents_BT]
    weights = [torch.zeros(2), copied_W.repeat(documents)]
    for turn, asked_BHF in enumerate(asked_BQHF.unbind(1)):
        if turn > 0:  # the first question is in the same message as the documents
            tokens.append(user_B1)
            weights.append(torch.zeros(1))
        question_BW = write(question_template, asked_BHF[:, 0])
        tokens.append(question_BW)
        weights.append(animal_W)
        for template, hop_BF in zip(response_templates, asked_BHF.unbind(1), strict=True):
            response_BW = write(template, hop_BF)
            tokens.append(response_BW)
            weights.append(torch.ones(response_BW.shape[1]))
    return torch.cat(tokens, 1), torch.cat(weights).expand(sequences, -1)


def _draw_context(
    sequences: int, documents: int, questions: int, kind: Kind, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The facts of the documents in prompt order, (B, D, F), and of the hops of every question, (B, Q, H, F)."""
    facts_BDF = draw_facts(sequences, documents, generator)
    if kind == "one hop":
        asked_BQ = _draw_distinct(sequences, documents, questions, generator)
        return facts_BDF, _pick(facts_BDF, asked_BQ)[:, :, None]
    facts_BDF = _link(facts_BDF)
    shown_BDF = _pick(facts_BDF, _draw_distinct(sequences, documents, documents, generator))
    if kind == "mixed":
        asked_BQ = _draw_distinct(sequences, documents, questions, generator)
        return shown_BDF, _pick(facts_BDF, asked_BQ)[:, :, None]
    first_BQ = _draw_distinct(sequences, documents // 2, questions, generator)
    hops = [_pick(facts_BDF, first_BQ), _pick(facts_BDF, first_BQ + documents // 2)]
    return shown_BDF, torch.stack(hops, dim=2)


def draw_facts(sequences: int, documents: int, generator: torch.Generator) -> Tensor:
    """The facts of each sequence's documents: (B, D, F) token ids, all different within a sequence."""
    adjective_BD = _draw_distinct(sequences, len(ADJECTIVES), documents, generator) + TOKEN_ID[ADJECTIVES[0]]
    animal_BD = _draw_distinct(sequences, len(ANIMALS), documents, generator) + TOKEN_ID[ANIMALS[0]]
    number_BN = _draw_distinct(sequences, len(NUMBERS), 2 * documents, generator) + FIRST_NUMBER_ID
    code_BD = torch.full_like(adjective_BD, TOKEN_ID[CODE])
    return torch.stack([code_BD, adjective_BD, animal_BD, number_BN[:, ::2], number_BN[:, 1::2]], dim=-1)


def _link(facts_BDF: Tensor) -> Tensor:
    """Make each animal of the second half of the facts the mentor of one of the first half, in the same order."""
    pupil_BPF, mentor_BPF = facts_BDF.chunk(2, dim=1)
    relation_BP1 = torch.full_like(pupil_BPF[..., :1], TOKEN_ID[MENTOR])
    linked_BPF = torch.cat([relation_BP1, pupil_BPF[..., 1:3], mentor_BPF[..., 1:3]], dim=-1)
    return torch.cat([linked_BPF, mentor_BPF], dim=1)


def _pick(facts_BDF: Tensor, index_BQ: Tensor) -> Tensor:
    """The facts at these indices: (B, Q, F)."""
    return facts_BDF.gather(1, index_BQ[..., None].expand(-1, -1, len(FIELDS)))


def write(template: str, facts_xF: Tensor) -> Tensor:
    """Fill a template with facts: (..., F) ids of fields to (..., W) ids of words."""
    words = []
    for word in template.split():
        if word in FIELDS:
            words.append(facts_xF[..., FIELDS.index(word)])
        else:
            words.append(torch.full(facts_xF.shape[:-1], TOKEN_ID[word]))
    return torch.stack(words, dim=-1)


def _draw_distinct(rows: int, population: int, count: int, generator: torch.Generator) -> Tensor:
    """(rows, count) numbers below `population`, different within a row, in random order."""
    return torch.rand(rows, population, generator=generator).argsort(1)[:, :count]


def _repeats(template: str) -> list[bool]:
    """For each word of a template, whether it is a field that occurred earlier in it."""
    words = template.split()
    return [word in FIELDS and word in words[:index] for index, word in enumerate(words)]
