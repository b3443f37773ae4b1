"""The commands that run a recipe, and what each of them does: for whoever shows, plans or submits one."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandFacts:
    """What a command does.

    Attributes:
        samples: it makes samples, and with them the states of a cached teacher.
        trains: it trains the student.
        analyzes: it makes the analysis of a recipe that has the section `analysis`.
        adds_analysis: it makes one of any recipe.
        reports: it writes the report.
        only_reads: it runs no stage; its stages are those whose results it reads.
        needs_training_data: it needs training examples, and a model whose weights can be read.
        takes_sweeps: it runs every study of a sweep; the others take one study.
        takes_gate: it takes the options of a gate.
    """

    samples: bool = False
    trains: bool = False
    analyzes: bool = False
    adds_analysis: bool = False
    reports: bool = False
    only_reads: bool = False
    needs_training_data: bool = True
    takes_sweeps: bool = False
    takes_gate: bool = False


COMMAND_FACTS: Mapping[str, CommandFacts] = {
    "study": CommandFacts(samples=True, trains=True, analyzes=True, reports=True, takes_sweeps=True),
    "evaluate": CommandFacts(needs_training_data=False, takes_gate=True),
    "analyze": CommandFacts(analyzes=True, adds_analysis=True),
    "sample": CommandFacts(samples=True),
    # In streamed mode it also makes the samples that are missing.
    "distill": CommandFacts(samples=True, trains=True),
    "report": CommandFacts(reports=True, only_reads=True, needs_training_data=False, takes_sweeps=True),
}
"""By the name of the command, in the order in which help lists them."""
