"""From prompts to processed responses, with one engine."""

import asyncio
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import ModelSection, Runtime, Study
from pos2distill.errors import TransientError, UserError
from pos2distill.randomness import derive_seed
from pos2distill.records import RESPONSE_SCHEMA
from pos2distill.sampling.consensus import most_consistent
from pos2distill.sampling.engines import build_engine
from pos2distill.sampling.engines.protocol import Failure, GenerationResult, SamplingParams, TextCompletion
from pos2distill.sampling.gpu_lock import gpu_start_lock
from pos2distill.sampling.postprocess import ProcessedResponse, process_text, response_processor
from pos2distill.tasks.thoughts import without_thought

ProcessFunction = Callable[[GenerationResult, Sequence[str]], ProcessedResponse]

# Columns that a response takes over from its prompt.
_PROMPT_COLUMNS = (
    "example_id",
    "sample_id",
    "documents",
    "placement",
    "order",
    "group",
    "slots",
    "prompt_ids",
    "seed",
    "example",
)


class GenerationOperator:
    """Generates and processes responses to prompts. Holds one engine; calls may overlap.

    Args:
        candidates: number of responses drawn for each prompt. The one that agrees most with the others is taken.
    """

    def __init__(self, study: Study, runtime: Runtime, params: SamplingParams, *, candidates: int = 1) -> None:
        model: ModelSection = study.model
        self.params = params
        self.candidates = candidates
        self.prompt_column = "prompt_ids"
        self.process: ProcessFunction
        if model.engine == "openai":
            # The server ends its model's responses, and decodes them.
            self.process = functools.partial(process_text, metric=study.data.metric, opening=_opening(model))
            if model.uses_chat_api:
                self.prompt_column = "messages"
        else:
            from pos2distill.models.chat import stop_token_ids
            from pos2distill.models.load import load_tokenizer

            tokenizer = load_tokenizer(study.model)
            self.params = replace(params, stop_ids=tuple(stop_token_ids(study.model, tokenizer)))
            self.process = response_processor(study, tokenizer)
        pool = runtime.samplers
        with gpu_start_lock(pool.gpus):
            self.engine = build_engine(model, study.inference, runtime, threads=pool.threads, device=pool.device)
        # An actor may be dropped at any time; vLLM's own processes must not outlive it.
        self.close = weakref.finalize(self, self.engine.shutdown)

    async def __call__(self, batch: pa.Table, rope_scales: tuple[float, ...] = ()) -> pa.Table:
        """Generate and process.

        Args:
            batch: a table of `PROMPT_SCHEMA`.
            rope_scales: see `SamplingParams`.
        Returns: a table of `RESPONSE_SCHEMA`; a row that failed holds its error and no response.
        Raises:
            EngineDied: the engine cannot answer any further call.
        """
        params = replace(self.params, rope_scales=rope_scales)
        # At the same time, so that an engine that shares prefixes computes each prompt once.
        drawn = await asyncio.gather(*[self._generate(batch, params, number) for number in range(self.candidates)])
        gold_answers = batch["answers"].to_pylist()
        columns: dict[str, list[Any]] = {name: [] for name in RESPONSE_SCHEMA.names if name not in _PROMPT_COLUMNS}
        for row, (*results, row_gold_answers) in enumerate(zip(*drawn, gold_answers, strict=True)):
            result, response = self._choose(results, row_gold_answers)
            values = _response_columns(result, response, len(batch["prompt_ids"][row]))
            for name, column in columns.items():
                column.append(values[name])
        return pa.table(
            {name: batch[name] if name in _PROMPT_COLUMNS else columns[name] for name in RESPONSE_SCHEMA.names},
            schema=RESPONSE_SCHEMA,
        )

    def _choose(
        self, results: Sequence[GenerationResult], gold_answers: Sequence[str]
    ) -> tuple[GenerationResult, ProcessedResponse]:
        """Choose one of a prompt's results: not a failure if any succeeded, not an empty answer if any has text."""
        processed = [(result, self.process(result, gold_answers)) for result in results]
        succeeded = [each for each in processed if not isinstance(each[0], Failure)]
        # Thoughts are removed: they are much longer than answers, and would decide the choice. Empty answers are left
        # out: their agreement is 0, like that of an answer that resembles no other, so one of them might be chosen.
        not_empty = [each for each in succeeded if without_thought(each[1].truncated_text).strip()]
        if not_empty:
            candidates = not_empty
        elif succeeded:
            candidates = succeeded
        else:
            candidates = processed
        if len(candidates) == 1:
            return candidates[0]
        answers = [without_thought(response.truncated_text) for _, response in candidates]
        return candidates[most_consistent(answers)]

    async def _generate(self, batch: pa.Table, params: SamplingParams, number: int) -> list[GenerationResult]:
        """One result for every row. Rows without a prompt do not reach the engine.

        Args:
            number: the candidate's number. Each candidate has its own seeds.
        """
        errors = batch["error"].to_pylist()
        seeds = batch["seed"].to_pylist()
        if number > 0:
            seeds = [derive_seed(seed, "candidate", number) for seed in seeds]
        rows = [row for row, error in enumerate(errors) if error is None]
        # Rows with a prompt get their result below.
        results: list[GenerationResult] = [Failure(error or "") for error in errors]
        if rows:
            prompts = [self._prompt(batch, row) for row in rows]
            generated = await self.engine.generate(prompts, params, [seeds[row] for row in rows])
            for row, result in zip(rows, generated, strict=True):
                results[row] = result
        return results

    def _prompt(self, batch: pa.Table, row: int) -> Any:
        value = batch[self.prompt_column][row]
        return value.as_py() if self.prompt_column == "messages" else value.values.to_numpy()


def require_responses(responses: pa.Table) -> None:
    """Raise if any prompt has no response: a missing response must not count as wrong.

    Args:
        responses: a table of `RESPONSE_SCHEMA`.
    Raises:
        UserError: a prompt failed; names the first example.
        TransientError: prompts failed only because a server did not answer; it may answer later.
    """
    failed = responses.filter(pc.is_valid(responses["error"]))
    if not len(failed):
        return
    lasting = failed.filter(pc.not_equal(failed["outcome"], "unanswered"))
    first = (lasting if len(lasting) else failed).slice(0, 1).to_pylist()[0]
    message = f"example {first['example_id']}: the engine gave no answer ({first['error']})"
    raise UserError(message) if len(lasting) else TransientError(message)


def _opening(model: ModelSection) -> str:
    """The start of the response that the chat template writes; empty if the server applies the template."""
    if model.uses_chat_api:
        return ""
    from pos2distill.models.chat import response_opening
    from pos2distill.models.load import load_tokenizer

    return response_opening(load_tokenizer(model), model.chat_template_kwargs)


def _response_columns(result: GenerationResult, response: ProcessedResponse, prompt_length: int) -> dict[str, Any]:
    """The values of one row of `RESPONSE_SCHEMA` that do not come from its prompt.

    Args:
        prompt_length: number of token ids in the prompt.
    """
    values: dict[str, Any] = {
        "error": None,
        "sampled_ids": (),
        "finish_reason": None,
        "text": response.text,
        "response_ids": response.response_ids,
        "truncated_text": response.truncated_text,
        "correct": response.correct,
        "f1": response.f1,
        "outcome": response.outcome,
        "prompt_tokens": None,
        "answer_tokens": None,
        "top_ids": None,
        "top_logprobs": None,
    }
    if isinstance(result, Failure):
        values["error"] = result.error
    elif isinstance(result, TextCompletion):
        values["finish_reason"] = result.finish_reason
        values["prompt_tokens"] = result.prompt_tokens
        values["answer_tokens"] = result.answer_tokens
    else:
        values["sampled_ids"] = result.token_ids
        values["finish_reason"] = result.finish_reason
        values["prompt_tokens"] = prompt_length
        values["answer_tokens"] = len(result.token_ids)
    if response.top is not None:
        values["top_ids"] = response.top.ids_SK.ravel()
        values["top_logprobs"] = response.top.logprobs_SK.ravel()
    return values
