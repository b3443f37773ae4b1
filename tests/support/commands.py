"""The commands for recipes that are planned here, as the command line and the Python functions do."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipelines import commands
from pos2distill.config import Recipe
from pos2distill.evaluation.result import Evaluation

Command = Callable[..., list[str]]
"""Runs the command line with these words and returns the lines that it prints."""


def run_study(recipe: Recipe) -> None:
    commands.run_study(recipe, commands.plan_command(recipe, "study"))


def run_evaluate(recipe: Recipe) -> list[Evaluation]:
    return commands.run_evaluate(recipe, commands.plan_command(recipe, "evaluate"))


def run_analyze(recipe: Recipe) -> None:
    commands.run_analyze(recipe, commands.plan_command(recipe, "analyze"))


def run_sample(recipe: Recipe) -> None:
    commands.run_sample(recipe, commands.plan_command(recipe, "sample"))


def run_distill(recipe: Recipe) -> None:
    commands.run_distill(recipe, commands.plan_command(recipe, "distill"))


def replace_command(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[..., object]) -> None:
    """Let a command run this function instead of its own."""
    monkeypatch.setitem(commands.COMMANDS, name, replace(commands.COMMANDS[name], run=run))
