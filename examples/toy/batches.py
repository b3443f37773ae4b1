"""Training batches of the toy task, written straight into tensors: thousands of fresh prompts a second.

A sequence is one context and a few questions about it, in the form the chat template gives:
`<s> <|user|> documents question <|assistant|> response <|end|> <|user|> question <|assistant|> ...`
Several questions a context cost little more than one, and each is a training signal.

Shapes: B sequences, D documents, Q questions, F fields of a fact (4), W words of a template, T tokens of a sequence.
"""

from __future__ import annotations

import torch
from task import (
    ADJECTIVES,
    ANIMALS,
    ASSISTANT,
    BOS,
    DOCUMENT_BLOCK,
    END,
    FIELDS,
    NUMBERS,
    QUESTION_BLOCK,
    RESPONSE,
    USER,
    VOCABULARY,
)
from torch import Tensor

TOKEN_ID = {token: place for place, token in enumerate(VOCABULARY)}
FIRST_NUMBER_ID = TOKEN_ID[NUMBERS[0]]  # numbers are the end of the vocabulary
QUESTION_TURN = f"{QUESTION_BLOCK} {ASSISTANT}"
RESPONSE_TURN = f"{RESPONSE} {END}"


def sequence_length(documents: int, questions: int) -> int:
    """Tokens of one sequence of `training_batch`."""
    turn = f"{USER} {QUESTION_TURN} {RESPONSE_TURN}"
    return 1 + documents * len(DOCUMENT_BLOCK.split()) + questions * len(turn.split())


def training_batch(
    sequences: int, documents: int, questions: int, *, copy_weight: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw a batch; the documents asked about are uniform over the slots, so the data teaches no position bias.

    Args:
        sequences: B.
        documents: D, at most 40.
        questions: Q, about different documents; at most D.
        copy_weight: loss weight of a document's words that repeat its title. Learning to copy them is a step
            towards retrieval, and there are many more of them than of answers.
        generator: the only source of randomness.
    Returns: token ids (B, T) int64; loss weights (B, T) float32: 1 on responses and on the animal of a question,
        copy_weight on repeated words, 0 elsewhere. A question's adjective stands in one title only, so its animal can
        be looked up: the easiest retrieval there is, and the way to the others.
    """
    facts_BDF = draw_facts(sequences, documents, generator)
    asked_BQ = _draw_distinct(sequences, documents, questions, generator)
    asked_BQF = facts_BDF.gather(1, asked_BQ[..., None].expand(-1, -1, len(FIELDS)))
    opening, user = (torch.full((sequences, 1), TOKEN_ID[token]) for token in (BOS, USER))
    documents_BT = write(DOCUMENT_BLOCK, facts_BDF).flatten(1)
    copied_W = torch.tensor(_repeats(DOCUMENT_BLOCK)) * copy_weight
    animal_W = [float(word == "{animal}") for word in QUESTION_TURN.split()]

    tokens = [opening, user, documents_BT]
    weights = [torch.zeros(2), copied_W.repeat(documents)]
    for turn, asked_BF in enumerate(asked_BQF.unbind(1)):
        if turn > 0:  # the first question stands in the same message as the documents
            tokens.append(user)
            weights.append(torch.zeros(1))
        question_BW, response_BW = write(QUESTION_TURN, asked_BF), write(RESPONSE_TURN, asked_BF)
        tokens += [question_BW, response_BW]
        weights += [torch.tensor(animal_W), torch.ones(response_BW.shape[1])]
    return torch.cat(tokens, 1), torch.cat(weights).expand(sequences, -1)


def draw_facts(sequences: int, documents: int, generator: torch.Generator) -> Tensor:
    """What the documents of each sequence say: (B, D, F) token ids, all different within a sequence."""
    adjective_BD = _draw_distinct(sequences, len(ADJECTIVES), documents, generator) + TOKEN_ID[ADJECTIVES[0]]
    animal_BD = _draw_distinct(sequences, len(ANIMALS), documents, generator) + TOKEN_ID[ANIMALS[0]]
    number_BN = _draw_distinct(sequences, len(NUMBERS), 2 * documents, generator) + FIRST_NUMBER_ID
    return torch.stack([adjective_BD, animal_BD, number_BN[:, ::2], number_BN[:, 1::2]], dim=-1)


def write(template: str, facts_xF: Tensor) -> Tensor:
    """Fill a template with facts: (..., F) ids of fields to (..., W) ids of words."""
    shape = facts_xF.shape[:-1]
    words = [
        facts_xF[..., FIELDS.index(word)] if word in FIELDS else torch.full(shape, TOKEN_ID[word])
        for word in template.split()
    ]
    return torch.stack(words, dim=-1)


def _draw_distinct(rows: int, population: int, count: int, generator: torch.Generator) -> Tensor:
    """(rows, count) numbers below `population`, different within a row, in random order."""
    return torch.rand(rows, population, generator=generator).argsort(1)[:, :count]


def _repeats(template: str) -> list[bool]:
    """Which words of a template are fields that it has already shown."""
    words = template.split()
    return [word in FIELDS and word in words[:place] for place, word in enumerate(words)]
