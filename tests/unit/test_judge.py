import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pos2distill.config import ModelSection
from pos2distill.models.load import end_of_turn_id, load_tokenizer
from pos2distill.models.responses import Tokens
from pos2distill.sampling.engine import Completion
from pos2distill.sampling.judge import Judge
from pos2distill.tasks.judge import first_line, normalize, sub_exact_match


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown\tFOX!", "quick brown fox"),
        ("a theatre an antenna", "theatre antenna"),  # articles go, words that hold them stay
        ("U.S.A.", "usa"),
        ("Élan à la Carte", "élan à la carte"),
        ("ΣΊΣΥΦΟΣ, Straße", "σίσυφος straße"),
        ("the -- a", ""),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


def test_first_line() -> None:
    assert first_line("  Paris \nLondon\nRome") == "Paris"
    assert first_line("\nParis") == ""
    assert first_line("Paris") == "Paris"


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("It was the Beatles, I think.", ["Beatles"], True),
        ("it was beatles", ["The Beatles!"], True),
        ("Marie Curie", ["Pierre Curie", "Curie"], True),
        ("Marie", ["Marie Curie"], False),
        ("", ["x"], False),
        ("1,914", ["1914"], True),
        ("anything", ["*"], False),
        ("anything", ["*", "thing"], True),
    ],
)
def test_sub_exact_match(text: str, answers: list[str], right: bool) -> None:
    assert sub_exact_match(text, answers) is right


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelSection(path=tiny_model_path))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def make_judge(tokenizer: PreTrainedTokenizerBase, keep: str = "correct") -> Judge:
    end = end_of_turn_id(tokenizer)
    eos = tokenizer.convert_tokens_to_ids("<s>")
    return Judge(tokenizer, end_of_turn=end, stop_ids=[end, eos], keep=keep)  # type: ignore[arg-type]


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
        ("\n42", "", False, "empty"),
        ("  \t\n42", "", False, "empty"),
    ],
)
def test_a_response_is_cut_then_judged(
    tokenizer: PreTrainedTokenizerBase, text: str, cut: str, correct: bool, outcome: str
) -> None:
    ids = encode(tokenizer, text)
    judged = make_judge(tokenizer)(complete([*ids, end_of_turn_id(tokenizer)]), ["42", "forty"])
    assert (judged.text, judged.cut_text, judged.correct, judged.outcome) == (text, cut, correct, outcome)


def test_keep_all_keeps_wrong_answers_but_no_empty_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    judge = make_judge(tokenizer, keep="all")
    wrong, empty = (judge(complete(encode(tokenizer, text)), ["42"]) for text in ("43", "\n42"))
    assert (wrong.correct, wrong.outcome, empty.outcome) == (False, "kept", "empty")


@pytest.mark.parametrize("stop", ["<|end|>", "<s>", None])
def test_end_of_turn_closes_the_response_once(tokenizer: PreTrainedTokenizerBase, stop: str | None) -> None:
    ids = encode(tokenizer, "It is 42.")
    sampled = ids if stop is None else [*ids, tokenizer.convert_tokens_to_ids(stop)]
    judged = make_judge(tokenizer)(complete(sampled), ["42"])
    assert judged.response_ids.tolist() == [*ids, end_of_turn_id(tokenizer)]
    assert judged.response_ids.dtype == np.int32


def test_the_cut_falls_on_the_sampled_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    judged = make_judge(tokenizer)(complete(encode(tokenizer, "  Zürich 42 \nno")), ["42"])
    assert judged.response_ids.tolist() == [*encode(tokenizer, "  Zürich 42 "), end_of_turn_id(tokenizer)]


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


def test_a_token_that_straddles_the_line_break_is_tokenised_anew(merging: PreTrainedTokenizerBase) -> None:
    straddling = merging.convert_tokens_to_ids("2Ċ")
    sampled = [*encode(merging, "is 4"), straddling, *encode(merging, "no")]
    judge = Judge(merging, end_of_turn=0, stop_ids=[0], keep="correct")
    judged = judge(complete(sampled), ["42"])
    assert judged.cut_text == "is 42"
    assert judged.response_ids.tolist() == [*encode(merging, "is 42"), 0]
    assert straddling not in judged.response_ids


def test_tokens_before_the_break_stay_as_sampled(merging: PreTrainedTokenizerBase) -> None:
    """The text 42 is one token when tokenised, but the model said it in two, and those are distilled."""
    two = [merging.convert_tokens_to_ids("4"), merging.convert_tokens_to_ids("2")]
    sampled: Tokens = np.asarray([*two, *encode(merging, "\nno")], np.int32)
    judged = Judge(merging, end_of_turn=0, stop_ids=[0], keep="correct")(Completion(sampled, "length"), ["42"])
    assert judged.response_ids.tolist() == [*two, 0]
