"""Answers of several engines to the same prompts, and the time that each engine takes."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pos2distill.config import ModelSection
from pos2distill.evaluation.statistics import accuracy_interval, student_t
from pos2distill.models.architecture import load_config
from pos2distill.records import Example, Tokens
from pos2distill.sampling.engines.protocol import Completion, Engine, SamplingParams
from pos2distill.tasks.formats import parse_record
from pos2distill.tasks.readers import read_records

NEW_TOKENS = 32
THREADS = 2
LARGEST_SCALE = 1.3

Answers = list[list[int]]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """What is timed: an engine, and its scales if it has any."""

    name: str
    engine: Engine
    scales: tuple[float, ...] = ()


def read_examples(path: Path, count: int) -> list[Example]:
    """The first examples of a JSONL file."""
    examples: list[Example] = []
    for where, row in itertools.islice(read_records(str(path)), count):
        example = parse_record("jsonl", row, where)
        assert isinstance(example, Example)  # this format skips no record
        examples.append(example)
    return examples


def rising_scales(model: ModelSection) -> tuple[float, ...]:
    """RoPE scales from 1 in the first layer to the largest in the last."""
    return tuple(np.linspace(1.0, LARGEST_SCALE, load_config(model).num_hidden_layers).tolist())


def answer(loop: asyncio.AbstractEventLoop, engine: Engine, prompts: list[Tokens], params: SamplingParams) -> Answers:
    """The answers to all prompts at once."""
    answers: Answers = []
    for result in loop.run_until_complete(engine.generate(prompts, params, [0] * len(prompts))):
        assert isinstance(result, Completion), result
        answers.append(result.token_ids.tolist())
    return answers


def agreement(one: Answers, other: Answers) -> dict[str, Any]:
    """The fraction of equal answers."""
    equal = np.array([a == b for a, b in zip(one, other, strict=True)], float)
    return {"equal": float(equal.mean()), "ci95": accuracy_interval(equal)}


def seconds_by_round(
    loop: asyncio.AbstractEventLoop,
    kinds: list[Kind],
    prompts: list[Tokens],
    params: SamplingParams,
    orders: Sequence[Sequence[int]],
) -> Seconds:
    """(rounds, kinds) seconds.

    Args:
        orders: the order of the kinds in each round. Each kind should come first equally often.
    """
    seconds_RK = np.zeros((len(orders), len(kinds)))
    for number, order in enumerate(orders):
        for index in order:
            kind = kinds[index]
            own = replace(params, rope_scales=kind.scales)
            # Changing the scales is a separate call, and not a part of an answer.
            answer(loop, kind.engine, prompts[:1], own)
            start = time.perf_counter()
            answer(loop, kind.engine, prompts, own)
            seconds_RK[number, index] = time.perf_counter() - start
            print(f"round {number + 1}, {kind.name}: {seconds_RK[number, index]:.1f} s", flush=True)
    return seconds_RK


def ratio(seconds_R: Seconds, base_R: Seconds) -> dict[str, Any]:
    """The mean ratio of a round, with Student's interval over rounds."""
    ratio_R = seconds_R / base_R
    mean, rounds = float(ratio_R.mean()), len(ratio_R)
    margin = student_t(rounds - 1) * float(ratio_R.std(ddof=1)) / rounds**0.5
    return {"mean": mean, "ci95": [mean - margin, mean + margin]}
