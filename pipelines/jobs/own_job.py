"""A study that runs as a job of a RayJob, and must not be retried."""

import json
import os
import time

from pos2distill.errors import UserError
from pos2distill.node_pools import JOB_DASHBOARD_VARIABLE

from .client import REQUEST_ERRORS, RequestFailures, connect, reason_of

_STOP_SECONDS = 60.0
# The head may be busy. A job that cannot be stopped is retried in vain, on new clusters.
_TRY_SECONDS = 120.0
_RETRY_SECONDS = 5.0


def stop_own_job(why: str) -> None:
    """Stop the Ray job that this process is the driver of.

    KubeRay 1.7 retries every job that fails, on a new cluster, and no job that is stopped.

    Args:
        why: printed before; `cluster submit` finds it at the end of the log.
    """
    # Ray 2.60 passes the job's metadata to its driver in this variable.
    config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    job = config.get("metadata", {}).get("job_submission_id")
    if job is None:
        return  # a command that somebody runs in the head's pod
    print(why, flush=True)
    give_up_at, failures = time.monotonic() + _TRY_SECONDS, RequestFailures(job)
    while True:
        try:
            connect(os.environ[JOB_DASHBOARD_VARIABLE]).stop_job(job)
            break
        except (UserError, *REQUEST_ERRORS) as error:
            if time.monotonic() > give_up_at:
                print(f"{job} could not be stopped: {reason_of(error)}", flush=True)
                return
            failures.show(error)
        time.sleep(_RETRY_SECONDS)
    # Ray ends this process. If it ended by itself before, the job would have failed.
    time.sleep(_STOP_SECONDS)
