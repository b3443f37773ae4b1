from collections.abc import Callable

import fsspec

from pipelines.distill import _ray_storage
from pos2distill.config import Recipe


def test_ray_train_keeps_its_notes_in_the_storage_through_the_same_file_system(
    storage: str, make_recipe: Callable[..., Recipe]
) -> None:
    where = _ray_storage(make_recipe(runtime={"storage": storage}))
    where["storage_filesystem"].create_dir(where["storage_path"])
    with where["storage_filesystem"].open_output_stream(f"{where['storage_path']}/note") as file:
        file.write(b"42")
    fs, path = fsspec.url_to_fs(storage)
    assert fs.cat_file(f"{path}/ray/note") == b"42"
