from pos2distill.records import (
    EXAMPLE_SCHEMA,
    PREDICTION_SCHEMA,
    SAMPLE_SCHEMA,
    Document,
    Example,
    example_from_row,
    examples_to_table,
)

EXAMPLE = Example(
    "e1",
    "Wer?",
    ("Käthe", "K."),
    (Document("a", "x", False), Document("b", "Käthe", True), Document("", "y", False)),
)


def test_an_example_survives_arrow() -> None:
    table = examples_to_table([EXAMPLE])
    assert table.schema.equals(EXAMPLE_SCHEMA, check_metadata=True)
    assert [example_from_row(row) for row in table.to_pylist()] == [EXAMPLE]


def test_gold_and_distractors_part_the_documents() -> None:
    assert EXAMPLE.gold == EXAMPLE.documents[1]
    assert EXAMPLE.distractors == (EXAMPLE.documents[0], EXAMPLE.documents[2])


def test_schemas_state_their_version() -> None:
    assert {schema.metadata[b"schema_version"] for schema in (EXAMPLE_SCHEMA, SAMPLE_SCHEMA, PREDICTION_SCHEMA)} == {
        b"1"
    }
