"""The texts of `--help` below the options."""

import textwrap

_EXAMPLES = {
    "recipes": ("recipes",),
    "study": (
        "study quickstart",
        "study quickstart --dry-run",
        "study quickstart training.learning_rate=5e-4 runtime.storage=/tmp/slow",
        "study my_recipe.yaml model.engine=vllm runtime.trainers.workers=2",
    ),
    "evaluate": (
        "evaluate quickstart --fail-if-gap-above 5",
        "evaluate --model Qwen/Qwen2.5-0.5B-Instruct --data questions.jsonl --documents 10",
        "evaluate --model Qwen/Qwen3-0.6B --data questions.jsonl model.chat_template_kwargs.enable_thinking=false",
        "evaluate --model qwen2.5 --data questions.jsonl --base-url http://127.0.0.1:8000/v1 --documents 10",
        "evaluate nq_mistral_7b data.path=s3://bucket/nq-open-20_total_documents_gold_at_0.jsonl.gz",
    ),
    "analyze": ("analyze quickstart", "analyze quickstart analysis.examples=30"),
    "sample": ("sample quickstart", "sample nq_mistral_7b data.path=nq.jsonl.gz runtime.samplers.max=4"),
    "distill": ("distill quickstart", "distill quickstart runtime.mode=streamed"),
    "report": ("report quickstart",),
    "inspect": ("inspect runs/quickstart --outcome gained --position 1 --prompts",),
    "runs": ("runs", "runs s3://bucket/runs --json"),
    "compare": ("compare runs/quickstart runs/slow",),
    "export": ("export runs/quickstart tasks",),
    "push": ("push runs/my-study my-name/my-model --private",),
    "submit": (
        "submit nq_mistral_7b data.path=s3://bucket/nq.jsonl.gz runtime.storage=s3://bucket/runs/nq "
        "--address http://127.0.0.1:8265",
    ),
    "cluster": (
        "cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8",
    ),
}
_READERS = ("recipes", "inspect", "runs", "compare", "export", "push")  # commands that run nothing


def _exit_codes(*codes: str) -> str:
    """The exit codes of a command: `0 success` and these, each with its meaning."""
    return textwrap.fill(f"Exit codes: {'; '.join(['0 success', *codes])}.", 115)


_BUG = "a bug (with its traceback)"
_FAULT = "2 wrong input, or a fault of the machine, the network or a storage (one line)"
_ENDED = "130 or 143 ended by Ctrl-C or SIGTERM; 141 the output was closed (`| head`)"
_OF_READERS = _exit_codes(f"1 {_BUG}", _FAULT, _ENDED)
_ALL_COMMANDS = (
    "The same command resumes an interrupted run, and does nothing if everything is finished.\n"
    + _exit_codes(
        f"1 a gate that failed (one line), or {_BUG}",
        _FAULT,
        "3 a job that was stopped, by someone or at its deadline",
        _ENDED,
    )
)


def examples(command: str | None = None) -> str:
    """Examples of a command, or one of each, as they are typed in a checkout."""
    shown = [lines[0] for lines in _EXAMPLES.values()] if command is None else _EXAMPLES[command]
    ending = _OF_READERS if command in _READERS else _ALL_COMMANDS
    return "\n".join(["examples:", *(f"  python run.py {line}" for line in shown), "", ending, ""])


SUBMIT = """Run a command as a job on a running Ray cluster, through its job API, and follow its log until it ends.

It uploads this project's code, recipes and examples, and a recipe of your own; secrets, data, results and
environments stay here. So runtime.storage must be a URL, or the absolute path of a folder that all nodes share; the
same is true of data and models outside examples/. The nodes need the packages of requirements/.

Submitting again follows a job that still runs; if it has ended, a new job resumes where it stopped. Ctrl-C stops
following, not the job. For a cluster with token authentication set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
"""

CLUSTER = """A study or another command on Kubernetes by KubeRay, from a cluster spec (docs/cluster.md).

  render     print the manifests: of a job if a recipe is given, else of a cluster
  validate   report the first error of a spec, or every error of a file of manifests
  submit     apply the job with kubectl and follow it: changes, log, exit code (1 failed, 3 stopped or deleted)
  status     the state of the job and its pods, and what pending pods wait for
  logs       the job's log so far
  delete     delete the job or the cluster, and everything that was created with it; results stay in the storage

The job runs `study RECIPE`, or the COMMAND that is written before the recipe; `evaluate` takes the options of its gate.
RECIPE may be a file of your own, which a ConfigMap takes to the cluster.
submit follows a job that already runs. A job that has ended is deleted and applied again: it resumes from its storage.
Ctrl-C stops following, not the job. The Kubernetes cluster is that of kubectl's current context.
"""

CLUSTER_EXAMPLES = """examples:
  cp cluster/presets/gke.yaml my_cluster.yaml
  python run.py cluster validate my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl --crds crds/
  python run.py cluster render my_cluster.yaml spec.sampling.max=16 --out manifests
  python run.py cluster submit my_cluster.yaml nq_mistral_7b data.path=gs://bucket/nq.jsonl runtime.trainers.workers=8
  python run.py cluster submit my_cluster.yaml evaluate nq_mistral_7b data.path=gs://b/nq.jsonl --fail-if-gap-above 5
  python run.py cluster status my_cluster.yaml --json
  python run.py cluster logs my_cluster.yaml
  python run.py cluster delete my_cluster.yaml

""" + _exit_codes(
    "1 the job or its gate failed",
    _FAULT,
    "3 the job was stopped, at its deadline or by someone, or deleted",
    "130 ended by Ctrl-C",
)
