"""Warnings about a stage's counts, which are in its manifest."""

from collections.abc import Mapping


def count_warnings(counts: Mapping[str, int]) -> list[str]:
    """All warnings about a stage's counts.

    Args:
        counts: those in the manifest of any stage. What a stage does not count gives no warning.
    """
    warnings = (
        _refusal_warning(counts),
        _truncation_warning(counts),
        _thought_warning(counts),
        _shortage_warning(counts),
        _usage_warning(counts),
        _search_warning(counts),
        distractor_warning(counts),
    )
    return [warning for warning in warnings if warning is not None]


def _refusal_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if a server refused prompts, else None."""
    if not counts.get("refused"):
        return None
    return (
        f"{counts['refused']} of {counts['examples']} questions are left out at every position, since the server "
        f"refused one of their prompts for its content; refused.parquet beside the answers has its reasons"
    )


def _usage_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if a server did not count the tokens of prompts, else None."""
    if not counts.get("without_usage"):
        return None
    return (
        f"the server counted no tokens in {counts['without_usage']} of {counts['prompts']} prompts, so nothing shows "
        f"whether it cut them"
    )


def _truncation_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if more than a tenth of a stage's answers reached `max_new_tokens`, else None."""
    section, answers = _answers(counts)
    truncated = counts.get("hit_max_tokens", 0)
    if 10 * truncated <= answers:
        return None
    return f"{truncated} of {answers} answers were cut at {section}.max_new_tokens; raise it if they are incomplete"


def _thought_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if more than a tenth of a stage's answers have a thought, else None."""
    section, answers = _answers(counts)
    thoughts, unfinished = counts.get("thoughts", 0), counts.get("unfinished_thoughts", 0)
    if 10 * thoughts <= answers:
        return None
    effect = "which is not judged; leave room for it in"
    if unfinished:
        effect = f"of which {unfinished} do not end, so that the answer is wrong; raise"
    return (
        f"{thoughts} of {answers} answers begin with a thought (<think>), {effect} {section}.max_new_tokens, or switch "
        f"thinking off, in many models by model.chat_template_kwargs={{enable_thinking: false}}"
    )


def _answers(counts: Mapping[str, int]) -> tuple[str, int]:
    """The section with the settings of a stage's answers, and their number."""
    return ("sampling", counts["sampled"]) if "sampled" in counts else ("evaluation", counts.get("prompts", 0))


def _shortage_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if fewer samples were kept than are wanted, else None."""
    if counts.get("kept", 0) >= counts.get("wanted", 0):
        return None
    return (
        f"{counts['kept']} of {counts['wanted']} wanted samples were kept after all {counts['sampled']} candidates had "
        f"been sampled; raise data.train_candidates, give more data, lower data.train_examples, or try another slot or "
        f"model"
    )


def _search_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if more than half the candidates of a search for RoPE scales give no correct answer, else None."""
    candidates, useless = counts.get("candidates", 0), counts.get("without_correct_answers", 0)
    if 2 * useless <= candidates:
        return None
    return (
        f"{useless} of {candidates} candidates give no correct answer, so that few could be compared; lower "
        f"inference.search.largest, or increase inference.search.population"
    )


def distractor_warning(counts: Mapping[str, int]) -> str | None:
    """A warning if more than a tenth of the evaluated questions have an answer in a distractor, else None."""
    found, questions = counts.get("answer_in_distractor", 0), counts.get("eval", 0)
    if 10 * found <= questions:
        return None
    return (
        f"{found} of {questions} evaluated questions have an answer in a document that is not marked as gold, where a "
        f"model finds it at every position of the gold one; leave such documents out of the data"
    )
