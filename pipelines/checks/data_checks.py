"""Checks of the data before anything expensive starts: the longest prompts fit the model's context and vocabulary."""

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pos2distill.config import EndpointSection, Recipe, Study
from pos2distill.errors import UserError, warn_once
from pos2distill.evaluation.count_warnings import distractor_warning
from pos2distill.parquet import open_parquet
from pos2distill.records import Example, Tokens, example_from_row
from pos2distill.sampling.prompting import cached_prompt_builder
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.data_files import data_bytes
from pos2distill.tasks.datasets import load_split, read_examples
from pos2distill.tasks.prompts import MessageBuilder, PromptTooLong, fewest_tokens, joined_text

from ..artifact_names import SCORES
from ..plan import Plan
from ..stages.prepare import EVALUATION_FILE, TRAIN_FILE, prefix_task_errors, read_locations
from ..stages.stage import Stage

# A data file of up to this size is read whole; of a larger one the first records. The stage `prepare` reads all.
_MAX_DATA_BYTES = 64 << 20
_FIRST_RECORDS = 2_000
_MAX_EXAMPLES = 5_000  # whose lengths are compared
_LONGEST = 8  # examples that are tokenized
_MANY_UNKNOWN = 0.2


@dataclass(frozen=True, slots=True)
class CheckedPrompts:
    """Evaluation prompts of one length.

    Attributes:
        text: the longest prompt that was checked, special tokens included.
        tokens: its length; None behind a server.
        reserve: tokens kept free for the answer.
    """

    documents: int
    tokens: int | None
    reserve: int
    text: str


@dataclass(frozen=True, slots=True)
class CheckedData:
    """The data of one task.

    Attributes:
        task: its name; None for the study itself.
        examples: what the stage `prepare` makes of it.
        counts: as that stage counts records; None of a file of which only the first ones were read.
        prompts: one for each prompt length that is evaluated.
    """

    task: str | None
    examples: Artifact
    counts: Mapping[str, int] | None
    prompts: list[CheckedPrompts]


def check_data(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> list[CheckedData]:
    """For `--dry-run`: read the records that are not prepared yet, and check prompts of them (`check_prompts`).

    From a file above 64 MiB only the first 2,000 records are read; a run reads all of them before it starts Ray.
    """
    checked = []
    for name, study, prepare in _tasks(plan):
        if prepare not in stages:
            continue
        with prefix_task_errors(name):
            examples = _prepared(prepare) if prepare.artifact.is_finished else _read(prepare)
            if examples.counts is not None and (warning := distractor_warning(examples.counts)):
                warn_once(f"{prepare.name}: {warning}")
            prompts = _check_prompts(study, recipe.runtime.endpoint, plan, stages, examples)
            checked.append(CheckedData(name, prepare.artifact, examples.counts, prompts))
    return checked


def check_prompts(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    """Raise if the longest prepared prompts do not fit the model's context with the response, or its vocabulary.

    The context is also that of the server, if it names it.
    """
    for name, study, prepare in _tasks(plan):
        if prepare in stages:
            with prefix_task_errors(name):
                _check_prompts(study, recipe.runtime.endpoint, plan, stages, _prepared(prepare))


def _tasks(plan: Plan) -> Iterator[tuple[str | None, Study, Stage]]:
    """The name, study and stage `prepare` of the study itself (no name) and of each other task."""
    yield None, plan.study, plan.prepare
    for name, other in plan.other_tasks.items():
        yield name, other.study, other.prepare


@dataclass(frozen=True, slots=True)
class _Examples:
    """The examples for training and for evaluation.

    Attributes:
        counts: as the stage `prepare` counts records; None of a file of which only the first ones were read.
        locations: returns where the data set has an example, by its id.
    """

    train: Iterable[Example]
    evaluation: Iterable[Example]
    counts: Mapping[str, int] | None
    locations: Callable[[], Mapping[str, str]]


def _prepared(prepare: Stage) -> _Examples:
    """The prepared examples."""
    train, evaluation = _read_prepared(prepare.artifact, TRAIN_FILE), _read_prepared(prepare.artifact, EVALUATION_FILE)
    counts = prepare.output().manifest().counts
    return _Examples(train, evaluation, counts, functools.partial(read_locations, prepare.artifact))


def _read_prepared(artifact: Artifact, file: str) -> Iterator[Example]:
    with artifact.reading(file), artifact.fs.open(f"{artifact.path}/{file}") as opened:
        for batch in open_parquet(opened).iter_batches(batch_size=256, use_threads=False):
            for row in batch.to_pylist():
                yield example_from_row(row)


def _read(prepare: Stage) -> _Examples:
    """The examples of the data set; of a large file some of its examples, for training and for evaluation."""
    data, documents = prepare.study.data, prepare.derived["longest_prompt"]
    if data_bytes(data.path) <= _MAX_DATA_BYTES:
        split = load_split(data, documents=documents, seed=prepare.study.seed, eval_seed=prepare.study.evaluation.seed)
        return _Examples(split.train, split.evaluation, split.counts, lambda: split.locations)
    found = islice(read_examples(data, documents), _FIRST_RECORDS)
    # Examples that still lack distractors are shorter than their prompts will be.
    examples = [each for each in found if isinstance(each, Example) and len(each.documents) >= documents]
    return _Examples(examples, examples, None, dict)


def _check_prompts(
    study: Study,
    endpoint: EndpointSection,
    plan: Plan,
    stages: Sequence[Stage],
    examples: _Examples,
) -> list[CheckedPrompts]:
    limits = _Limits.of(study, endpoint, examples.locations)
    checked = []
    if any(stage.artifact.name in SCORES for stage in stages):
        evaluated = list(islice(examples.evaluation, _MAX_EXAMPLES))
        for count in study.prompt_lengths:
            length = functools.partial(_characters, documents=count)
            longest = heapq.nlargest(_LONGEST, evaluated, key=length)
            if longest:
                checked.append(_check_examples(limits, longest, count, study.evaluation.max_new_tokens))
    if study is plan.study and plan.first_sample in stages:
        # A sample whose prompt is too long is a failed one, of which some are allowed. If the shortest is, all are.
        length = functools.partial(_characters, documents=study.data.documents)
        shortest = heapq.nsmallest(1, islice(examples.train, _MAX_EXAMPLES), key=length)
        if shortest:
            _check_examples(limits, shortest, study.data.documents, study.sampling.max_new_tokens)
    return checked


@dataclass(frozen=True, slots=True)
class _Limits:
    """What prompts of a study must fit.

    Attributes:
        served_context: tokens of the server's context, if it reports them.
        vocabulary: its size; 0 behind a server.
        locations: as in `_Examples`.
    """

    study: Study
    endpoint: EndpointSection
    served_context: int | None
    vocabulary: int
    locations: Callable[[], Mapping[str, str]]

    @classmethod
    def of(cls, study: Study, endpoint: EndpointSection, locations: Callable[[], Mapping[str, str]]) -> "_Limits":
        from pos2distill.models.architecture import load_config

        vocabulary = 0
        if not study.model.uses_chat_api:
            vocabulary = load_config(study.model).get_text_config().vocab_size
        served_tokens = None
        if not study.has_weights:
            from pos2distill.sampling.engines.openai_server import served_context

            served_tokens = served_context(study.model, endpoint)
        return cls(study, endpoint, served_tokens, vocabulary, locations)

    def require(self, example: Example, prompt: str | Tokens, reserve: int) -> None:
        """Reject a prompt that does not fit.

        Raises:
            UserError: naming the example, or the model whose tokenizer is another one's.
        """
        self._require_room(example, prompt, reserve)
        # Only the server knows the tokens of messages.
        if not isinstance(prompt, str) and prompt.max(initial=0) >= self.vocabulary:
            raise UserError(
                f"{self.study.model.path}: its tokenizer gives token {prompt.max()}, its config.json describes "
                f"{self.vocabulary} tokens; the tokenizer and the model do not belong together"
            )

    def _require_room(self, example: Example, prompt: str | Tokens, reserve: int) -> None:
        """Reject a prompt that the server would cut or reject. Of messages, at least their words are tokens."""
        tokens = fewest_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if self.served_context and tokens + reserve > self.served_context:
            least = "at least " if isinstance(prompt, str) else ""
            raise UserError(
                f"{self.endpoint.base_url}: serves the model with a context of {self.served_context} tokens, but the "
                f"prompt of {self.label(example)} has {least}{tokens}, and {reserve} are for the answer; lower "
                f"data.documents, evaluation.other_documents or evaluation.max_new_tokens, or start the server with a "
                f"longer context"
            )

    def label(self, example: Example) -> str:
        """An example by its id and, if it is known, where the data set has it."""
        location = self.locations().get(example.example_id)
        return f"example {example.example_id}" + (f" ({location})" if location is not None else "")


def _check_examples(limits: _Limits, examples: Sequence[Example], documents: int, reserve: int) -> CheckedPrompts:
    """Build the prompts of at least one example, with the gold documents first."""
    build = cached_prompt_builder(limits.study, reserve)
    prompts: list[str | Tokens] = []
    for example in examples:
        slots = tuple(range(len(example.golds)))
        prompt: str | Tokens
        try:
            if isinstance(build, MessageBuilder):
                prompt = joined_text(build(example, documents, slots))
            else:
                prompt = build(example, documents, slots)
        except PromptTooLong as error:
            raise UserError(f"{limits.label(example)}: {error.problem}") from None
        limits.require(example, prompt, reserve)
        prompts.append(prompt)
    longest = max(prompts, key=len)
    if isinstance(build, MessageBuilder) or isinstance(longest, str):
        return CheckedPrompts(documents, None, reserve, str(longest))
    _warn_of_unknown_words(limits.study.model.path, longest, build.tokenizer.unk_token_id)
    return CheckedPrompts(documents, len(longest), reserve, str(build.tokenizer.decode(longest)))


def _warn_of_unknown_words(model: str, prompt: Tokens, unknown: int | None) -> None:
    """Warn of a model that cannot read the data, such as a toy: it would answer every question wrong."""
    fraction = float((prompt == unknown).mean()) if unknown is not None else 0.0
    if fraction > _MANY_UNKNOWN:
        warn_once(
            f"{model}: its tokenizer does not know {fraction:.0%} of a prompt's words; is it the model for this data "
            f"and for this wording (data.prompt)?"
        )


def _characters(example: Example, documents: int) -> int:
    """The length of an example's prompt without the words around it."""
    golds = example.golds
    shown = (*golds, *example.distractors[: documents - len(golds)])
    return len(example.question) + sum(len(document.title) + len(document.text) for document in shown)
