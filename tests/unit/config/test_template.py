from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pos2distill.config import Recipe
from pos2distill.config.defaults import changed_settings
from pos2distill.config.load import load_recipe
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError

OWN = {"user": "{documents}\n\nQ: {question}"}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    """`load(template, *overrides)`: a recipe with this section, or without one."""

    def load(template: Any, *overrides: str) -> Recipe:
        data = {"format": "nq", "path": "data.jsonl"} | ({} if template is None else {"template": template})
        raw = {"name": "small", "description": "Own.", "model": {"path": "m"}, "data": data}
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(raw))
        return load_recipe(str(path), overrides)

    return load


def test_template_takes_the_place_of_the_prompt(load: Callable[..., Recipe]) -> None:
    data = load(OWN).study.data
    assert (data.prompt, data.metric, data.wording) == ("template", "sub_em", data.template)
    assert load(OWN, "data.prompt=template").study.data == data
    assert load(None, "data.template.user='{documents} {question}'").study.data.prompt == "template"
    plain = load(None).study.data
    assert (plain.prompt, plain.wording) == ("qa", "qa")


@pytest.mark.parametrize("settings", [[], ["data.template=null"]])
def test_template_is_in_no_dump_where_there_is_none(load: Callable[..., Recipe], settings: list[str]) -> None:
    """So that earlier fingerprints stay."""
    assert '"template"' not in load(None, *settings).study.model_dump_json()


@pytest.mark.parametrize(
    ("template", "metric"),
    [
        ({"user": "{documents} {question} End with: The answer is: ..."}, "em"),
        ({"system": 'Say "the answer is".', **OWN}, "em"),
        (OWN, "sub_em"),
    ],
)
def test_template_that_asks_for_a_conclusion_is_judged_by_it(
    load: Callable[..., Recipe], template: dict[str, str], metric: str
) -> None:
    assert load(template).study.data.metric == metric
    for other in ("sub_em", "substring", "em"):
        assert load(template, f"data.metric={other}").study.data.metric == other


def test_changed_settings_of_a_template_load_as_the_same_study(load: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = load({**OWN, "system": "Be brief."})
    settings = changed_settings(recipe)
    assert settings["data"]["template"] == {**OWN, "system": "Be brief."}
    assert "prompt" not in settings["data"]
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(settings))
    assert load_recipe(str(tmp_path / "again.yaml")).study == recipe.study


def test_template_can_be_swept_with_a_built_in_prompt(load: Callable[..., Recipe]) -> None:
    template = yaml.safe_dump(OWN, default_flow_style=True).strip()
    cells = sweep_cells(load(None, f"sweep={{data.template: [null, {template}]}}"))
    assert [cell.study.data.prompt for _, cell in cells] == ["qa", "template"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"usr": "x"}, "data.template.usr: unknown field; did you mean 'user'?"),
        ({"document": "{text}"}, "data.template.user: missing"),
        ({"user": " "}, "data.template.user: is empty; expected the user's message, with {question}"),
        ({"user": "{documents}"}, "data.template.user: has no {question}, and neither has system"),
        (
            {"user": "{question}"},
            "data.template.user: {documents} is neither here nor in system; expected it once, where the documents are "
            "shown",
        ),
        (
            {"user": "{documents} {question}", "system": "{documents}"},
            "data.template.user: {documents} is in the messages more than once; expected it once, where the documents "
            "are shown",
        ),
        (
            {"user": "{document} {question}"},
            "data.template.user: unknown field {document}; did you mean 'documents'?",
        ),
        (
            {"user": "{context} {question}"},
            "data.template.user: unknown field {context}; expected one of: documents, question",
        ),
        (
            {**OWN, "system": "{text}"},
            "data.template.system: unknown field {text}; expected one of: documents, question",
        ),
        ({**OWN, "document": "{titel} {text}"}, "data.template.document: unknown field {titel}; did you mean 'title'"),
        ({**OWN, "document": "{title}"}, "data.template.document: has no {text}"),
        ({**OWN, "separator": "{number}"}, "data.template.separator: unknown field {number}; expected no field here"),
        ({**OWN, "without_documents": "Answer."}, "data.template.without_documents: has no {question}"),
        (
            {**OWN, "document": {"text": None}},
            "data.template.document: expected a text, got a mapping; put it in quotes, such as '{text}'",
        ),
        ({**OWN, "json_strings": 2}, "data.template.json_strings: input should be true or false, got 2"),
        ("{documents} {question}", "data.template: expected a section with fields, got '{documents} {question}'"),
    ],
)
def test_template_with_other_fields_is_rejected(load: Callable[..., Recipe], template: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(template)
    assert str(caught.value).partition("small.yaml: ")[2].startswith(message)


def test_template_and_prompt_are_not_both_set(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError) as caught:
        load(OWN, "data.prompt=coc")
    assert str(caught.value) == (
        "command line: data.prompt: 'coc', but data.template is the prompt; leave data.prompt out or set it to template"
    )
    with pytest.raises(UserError, match=r"^command line: data.prompt: 'template' needs the section data.template$"):
        load(None, "data.prompt=template")


def test_template_keeps_other_braces(load: Callable[..., Recipe]) -> None:
    text = 'Answer as JSON, {"answer": "..."}.\n{documents}\n{question} { x }'
    template = load({"user": text}).study.data.template
    assert template is not None
    assert template.user == text
