"""Why attempts of a cluster's job failed, in its storage: the cluster of an attempt is deleted with its logs."""

import os
import threading
import time
import traceback
from contextlib import suppress

from pos2distill.config import Recipe
from pos2distill.errors import Stopped, UserError, one_line
from pos2distill.faults import describe
from pos2distill.literal_paths import make_folder
from pos2distill.node_pools import JOB_DASHBOARD_VARIABLE
from pos2distill.secrets import mask_secrets
from pos2distill.store.files import write_json
from pos2distill.store.storage import check_storage
from pos2distill.urls import open_url

FAILED_ATTEMPTS = "failed-attempts"
_WRITE_SECONDS = 10.0


def record_failure(recipe: Recipe, command: str, error: Exception) -> None:
    """Write the error that ends this attempt to `failed-attempts/` of the storage; nothing outside of such a job.

    Not before the recipe has stored something: no run could claim a folder that holds other files. Nothing is raised,
    and it takes seconds at most: the storage may be what failed, and the error itself is what the user must see.
    """
    if not os.environ.get(JOB_DASHBOARD_VARIABLE) or isinstance(error, Stopped):
        return
    now = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    line = str(error) if isinstance(error, UserError) else describe(error)
    record = {"time": now, "command": command, "error": one_line(mask_secrets(line or repr(error)))}
    if line is None:
        record["traceback"] = mask_secrets("".join(traceback.format_exception(error)))
    # A request to a storage that accepts it and says nothing can take minutes.
    thread = threading.Thread(target=_write, args=(recipe, record), name="failed attempt", daemon=True)
    thread.start()
    thread.join(_WRITE_SECONDS)


def _write(recipe: Recipe, record: dict[str, str]) -> None:
    with suppress(Exception):
        if not check_storage(recipe.storage, recipe.name):
            return
        path_of_record = f"{recipe.storage.rstrip('/')}/{FAILED_ATTEMPTS}/{record['time']}.json"
        fs, path = open_url(path_of_record, "runtime.storage")
        make_folder(fs, path.rpartition("/")[0])
        write_json(fs, path, record)
