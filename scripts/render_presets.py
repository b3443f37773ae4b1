"""Writes rendered/*.yaml, what each example becomes: `make docs`. A test holds them to it."""

import shlex
from pathlib import Path

from cluster.render import render, to_yaml
from cluster.spec import load_cluster

RENDERED = Path(__file__).parents[1] / "cluster" / "presets" / "rendered"

# File: spec, recipe, overrides of the recipe.
PRESETS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "gke": (
        "gke",
        "nq_mistral_7b",
        ("data.path=gs://my-bucket/data/nq-open-20_total_documents_gold_at_0.jsonl.gz", "runtime.trainers.workers=8"),
    ),
    "eks": (
        "eks",
        "nq_llama3_8b",
        (
            "data.path=s3://my-bucket/data/nq-open-20_total_documents_gold_at_0.jsonl.gz",
            "evaluation.slots=[0, 9, 19]",
            "runtime.trainers.workers=8",
        ),
    ),
    "onprem": (
        "onprem",
        "nq_qwen1_5_7b",
        (
            "model.path=/mnt/storage/models/Qwen1.5-7B-Chat",
            "data.path=/mnt/storage/data/nq-open-20_total_documents_gold_at_0.jsonl.gz",
            "runtime.trainers.workers=8",
        ),
    ),
    "kind": ("kind", "quickstart", ()),
    "onprem-cluster": ("onprem", None, ()),
}


def rendered(name: str) -> str:
    """The text of one file."""
    spec, recipe, overrides = PRESETS[name]
    command = " ".join(["python run.py cluster render", spec, recipe or "", *map(shlex.quote, overrides)]).rstrip()
    return (
        f"# {command}\n# Made by scripts/render_presets.py.\n{to_yaml(render(load_cluster(spec), recipe, overrides))}"
    )


if __name__ == "__main__":
    for name in PRESETS:
        (RENDERED / f"{name}.yaml").write_text(rendered(name))
