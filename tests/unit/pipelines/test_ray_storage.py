from collections.abc import Callable

from pipelines.executors.ray.train import arrow_filesystem
from pipelines.plan import make_plan
from pos2distill.config import Recipe


def test_ray_train_reaches_the_storage_through_the_same_file_system(make_recipe: Callable[..., Recipe]) -> None:
    artifact = make_plan(make_recipe(runtime={"storage": "memory://bucket/run"})).distill.artifact
    filesystem = arrow_filesystem(artifact)
    assert filesystem is not None
    filesystem.create_dir(artifact.path)
    with filesystem.open_output_stream(f"{artifact.path}/note") as file:
        file.write(b"42")
    assert artifact.fs.cat_file(f"{artifact.path}/note") == b"42"


def test_a_folder_of_this_machine_is_its_own(make_recipe: Callable[..., Recipe]) -> None:
    assert arrow_filesystem(make_plan(make_recipe()).distill.artifact) is None
