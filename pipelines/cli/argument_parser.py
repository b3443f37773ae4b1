"""argparse with the same errors as the rest of the program: one line, with the nearest right name."""

import argparse
import re
from typing import Any, NoReturn

from pos2distill.config import Recipe
from pos2distill.config.validation import dotted_names
from pos2distill.errors import ExitCode, did_you_mean, did_you_mean_one, one_line
from pos2distill.secrets import mask_secrets


class OneLineParser(argparse.ArgumentParser):
    """Its subparsers are of the same class. commands: these, by name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands: dict[str, OneLineParser] = {}

    def error(self, message: str) -> NoReturn:
        """End the program with this message. argparse would show the usage before it, and has no hint for commands."""
        unknown = re.fullmatch(r"argument (COMMAND|action): invalid choice: '(.*?)' \(.*", message, re.DOTALL)
        if unknown:
            argument, word = unknown.groups()
            names = self.commands if argument == "COMMAND" else self._choices_of(argument)
            message = f"{word}: no such {argument.lower()}{did_you_mean(word, names, likeness=0.7)}"
        self.exit(ExitCode.USER_ERROR, f"error: {one_line(mask_secrets(message))} (see {self.prog} --help)\n")

    def _choices_of(self, argument: str) -> list[str]:
        return [str(choice) for action in self._actions if action.dest == argument for choice in action.choices or ()]


def reject_unknown(parser: OneLineParser, options: argparse.Namespace, remaining: list[str]) -> None:
    """End the program if a word that argparse left over is no setting of a command that takes them."""
    unknown = [word for word in remaining if word.startswith("-") or not options.takes_settings]
    if not unknown:
        return
    hint = _hint(parser, options.command, unknown[0]) if "." not in unknown[0].partition("=")[0] else ""
    if not hint and options.takes_settings:
        hint = _setting_hint(unknown[0]) or "; a setting is given as section.field=value, such as training.epochs=2"
    parser.commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _hint(parser: OneLineParser, command: str, word: str) -> str:
    """What may have been meant by a word that the command does not know; empty if nothing is similar."""
    option = word.partition("=")[0]
    if command == "cluster" and option == "--dry-run":
        return "; cluster render and validate send nothing"
    if command == "submit" and option == "--dry-run":
        return "; without `submit` and its options, the same command with --dry-run is checked here, and not run"
    if command in ("cluster", "submit") and option in ("--model", "--data"):
        return "; a job needs a recipe, which settings change, as in nq_mistral_7b model.path=... data.path=..."
    others = [name for name, other in parser.commands.items() if option in _options(other)]
    if others:
        return f"; an option of {', '.join(others)}"
    return did_you_mean_one(option, _options(parser.commands[command]), likeness=0.7)


def _setting_hint(word: str) -> str:
    """For an option that other programs have, or that has the name of a setting."""
    option, _, given = word.partition("=")
    value = given or "…"
    if option == "--resume":
        return "; the same command continues a run that was stopped"
    name = option.lstrip("-").replace("-", "_")
    settings = [dotted for dotted in dotted_names(Recipe) if name in (dotted, dotted.rpartition(".")[2])]
    if "." in name:
        settings = settings or [name]
    if not settings:
        return ""
    return f"; settings have no dashes: {' or '.join(f'{dotted}={value}' for dotted in settings)}"


def _options(command: OneLineParser) -> list[str]:
    """The long options that its help names."""
    return re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", command.format_help(), re.MULTILINE)
