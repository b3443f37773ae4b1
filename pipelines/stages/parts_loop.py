"""Work whose results are stored as they come, so that a run that was stopped continues after the last of them."""

from collections.abc import Callable, Sequence
from contextlib import closing

import pyarrow as pa

from pos2distill.sampling.operators import Operator

from ..progress_bar import show_stage
from .stage import RunContext, Stage


def map_and_store(
    stage: Stage,
    context: RunContext,
    blocks: Sequence[pa.Table],
    operators: Sequence[Operator],
    store: Callable[[pa.Table], str | None],
    *,
    label: str,
    total: int,
    done: int,
    unit: str,
) -> None:
    """Run the operators over the blocks, store each result at once, and show the progress.

    Args:
        store: stores one result. Returns what is shown behind the progress, if anything.
        label: what this is, for messages of the executor.
        total: rows of the results of all runs.
        done: those of earlier runs.
        unit: what a row is, in the singular.
    Raises:
        UserError: as the operators and `store`.
    """
    if not blocks:  # no model is loaded for nothing
        return
    # Before the progress is shown: an executor connects at once, and until then there is none.
    results = context.executor.map(blocks, operators, label=label)
    hint = context.executor.stalled_hint
    with closing(results), show_stage(stage.name, total, done=done, unit=unit, hint=hint) as progress:
        for result in results:
            note = store(result)
            progress.update(len(result), note or "")
