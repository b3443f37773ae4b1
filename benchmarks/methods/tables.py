"""The tables of `benchmarks.methods.methods`: their recipes, common settings and variants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Variant:
    """One line of the table.

    settings: settings in addition to those of the table.
    trains: whether a model is distilled.
    seeds: the seeds that run; only the first for a variant without randomness.
    base: the variant to which change and time are relative; it has the same engine and prompt.
    """

    name: str
    settings: tuple[str, ...]
    trains: bool = False
    seeds: tuple[int, ...] = (0,)
    base: str = "base"


@dataclass(frozen=True)
class Table:
    """One report.

    common: the settings that all variants share.
    timed: whether all runs are made one after the other on an otherwise idle machine, so that the time of an answer can
        be compared. Longer tables are made in several parts, on different machines or while other programs run.
    """

    recipe: str
    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    timed: bool = False


def trained(name: str, *settings: str, base: str = "base") -> Variant:
    """A variant that trains with these settings, with each seed."""
    return Variant(name, settings, trains=True, seeds=SEEDS, base=base)


def searched(budget: str) -> tuple[Variant, ...]:
    """LPES and the searches that it is compared with, each with this `inference.search`."""
    lpes = ("inference.method=lpes", f"inference.search={budget}")
    return (
        Variant("uniform scale, searched", (*lpes, "inference.search.strategy=uniform"), seeds=SEEDS),
        Variant("lpes", lpes, seeds=SEEDS),
        Variant("lpes, random search", (*lpes, "inference.search.strategy=random"), seeds=SEEDS),
    )


def views(*settings: str) -> tuple[Variant, ...]:
    """Training on rows whose positions are changed."""
    return tuple(
        trained(f"seqkd + {name}", "method.name=seqkd", f"method.view={view}", *settings)
        for name, view in (("rpsd skip", "skip"), ("rpsd cyclic", "cyclic"), ("pose", "pose"))
    )


BASE = Variant("base", ())
REORDER = Variant("reorder", ("inference.method=reorder",))
R1 = trained("r1", "method.name=r1")
R1_RANDOM_TEACHER = trained("r1, random-slot teacher", "method.name=r1", "method.teacher_slot=random")
R1_RANDOM_SLOT = trained("r1, random sampling slot", "method.name=r1", "method.advantageous_slot=random")
SEQKD = trained("seqkd", "method.name=seqkd")
# As in its paper: without the data set's answers, and with the gold document at random slots.
SEALONG = ("method.name=seqkd", "method.advantageous_slot=random", "sampling.candidates=8", "sampling.keep=all")

TOY_SEARCH = (
    "{generations: 5, population: 12, parents: 6, mutations: 3, crossovers: 3, examples: 40, mutation_step: 0.05}"
)
TOY_VARIANTS = (
    BASE,
    REORDER,
    *searched(TOY_SEARCH),
    # The toy has three layers, so the published first layer leaves one.
    Variant("ms_poe, last layer", ("inference.method=ms_poe", "inference.ms_poe.first_layer=2")),
    Variant("ms_poe, all layers", ("inference.method=ms_poe", "inference.ms_poe.first_layer=0")),
    Variant("attention_buckets", ("inference.method=attention_buckets",)),
    R1,
    R1_RANDOM_SLOT,
    R1_RANDOM_TEACHER,
    # Two rounds of one epoch: the same number of rows and steps as the two epochs of the others.
    trained("on-policy r1", "method.name=r1-on-policy", "training.epochs=1"),
    trained(
        "on-policy r1, random-slot teacher",
        *("method.name=r1-on-policy", "method.teacher_slot=random", "training.epochs=1"),
    ),
    SEQKD,
    trained("sealong", *SEALONG),
    # Skips need twice the positions of a row, and the toy has 1,024.
    *views("model.max_length=512"),
    trained("r1 + lpes", "method.name=r1", "inference.method=lpes", f"inference.search={TOY_SEARCH}"),
)

TWO_HOP_VARIANTS = (
    BASE,
    REORDER,
    Variant("lpes", ("inference.method=lpes", f"inference.search={TOY_SEARCH}"), seeds=SEEDS),
    SEQKD,
    trained("r2", "method.name=r2"),
    trained("sft", "method.name=sft"),
    # Skips need twice the positions of a row, and the toy has 1,024.
    trained("r2 + rpsd skip", "method.name=r2", "method.view=skip", "model.max_length=512"),
)

# Also where `auto` would choose float32, so that runs of several machines are of one precision.
BFLOAT16 = ("model.dtype=bfloat16", "training.precision=bfloat16")
FLOAT32 = ("model.dtype=float32", "training.precision=float32")

BASE_HF = Variant("base, hf", ("model.engine=hf",), base="base, hf")
COC = ("data.prompt=coc", "data.metric=em", "evaluation.max_new_tokens=512")
BASE_COC = Variant("base, coc", COC, base="base, coc")

# 12 candidates on 20 questions: more would take hours on two cores.
REAL_SEARCH = "{generations: 3, population: 6, parents: 3, mutations: 2, crossovers: 1, examples: 20}"
# With larger scales this model answers nothing, as searches in the whole range show.
NARROW_SEARCH = f"{REAL_SEARCH[:-1]}, largest: 1.3}}"
NARROW_LPES = ("inference.method=lpes", f"inference.search={NARROW_SEARCH}")
REAL_VARIANTS = (
    BASE,
    REORDER,
    *searched(REAL_SEARCH),
    Variant("lpes, scales up to 1.3", NARROW_LPES, seeds=SEEDS),
    BASE_HF,
    Variant("ms_poe", ("inference.method=ms_poe", "model.engine=hf"), base=BASE_HF.name),
    Variant("attention_buckets", ("inference.method=attention_buckets", "model.engine=hf"), base=BASE_HF.name),
    R1,
    # The recipe's rate is 5e-5. Others were tried on other questions: it is SFT's best in `rates_gpu`, 1e-4 SeqKD's; of
    # the others, these are the best in `rates_cpu`.
    trained("r1, rate 2e-4", "method.name=r1", "training.learning_rate=2e-4"),
    trained("kl, rate 1e-4", "method.name=kl", "training.learning_rate=1e-4"),
    trained("kl+align, rate 2e-4", "method.name=kl+align", "training.learning_rate=2e-4"),
    trained("seqkd, rate 1e-4", "method.name=seqkd", "training.learning_rate=1e-4"),
    # R1's rate.
    trained("seqkd, rate 2e-4", "method.name=seqkd", "training.learning_rate=2e-4"),
    # The steps of on-policy R1, whose two rounds have an epoch each.
    trained("r1, 2 epochs", "method.name=r1", "training.epochs=2"),
    # As many steps as with K = 2.
    trained("r1, K = 1", "method.name=r1", "method.k=1", "training.global_batch_rows=6"),
    trained("r1, K = 4", "method.name=r1", "method.k=4", "training.global_batch_rows=15"),
    R1_RANDOM_SLOT,
    R1_RANDOM_TEACHER,
    # Twice the steps of R1: two rounds of one epoch.
    trained("on-policy r1", "method.name=r1-on-policy"),
    trained("on-policy r1, random-slot teacher", "method.name=r1-on-policy", "method.teacher_slot=random"),
    trained("kl+align", "method.name=kl+align"),
    trained("kl", "method.name=kl"),
    SEQKD,
    trained("sft", "method.name=sft"),
    *views(),
    trained("sealong", *SEALONG, "sampling.temperature=0.7"),
    # The prompt asks for chains with sources, so the base gets the same prompt.
    BASE_COC,
    trained("longfaith", "method.name=seqkd", *COC, "sampling.max_new_tokens=512", base=BASE_COC.name),
    trained("r1 + lpes", "method.name=r1", "inference.method=lpes", f"inference.search={REAL_SEARCH}"),
    trained("r1 + lpes, scales up to 1.3", "method.name=r1", *NARROW_LPES),
)

# On a GPU: transformers in one process, with batches and micro-batches as large as a few processes on one card allow.
ON_GPU = (
    "model.engine=hf",
    *BFLOAT16,
    "runtime.executor=local",
    "runtime.samplers={gpus: 1, batch_size: 128}",
    "runtime.teachers={gpus: 1, batch_size: 64}",
    "runtime.trainers={strategy: torch, gpus: 1, gradient_checkpointing: false, micro_batch_tokens: 16384}",
    "evaluation.seed=0",
    "evaluation.reference_prompts=false",
)

# Chosen by `rates_gpu` on other questions. Variants whose losses differ only in a part have the same rate.
KL_RATE = "training.learning_rate=2e-4"
SEQKD_RATE = "training.learning_rate=1e-4"
SFT_RATE = "training.learning_rate=5e-5"
# 26 candidates on 40 questions.
GPU_SEARCH = "{generations: 4, population: 8, parents: 4, mutations: 4, crossovers: 2, examples: 40}"


def by_objective() -> tuple[Variant, ...]:
    """Each part of R1's objective, and cross-entropy on the same answers (SeqKD) and on those of the data set (SFT)."""
    return (
        trained("r1", "method.name=r1", KL_RATE),
        trained("seqkd", "method.name=seqkd", SEQKD_RATE),
        trained("kl", "method.name=kl", KL_RATE),
        trained("sft", "method.name=sft", SFT_RATE),
        trained("kl+align", "method.name=kl+align", KL_RATE),
    )


# The most important variants first, for a GPU that can be used for a limited time.
FACTS_GPU_VARIANTS = (
    BASE,
    *by_objective(),
    REORDER,
    Variant("ms_poe", ("inference.method=ms_poe",)),
    Variant("attention_buckets", ("inference.method=attention_buckets",)),
    *searched(GPU_SEARCH),
    trained("r1, random sampling slot", "method.name=r1", "method.advantageous_slot=random", KL_RATE),
    trained("r1, random-slot teacher", "method.name=r1", "method.teacher_slot=random", KL_RATE),
    # Two rounds of one epoch.
    trained("on-policy r1", "method.name=r1-on-policy", KL_RATE),
    *views(SEQKD_RATE),
    trained("r1 + lpes", "method.name=r1", "inference.method=lpes", f"inference.search={GPU_SEARCH}", KL_RATE),
    # As many steps as with K = 2.
    trained("r1, K = 1", "method.name=r1", "method.k=1", "training.global_batch_rows=6", KL_RATE),
    trained("r1, K = 4", "method.name=r1", "method.k=4", "training.global_batch_rows=15", KL_RATE),
    # Twelve examples in a batch, so that a slot has several rows and its position weight is less of one row's KL.
    trained("r1, batches of 36", "method.name=r1", "training.global_batch_rows=36", "training.epochs=4", KL_RATE),
    trained(
        "kl+align, batches of 36",
        *("method.name=kl+align", "training.global_batch_rows=36", "training.epochs=4", KL_RATE),
    ),
    # The steps of on-policy R1.
    trained("r1, 2 epochs", "method.name=r1", "training.epochs=2", KL_RATE),
    trained("on-policy r1, random-slot teacher", "method.name=r1-on-policy", "method.teacher_slot=random", KL_RATE),
    trained("sealong", *SEALONG, "sampling.temperature=0.7", SEQKD_RATE),
)


def by_rate(rates: Mapping[str, Sequence[str]]) -> tuple[Variant, ...]:
    """Each method with each of its learning rates."""
    return tuple(
        trained(f"{name}, rate {rate}", f"method.name={name}", f"training.learning_rate={rate}")
        for name, rates_of_method in rates.items()
        for rate in rates_of_method
    )


RATES = ("2e-5", "5e-5", "1e-4", "2e-4")
RATES_GPU_VARIANTS = (BASE, *by_rate({"r1": (*RATES, "5e-4"), "seqkd": RATES, "sft": RATES}))

KL_RATES = ("1e-4", "2e-4", "5e-4", "1e-3")
RATES_CPU_VARIANTS = (
    BASE,
    *by_rate(
        {
            "r1": KL_RATES,
            "kl": KL_RATES,
            "kl+align": KL_RATES,
            "seqkd": ("1e-4", "2e-4", "5e-4"),
            "sft": ("5e-5", "1e-4", "2e-4"),
        }
    ),
)

# All seeds have the same evaluation questions: a seed changes training, search and the examples that these use.
TABLES = {
    "toy": Table(
        "quickstart",
        (
            "evaluation.slots=[0, 7, 14, 22, 29]",
            "evaluation.other_documents=[]",
            "evaluation.seed=0",
            "runtime.executor=local",
        ),
        TOY_VARIANTS,
        timed=True,
    ),
    "two_hop": Table("quickstart_r2", ("evaluation.seed=0", "runtime.executor=local"), TWO_HOP_VARIANTS, timed=True),
    "smollm2": Table(
        "facts_smollm2",
        (
            "data.eval_examples=120",
            "evaluation.slots=[0, 3, 7]",
            "evaluation.seed=0",
            # These have shorter prompts, which would change the measured time of an answer.
            "evaluation.reference_prompts=false",
            *BFLOAT16,
        ),
        REAL_VARIANTS,
    ),
    # Six examples in a batch, with two of three slots each: nearly every slot has several rows (98 %), so that position
    # weights differ from equal ones. 30 steps, as in the table above.
    "few_slots": Table(
        "facts_smollm2",
        (
            "data.documents=4",
            "data.eval_examples=120",
            "evaluation.slots=[0, 1, 2, 3]",
            "evaluation.seed=0",
            "evaluation.reference_prompts=false",
            "training.global_batch_rows=18",
            "training.epochs=2",
        ),
        (BASE, trained("kl+align", "method.name=kl+align"), trained("kl", "method.name=kl")),
    ),
    # `python -m examples.smollm2.facts runs/facts.jsonl.gz --records 1600`
    "facts_gpu": Table(
        "facts_smollm2",
        ("data.train_examples=180", "data.eval_examples=150", *ON_GPU, "runtime.samplers.batch_size=256"),
        FACTS_GPU_VARIANTS,
    ),
    # `python -m examples.smollm2.facts runs/facts_rates.jsonl.gz --records 800 --seed 1`
    "rates_gpu": Table(
        "facts_smollm2",
        (
            "data.path=runs/facts_rates.jsonl.gz",
            "data.train_examples=180",
            "data.eval_examples=100",
            *ON_GPU,
            "runtime.samplers.batch_size=256",
        ),
        RATES_GPU_VARIANTS,
    ),
    # The same questions on two cores, at fewer positions and with half the answers.
    "rates_cpu": Table(
        "facts_smollm2",
        (
            "data.path=runs/facts_rates.jsonl.gz",
            "data.eval_examples=100",
            "evaluation.slots=[0, 3, 7]",
            "evaluation.seed=0",
            "evaluation.reference_prompts=false",
            *FLOAT32,
        ),
        RATES_CPU_VARIANTS,
    ),
    "nq_gpu": Table(
        "nq_smollm2",
        (
            "method.advantageous_slot=last",
            "data.eval_fraction=0.4",
            "data.train_examples=150",
            "data.eval_examples=200",
            *ON_GPU,
        ),
        (
            BASE,
            *by_objective(),
            REORDER,
            Variant("lpes", ("inference.method=lpes", f"inference.search={GPU_SEARCH}"), seeds=SEEDS),
        ),
    ),
    "kv_gpu": Table("kv_smollm2", ON_GPU, (BASE, *by_objective())),
}
