from collections.abc import Callable

from cluster.entrypoint import make_entrypoint
from cluster.job_command import load_job
from cluster.spec import ClusterSpec


def test_make_entrypoint_quotes_for_a_shell(load: Callable[..., ClusterSpec]) -> None:
    made = make_entrypoint(load(), load_job("quickstart", ["evaluation.slots=[0, 9]", "runtime.trainers.workers=1"]))
    assert made == (
        "env --chdir=/opt/pos2distill POS2DISTILL_JOB_DASHBOARD=http://127.0.0.1:8265 "
        "python run.py study quickstart 'evaluation.slots=[0, 9]' "
        "runtime.trainers.workers=1 runtime.storage=gs://bucket/runs/quickstart"
    )


def test_make_entrypoint_keeps_the_storage_of_an_override(load: Callable[..., ClusterSpec]) -> None:
    made = make_entrypoint(load(), load_job("quickstart", ["runtime.storage=s3://other/run"]))
    assert made.endswith(" quickstart runtime.storage=s3://other/run")
