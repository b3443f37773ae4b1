"""What defines a result: the part of a recipe that is fingerprinted."""

import math
from typing import Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Count, Section

ONE_HOP_FORMATS = ("nq", "nq_oracle", "kv", "dpr")
SEVERAL_HOP_FORMATS = ("musique", "hotpotqa", "2wiki")  # `jsonl` holds either
RowWeights = Literal["paper", "official", "uniform", "adaptive"]


class ModelSection(Section):
    """The model that is measured, sampled from and distilled."""

    path: str = Field(description="folder or fsspec URL of a Hugging Face model, or its hub name")
    revision: str | None = Field(None, description="hub revision; fixes what a hub name stands for")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="on a CPU float32 is often faster")
    engine: Literal["vllm", "hf", "fake"] = Field(
        "vllm",
        description="what generates: vllm; hf, transformers itself, slower and without a start-up; fake, for tests",
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto", description="auto: flash_attention_2 where it can be had, else sdpa"
    )
    max_length: int | None = Field(None, gt=0, description="context in tokens; default: what the model's config says")
    trust_remote_code: bool = False


class DataSection(Section):
    """The questions, and how they are shown."""

    format: Literal["nq", "nq_oracle", "kv", "dpr", "musique", "hotpotqa", "2wiki", "jsonl"] = Field(
        description="see docs/data.md"
    )
    path: str = Field(description="a file, gzip or plain: a path or any fsspec URL")
    prompt: Literal["qa", "kv", "plain", "coc", "reasoning"] = Field(
        "qa",
        description="wording: qa and kv are the benchmarks' own (Liu et al. 2024); reasoning: a chain of thought as in "
        "the paper's R2; coc: one with a source for every claim; plain: documents, then the question",
    )
    metric: Literal["sub_em", "em"] = Field(
        "sub_em",
        description="sub_em: an answer stands in the first line; em: what follows 'The answer is:' equals an answer",
    )
    hops: tuple[int, ...] = Field(
        (1,), description="gold documents of an example; of files that mix numbers of hops, those used"
    )
    documents: int = Field(20, ge=2, description="documents in a prompt")
    distractors: Literal["given", "random"] = Field(
        "given",
        description="given: those of the record, and a record with too few is refused; random: the missing ones are drawn "
        "from other examples. Random distractors are easier than retrieved ones, so results are named after them",
    )
    train_examples: int = Field(300, ge=1, description="examples to sample from and train on")
    eval_examples: int = Field(500, ge=1, description="other examples, asked at every slot")
    eval_fraction: float = Field(
        0.5, gt=0, lt=1, description="share of all questions set aside for evaluation, by a hash of the question"
    )
    answer_in_gold: bool = Field(
        True, description="to_user_error a row of one hop whose gold document holds none of the answers"
    )

    @model_validator(mode="after")
    def _hops_fit_the_format(self) -> "DataSection":
        if not self.hops or len(set(self.hops)) != len(self.hops) or min(self.hops) < 1 or max(self.hops) > 4:
            raise ValueError("hops: expected numbers of gold documents from 1 to 4, each of them once")
        if self.format in ONE_HOP_FORMATS and self.hops != (1,):
            raise ValueError(f"hops: rows of format '{self.format}' have one gold document; set [1]")
        if self.format in SEVERAL_HOP_FORMATS and 1 in self.hops:
            raise ValueError(f"hops: rows of format '{self.format}' have several gold documents; set [2]")
        if (self.metric == "em") != (self.prompt in ("reasoning", "coc")) and self.prompt != "plain":
            asked = "asks" if self.metric == "sub_em" else "does not ask"
            other = "em" if self.metric == "sub_em" else "sub_em"
            raise ValueError(
                f"metric: '{self.metric}', but prompt '{self.prompt}' {asked} for 'The answer is:'; "
                f"set data.metric={other} or another data.prompt"
            )
        if 1 in self.hops and len(self.hops) > 1:
            raise ValueError("hops: one hop and several cannot be mixed; they are judged and placed differently")
        if max(self.hops) >= self.documents:
            raise ValueError(f"hops: {max(self.hops)} gold documents leave no distractor among {self.documents}")
        return self


class MethodSection(Section):
    """What is distilled from where (arXiv:2508.15709); the name decides what `weights`, `anchor_weight` leave open."""

    name: Literal["r1", "kl+align", "kl", "r2", "seqkd", "sft"] = Field(
        "r1",
        description="r1: KL to the frozen model, position weights, anchor; kl+align: without anchor; kl: without "
        "weights too; r2: cross-entropy on sampled chains; seqkd: on sampled answers; sft: on the data set's answers",
    )
    advantageous_slot: Literal["first", "last", "auto"] | int | tuple[int, ...] = Field(
        "first",
        description="where the model does best; of several hops, the first or last slots in hop order, or a list; "
        "auto: measured on the training examples",
    )
    auto_slots: Literal["all"] | Count | None = Field(
        None,
        description="auto: slots tried, spread evenly; of several hops the first slot, with the others next to it. "
        "Default: 10, or all where there are fewer",
    )
    auto_examples: int = Field(100, ge=1, description="auto: training examples asked")
    k: int = Field(4, ge=0, description="trivial slots, or ordered tuples of them, drawn for one example")
    distractor_order: Literal["fixed", "reshuffled"] = Field("fixed", description="their order in each row's prompt")
    weights: RowWeights | None = Field(
        None,
        description="of trivial rows. paper: alpha; official: as the authors' code scales it; uniform: all alike; "
        "adaptive (of cross-entropies): harder rows count more. Default: paper for r1 and kl+align, else uniform",
    )
    weights_scope: Literal["global", "micro"] = Field("global", description="the batch that position weights see")
    anchor_weight: float | None = Field(
        None, ge=0, description="lambda, the weight of the rows at the advantageous slot. Default: 1 for r1, else 0"
    )
    alignment: Literal["shifted", "official"] = Field(
        "shifted", description="shifted: logits that predict the response; official: one later, as the authors' code"
    )
    teacher: Literal["cached", "resident", "topk"] = Field(
        "cached",
        description="cached: hidden states stored with the samples; resident: the frozen model beside the student; "
        "topk: the likeliest tokens, as the sampler tells them, without a teacher stage; approximate",
    )
    teacher_topk: int | None = Field(
        None, ge=1, description="topk: tokens kept at each position, the rest counts as one. Default: 64"
    )

    @property
    def loss(self) -> Literal["kl", "ce"]:
        """What a row's loss is: KL to the frozen model, or cross-entropy on the response."""
        return "kl" if self.name in ("r1", "kl+align", "kl") else "ce"

    @property
    def row_weights(self) -> RowWeights:
        """How trivial rows are weighted; the method's own way if nothing else is set."""
        return self.weights or ("paper" if self.name in ("r1", "kl+align") else "uniform")

    @property
    def anchor(self) -> float:
        """lambda; the method's own if nothing else is set."""
        return float(self.name == "r1") if self.anchor_weight is None else self.anchor_weight

    @property
    def tried_slots(self) -> Literal["all"] | int:
        """How many slots `auto` tries, at most."""
        return self.auto_slots or 10

    @property
    def needs_teacher(self) -> bool:
        """Whether training looks at the frozen model's distribution."""
        return self.loss == "kl" or self.row_weights == "adaptive"

    @property
    def stored_top_k(self) -> int:
        """How many of the likeliest tokens are stored with the samples at each position; 0 for another teacher."""
        return (self.teacher_topk or 64) if self.needs_teacher and self.teacher == "topk" else 0

    @property
    def has_cached_teacher(self) -> bool:
        """Whether hidden states are stored with the samples."""
        return self.needs_teacher and self.teacher == "cached"

    @property
    def has_resident_teacher(self) -> bool:
        """Whether the frozen model lives beside the student."""
        return self.needs_teacher and self.teacher == "resident"

    @model_validator(mode="after")
    def _weights_fit_the_loss(self) -> "MethodSection":
        possible = {"kl": ("paper", "official", "uniform"), "ce": ("uniform", "adaptive")}[self.loss]
        if self.row_weights not in possible or (self.name == "sft" and self.weights == "adaptive"):
            raise ValueError(f"weights: '{self.weights}' does not go with method '{self.name}'")
        if self.alignment == "official" and self.loss == "ce":
            raise ValueError(f"alignment: 'official' is about distributions; method '{self.name}' distils text")
        if not self.k and not self.anchor:
            raise ValueError("k: 0 trivial slots and no weight on the advantageous one leave nothing to train on")
        return self

    @model_validator(mode="after")
    def _sampler_knows_what_is_distilled(self) -> "MethodSection":
        if self.teacher != "topk":
            if self.teacher_topk is not None:
                raise ValueError(f"teacher_topk: only teacher 'topk' keeps some tokens, not '{self.teacher}'")
            return self
        if self.alignment == "official":
            raise ValueError(
                "alignment: 'official' distils one token after the response's end, of which the sampler tells nothing; "
                "set teacher to cached or resident"
            )
        if self.row_weights == "adaptive":
            raise ValueError(
                "weights: 'adaptive' wants the frozen model's loss on the whole response, and the sampler tells "
                "nothing of a closing token that it did not draw; set teacher to cached or resident"
            )
        return self


class SamplingSection(Section):
    """How the advantaged responses are drawn and which of them are kept."""

    temperature: float = Field(0.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(100, ge=1, description="of a response; 512 for data.prompt reasoning or coc")
    keep: Literal["correct", "all"] = Field("correct", description="which responses are distilled")


class LoraSection(Section):
    """Low-rank adapters (arXiv:2106.09685). Without this section all weights are trained.

    There is no dropout, as in all training here: rows are passed twice, first for their weights and then for the
    gradient, with equal losses.
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="an adapter counts alpha / rank times")
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description="linear layers by the last part of their names, as q_proj; all: every one but the output head",
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> "LoraSection":
        if not self.targets:
            raise ValueError("targets: expected at least one linear layer, or all")
        return self


class TrainingSection(Section):
    """The optimisation; the defaults are the paper's."""

    learning_rate: float = Field(3e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.01, ge=0)
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="cosine decay ends at this share of the rate")
    max_grad_norm: float = Field(1.0, gt=0)
    global_batch_rows: int = Field(
        32,
        ge=2,
        description="rows of the global batch, at most: all ranks, all micro-batches; as many examples as their k + 1 "
        "rows leave room for. Rows at the advantageous slot keep their places where lambda is 0, but are not computed",
    )
    epochs: int = Field(2, ge=1)
    order: Literal["arrival", "fixed"] = Field(
        "arrival",
        description="of a streamed run's first epoch. arrival: as samples come; fixed: by the seed, whatever comes "
        "first. All else has one order, by the seed",
    )
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    lora: LoraSection | None = None


class EvaluationSection(Section):
    """What is measured: greedy answers by the gold document's slot."""

    slots: Literal["all", "pairs"] | Count | tuple[int | tuple[int, ...], ...] | None = Field(
        None,
        description="all; a number of slots spread evenly from first to last; a list (0-based). Of several hops: every "
        "ordered tuple of these; pairs: the paper's 12 in their three groups. Default: all; of several hops pairs",
    )
    other_documents: tuple[int, ...] = Field((), description="further prompt lengths, in documents")
    other_slots: Literal["all", "pairs"] | Count | None = Field(
        None,
        description="slots at each further length. Default: 10, or all where there are fewer; of several hops pairs",
    )
    max_new_tokens: int = Field(100, ge=1, description="of an answer; 512 for data.prompt reasoning or coc")
    also_evaluate: tuple[str, ...] = Field(
        (), description="other recipes, by name or path, whose data and evaluation both models are asked too"
    )
    bootstrap_samples: int = Field(2000, ge=100, description="bootstrap bootstrap_samples of the intervals")


class Study(Section):
    """All that defines a result. Equal studies have equal fingerprints and, up to rounding, equal results."""

    model: ModelSection
    data: DataSection
    method: MethodSection = MethodSection()
    sampling: SamplingSection = SamplingSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    seed: int = Field(0, ge=0)

    def advantageous(self, hops: int) -> tuple[int, ...]:
        """The advantageous slots of an example with so many gold documents, 0-based, in hop order.

        Raises:
            ValueError: while `auto` is not resolved.
        """
        slot = self.method.advantageous_slot
        if slot == "auto":
            raise ValueError("the advantageous slot is measured first")
        if isinstance(slot, str):
            first = 0 if slot == "first" else self.data.documents - hops
            return tuple(range(first, first + hops))
        return (slot,) if isinstance(slot, int) else slot

    @property
    def has_frozen_copy(self) -> bool:
        """Whether a second model stands beside the student. With adapters the student holds the initial one itself."""
        return self.method.has_resident_teacher and self.training.lora is None

    @property
    def evaluated_slots(self) -> Literal["all", "pairs"] | int | tuple[int | tuple[int, ...], ...]:
        """Which slots are evaluated at the length trained on."""
        return self.evaluation.slots or ("all" if self.data.hops == (1,) else "pairs")

    @property
    def other_evaluated_slots(self) -> Literal["all", "pairs"] | int:
        """Which slots are evaluated at further lengths."""
        return self.evaluation.other_slots or (10 if self.data.hops == (1,) else "pairs")

    @model_validator(mode="after")
    def _advantageous_slot_exists(self) -> "Study":
        documents, hops = self.data.documents, self.data.hops
        slot = self.method.advantageous_slot
        if not isinstance(slot, str):
            _check_slots("method.advantageous_slot", slot, documents, hops)
        elif slot == "auto" and len(hops) > 1:
            raise ValueError("method.advantageous_slot: 'auto' wants one number of hops (data.hops)")
        elif slot == "auto":
            _check_count("method.auto_slots", self.method.auto_slots, documents - hops[0] + 1)
        if self.method.k > (trivial := math.perm(documents, min(hops)) - 1):
            raise ValueError(
                f"method.k: {self.method.k} trivial slots asked for, but {documents} documents have {trivial}; "
                f"lower method.k or raise data.documents"
            )
        return self

    @model_validator(mode="after")
    def _batch_holds_an_example(self) -> "Study":
        if self.training.global_batch_rows <= self.method.k:
            raise ValueError(
                f"training.global_batch_rows: {self.training.global_batch_rows} rows have no room for one example's "
                f"{self.method.k + 1} (method.k + 1)"
            )
        return self

    @model_validator(mode="after")
    def _evaluated_slots_exist(self) -> "Study":
        documents, hops = self.data.documents, self.data.hops
        slots = self.evaluation.slots
        if isinstance(slots, tuple):
            for each in slots:
                _check_slots("evaluation.slots", each, documents, hops)
            if len(set(slots)) != len(slots) or not slots:
                raise ValueError("evaluation.slots: expected at least one slot, each of them once")
        others = self.evaluation.other_documents
        further = (("other_slots", self.evaluation.other_slots, each) for each in others)
        for name, wanted, there in (("slots", slots, documents), *further):
            if wanted == "pairs" and hops == (1,):
                raise ValueError(f"evaluation.{name}: 'pairs' are for several hops (data.hops)")
            if wanted not in ("pairs", None) and len(hops) > 1:
                raise ValueError(f"evaluation.{name}: of several numbers of hops (data.hops) only 'pairs' can be asked")
            if isinstance(wanted, int) and wanted < max(hops):
                raise ValueError(f"evaluation.{name}: {wanted} slots have no place for {max(hops)} gold documents")
            _check_count(f"evaluation.{name}", wanted, there)
        if few := [n for n in others if n <= max(hops) or n == documents]:
            raise ValueError(
                f"evaluation.other_documents: {few[0]} leaves no distractor (data.hops) or equals data.documents"
            )
        if len(set(others)) != len(others):
            raise ValueError("evaluation.other_documents: expected each number once")
        return self


def _check_count(field: str, wanted: object, there: int) -> None:
    if isinstance(wanted, int) and wanted > there:
        raise ValueError(f"{field}: {wanted} slots asked for, but there are {there}; lower it, or say all")


def _check_slots(field: str, slots: int | tuple[int, ...], documents: int, hops: tuple[int, ...]) -> None:
    places = (slots,) if isinstance(slots, int) else slots
    if absent := [slot for slot in places if not 0 <= slot < documents]:
        raise ValueError(f"{field}: {absent[0]} is not one of the slots 0 to {documents - 1}")
    if hops != (len(places),) or len(set(places)) != len(places):
        wanted = " or ".join(map(str, hops))
        raise ValueError(f"{field}: {list(places)} should be {wanted} different slots, one for each gold document")
