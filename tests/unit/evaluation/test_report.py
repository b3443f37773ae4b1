import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import yaml

from pos2distill.config import DataSection, EvaluationSection, ModelSection, Study
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_model_card,
    render_report,
)

STUDY = Study(
    model=ModelSection(path="m"),
    data=DataSection(format="jsonl", path="d"),
    evaluation=EvaluationSection(bootstrap_samples=100),
)
PNG = b"\x89PNG\r\n\x1a\n"


def predictions(documents: int, correct_ES: list[list[int]]) -> pa.Table:
    rows = [
        {
            "example_id": f"e{example}",
            "documents": documents,
            "placement": slot,
            "group": "",
            "slots": [slot],
            "correct": bool(right),
            "f1": float(right),
        }
        for example, row in enumerate(correct_ES)
        for slot, right in enumerate(row)
    ]
    return pa.Table.from_pylist(rows)


def pair_predictions(correct: int) -> pa.Table:
    """One example at every ordered pair of three slots."""
    pairs = list(itertools.permutations((0, 1, 2), 2))
    return pa.Table.from_pylist(
        [
            {
                "example_id": "e0",
                "documents": 3,
                "placement": number,
                "group": "",
                "slots": pair,
                "correct": number < correct,
                "f1": 0.0,
            }
            for number, pair in enumerate(pairs)
        ]
    )


@pytest.fixture(scope="module")
def pairs() -> Comparison:
    return compare(pair_predictions(3), pair_predictions(6), 3, STUDY)


@pytest.fixture(scope="module")
def inputs(pairs: Comparison) -> ReportInputs:
    # Accuracies before: 1, 1/2, 0; after: 1, 1, 1/2.
    before, after = [[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 0]]
    longer = [[1, 0], [1, 0]], [[1, 0], [0, 0]]
    step = {"loss": 0.5, "loss_trivial": 0.4, "loss_anchor": None, "weight_by_slot": {"1": 0.6, "2": 0.4}}
    return ReportInputs(
        name="tiny",
        description="A run <script>alert('x')</script> & more",
        method="r1",
        advantageous=(0,),
        choice=None,
        main=compare(predictions(3, before), predictions(3, after), 3, STUDY),
        others=[compare(predictions(5, longer[0]), predictions(5, longer[1]), 5, STUDY)],
        other_tasks={"chains": pairs},
        steps=[{**step, "step": number} for number in range(3)],
        counts={"examples": {"rows": 9, "train_unused": 2}},
        seconds={"examples": 0.25},
        settings={"model": {"path": "base/model", "rope_scales": []}, "inference": {"method": "none"}, "seed": 3},
        versions={"torch": "2.13.0"},
        checkpoint="storage/checkpoint-abcd/model",
        fingerprint="0123456789abcdef",
    )


@pytest.fixture(scope="module")
def files(inputs: ReportInputs) -> dict[str, bytes]:
    return render_report(inputs)


@pytest.fixture(scope="module")
def html(files: dict[str, bytes]) -> str:
    return files["index.html"].decode()


def test_build_summary_keys_and_values(inputs: ReportInputs) -> None:
    summary: dict[str, Any] = json.loads(json.dumps(build_summary(inputs)))
    assert summary["base"]["accuracy_by_slot"] == [1.0, 0.5, 0.0]
    assert summary["distilled"]["accuracy_by_slot"] == [1.0, 1.0, 0.5]
    assert summary["base"]["slots"] == [0, 1, 2]
    assert (summary["base"]["mean"], summary["base"]["gap"]) == (0.5, 1.0)
    assert summary["distilled"]["mean"] == pytest.approx(5 / 6)
    assert summary["paired"]["mean_difference"] == pytest.approx(1 / 3)
    for part in (summary["base"], summary["distilled"], summary["paired"]):
        low, high = part["ci95"]
        assert low <= high
    assert summary["other_documents"]["5"]["paired"]["mean_difference"] == -0.25
    assert summary["counts"] == {"examples": {"rows": 9, "train_unused": 2}}
    assert summary["seconds"] == {"examples": 0.25}
    assert (summary["fingerprint"], summary["dataset"]) == ("0123456789abcdef", "jsonl")


def test_render_report_page_needs_no_other_file(html: str) -> None:
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", html)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,iVBORw0KGgo") for source in sources)
    assert not re.search(r"@import|url\(|<link|<iframe|<object", html)


def test_render_report_escapes_text(html: str) -> None:
    assert "<script>" not in html
    assert "A run &lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; more" in html


def test_render_report_shows_the_numbers(html: str) -> None:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    for part in ("0.500 → 0.833", "1.000 → 0.500", "+0.333", "train unused 2", "0.2 s", "torch 2.13.0", "Seed 3"):
        assert part in text


def test_render_report_warns_of_truncated_answers(inputs: ReportInputs, html: str) -> None:
    assert "Warning" not in html
    counts = {**inputs.counts, "evaluate base": {"prompts": 20, "hit_max_tokens": 3}}
    page = render_report(replace(inputs, counts=counts))["index.html"].decode()
    assert page.count("Warning:") == 1
    assert (
        "evaluate base: 3 of 20 answers were cut at evaluation.max_new_tokens; raise it if they are incomplete." in page
    )


def test_render_report_plots_are_png(files: dict[str, bytes]) -> None:
    pictures = {"accuracy.png", "loss.png", "weights.png", "accuracy-5-documents.png"}
    assert files.keys() == pictures | {"index.html"}
    assert all(files[name].startswith(PNG) for name in pictures)
    assert len({files[name] for name in pictures}) == 4


def test_plot_loss_of_zero_losses(inputs: ReportInputs) -> None:
    """A logarithmic axis cannot show a loss of 0."""
    step: dict[str, Any] = {"step": 0, "loss": 0.0, "loss_trivial": 0.0, "loss_anchor": None, "weight_by_slot": {}}
    assert render_report(replace(inputs, steps=[step]))["loss.png"].startswith(PNG)


def test_render_model_card_shows_the_curve(inputs: ReportInputs) -> None:
    card = render_model_card(inputs)
    _, head, body = card.split("---\n", 2)
    assert card.startswith("---\n")
    assert yaml.safe_load(head) == {
        "base_model": "base/model",
        "library_name": "transformers",
        "tags": ["pos2distill", "position-bias"],
    }
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", body, re.MULTILINE)
    assert rows == [("1", "1.000", "1.000"), ("2", "0.500", "1.000"), ("3", "0.000", "0.500")]
    assert "| GAP (max - min) | 1.000 | 0.500 |" in body
    assert "position 1 of 3" in body
    assert "0123456789abcdef" in body


def test_render_report_of_two_hops_has_a_heat_map_and_no_weights(inputs: ReportInputs, pairs: Comparison) -> None:
    choice = {"slots": [1, 2], "accuracy": 0.75, "ci95": (0.7, 0.8)}
    two_hop = replace(inputs, main=pairs, others=[], advantageous=(1, 2), choice=choice, method="r2")
    files = render_report(two_hop)
    assert files.keys() == {"index.html", "accuracy.png", "loss.png"}
    html = re.sub(r"\s+", " ", files["index.html"].decode())
    assert "advantageous position 2&gt;3 (measured: 0.750 [0.700, 0.800] on training examples)" in html
    assert "at position 2>3 of 3" in render_model_card(two_hop)
    assert "| 1>3 | 1.000 | 1.000 |" in render_model_card(two_hop)
    assert build_summary(two_hop)["base"]["slots"][1] == (0, 2)


def test_render_report_and_summary_include_other_tasks(inputs: ReportInputs, html: str) -> None:
    assert build_summary(inputs)["other_tasks"]["chains"]["paired"]["mean_difference"] == 0.5
    assert re.search(r"<th>chains</th><td>0.500</td><td>1.000</td>", html)
    assert "chains: sub-EM of the first line, SQuAD normalisation, greedy, on jsonl." in html
