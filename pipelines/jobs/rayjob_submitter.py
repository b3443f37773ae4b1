"""What the submitter's pod of a RayJob runs: `python -m pipelines.jobs.rayjob_submitter ENTRYPOINT`.

It submits the job to its cluster, prints its log, and ends when the job has ended. KubeRay 1.7's own command ends when
the stream of the log is closed; half a minute later KubeRay marks the RayJob as failed and deletes its cluster,
although the job may still run (ray-project/kuberay#4921).

KubeRay sets RAY_DASHBOARD_ADDRESS, RAY_JOB_SUBMISSION_ID and the token. It asks the head whether the job succeeded.
"""

import os
import sys
import threading
import time

from ray.job_submission import JobDetails, JobSubmissionClient

from pos2distill.errors import UserError
from pos2distill.node_pools import DEADLINE_PASSED, JOB_DEADLINE_VARIABLE

from .client import REQUEST_ERRORS, RequestFailures, connect
from .follow import follow

RETRY_SECONDS = 5.0


def main() -> int:
    """Submit the job that the environment names. Returns 0 however it ended: KubeRay asks the head how."""
    address = os.environ["RAY_DASHBOARD_ADDRESS"]
    if "://" not in address:
        address = f"http://{address}"
    job = os.environ["RAY_JOB_SUBMISSION_ID"]
    deadline = os.environ.get(JOB_DEADLINE_VARIABLE)
    ended = threading.Event()
    if deadline:
        threading.Thread(target=stop_at, args=(address, job, float(deadline), ended), daemon=True).start()
    try:
        details = run_to_end(address, job, sys.argv[1])
    finally:
        ended.set()
    print(f"{job}: {details.status}", flush=True)
    return 0


def run_to_end(address: str, job: str, entrypoint: str) -> JobDetails:
    """Submit a job, or attach to it if it is there, and print its log until it has ended.

    There is no limit to failures: KubeRay ends this process when it gives up on the job.
    """
    failures = RequestFailures(job)
    while True:
        try:
            client = connect(address)
            # Also when a new head has replaced the one that the job was submitted to.
            if not _is_known(client, job):
                client.submit_job(entrypoint=entrypoint, submission_id=job)
            failures.end()
            return follow(client, job)
        except (UserError, *REQUEST_ERRORS) as error:
            failures.show(error)
        time.sleep(RETRY_SECONDS)


def stop_at(address: str, job: str, deadline: float, ended: threading.Event) -> None:
    """Stop a job at a time, in seconds since 1970, unless it has ended. A stopped job is not retried.

    Again and again until the end: a job that is being submitted cannot be stopped yet, and a new head runs it again.
    """
    if ended.wait(max(0.0, deadline - time.time())):
        return
    print(f"{job}: {DEADLINE_PASSED}", flush=True)
    failures = RequestFailures(job)
    while not ended.is_set():
        try:
            client = connect(address)
            if not client.get_job_info(job).status.is_terminal():
                client.stop_job(job)
            failures.end()
        except (UserError, *REQUEST_ERRORS) as error:  # also if the job is only about to be submitted
            failures.show(error)
        ended.wait(RETRY_SECONDS)


def _is_known(client: JobSubmissionClient, job: str) -> bool:
    return any(details.submission_id == job for details in client.list_jobs())


if __name__ == "__main__":
    sys.exit(main())
