"""The report in a real browser. The page itself asks for nothing but its own file."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from pos2distill.config import ModelSection, TemplateSection
from pos2distill.evaluation.evaluation_page import render_evaluation
from pos2distill.evaluation.questions import EvaluatedPrompts, EvaluatedTask
from pos2distill.evaluation.report import compare, render_analysis, render_report
from pos2distill.evaluation.sweep import CellResult, render_sweep
from pos2distill.models.load import load_tokenizer
from pos2distill.records import Document, Example
from pos2distill.tasks.prompts import MessageBuilder, PromptBuilder, joined_text
from tests.support.chromium import NoChromiumError, open_browser
from tests.support.predictions import make_examples, predictions
from tests.support.reports import STUDY, analyses, evaluation_inputs, report_inputs, with_search
from tests.support.tables import examples_to_table

# Of the tiny model's chat template.
CHAT = ("<s><|user|>", "<|end|><|assistant|>")
HTML = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"

# A prompt of one's own, whose second message is a part of the chat frame.
TEMPLATE = TemplateSection(
    system="Use this:\n{documents}\nNo more.", user="Q: {question}", document="<{number}> {text}"
)

# 25 questions at 3 slots. Question 0 is gained at slot 0, question 1 is lost at slot 2, the others are always right.
BEFORE = [[0, 1, 1], [1, 1, 1], *([[1, 1, 1]] * 23)]
AFTER = [[1, 1, 1], [1, 1, 0], *([[1, 1, 1]] * 23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pages: `index.html` in the folders `study`, `evaluation`, `template`, `sweep` and `analysis`."""
    examples = questions()
    before, after = predictions(3, BEFORE, wrong=HTML), predictions(3, AFTER, wrong="1001")
    shorter = predictions(2, [[1, 1]] * 25)
    prompts = [EvaluatedPrompts("3 documents", 3, [before, after])]
    prompts.append(EvaluatedPrompts("2 documents", 2, [shorter, shorter]))
    table, locations = examples_to_table(examples), {"e0": "d.jsonl, line 1"}
    task = EvaluatedTask("sub_em", "qa", table, locations, prompts, chat=CHAT)
    answers = EvaluatedPrompts("3 documents", 3, [before])
    served = EvaluatedTask("sub_em", "kv", table, locations, [answers])  # on a server: no chat template
    chat = ("<s><|system|>", "<|end|><|user|>Q: {question}<|end|><|assistant|>")
    own = EvaluatedTask("sub_em", TEMPLATE, table, locations, [answers], chat=chat)
    evaluated = evaluation_inputs(served)
    inputs = report_inputs()
    study = replace(
        inputs,
        main=compare(before, after, 3, STUDY),
        others=[compare(shorter, shorter, 2, STUDY)],
        tasks=[task, inputs.tasks[1]],
        analyses=analyses(),
    )
    cells = [CellResult({"method.name": name}, {"training task": study.main}) for name in ("r1", "sft")]
    root = tmp_path_factory.mktemp("reports")
    pages = {
        "study": render_report(study),
        "evaluation": render_evaluation(replace(evaluated, run=with_search(evaluated.run))),
        "template": render_evaluation(evaluation_inputs(own)),
        "sweep": render_sweep("sweep", "Two methods.", cells, {}),
        "analysis": render_analysis("analysis", analyses()),
    }
    for name, files in pages.items():
        (root / name).mkdir()
        for file, data in files.items():
            (root / name / file).write_bytes(data)
    return root


def questions() -> list[Example]:
    """25 questions of three documents, the first of which contain HTML, quotes and characters that are not ASCII."""
    examples = make_examples(25, 3)
    hostile = Document(HTML, f'{HTML}\n"quoted" {{title}} Bär 🦊 \x7f')
    examples[0] = Example("e0", f"Which code? {HTML}", ("0",), (examples[0].documents[0], hostile, hostile))
    return examples


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        with sync_playwright() as playwright, open_browser(playwright) as chromium:
            yield chromium
    except NoChromiumError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def open_page(browser: Browser, path: Path, *, scheme: Literal["light", "dark"] = "light", width: int = 1200) -> Page:
    """The loaded page. Whatever else it asks for, and every error and warning, fails the test."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.on("request", lambda request: refuse(request.url, path))
    page.on("console", lambda message: pytest.fail(f"console: {message.text}"))
    page.on("pageerror", lambda error: pytest.fail(f"error: {error}"))
    page.goto(path.as_uri())
    return page


def refuse(url: str, path: Path) -> None:
    if url != path.as_uri():
        pytest.fail(f"the page asks for {url[:200]}")


@contextlib.contextmanager
def opened(browser: Browser, path: Path) -> Iterator[Page]:
    """The page, once its scripts have run."""
    page = open_page(browser, path)
    page.wait_for_selector("html[data-ready]")
    yield page
    page.close()


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    with opened(browser, folder / "study" / "index.html") as page:
        yield page


@pytest.fixture
def evaluation_page(browser: Browser, folder: Path) -> Iterator[Page]:
    with opened(browser, folder / "evaluation" / "index.html") as page:
        yield page


def open_question(page: Page) -> None:
    """The first one. Its prompts and answers are made when it is opened."""
    page.click(".question summary")
    page.wait_for_selector(".question[open] .prompt")


def count(page: Page) -> str:
    return page.inner_text("#question-count")


def test_report_page_filters_questions(page: Page) -> None:
    assert count(page) == "25 of 25 questions, 1 to 20 shown"
    page.click("#next")
    assert count(page) == "25 of 25 questions, 21 to 25 shown"
    assert page.is_disabled("#next")
    for outcome, expected in (("flipped", 2), ("gained", 1), ("lost", 1), ("wrong", 1), ("elsewhere", 1), ("cut", 0)):
        page.select_option("#outcome", outcome)
        assert count(page).startswith(f"{expected} of 25 questions")
    page.select_option("#outcome", "gained")
    page.select_option("#position", "2")
    assert count(page) == "0 of 25 questions"
    page.select_option("#position", "0")
    assert count(page) == "1 of 25 questions, 1 to 1 shown"
    page.select_option("#outcome", "all")
    page.fill("#search", "CODE fox 17")
    assert count(page) == "1 of 25 questions, 1 to 1 shown"


def test_report_page_opens_a_question_by_keyboard(page: Page) -> None:
    page.select_option("#outcome", "lost")
    page.focus(".question summary")
    page.keyboard.press("Enter")
    page.wait_for_selector(".question[open] .prompt")
    answers = page.inner_text(".answers")
    assert "✗ wrong" in answers
    # Its wrong answer is the code of its second document, which stands first where the gold document is last.
    assert "in document 1" in answers
    assert page.inner_text(".prompt mark").startswith("Document [1](Title: Fox 1.0)")
    page.select_option(".question select", "2")
    assert page.inner_text(".prompt mark").startswith("Document [3](Title: Fox 1.0)")


def shown_prompt(page: Page) -> str:
    return page.evaluate("document.querySelector('.question[open] .prompt').textContent")


@pytest.mark.parametrize("slot", [0, 2])
def test_report_page_shows_the_prompt_that_the_model_read(page: Page, slot: int, tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    builder = PromptBuilder(tokenizer, "qa", max_length=4096, reserve=8)
    assert builder.chat_frame() == CHAT
    open_question(page)
    page.select_option(".question select", str(slot))
    assert shown_prompt(page) == str(tokenizer.decode(builder(questions()[0], 3, (slot,))))


def test_evaluation_page_shows_a_prompt_of_ones_own(browser: Browser, folder: Path, tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    builder = PromptBuilder(tokenizer, TEMPLATE, max_length=4096, reserve=8)
    with opened(browser, folder / "template" / "index.html") as page:
        open_question(page)
        page.select_option(".question select", "1")
        assert shown_prompt(page) == str(tokenizer.decode(builder(questions()[0], 3, (1,))))


def test_evaluation_page_shows_the_message_that_the_server_got(evaluation_page: Page) -> None:
    """Of the style `kv`, whose documents are JSON."""
    open_question(evaluation_page)
    evaluation_page.select_option(".question select", "1")
    builder = MessageBuilder("kv", max_length=None, reserve=8)
    assert shown_prompt(evaluation_page) == joined_text(builder(questions()[0], 3, (1,)))
    assert "without the chat template" in evaluation_page.inner_text(".question")


def test_evaluation_page_filters_questions(evaluation_page: Page) -> None:
    """Question 0 alone is wrong: at the first position, and right at the others."""
    assert count(evaluation_page) == "25 of 25 questions, 1 to 20 shown"
    assert "correct at 2 of 3 positions · ✗✓✓" in evaluation_page.inner_text(".question summary")
    outcomes = evaluation_page.locator("#outcome option").evaluate_all("all => all.map((each) => each.value)")
    assert outcomes == ["all", "wrong", "elsewhere", "cut"]
    for position, expected in (("", 1), ("0", 1), ("1", 0)):
        evaluation_page.select_option("#position", position)
        for outcome in ("wrong", "elsewhere"):
            evaluation_page.select_option("#outcome", outcome)
            assert count(evaluation_page).startswith(f"{expected} of 25 questions")
    evaluation_page.select_option("#position", "")
    open_question(evaluation_page)
    header = evaluation_page.locator(".answers th[scope=col]").all_inner_texts()
    assert header == ["position", "answer"]


@pytest.mark.parametrize("report", ["study", "evaluation"])
def test_report_page_shows_html_as_text(browser: Browser, folder: Path, report: str) -> None:
    page = open_page(browser, folder / report / "index.html")
    page.wait_for_selector("html[data-ready]")
    title = page.title()
    open_question(page)
    for shown in (".question summary", ".answers"):
        assert HTML in page.inner_text(shown)
    # Once in the question, and in title and text of two documents.
    assert shown_prompt(page).count("<script>") == 5
    assert page.locator("#question-list img, #question-list script").count() == 0
    assert page.title() == title != "run"
    page.close()


def test_report_page_switches_the_prompt_length(page: Page) -> None:
    assert "among 3 (from 1)" in page.inner_html("#curve")
    page.select_option("#question-view", "1")
    page.wait_for_function("document.getElementById('curve').innerHTML.includes('among 2 (from 1)')")
    assert page.input_value("#view") == "1"
    assert page.locator("#position option").all_inner_texts() == ["any position", "position 1", "position 2"]
    page.select_option("#view", "2")  # another task, whose placements are pairs
    page.wait_for_function("document.getElementById('curve').innerHTML.includes('second hop')")
    assert count(page) == "1 of 1 questions, 1 to 1 shown"


def test_report_page_shows_intervals_on_hover(page: Page) -> None:
    page.locator("#curve .mark-symbol path").first.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    tooltip = page.inner_text("#vg-tooltip-element")
    assert "95 % interval" in tooltip
    assert "0.960" in tooltip


def test_evaluation_page_shows_the_search_of_scales(browser: Browser, folder: Path) -> None:
    with opened(browser, folder / "evaluation" / "index.html") as page:
        assert page.locator("#scale-search .mark-symbol path").count() == 5
        assert "without scales" in page.inner_html("#scale-search")
        assert page.locator("#rope-scales .mark-symbol path").count() == 4


def test_report_page_shows_charts_of_an_analysis(page: Page) -> None:
    # The second point, since the points of both models lie on each other at the first position.
    page.locator("#token-shift .mark-symbol.role-mark path").nth(1).hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    assert "95 % interval" in page.inner_text("#vg-tooltip-element")
    for name in ("attention", "thought-shift", "wrong-answers"):
        assert page.locator(f"#{name} .mark-rect path").count() > 0


@pytest.mark.parametrize("report", ["study", "evaluation", "sweep", "analysis"])
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_pages_pass_the_rules_of_accessibility(
    browser: Browser, folder: Path, report: str, scheme: Literal["light", "dark"], width: int
) -> None:
    page = open_page(browser, folder / report / "index.html", scheme=scheme, width=width)
    # What the page draws last.
    last = {"sweep": "#sweep svg", "analysis": "#wrong-answers svg"}
    page.wait_for_selector(last.get(report, "html[data-ready]"))
    if report in ("study", "evaluation"):
        open_question(page)
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    # Nothing is wider than the screen, except inside its own scroll box.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
