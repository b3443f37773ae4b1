from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pos2distill.config import DataSection, MethodSection, ModelSection, Study, fingerprint, restrict
from pos2distill.config.restrict import RestrictedStudy

ONE: dict[str, Any] = {
    "model": {"path": "a", "dtype": "float32"},
    "data": {"format": "nq", "path": "a.jsonl", "documents": 10, "prompt": "kv"},
    "method": {"name": "seqkd", "k": 2, "advantageous_slot": "auto"},
    "sampling": {"temperature": 0.5},
    "training": {"lora": {"rank": 4}, "epochs": 3},
    "evaluation": {"slots": 3, "other_documents": [6]},
    "seed": 1,
}
OTHER: dict[str, Any] = {
    "model": {"path": "b", "engine": "hf"},
    "data": {"format": "jsonl", "path": "b.jsonl", "documents": 12, "hops": [2]},
    "method": {"name": "r1", "k": 3, "advantageous_slot": "last"},
    "sampling": {"temperature": 0.7},
    "training": {"epochs": 1},
    "evaluation": {},
    "seed": 2,
}


def dotted_names() -> list[str]:
    names = ["seed"]
    for section in ("model", "data", "method", "sampling", "training", "evaluation"):
        names.append(section)
        kind: Any = Study.model_fields[section].annotation
        names += [f"{section}.{name}" for name in kind.model_fields]
    return names


def value_at(study: Study, dotted: str) -> Any:
    value: Any = study
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


@given(st.sets(st.sampled_from(dotted_names())))
def test_restrict_dumps_equal_if_and_only_if_the_named_settings_are(names: set[str]) -> None:
    one, other = Study.model_validate(ONE), Study.model_validate(OTHER)
    equal = all(value_at(one, name) == value_at(other, name) for name in names)
    restricted, other_restricted = restrict(one, names), restrict(other, names)
    assert (restricted.model_dump(mode="json") == other_restricted.model_dump(mode="json")) == equal
    assert (fingerprint(restricted) == fingerprint(other_restricted)) == equal
    assert all(value_at(restricted, name) == value_at(one, name) for name in names)


def test_restrict_to_nothing_holds_defaults_and_placeholders() -> None:
    study = restrict(Study.model_validate(ONE), [])
    defaults = Study(model=ModelSection(path=""), data=DataSection(format="nq", path=""))
    assert study.model_dump() == defaults.model_dump()


def test_restrict_to_all_sections_is_the_study() -> None:
    study = Study.model_validate(ONE)
    assert restrict(study, list(Study.model_fields)).model_dump() == study.model_dump()


def test_restrict_keeps_what_is_named_and_nothing_else() -> None:
    study = restrict(Study.model_validate(ONE), ["data.documents", "method.k", "training.lora", "seed"])
    assert (study.data.documents, study.method.k, study.seed) == (10, 2, 1)
    assert study.training.lora is not None
    assert study.training.lora.rank == 4
    assert (study.model.path, study.data.prompt, study.method.name, study.training.epochs) == ("", "qa", "r1", 2)


@pytest.mark.parametrize("name", ["sed", "data.promt", "data.", "seed.x", "training.lora.rank", "runtime", ""])
def test_restrict_rejects_unknown_names(name: str) -> None:
    with pytest.raises(KeyError, match="not a setting of a study"):
        restrict(Study.model_validate(ONE), [name])


def test_replace_validates_a_whole_study() -> None:
    study = Study.model_validate(ONE)
    replaced = study.replace(method=MethodSection(name="r1", advantageous_slot=9))
    assert type(replaced) is Study
    assert replaced.fixed_advantageous_slots(1) == (9,)
    assert (replaced.model, replaced.data, replaced.evaluation) == (study.model, study.data, study.evaluation)
    with pytest.raises(ValidationError, match=r"method.advantageous_slot: 10 is not one of the slots 0 to 9"):
        study.replace(method=MethodSection(name="r1", advantageous_slot=10))


def test_replace_keeps_a_restricted_study_restricted() -> None:
    """The constants of the other settings may contradict the kept ones, here the default of 20 documents."""
    study = restrict(Study.model_validate(ONE), ["seed"])
    replaced = study.replace(method=MethodSection(advantageous_slot=99))
    assert type(replaced) is RestrictedStudy
    assert (replaced.method.advantageous_slot, replaced.seed) == (99, 1)


def test_replace_validates_a_section() -> None:
    section = MethodSection(name="r1", k=3)
    assert section.replace(advantageous_slot=(0, 1)) == MethodSection(name="r1", k=3, advantageous_slot=(0, 1))
    with pytest.raises(ValidationError, match=r"^1 validation error"):
        section.replace(k=-1)
