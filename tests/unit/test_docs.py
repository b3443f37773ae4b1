from scripts.reference_tables import CLUSTER_PAGE, PAGE, render, render_cluster


def test_reference_tables_are_up_to_date() -> None:
    """Else run `make docs`."""
    assert PAGE.read_text() == render(PAGE.read_text())
    assert CLUSTER_PAGE.read_text() == render_cluster(CLUSTER_PAGE.read_text())


def test_reference_tables_list_every_setting() -> None:
    page = PAGE.read_text()
    for line in (
        "| `advantageous_slot` | first \\| last \\| auto \\| random \\| integer \\| [integer, …] | first |",
        "| `betas` | [number, number] | [0.9, 0.95] |",
        "## `runtime.samplers`, `runtime.teachers`",
    ):
        assert line in page
