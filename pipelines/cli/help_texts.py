"""The texts of `--help`: what each command does, and what is printed below the options."""

import textwrap

COMMAND_HELP = {
    "study": "run the whole study: evaluate, sample, distill, evaluate again, report; finished stages are skipped",
    "evaluate": "measure accuracy at every slot: of a recipe's base model and its checkpoint if any, or of any --model",
    "analyze": "analyze why a recipe's models answer differently by position: KL by token, recovery, attention, failed "
    "steps",
    "sample": "sample responses to advantageous prompts and store them, with the teacher's hidden states",
    "distill": "train on the stored samples; with runtime.mode=streamed, sample missing ones at the same time",
    "report": "write the HTML page and summary.json from finished results",
}
WORDS_HELP = (
    f"command of the job ({', '.join(COMMAND_HELP)}; default: study), then a recipe, then settings as "
    "section.field=value"
)

_EXAMPLES = {
    "recipes": ("recipes", "recipes quickstart > my_recipe.yaml"),
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

The job gets this project's code, recipes and examples, and your own recipe if you name one. Secrets, data, results and
environments are not uploaded. Therefore runtime.storage must be a URL, or the absolute path of a folder that all nodes
share, and so must data and models outside examples/. The nodes need the packages of requirements/.

Run the same command again to follow a job that is still running, or, if it has ended, to resume it in a new job.
Ctrl-C stops following the job, not the job itself. For a cluster with token authentication, set RAY_AUTH_TOKEN or
RAY_AUTH_TOKEN_PATH.
"""

CLUSTER = """Run a study or another command on Kubernetes with KubeRay, from a cluster spec (docs/cluster.md).

  render     print the manifests: of a job if a recipe is given, else of a cluster
  validate   report the first error in a spec, or every error in a file of manifests
  submit     create the job with kubectl and follow it: status changes, log, exit code (1 failed, 3 stopped or deleted)
  status     print the state of the job and its pods, and what pending pods wait for
  logs       print the job's log so far
  delete     delete the job or the cluster, and everything that was created with it; results stay in the storage

The job runs `study RECIPE`, or the COMMAND before the recipe; with `evaluate`, the gate options below are possible.
RECIPE may be your own file, which a ConfigMap brings to the cluster.
If the job is already running, submit only follows it. If it has ended, submit deletes it and creates it again; the new
job resumes from the storage. Ctrl-C stops following the job, not the job itself.
The Kubernetes cluster is the one of kubectl's current context.
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
