"""`--dry-run`: check everything, show the settings and what a command would run."""

from collections.abc import Sequence

import yaml

from pos2distill.config import Recipe
from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.defaults import all_settings, changed_settings

from .checks.data_checks import CheckedData, check_data
from .checks.preflight import preflight
from .commands import COMMANDS, plan_command
from .expected_work import expected_work
from .pending import is_pending
from .plan import PlannedStudy
from .results.folders import REPORT_FOLDER, page_url
from .results.gate import read_baseline
from .results.report import report_shows
from .stages.stage import Stage
from .terminal import format_counts, format_settings

_WIDTH = 100  # line width for printed prompts
_PROMPT_LINES = 5  # lines printed of the start and of the end of a prompt


def show(recipe: Recipe, command: str, *, full: bool, baseline: str | None = None) -> None:
    """Print the settings that differ from the defaults, what the command would run, and parts of a prompt.

    full: all settings, and the whole prompt. baseline: URL of the predictions that the gate compares with.

    Raises:
        UserError: as `describe`, or if there is no baseline; then nothing is printed.
    """
    if baseline is not None:
        read_baseline(baseline, recipe.study)
    stages = describe(recipe, command, full=full)
    settings = all_settings(recipe) if full else changed_settings(recipe)
    # Unsorted, so that the sections are in the order in which recipes have them.
    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
    if not full:
        # A sweep may have several, which its studies name.
        has_method = COMMAND_FACTS[command].samples and not {"method", "method.name"} & recipe.sweep.keys()
        method = f"method {recipe.study.method.name}; " if has_method else ""
        print(f"# {method}all other settings have their defaults (--full shows them)")
    print(stages)


def describe(recipe: Recipe, command: str = "study", *, full: bool = False) -> str:
    """What is shown below the settings: which stages the command would run, where results are, and prompts.

    Raises:
        UserError: as the command itself would, before its first stage or for its data.
    """
    lines = []
    studies = plan_command(recipe, command)
    spec, facts = COMMANDS[command], COMMAND_FACTS[command]
    if not facts.only_reads:
        for planned in studies:
            preflight(planned.recipe, planned.plan, planned.stages(spec.stages))
    spec.require(recipe, studies)
    # For a sweep, those of its first study that has any.
    data: list[CheckedData] = []
    work: list[str] = []
    for planned in studies:
        plan, stages = planned.plan, planned.stages(spec.stages)
        checked = [] if facts.only_reads else check_data(planned.recipe, plan, stages)
        data = data or checked
        pending = [stage for stage in stages if is_pending(stage, plan, stages, planned.recipe.runtime)]
        work = work or _work_lines(planned, pending, checked)
        lines.append(f"# study {plan.fingerprint}, storage {planned.recipe.storage}{format_settings(planned.settings)}")
        for stage in stages:
            state = "cached" if stage.artifact.is_finished else "unneeded"  # samples of a finished checkpoint
            state = "to run" if stage in pending else state
            lines.append(f"#   {state:<8}  {stage.name:<18}  {stage.artifact.url}")
    if facts.reports:
        # `report` always writes the page again, and a sweep does.
        is_cached = not facts.only_reads and not recipe.sweep and report_shows(recipe.storage, studies[0].plan)
        state = "cached" if is_cached else "to write"
        lines.append(f"#   {state:<8}  {'report':<18}  {page_url(recipe.storage, REPORT_FOLDER)}")
    return "\n".join(lines + work + _data_lines(data, full=full))


def _work_lines(planned: PlannedStudy, pending: Sequence[Stage], data: Sequence[CheckedData]) -> list[str]:
    """What the stages of one study that are still to run have to do."""
    counts = {of_task.examples.url: of_task.counts for of_task in data}
    lines = []
    for stage in pending:
        work = expected_work(stage, counts)
        if work:
            lines.append(f"# work      {stage.name}: {work}{format_settings(planned.settings)}")
    return lines


def _data_lines(data: Sequence[CheckedData], *, full: bool) -> list[str]:
    """What was read, the tokens of all prompts, and the first of them."""
    counted, prompts = [], []
    for of_task in data:
        task = f"{of_task.task}, " if of_task.task else ""
        if of_task.counts is not None:
            counted.append(f"# data      {task}{format_counts(of_task.counts)}")
        for each in of_task.prompts:
            tokens = "the server counts the tokens"
            if each.tokens is not None:
                tokens = f"{each.tokens} tokens (the longest checked)"
            prompts.append(f"# prompt    {task}{each.documents} documents: {tokens}, and {each.reserve} for the answer")
    lines = counted + prompts
    if not prompts:
        return lines
    first = next(each for of_task in data for each in of_task.prompts)
    text = first.text.splitlines()
    if not full:
        text = [line if len(line) <= _WIDTH else f"{line[: _WIDTH // 2]} … {line[-_WIDTH // 2 :]}" for line in text]
        if len(text) > 2 * _PROMPT_LINES:
            hidden = len(text) - 2 * _PROMPT_LINES
            text[_PROMPT_LINES:-_PROMPT_LINES] = [f"… {hidden} more lines (--full shows them)"]
    return lines + [f"#   | {line}" for line in text]
