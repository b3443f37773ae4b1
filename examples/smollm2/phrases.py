"""Words and sentences from which `facts` builds fictional encyclopedia entries.

An entry is about a subject of one `Kind`: a person, a place, a work or an event. It states up to one `Fact` for each
type of value (a person, a place, a year, a count), so a question about a fact has exactly one answer in the entry.

Fields of the templates: `{name}` is the subject's name, `{role}` a word for it (a botanist, a village, a novel) and
`{value}` the fact's value.

The wording is deliberately plain, and questions use the words of the entries. Paraphrases, pronouns, questions with
"Who wrote" and questions about years were measured too: SmolLM2-135M-Instruct often failed on them even with the gold
entry alone. So entries state years, and no question asks for one.
"""

from dataclasses import dataclass
from typing import Literal

ValueType = Literal["person", "place", "year", "count"]


@dataclass(frozen=True)
class Fact:
    """One property of a subject: the type of its value, the sentences that state it and the questions about it."""

    name: str
    value_type: ValueType
    statements: tuple[str, ...]
    questions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """One kind of subject, with the sentences of its entries.

    `title` is a template for names of works and events, with the fields `{person}` and `{place}`. People and places
    have none: their names are coined.
    """

    name: str
    roles: tuple[str, ...]
    openings: tuple[str, ...]
    fillers: tuple[str, ...]
    facts: tuple[Fact, ...]
    titles: tuple[str, ...] = ()

    @property
    def asked_facts(self) -> tuple[Fact, ...]:
        """The facts that questions ask for."""
        return tuple(fact for fact in self.facts if fact.questions)


# Coined stems and endings: together they give names that no real encyclopedia has.
STEMS = (
    "Velm", "Quor", "Drusk", "Orven", "Thess", "Brack", "Wyx", "Jolm", "Karv", "Mundr", "Pell", "Ostr", "Yarl", "Zeth",
    "Fenr", "Gorl", "Hask", "Ilv", "Lorm", "Nuth", "Rund", "Skell", "Tavr", "Umbr", "Vask", "Corv", "Eldr", "Brenn",
    "Dorv", "Galv", "Harn", "Jask", "Keld", "Lund", "Morv", "Narb", "Prask", "Stolv", "Trenn", "Wend",
)  # fmt: skip
PLACE_ENDINGS = (
    "abury", "afell", "agard", "ahaven", "aholm", "amarsh", "amere", "aness", "apool", "astead", "aton", "awater",
    "awick", "aworth",
)  # fmt: skip
SURNAME_ENDINGS = ("ane", "ault", "elli", "essen", "etti", "inde", "ishaw", "omar", "oway", "umber")
FIRST_NAMES = (
    "Agatha", "Bettina", "Clara", "Dorothea", "Edith", "Flora", "Greta", "Hilda", "Irma", "Josephine", "Lydia",
    "Matilda", "Nora", "Ottilie", "Petra", "Rosalind", "Sybil", "Theresa", "Ursula", "Wanda",
    "Albert", "Bernard", "Caspar", "Dominic", "Edgar", "Felix", "Gustav", "Hector", "Ivor", "Julius", "Konrad",
    "Leopold", "Magnus", "Nigel", "Oscar", "Percy", "Rupert", "Simon", "Tobias", "Walter",
)  # fmt: skip

# Roles begin with a consonant: the openings write "a {role}".
PERSON = Kind(
    name="person",
    roles=(
        "baker",
        "botanist",
        "clockmaker",
        "composer",
        "gardener",
        "mathematician",
        "painter",
        "poet",
        "potter",
        "printer",
        "sculptor",
        "shipbuilder",
        "tailor",
        "weaver",
    ),
    openings=(
        "{name} was a {role}.",
        "{name} was a {role} who came from a poor family.",
        "{name} was a well-known {role}.",
        "The {role} {name} worked in a small workshop.",
        "{name} worked as a {role} for forty years.",
    ),
    fillers=(
        "A small museum shows tools from the workshop.",
        "The house of the family was later sold.",
        "Friends remembered a patient and quiet neighbour.",
        "A street is named after the family.",
        "Only one portrait is known.",
    ),
    facts=(
        Fact(
            "birthplace",
            "place",
            (
                "{name} was born in {value}.",
                "{name} was born in the town of {value}.",
                "{value} is the town where {name} was born.",
            ),
            ("Where was the {role} {name} born?", "In which town was the {role} {name} born?"),
        ),
        Fact(
            "burial",
            "place",
            (
                "{name} is buried in {value}.",
                "{name} died in old age and is buried in {value}.",
                "The grave of {name} is in {value}.",
            ),
            ("In which town is the {role} {name} buried?", "Where is the grave of the {role} {name}?"),
        ),
        Fact(
            "workshop",
            "place",
            (
                "{name} had a workshop in {value}.",
                "The workshop of {name} was in {value}.",
                "In {value}, {name} had a workshop.",
            ),
            ("In which town did the {role} {name} have a workshop?", "Where was the workshop of the {role} {name}?"),
        ),
        Fact(
            "marriage",
            "person",
            (
                "{name} was married to {value}.",
                "In old age, {name} was married to {value}.",
                "{name} was happily married to {value}.",
            ),
            ("Who was the {role} {name} married to?", "To whom was the {role} {name} married?"),
        ),
        Fact(
            "birth year",
            "year",
            (
                "{name} was born in {value}.",
                "{name} was born in the year {value}.",
                "The parish records say that {name} was born in {value}.",
            ),
        ),
        Fact(
            "death",
            "year",
            ("{name} died in {value}.", "{name} died in the year {value}.", "{name} died of a fever in {value}."),
        ),
        Fact(
            "letters",
            "count",
            (
                "{name} wrote {value} letters.",
                "In all, {name} wrote {value} letters.",
                "There are {value} letters that {name} wrote.",
            ),
            ("How many letters did the {role} {name} write?",),
        ),
    ),
)

PLACE = Kind(
    name="place",
    roles=("village", "market town", "fishing port", "mining town", "mountain village", "harbour town"),
    openings=(
        "{name} is a {role} with narrow streets.",
        "{name} is a quiet {role}.",
        "{name} is a {role} known for its long winters.",
        "The {role} of {name} can be reached by a single road.",
        "{name} is a small {role} with two schools.",
    ),
    fillers=(
        "A fire destroyed much of the old centre.",
        "Most families once kept sheep.",
        "The weekly market sells cheese and wool.",
        "A stone bridge crosses the stream.",
        "Many of the younger people have moved away.",
    ),
    facts=(
        Fact(
            "mayor",
            "person",
            (
                "The first mayor of {name} was {value}.",
                "{value} was the first mayor of {name}.",
                "For ten years the first mayor of {name} was {value}.",
            ),
            ("Who was the first mayor of {name}?", "Who was the first mayor of the {role} {name}?"),
        ),
        Fact(
            "twin town",
            "place",
            (
                "The twin town of {name} is {value}.",
                "{name} is twinned with {value}.",
                "{value} is the twin town of {name}.",
            ),
            ("Which town is {name} twinned with?", "What is the twin town of {name}?"),
        ),
        Fact(
            "church",
            "year",
            (
                "The church of {name} was built in {value}.",
                "In {value}, the church of {name} was built.",
                "The church of {name} was built in the year {value}.",
            ),
        ),
        Fact(
            "railway",
            "year",
            (
                "The railway station of {name} opened in {value}.",
                "In {value}, the railway station of {name} opened.",
                "The railway station of {name} opened in the spring of {value}.",
            ),
        ),
        Fact(
            "paintings",
            "count",
            (
                "The museum of {name} has {value} paintings.",
                "There are {value} paintings in the museum of {name}.",
                "{name} has a museum with {value} paintings.",
            ),
            (
                "How many paintings does the museum of {name} have?",
                "How many paintings are there in the museum of {name}?",
            ),
        ),
        Fact(
            "population",
            "count",
            (
                "{name} has {value} inhabitants.",
                "The population of {name} is {value}.",
                "There are {value} inhabitants in {name}.",
            ),
            ("How many inhabitants does {name} have?", "What is the population of {name}?"),
        ),
    ),
)

WORK = Kind(
    name="work",
    roles=("ballet", "comedy", "musical", "novel", "play", "poem"),
    openings=(
        "{name} is a {role} about pride and forgiveness.",
        "{name} is a {role} in three parts.",
        "The {role} {name} was praised by critics.",
        "{name} is a {role} that was almost forgotten.",
        "{name} is a popular {role}.",
    ),
    fillers=(
        "The first reviews were mixed.",
        "Schools still use it in lessons.",
        "It has been translated into many languages.",
        "A film of the same story was never finished.",
        "Its last part is the most famous one.",
    ),
    titles=(
        "The Weavers of {place}",
        "The Bells of {place}",
        "The Road to {place}",
        "The Garden of {person}",
        "The Children of {place}",
        "The Letters of {person}",
        "The Song of {person}",
    ),
    facts=(
        Fact(
            "hero",
            "person",
            (
                "The main character of {name} is {value}.",
                "{value} is the main character of {name}.",
                "{name} has a main character called {value}.",
            ),
            ("Who is the main character of the {role} {name}?", "Who is the main character of {name}?"),
        ),
        Fact(
            "setting",
            "place",
            (
                "{name} is set in {value}.",
                "{name} is set in the town of {value}.",
                "The story of {name} is set in {value}.",
            ),
            ("Where is the {role} {name} set?", "In which town is the {role} {name} set?"),
        ),
        Fact(
            "publication",
            "year",
            (
                "{name} was published in {value}.",
                "In {value}, {name} was published.",
                "{name} was first published in {value}.",
            ),
        ),
        Fact(
            "pages",
            "count",
            (
                "{name} has {value} pages.",
                "The first edition of {name} has {value} pages.",
                "{name} is {value} pages long.",
            ),
            ("How many pages does {name} have?", "How many pages long is {name}?"),
        ),
    ),
)

EVENT = Kind(
    name="event",
    roles=("event",),
    openings=(
        "The {name} is remembered in many songs.",
        "The {name} surprised the whole region.",
        "The {name} was described in several newspapers.",
        "The {name} is mentioned in many diaries.",
        "Paintings of the {name} can be seen in the town hall.",
    ),
    fillers=(
        "The weather was unusually warm.",
        "A brass band played until midnight.",
        "Several visitors wrote down what they saw.",
        "Local schools celebrate the anniversary.",
        "Some of the letters about it have been lost.",
    ),
    titles=(
        "{place} Boat Race",
        "{place} Chess Tournament",
        "{place} Regatta",
        "{place} Song Contest",
        "{place} Horse Race",
        "{person} Memorial Race",
        "{person} Cup",
    ),
    facts=(
        Fact(
            "winner",
            "person",
            (
                "The winner of the {name} was {value}.",
                "{value} was the winner of the {name}.",
                "To the surprise of many, the winner of the {name} was {value}.",
            ),
            ("Who was the winner of the {name}?", "What was the name of the winner of the {name}?"),
        ),
        Fact(
            "start",
            "place",
            (
                "The {name} began in {value}.",
                "The {name} began in the town of {value}.",
                "It was in {value} that the {name} began.",
            ),
            ("Where did the {name} begin?", "In which town did the {name} begin?"),
        ),
        Fact(
            "end",
            "place",
            (
                "The {name} ended in {value}.",
                "The {name} ended in the town of {value}.",
                "After a week, the {name} ended in {value}.",
            ),
            ("Where did the {name} end?", "In which town did the {name} end?"),
        ),
        Fact(
            "date",
            "year",
            (
                "The {name} took place in {value}.",
                "In {value}, the {name} took place.",
                "The {name} took place in the spring of {value}.",
            ),
        ),
        Fact(
            "participants",
            "count",
            (
                "In all, {value} people took part in the {name}.",
                "The {name} had {value} participants.",
                "There were {value} participants in the {name}.",
            ),
            ("How many people took part in the {name}?", "How many participants did the {name} have?"),
        ),
    ),
)

KINDS = (PERSON, PLACE, WORK, EVENT)
