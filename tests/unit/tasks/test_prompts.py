import functools
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pos2distill.config import ModelSection, Recipe, TemplateSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_prompt_builder, load_tokenizer
from pos2distill.records import Document, Example
from pos2distill.tasks.prompts import AFTER, BEFORE, MessageBuilder, PromptBuilder, PromptTooLong, joined_text
from tests.support.tiny import CHAT_TEMPLATE

EXAMPLE = Example(
    "fox",
    'Which "code"?',
    ("42",),
    (
        Document("Fox", 'It is "42".', 0),
        Document("Owl", "It is\n17."),
        Document("Bär", "Es ist 99."),
    ),
)


def build(tiny_model_path: str, style: str, max_length: int = 4096, reserve: int = 8) -> PromptBuilder:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    return PromptBuilder(tokenizer, style, max_length=max_length, reserve=reserve)  # type: ignore[arg-type]


def render(builder: PromptBuilder, *slots: int, documents: int = 3, example: Example = EXAMPLE) -> str:
    return str(builder.tokenizer.decode(builder(example, documents, slots)))


TWO_HOPS = replace(EXAMPLE, documents=(*EXAMPLE.documents[:2], replace(EXAMPLE.documents[2], hop=1)))


def search_result(document: Document, number: int) -> str:
    return f"Document [{number}](Title: {document.title}) {document.text}\n"


json_string = functools.partial(json.dumps, ensure_ascii=False)

SHOWN = {
    "qa": search_result,
    "coc": search_result,
    "reasoning": search_result,
    "kv": lambda document, number: f"{json_string(document.title)}: {json_string(document.text)}",
    "plain": lambda document, number: f"Title: {document.title}\n{document.text}\n",
}


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("style", SHOWN)
def test_prompt_builder_shows_each_document_once_then_the_question(tiny_model_path: str, style: str, slot: int) -> None:
    text = render(build(tiny_model_path, style), slot)
    order = list(EXAMPLE.distractors)
    order.insert(slot, *EXAMPLE.golds)
    shown = [SHOWN[style](document, number) for number, document in enumerate(order, start=1)]
    assert [text.count(part) for part in shown] == [1, 1, 1]
    offsets = [text.index(part) for part in [*shown, EXAMPLE.question]]
    assert offsets == sorted(offsets)


QUESTIONS_ALONE = {
    "qa": f"Question: {EXAMPLE.question}\nAnswer:",
    "kv": f'Key: "{EXAMPLE.question}"\nCorresponding value:',
    "plain": f"Question: {EXAMPLE.question}",
}


@pytest.mark.parametrize("style", SHOWN)
def test_prompt_builder_without_documents_asks_the_question_alone(tiny_model_path: str, style: str) -> None:
    text = render(build(tiny_model_path, style), documents=0)
    if style in QUESTIONS_ALONE:
        assert text == f"<s><|user|>{QUESTIONS_ALONE[style]}<|end|><|assistant|>"
        return
    # A chain of thought about the question, in the form that is judged.
    assert "ocument" not in text
    assert text.index("Reason step by step") < text.index('"The answer is: "') < text.index(EXAMPLE.question)


def test_prompt_builder_kv_contains_valid_json(tiny_model_path: str) -> None:
    text = render(build(tiny_model_path, "kv"), 1)
    shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert shown == {document.title: document.text for document in EXAMPLE.documents}


@pytest.mark.parametrize(("slots", "titles"), [((0, 2), ["Fox", "Owl", "Bär"]), ((2, 1), ["Owl", "Bär", "Fox"])])
def test_prompt_builder_places_several_hops(tiny_model_path: str, slots: tuple[int, int], titles: list[str]) -> None:
    text = render(build(tiny_model_path, "plain"), *slots, example=TWO_HOPS)
    offsets = [text.index(f"Title: {title}\n") for title in titles]
    assert offsets == sorted(offsets)


def test_prompt_builder_qa_has_the_published_wording(tiny_model_path: str) -> None:
    """Liu et al. 2024, figure 2."""
    instruction = "Write a high-quality answer for the given question using only the provided search results "
    instruction += "(some of which might be irrelevant)."
    results = 'Document [1](Title: Owl) It is\n17.\nDocument [2](Title: Fox) It is "42".'
    assert render(build(tiny_model_path, "qa"), 1, documents=2) == (
        f'<s><|user|>{instruction}\n\n{results}\n\nQuestion: Which "code"?\nAnswer:<|end|><|assistant|>'
    )


@pytest.mark.parametrize(
    ("style", "steps"),
    [
        ("reasoning", ("identify", "list", "reason step by step")),
        ("coc", ("Reason step by step", "name the document that supports it")),
    ],
)
def test_prompt_builder_reasoning_requests_a_parsable_answer(
    tiny_model_path: str, style: str, steps: tuple[str, ...]
) -> None:
    text = render(build(tiny_model_path, style), 0)
    starts = [text.index(step) for step in (*steps, '"The answer is: "')]
    assert starts == sorted(starts)
    assert starts[-1] < text.index("Document [1]")


def test_prompt_builder_applies_the_chat_template(tiny_model_path: str) -> None:
    """Two documents, plain style, written out."""
    assert render(build(tiny_model_path, "plain"), 1, documents=2) == (
        '<s><|user|>Title: Owl\nIt is\n17.\nTitle: Fox\nIt is "42".\nQuestion: Which "code"?<|end|><|assistant|>'
    )


def test_prompt_builder_rejects_a_prompt_without_room(tiny_model_path: str) -> None:
    length = len(build(tiny_model_path, "plain")(EXAMPLE, 3, (0,)))
    assert len(build(tiny_model_path, "plain", max_length=length + 8)(EXAMPLE, 3, (0,))) == length
    with pytest.raises(PromptTooLong) as caught:
        build(tiny_model_path, "plain", max_length=length + 7)(EXAMPLE, 3, (0,))
    assert str(caught.value) == (
        f"example fox: prompt of {length} tokens (3 documents) + 8 for the response exceed the model's context of "
        f"{length + 7}; lower data.documents or max_new_tokens, or use a model with a longer context"
    )


def test_prompt_builder_reshuffles_distractors(tiny_model_path: str) -> None:
    builder = build(tiny_model_path, "plain")
    prompts = {bytes(builder(EXAMPLE, 3, (0,), order="reshuffled", seed=seed)) for seed in range(8)}
    assert len(prompts) == 2  # two distractors have two orders


@pytest.mark.parametrize("style", SHOWN)
def test_prompt_builder_locates_every_document_exactly(tiny_model_path: str, style: str) -> None:
    """The tokens of the tiny model are single bytes, so parts end where the texts end."""
    builder = build(tiny_model_path, style)
    ids, part_L = builder.locate(EXAMPLE, 3, (1,))
    assert np.array_equal(ids, builder(EXAMPLE, 3, (1,)))
    order = [EXAMPLE.documents[1], EXAMPLE.documents[0], EXAMPLE.documents[2]]
    for slot, document in enumerate(order):
        text = str(builder.tokenizer.decode(ids[part_L == slot]))
        # Separators of search results are after a document; the last one is followed by the question.
        assert text.strip(",\n ") == SHOWN[style](document, slot + 1).strip(",\n ")
    after = str(builder.tokenizer.decode(ids[part_L == AFTER]))
    assert EXAMPLE.question in after
    assert after.endswith("<|assistant|>")
    assert str(builder.tokenizer.decode(ids[part_L == BEFORE])).startswith("<s><|user|>")
    assert np.array_equal(part_L, [*part_L[part_L == BEFORE], *np.sort(part_L[part_L >= 0]), *part_L[part_L == AFTER]])


def test_prompt_builder_refuses_to_locate_in_a_changed_message(tiny_model_path: str) -> None:
    builder = build(tiny_model_path, "qa")
    builder.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(UserError, match=r"^example fox: its documents cannot be located in the prompt, because the"):
        builder.locate(EXAMPLE, 3, (0,))


def test_prompt_builder_refuses_to_locate_without_offsets(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = build(tiny_model_path, "qa")

    def tokenize(*_: object, **settings: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(builder.tokenizer), "__call__", tokenize)
    with pytest.raises(UserError, match=r"where its tokens are in the text; set analysis.attention to false$"):
        builder.locate(EXAMPLE, 3, (0,))


def test_prompt_builder_writes_the_same_date_every_day(make_recipe: Callable[..., Recipe]) -> None:
    """As Llama 3's template asks for it; `date_string` is its variable for another date."""
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "Today Date: {{ date_string }}\n" + CHAT_TEMPLATE
    )
    variables: dict[str, str]
    for variables, date in (({}, "26 Jul 2024"), ({"date_string": "1 Jan 2026"}, "1 Jan 2026")):
        tokenizer = load_tokenizer(make_recipe().study.model)
        tokenizer.chat_template = dated
        build = PromptBuilder(tokenizer, "plain", max_length=500, reserve=8, chat_template_kwargs=variables)
        assert build.chat_frame()[0].startswith(f"Today Date: {date}\n")


def test_prompt_builder_passes_variables_to_the_chat_template(make_recipe: Callable[..., Recipe]) -> None:
    """As those of Qwen3 that switch thinking off."""
    study = make_recipe(model={"chat_template_kwargs": {"enable_thinking": False}}).study
    builder = load_prompt_builder(study, reserve=8)
    tokenizer = builder.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
    assert render(builder, 0).endswith("<|end|><|assistant|><think></think>")
    ids, _ = builder.locate(EXAMPLE, 3, (0,))
    assert str(tokenizer.decode(ids)) == render(builder, 0)
    assert builder.chat_frame() == ("<s><|user|>", "<|end|><|assistant|><think></think>")


# --- templates of one's own

SYSTEM_AND_USER = TemplateSection(
    system="Be brief.", user="Context:\n{documents}\n\nQ: {question}", document="[{number}] {title}: {text}"
)
IN_SYSTEM = TemplateSection(
    system="\n{documents}\nUse this.", user="{question}?", document="{text}", separator=" | ", json_strings=True
)


def build_own(tiny_model_path: str, template: TemplateSection) -> PromptBuilder:
    return PromptBuilder(load_tokenizer(ModelSection(path=tiny_model_path)), template, max_length=4096, reserve=8)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            SYSTEM_AND_USER,
            '<|system|>Be brief.<|end|><|user|>Context:\n[1] Owl: It is\n17.\n\n[2] Fox: It is "42".\n\n'
            'Q: Which "code"?<|end|>',
        ),
        (IN_SYSTEM, '<|system|>\n"It is\\n17." | "It is \\"42\\"."\nUse this.<|end|><|user|>Which "code"??<|end|>'),
    ],
)
def test_prompt_builder_of_an_own_template(tiny_model_path: str, template: TemplateSection, expected: str) -> None:
    builder = build_own(tiny_model_path, template)
    assert render(builder, 1, documents=2) == f"<s>{expected}<|assistant|>"


def test_prompt_builder_shows_json_strings_in_the_letters_of_their_language(tiny_model_path: str) -> None:
    """As escape codes, a title would not be the key that the question names, nor a text the answer."""
    example = replace(EXAMPLE, documents=(Document('Zürich "HB"', "Größe 中文", 0), Document("Owl", "17")))
    text = render(build_own(tiny_model_path, IN_SYSTEM), 0, documents=2, example=example)
    assert '"Größe 中文" | "17"' in text
    key_value = PromptBuilder(load_tokenizer(ModelSection(path=tiny_model_path)), "kv", max_length=4096, reserve=8)
    assert '{"Zürich \\"HB\\"": "Größe 中文",\n "Owl": "17"}' in render(key_value, 0, documents=2, example=example)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SYSTEM_AND_USER, "<|system|>Be brief.<|end|><|user|>"),
        (IN_SYSTEM, "<|user|>"),  # a system message about documents would ask for some
    ],
)
def test_prompt_builder_of_an_own_template_without_documents(
    tiny_model_path: str, template: TemplateSection, expected: str
) -> None:
    text = render(build_own(tiny_model_path, template), documents=0)
    assert text == f"<s>{expected}{EXAMPLE.question}<|end|><|assistant|>"


def test_prompt_builder_fills_each_field_once(tiny_model_path: str) -> None:
    """Questions and documents may contain the names of fields."""
    example = replace(
        EXAMPLE,
        question="What is {documents} and {question}?",
        documents=(Document("{text}", "{title} {documents} {question}", 0), Document("Owl", "{number}")),
    )
    text = render(build_own(tiny_model_path, SYSTEM_AND_USER), 0, documents=2, example=example)
    shown = "[1] {text}: {title} {documents} {question}\n\n[2] Owl: {number}\n\nQ: What is {documents} and {question}?"
    assert f"<|user|>Context:\n{shown}<|end|>" in text


@pytest.mark.parametrize("template", [SYSTEM_AND_USER, IN_SYSTEM, TemplateSection(user=" \n{documents}\n{question}")])
@pytest.mark.parametrize("strips", [False, True])
def test_prompt_builder_locates_the_documents_of_an_own_template(
    tiny_model_path: str, template: TemplateSection, strips: bool
) -> None:
    """Also where the chat template strips messages, which may begin with white space."""
    builder = build_own(tiny_model_path, template)
    if strips:
        builder.tokenizer.chat_template = CHAT_TEMPLATE.replace("m['content']", "m['content'] | trim")
    ids, part_L = builder.locate(EXAMPLE, 3, (1,))
    assert np.array_equal(ids, builder(EXAMPLE, 3, (1,)))
    order = [EXAMPLE.documents[1], EXAMPLE.documents[0], EXAMPLE.documents[2]]
    for slot, document in enumerate(order):
        text = str(builder.tokenizer.decode(ids[part_L == slot]))
        shown = json_string(document.text) if template.json_strings else document.text
        assert shown in text
        first = f"[{slot + 1}]" if template is SYSTEM_AND_USER else shown[0]
        assert text.startswith(first)
    assert EXAMPLE.question in str(builder.tokenizer.decode(ids[part_L == AFTER]))


@pytest.mark.parametrize("template", [SYSTEM_AND_USER, IN_SYSTEM])
def test_chat_frame_holds_the_message_without_documents(tiny_model_path: str, template: TemplateSection) -> None:
    before, after = build_own(tiny_model_path, template).chat_frame()
    if template is IN_SYSTEM:
        assert (before, after) == ("<s><|system|>", "<|end|><|user|>{question}?<|end|><|assistant|>")
    else:
        assert (before, after) == ("<s><|system|>Be brief.<|end|><|user|>", "<|end|><|assistant|>")


def test_message_builder_of_an_own_template() -> None:
    messages = MessageBuilder(SYSTEM_AND_USER, max_length=None, reserve=8)(EXAMPLE, 2, (1,))
    user = 'Context:\n[1] Owl: It is\n17.\n\n[2] Fox: It is "42".\n\nQ: Which "code"?'
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": user}]
    assert joined_text(messages) == f"Be brief.\n\n{user}"
    with pytest.raises(PromptTooLong, match=r"prompt of at least 16 tokens \(2 documents\) \+ 8 for the response"):
        MessageBuilder(SYSTEM_AND_USER, max_length=20, reserve=8)(EXAMPLE, 2, (1,))
