from collections.abc import Callable

from pipelines.executors.ray.train import arrow_filesystem
from pipelines.plan import make_plan
from pos2distill.config import Recipe


def test_arrow_filesystem_wraps_the_artifacts_own(make_recipe: Callable[..., Recipe]) -> None:
    artifact = make_plan(make_recipe(runtime={"storage": "memory://bucket/run"})).distill.artifact
    filesystem = arrow_filesystem(artifact)
    assert filesystem is not None
    filesystem.create_dir(artifact.path)
    with filesystem.open_output_stream(f"{artifact.path}/note") as file:
        file.write(b"42")
    assert artifact.fs.cat_file(f"{artifact.path}/note") == b"42"


def test_arrow_filesystem_of_a_local_folder_is_none(make_recipe: Callable[..., Recipe]) -> None:
    assert arrow_filesystem(make_plan(make_recipe()).distill.artifact) is None
