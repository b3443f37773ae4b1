"""Follow a job of a Ray cluster: print its log while it runs, over any number of connections, and how it ended."""

import asyncio
import time
from typing import Any

import aiohttp
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from pos2distill.errors import ExitCode, UserError, collapse_whitespace

from .client import REQUEST_ERRORS, reason_of

_QUIET_SECONDS = 60.0  # without log lines for this long, the log is requested again: the connection may be dead
_UNREACHABLE_SECONDS = 120.0  # without an answer for this long, the cluster counts as unreachable


def follow(client: JobSubmissionClient, job: str) -> JobDetails:
    """Print a job's log until the job ends, over any number of connections.

    Raises:
        UserError: if the cluster does not answer for a while, or does not know the job.
    """
    shown = 0
    silent: float | None = None  # since when there is no output and no answer
    started: int | None = None  # when the job was submitted
    while True:
        before = shown
        shown = asyncio.run(_show(client, job, shown))
        now = time.monotonic()
        if silent is None or shown > before:
            silent = now
        try:
            details = client.get_job_info(job)
        except REQUEST_ERRORS as error:
            if f"{job} does not exist" in str(error):
                raise _unknown(job) from None
            if now - silent > _UNREACHABLE_SECONDS:
                raise UserError(
                    f"{job}: no answer from the cluster for {_UNREACHABLE_SECONDS:.0f} s ({reason_of(error)}); "
                    f"the job may continue, and the same command follows it again"
                ) from None
        else:
            # A head that was started again counts ids anew: another command may have submitted another job by this one.
            if started is not None and details.start_time != started:
                raise _unknown(job)
            started = details.start_time
            if not details.status.is_terminal():
                silent = None
            # The end of the log is waited for, but not forever.
            elif _show_rest(client, job, shown) or now - silent > _UNREACHABLE_SECONDS:
                return details
        time.sleep(1)


def _unknown(job: str) -> UserError:
    return UserError(
        f"{job}: the cluster does not know this job, probably since its head was started again; run the same command "
        f"to resume it"
    )


async def _show(client: JobSubmissionClient, job: str, shown: int) -> int:
    """Print what follows the first `shown` characters of a log while it is written.

    Returns: how many are shown now. A stream that ends says nothing: connections may be closed at any time.
    """
    passed = 0
    chunks: Any = client.tail_job_logs(job)
    while True:
        try:
            chunk = await asyncio.wait_for(anext(chunks), _QUIET_SECONDS)
        except (StopAsyncIteration, TimeoutError, aiohttp.ClientError, *REQUEST_ERRORS):
            return shown
        # A new connection sends the log from its beginning, so what was already printed is skipped.
        print(chunk[max(shown - passed, 0) :], end="", flush=True)
        passed += len(chunk)
        shown = max(shown, passed)


def _show_rest(client: JobSubmissionClient, job: str, shown: int) -> bool:
    """Print what follows the first `shown` characters of the log of a job that has ended. Whether it could be read."""
    try:
        log = client.get_job_logs(job)
    except REQUEST_ERRORS:
        return False
    print(log[shown:], end="", flush=True)
    return True


def report_end(details: JobDetails) -> int:
    """Print how a job ended. Returns the exit code."""
    job, code = details.submission_id, details.driver_exit_code
    if details.status == JobStatus.SUCCEEDED:
        print(f"{job} succeeded")
        return ExitCode.SUCCESS
    if details.status == JobStatus.STOPPED:
        print(f"{job} was stopped; the same command resumes it")
        return ExitCode.STOPPED
    why = (details.message or "").partition(", last available logs")[0]  # they have been printed
    print(f"{job} failed: {collapse_whitespace(why, 300)}")
    # A signal, or a driver that never started, is not the user's error.
    return code if code in (ExitCode.FAILED, ExitCode.USER_ERROR) else ExitCode.FAILED
