"""The content of analysis.json: the figures of one model, from its passes and its predictions.

docs/analysis.md describes every field.

Shapes: E examples, S placements, N layers, D documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.config import Study
from pos2distill.evaluation.attribution import Attribution, summarize_attribution
from pos2distill.evaluation.chains import Chain, judge_chain, summarize_chains
from pos2distill.evaluation.token_shift import Shift, estimate_mean, summarize_shift
from pos2distill.records import Bools, Document, Example, Floats, Slots
from pos2distill.tasks.permutations import arrange, evaluated_placements
from pos2distill.tasks.thoughts import without_thought

PARTS_AROUND = ("before", "after", "response")
QUERIES = ("answer", "last_prompt_token")
# What `summarize_analysis` returns.
FIGURES = ("documents", "slots", "groups", "token_shift", "attention", "thought_shift", "wrong_answers")


def summarize_analysis(
    study: Study, passes: pa.Table, predictions: pa.Table, examples: Mapping[str, Example]
) -> dict[str, Any]:
    """The figures of one model.

    Args:
        passes: a table of `PASSES_SCHEMA`.
        predictions: a table of `PREDICTION_SCHEMA`; only those at the prompt length of training are used.
        examples: those of the predictions, by id.
    """
    documents, seed = study.data.documents, study.evaluation.seed
    at_length = predictions.filter(pc.field("documents") == documents)
    return {
        "documents": documents,
        **_placements(study),
        "token_shift": _token_shift(passes, seed),
        "attention": _attention(passes, documents, seed),
        "thought_shift": _thought_shift(study, at_length, examples),
        "wrong_answers": _wrong_answers(study, at_length, examples),
    }


def _placements(study: Study) -> dict[str, Any]:
    """0-based slots and group of every placement, of the examples with the fewest hops."""
    by_hops = evaluated_placements(study.data.documents, study.data.hops, study.evaluation.slots)
    placements = by_hops[min(study.data.hops)]
    return {
        "slots": [list(placement.slots) for placement in placements],
        "groups": [placement.group for placement in placements],
    }


def _skipped(reason: str) -> dict[str, Any]:
    return {"skipped": reason}


def _token_shift(passes: pa.Table, seed: int) -> dict[str, Any]:
    if not len(passes):
        return _skipped("no answer at the advantageous slot was correct")
    shifts = []
    for row in passes.select(["slots", "placement_slots", "kl", "agrees"]).to_pylist():
        trivial = [slots != row["slots"] for slots in row["placement_slots"]]
        shifts.append(Shift(np.asarray(row["kl"], np.float64), np.asarray(row["agrees"], bool), np.asarray(trivial)))
    return summarize_shift(shifts, seed=seed)


def _attention(passes: pa.Table, documents: int, seed: int) -> dict[str, Any]:
    if not len(passes):
        return _skipped("no answer at the advantageous slot was correct")
    rows = passes.select(["placement_slots", "layers", "attention"]).to_pylist()
    layers = rows[0]["layers"]
    if not layers:
        return _skipped("analysis.attention is false")
    shape = (len(rows), -1, layers, len(QUERIES), documents + len(PARTS_AROUND))
    attention_ESNQP = np.asarray([row["attention"] for row in rows], np.float64).reshape(shape)
    gold_ESD = _gold_documents([row["placement_slots"] for row in rows], documents)
    summary: dict[str, Any] = {"examples": len(rows), "layers": layers}
    for index, query in enumerate(QUERIES):
        summary[query] = _attention_of(attention_ESNQP[:, :, :, index], gold_ESD, seed)
    return summary


def _gold_documents(placements: Sequence[Sequence[Sequence[int]]], documents: int) -> Bools:
    """(E, S, D) which documents are gold."""
    gold_ESD = np.zeros((len(placements), len(placements[0]), documents), bool)
    for example, all_slots in enumerate(placements):
        for placement, slots in enumerate(all_slots):
            gold_ESD[example, placement, slots] = True
    return gold_ESD


def _attention_of(attention_ESNP: Floats, gold_ESD: Bools, seed: int) -> dict[str, Any]:
    """The attention of one kind of query: sums over the tokens of a part, means over heads and examples."""
    documents = gold_ESD.shape[2]
    mean_ESP = attention_ESNP.mean(2)
    # The sum over several gold documents.
    gold_ESN = np.einsum("esnd,esd->esn", attention_ESNP[..., :documents], gold_ESD)
    mean_SP = mean_ESP.mean(0)
    around = {name: mean_SP[:, documents + index].tolist() for index, name in enumerate(PARTS_AROUND)}
    return {
        "by_document": mean_SP[:, :documents].tolist(),
        **around,
        "gold": [estimate_mean(gold_E, seed) for gold_E in gold_ESN.mean(2).T],
        "gold_by_layer": gold_ESN.mean(0).T.tolist(),
    }


def _thought_shift(study: Study, predictions: pa.Table, examples: Mapping[str, Example]) -> dict[str, Any]:
    if max(study.data.hops) == 1:
        return _skipped("questions of one hop are answered without a chain (data.hops)")
    if study.data.metric != "em":
        return _skipped("answers are not chains of thought with a conclusion (data.metric is not em)")
    template = study.data.template
    if template is not None and not template.names_documents:
        return _skipped("documents cannot be named in a chain: data.template shows neither their numbers nor titles")
    by_number = study.data.prompt == "coc" if template is None else template.asks_for_numbers
    by: Literal["number", "title"] = "number" if by_number else "title"
    chains: list[tuple[str, str, Chain]] = []
    ambiguous = 0
    for prediction, example, shown in _shown(study, predictions, examples):
        text = without_thought(prediction["text"])
        chain = judge_chain(text, correct=prediction["correct"], answers=example.answers, shown=shown, by=by)
        if chain is None:
            ambiguous += 1
        else:
            chains.append((example.example_id, prediction["group"], chain))
    if not chains:
        return _skipped("documents cannot be distinguished in a chain: titles of a prompt are missing or equal")
    summary = summarize_chains(chains, documents=study.data.documents, seed=study.evaluation.seed)
    return {"documents_named_by": by, "left_out_for_equal_titles": ambiguous, **summary}


def _wrong_answers(study: Study, predictions: pa.Table, examples: Mapping[str, Example]) -> dict[str, Any]:
    wrong: list[tuple[Slots, list[int]]] = []
    for prediction, example, shown in _shown(study, predictions, examples):
        if prediction["correct"]:
            continue
        holding = Attribution(example.question, study.data.metric, shown)(prediction["text"])
        wrong.append((tuple(prediction["slots"]), holding))
    return {"answers": len(predictions), **summarize_attribution(wrong, documents=study.data.documents)}


def _shown(
    study: Study, predictions: pa.Table, examples: Mapping[str, Example]
) -> Iterator[tuple[dict[str, Any], Example, tuple[Document, ...]]]:
    """Each prediction with its example and the documents of its prompt in order."""
    # Python objects of all token ids would take gigabytes.
    for prediction in predictions.drop_columns(["sampled_ids"]).to_pylist():
        example, slots = examples[prediction["example_id"]], tuple(prediction["slots"])
        shown = arrange(example, study.data.documents, slots, order=prediction["order"])
        yield prediction, example, shown
