import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pos2distill.config import ModelSection
from pos2distill.models.chat import end_of_turn_id
from pos2distill.models.load import load_tokenizer
from pos2distill.records import Tokens, TopKLogprobs
from pos2distill.sampling.engines.protocol import Completion, Failure, TextCompletion
from pos2distill.sampling.postprocess import ResponseProcessor, process_text


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelSection(path=tiny_model_path))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    index = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(index, int)
    return index


def make_processor(
    tokenizer: PreTrainedTokenizerBase, keep: str = "correct", metric: str = "sub_em"
) -> ResponseProcessor:
    end = end_of_turn_id(tokenizer)
    eos = token_id(tokenizer, "<s>")
    return ResponseProcessor(tokenizer, metric=metric, end_of_turn=end, stop_ids=[end, eos], keep=keep)  # type: ignore[arg-type]


def complete(ids: list[int]) -> Completion:
    return Completion(np.asarray(ids, np.int32), "stop")


@pytest.mark.parametrize(
    ("text", "cut", "correct", "outcome"),
    [
        ("It is 42.", "It is 42.", True, "kept"),
        ("It is 42.\nOr 43.", "It is 42.", True, "kept"),
        ("No idea.\n42", "No idea.", False, "wrong"),
        ("43", "43", False, "wrong"),
        ("", "", False, "empty"),
        ("\n42", "42", True, "kept"),  # some models begin with a line break
        ("  \t\n42\n43", "42", True, "kept"),
        (" \n ", "", False, "empty"),
    ],
)
def test_response_processor_truncates_then_scores(
    tokenizer: PreTrainedTokenizerBase, text: str, cut: str, correct: bool, outcome: str
) -> None:
    ids = encode(tokenizer, text)
    processed = make_processor(tokenizer)(complete([*ids, end_of_turn_id(tokenizer)]), ["42", "forty"])
    assert (processed.text, processed.truncated_text, processed.correct, processed.outcome) == (
        text,
        cut,
        correct,
        outcome,
    )


@pytest.mark.parametrize(
    ("text", "correct", "f1", "outcome"),
    [
        ("It is 42 or 43.\nThe answer is: 42.", True, 1.0, "kept"),
        ("42\nThe answer is: 42 apples", False, 2 / 3, "wrong"),
        ("It is 42.", False, 0.0, "wrong"),
        (" \n", False, 0.0, "empty"),
    ],
)
def test_response_processor_keeps_a_chain_of_thought_whole(
    tokenizer: PreTrainedTokenizerBase, text: str, correct: bool, f1: float, outcome: str
) -> None:
    ids = encode(tokenizer, text)
    processed = make_processor(tokenizer, metric="em")(complete(ids), ["42", "forty"])
    assert (processed.truncated_text, processed.correct, processed.outcome) == (text.strip(), correct, outcome)
    assert processed.f1 == pytest.approx(f1)
    assert processed.response_ids.tolist() == [*ids, end_of_turn_id(tokenizer)]


@pytest.mark.parametrize("keep", ["correct", "all"])
def test_response_processor_of_a_failure(tokenizer: PreTrainedTokenizerBase, keep: str) -> None:
    processed = make_processor(tokenizer, keep=keep)(Failure("out of memory"), ["42", ""])
    assert (processed.text, processed.truncated_text, processed.correct, processed.f1, processed.outcome) == (
        "",
        "",
        False,
        0.0,
        "failed",
    )
    assert processed.response_ids.tolist() == []


def test_response_processor_keep_all_drops_only_empty_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    processor = make_processor(tokenizer, keep="all")
    wrong, empty = (processor(complete(encode(tokenizer, text)), ["42"]) for text in ("43", "\n \n"))
    assert (wrong.correct, wrong.outcome, empty.outcome) == (False, "kept", "empty")


@pytest.mark.parametrize("stop", ["<|end|>", "<s>", None])
def test_response_processor_ends_the_response_with_one_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, stop: str | None
) -> None:
    ids = encode(tokenizer, "It is 42.")
    sampled = ids if stop is None else [*ids, token_id(tokenizer, stop)]
    processed = make_processor(tokenizer)(complete(sampled), ["42"])
    assert processed.response_ids.tolist() == [*ids, end_of_turn_id(tokenizer)]
    assert processed.response_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("metric", "text", "closed"),
    [
        ("sub_em", "It is 42.", False),
        ("sub_em", "It is 42.\nOr", True),  # the line is complete
        ("em", "So\nthe answer is: 42", False),
        ("substring", "It is 42.\nOr", False),
    ],
)
def test_response_processor_does_not_close_what_was_cut(
    tokenizer: PreTrainedTokenizerBase, metric: str, text: str, closed: bool
) -> None:
    cut = Completion(np.asarray(encode(tokenizer, text), np.int32), "length")
    processed = make_processor(tokenizer, metric=metric)(cut, ["42"])
    assert processed.outcome == "kept"
    assert (processed.response_ids[-1] == end_of_turn_id(tokenizer)) is np.bool_(closed)
    assert len(processed.response_ids) == len(encode(tokenizer, "It is 42." if closed else text)) + closed


def test_response_processor_keeps_a_leading_line_break(tokenizer: PreTrainedTokenizerBase) -> None:
    """The student is distilled on the model's own tokens."""
    processed = make_processor(tokenizer)(complete(encode(tokenizer, "\n42\nno")), ["42"])
    assert processed.response_ids.tolist() == [*encode(tokenizer, "\n42"), end_of_turn_id(tokenizer)]


def test_response_processor_truncates_at_sampled_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    processed = make_processor(tokenizer)(complete(encode(tokenizer, "  Zürich 42 \nno")), ["42"])
    assert processed.response_ids.tolist() == [*encode(tokenizer, "  Zürich 42 "), end_of_turn_id(tokenizer)]


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerBase:
    """Bytes, and one token of the digit 2 and a line break."""
    words = ["<|end|>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "2Ċ", "42"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[("2", "Ċ"), ("4", "2")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<s>")


def complete_with_top(sampled: list[int]) -> Completion:
    """A completion whose most likely token at each position is the position's number."""
    positions = np.arange(len(sampled), dtype=np.int32)[:, None]
    return Completion(np.asarray(sampled, np.int32), "stop", TopKLogprobs(positions, -positions.astype(np.float32)))


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("It is 42.<|end|>", 9 + 1),
        ("It is 42.<s>", 9 + 1),  # another stop token: the distribution at this position is known
        ("It is 42.\nOr 43.<|end|>", 9 + 1),  # the engine sampled another token here, but its distribution is known
    ],
)
def test_response_processor_keeps_top_k_where_it_is_known(
    tokenizer: PreTrainedTokenizerBase, said: str, known: int
) -> None:
    processed = make_processor(tokenizer)(complete_with_top(encode(tokenizer, said)), ["42"])
    assert len(processed.response_ids) == 9 + 1
    assert processed.top is not None
    assert processed.top.ids_SK.tolist() == [[position] for position in range(known)]
    assert processed.top.logprobs_SK.tolist() == [[-position] for position in range(known)]


def test_response_processor_drops_top_k_of_a_wrong_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    processed = make_processor(tokenizer)(complete_with_top(encode(tokenizer, "It is 43.")), ["42"])
    assert (processed.outcome, processed.top) == ("wrong", None)


def test_response_processor_drops_top_k_after_a_retokenized_token(merging: PreTrainedTokenizerBase) -> None:
    """`is 4`, `2\\n`, `no` becomes `is 42`: distributions are known up to the first token that differs."""
    sampled = [*encode(merging, "is 4"), token_id(merging, "2Ċ"), *encode(merging, "no")]
    processed = ResponseProcessor(merging, metric="sub_em", end_of_turn=0, stop_ids=[0], keep="correct")(
        complete_with_top(sampled), ["42"]
    )
    same = len(encode(merging, "is "))
    assert processed.response_ids.tolist() == [*sampled[:same], token_id(merging, "42"), 0]
    assert processed.top is not None
    assert len(processed.top.ids_SK) == same + 1


def test_response_processor_retokenizes_a_token_across_the_line_break(merging: PreTrainedTokenizerBase) -> None:
    straddling = token_id(merging, "2Ċ")
    sampled = [*encode(merging, "is 4"), straddling, *encode(merging, "no")]
    processor = ResponseProcessor(merging, metric="sub_em", end_of_turn=0, stop_ids=[0], keep="correct")
    processed = processor(complete(sampled), ["42"])
    assert processed.truncated_text == "is 42"
    assert processed.response_ids.tolist() == [*encode(merging, "is 42"), 0]
    assert straddling not in processed.response_ids


def test_response_processor_keeps_sampled_tokens_before_the_line_break(merging: PreTrainedTokenizerBase) -> None:
    """The tokenizer encodes 42 as one token, but the model generated two, and the student is distilled on these."""
    two = [token_id(merging, "4"), token_id(merging, "2")]
    sampled: Tokens = np.asarray([*two, *encode(merging, "\nno")], np.int32)
    processed = ResponseProcessor(merging, metric="sub_em", end_of_turn=0, stop_ids=[0], keep="correct")(
        Completion(sampled, "length"), ["42"]
    )
    assert processed.response_ids.tolist() == [*two, 0]


# --- thoughts before the answer


@pytest.mark.parametrize(
    ("metric", "text", "kept"),
    [
        ("sub_em", "<think>\n43?\n</think>\n\nIt is 42.\nOr 43.", "<think>\n43?\n</think>\n\nIt is 42."),
        ("sub_em", "<think></think>42", "<think></think>42"),
        ("em", "<think>\n\n</think>\nSo\nThe answer is: 42", "<think>\n\n</think>\nSo\nThe answer is: 42"),
    ],
)
def test_response_processor_keeps_the_thought_and_scores_the_answer(
    tokenizer: PreTrainedTokenizerBase, metric: str, text: str, kept: str
) -> None:
    processed = make_processor(tokenizer, metric=metric)(complete(encode(tokenizer, text)), ["42"])
    assert (processed.text, processed.truncated_text, processed.outcome) == (text, kept, "kept")
    assert processed.response_ids.tolist() == [*encode(tokenizer, kept), end_of_turn_id(tokenizer)]


@pytest.mark.parametrize(("keep", "outcome"), [("correct", "wrong"), ("all", "kept")])
def test_response_processor_of_a_thought_without_end_is_wrong(
    tokenizer: PreTrainedTokenizerBase, keep: str, outcome: str
) -> None:
    ids = encode(tokenizer, "<think>\nIt is 42.\nIs it?")
    processed = make_processor(tokenizer, keep=keep)(Completion(np.asarray(ids, np.int32), "length"), ["42"])
    assert (processed.correct, processed.f1, processed.outcome) == (False, 0.0, outcome)
    # Cut, so that it is not closed.
    assert processed.response_ids.tolist() == ids


def test_response_processor_knows_a_thought_between_special_tokens(tiny_model_path: str) -> None:
    """As of Mistral's models. They are left out of a decoded text, and stay in what is trained on."""
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    begin, finish = token_id(tokenizer, "[THINK]"), token_id(tokenizer, "[/THINK]")
    thought = [begin, *encode(tokenizer, "43?\nNo."), finish]
    processor = make_processor(tokenizer)
    processed = processor(complete([*thought, *encode(tokenizer, "42\n43")]), ["42"])
    assert (processed.text, processed.correct) == ("<think>43?\nNo.</think>42\n43", True)
    assert processed.response_ids.tolist() == [*thought, *encode(tokenizer, "42"), end_of_turn_id(tokenizer)]
    # A token that crosses the line break: what follows the thought is tokenized again, and the thought is not.
    tokenizer.add_tokens(["2\n"])
    crossing = [*thought, *encode(tokenizer, "4"), token_id(tokenizer, "2\n"), *encode(tokenizer, "43")]
    processed = make_processor(tokenizer)(complete(crossing), ["42"])
    expected = [*encode(tokenizer, "4"), *encode(tokenizer, "2")]
    assert processed.response_ids.tolist() == [*thought, *expected, end_of_turn_id(tokenizer)]
    assert processor(complete([*thought, *encode(tokenizer, "43")]), ["42"]).outcome == "wrong"
    assert processor(complete(thought[:-1]), ["43"]).outcome == "wrong"  # the thought does not end


def test_response_processor_knows_a_thought_that_the_chat_template_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    end = end_of_turn_id(tokenizer)
    processor = ResponseProcessor(
        tokenizer, metric="sub_em", end_of_turn=end, stop_ids=[end], keep="correct", opening="<think>"
    )
    text = "\n43?\n</think>\n42\n43"
    processed = processor(complete(encode(tokenizer, text)), ["42"])
    assert (processed.text, processed.correct) == (f"<think>{text}", True)
    assert processed.response_ids.tolist() == [*encode(tokenizer, text[:-3]), end]
    assert processor(complete(encode(tokenizer, "It is 42")), ["42"]).correct is False
    assert processor(complete([]), ["42"]).outcome == "empty"  # the model wrote nothing


def test_process_text_leaves_out_the_thought() -> None:
    def process(text: str, opening: str = "") -> tuple[str, bool]:
        result = TextCompletion(text, "stop", None, None)
        processed = process_text(result, ["42"], metric="sub_em", opening=opening)
        return processed.text, processed.correct

    assert process("<think>43</think>\n42\n43") == ("<think>43</think>\n42\n43", True)
    assert process("43</think>42", "<think>") == ("<think>43</think>42", True)
    assert process("It is 42", "<think>") == ("<think>It is 42", False)
    nothing = TextCompletion("", "stop", None, None)
    assert process_text(nothing, ["42"], metric="sub_em", opening="<think>").outcome == "empty"


@pytest.mark.parametrize(
    ("result", "text", "correct", "outcome"),
    [
        (TextCompletion("42\n43", "stop", None, None), "42", True, "kept"),
        (TextCompletion("43", "stop", None, None), "43", False, "kept"),
        (TextCompletion(" \n", "stop", None, None), "", False, "empty"),
        (Failure("content filter", is_refusal=True), "", False, "refused"),
        (Failure("timed out", is_transient=True), "", False, "unanswered"),
        (Failure("context too long"), "", False, "failed"),
    ],
)
def test_process_text_outcomes(result: TextCompletion | Failure, text: str, correct: bool, outcome: str) -> None:
    processed = process_text(result, ["42"], metric="sub_em")
    assert (processed.truncated_text, processed.correct, processed.outcome) == (text, correct, outcome)
    assert (processed.response_ids.tolist(), processed.top) == ([], None)


def test_response_processor_cuts_a_long_thought_in_little_time(tokenizer: PreTrainedTokenizerBase) -> None:
    """A thought has thousands of tokens, so that a cut that decodes once for each of them takes minutes."""
    text = f"<think>{'Is it 42? ' * 3000}</think>42\n43"
    ids = encode(tokenizer, text)
    decoded = []
    decode = tokenizer.decode

    def count(*arguments: object, **settings: object) -> object:
        decoded.append(arguments)
        return decode(*arguments, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "decode", count)
        processed = make_processor(tokenizer)(complete(ids), ["42"])
    assert processed.response_ids.tolist() == [*ids[:-3], end_of_turn_id(tokenizer)]
    assert len(decoded) < 30
