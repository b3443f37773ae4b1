"""The command that a RayJob runs."""

import shlex

from pos2distill.node_pools import JOB_DASHBOARD_VARIABLE

from .job_command import JobCommand
from .recipe_checks import check_recipe
from .spec import ClusterSpec

_DASHBOARD = "http://127.0.0.1:8265"  # the driver runs on the head, as the dashboard does


def make_entrypoint(spec: ClusterSpec, job: JobCommand) -> str:
    """The shell command of the job: `run.py COMMAND` in the image, with storage that all pods can reach.

    Raises:
        UserError: for a recipe, setting, file or pool size that cannot work on this cluster.
    """
    check_recipe(spec, job)
    words = ["python", "run.py", job.command, job.recipe_in_pod, *job.overrides]
    if job.storage is None:
        words.append(f"runtime.storage={job_storage(spec, job)}")
    words += job.gate.words()
    # The driver does not start in the image's working directory. `cd` would change that of the submitter's shell only.
    return shlex.join(["env", f"--chdir={spec.pods.project}", f"{JOB_DASHBOARD_VARIABLE}={_DASHBOARD}", *words])


def job_storage(spec: ClusterSpec, job: JobCommand) -> str:
    """Where the results of the job's study are: what its recipe or overrides set, or a folder of the spec's storage."""
    return job.storage or f"{spec.storage.url.rstrip('/')}/{job.recipe.name}"
