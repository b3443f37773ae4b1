"""Plain fine-tuning on the rows of a finished quickstart: same rows, steps and rate, cross-entropy instead of R1.

The toy's kept responses are the gold sentences word for word, so this is SFT and SeqKD at once.

Example:
  make quickstart
  .venv/bin/python -m benchmarks.quickstart.fine_tune /tmp/fine-tuned
  .venv/bin/python run.py evaluate quickstart model.path=/tmp/fine-tuned runtime.storage=/tmp/fine-tuned-curve
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from pipelines.distill import make_source
from pipelines.plan import make_plan
from pos2distill.losses.kl import mean_by_row
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.models.responses import collate, predicting_hidden
from pos2distill.recipes import load_recipe
from pos2distill.training.schedule import learning_rate


def main() -> None:
    """Fine-tune and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    study = load_recipe(arguments.recipe).study
    settings = study.training
    source = make_source(study, make_plan(load_recipe(arguments.recipe)))
    lm = load_model(study.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(lm.parameters(), betas=settings.betas, weight_decay=settings.weight_decay)
    batches = [keys for epoch in range(settings.epochs) for keys in source.global_batches(epoch)]
    for step, keys in enumerate(batches):
        rows = [source.row(key) for key in keys]
        batch = collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])
        logits_TV = lm.get_output_embeddings()(predicting_hidden(lm, batch))
        target_T = torch.cat([torch.from_numpy(row.response_ids.astype("int64")) for row in rows])
        loss = mean_by_row(cross_entropy(logits_TV, target_T, reduction="none"), batch.row_T, len(rows)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), settings.gradient_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), settings)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1}/{len(batches)}  loss {loss.item():.4f}", flush=True)
    lm.to(torch.bfloat16).save_pretrained(arguments.out)
    load_tokenizer(study.model).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
