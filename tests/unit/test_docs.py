from scripts.reference_tables import CLUSTER_PAGE, PAGE, render, render_cluster


def test_the_pages_of_settings_are_those_that_the_code_makes() -> None:
    """Else run `make docs`."""
    assert PAGE.read_text() == render(PAGE.read_text())
    assert CLUSTER_PAGE.read_text() == render_cluster(CLUSTER_PAGE.read_text())


def test_every_setting_stands_on_the_page() -> None:
    page = PAGE.read_text()
    for line in (
        "| `advantageous_slot` | first \\| last \\| auto \\| integer \\| [integer, …] | first |",
        "| `betas` | [number, number] | [0.9, 0.95] |",
        "## `runtime.samplers`, `runtime.teachers`",
    ):
        assert line in page
