"""Stage `evaluate`: greedy answers at every slot, judged, one table of predictions."""

import time

import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from pipelines.generate import Placement, generate
from pipelines.plan import Plan
from pipelines.ray_session import ray_session, require_resources
from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.tasks.permutations import spread_slots


def evaluation_placements(study: Study) -> list[Placement]:
    """The prompt lengths and slots that are asked for, the length trained on first."""
    main = (study.data.documents, spread_slots(study.data.documents, study.evaluation.slots))
    others = [(n, spread_slots(n, study.evaluation.other_slots)) for n in study.evaluation.other_documents]
    return [main, *others]


def make_scores(recipe: Recipe, plan: Plan, artifact: Artifact, model: ModelSection, label: str) -> Manifest:
    """Ask one model the evaluation examples at every slot and write `predictions.parquet`.

    Counts: prompts = right + wrong.

    Args:
        artifact: where the predictions go. model: the recipe's own, or the distilled one. label: for the progress bar.
    """
    start = time.monotonic()
    study = recipe.study
    examples = plan.examples.read_table("evaluation.parquet")
    placements = evaluation_placements(study)
    total = len(examples) * sum(len(slots) for _, slots in placements)
    parts = []
    with ray_session(), tqdm(desc=f"evaluate {label}", total=total, unit="prompt") as bar:
        pool = recipe.runtime.samplers
        require_resources("evaluation", cpus=pool.min * pool.cpus, gpus=pool.min * pool.gpus)
        answers = generate(
            recipe,
            model,
            examples,
            placements,
            temperature=0.0,
            top_p=1.0,
            max_new_tokens=study.evaluation.max_new_tokens,
        ).select_columns(PREDICTION_SCHEMA.names)
        for part in answers.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.append(part.cast(PREDICTION_SCHEMA))
            bar.update(len(part))
    table = pa.concat_tables(parts).sort_by([(name, "ascending") for name in ("documents", "example_id", "slot")])
    right = pc.sum(table["correct"]).as_py()
    counts = {"examples": len(examples), "prompts": len(table), "right": right, "wrong": len(table) - right}
    with artifact.writing():
        artifact.write_table("predictions.parquet", table)
        return artifact.publish(counts=counts, seconds={"evaluate": time.monotonic() - start})
