"""Small models and data files that tests make themselves."""

import json
from pathlib import Path
from typing import Any

SPECIALS = ("<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_examples(path: Path | str, count: int, documents: int) -> Path:
    """Write `count` questions in the generic format, each with its gold document first."""

    def document(index: int, gold: bool) -> dict[str, Any]:
        # 7919 is prime to 10000, so no two of 10000 codes are equal.
        code = index * 7919 % 10000
        return {"title": f"Fox{index:04d}", "text": f"The code of Fox{index:04d} is {code:04d}.", "gold": gold}

    lines = []
    for index in range(count):
        gold = document(index, True)
        others = [document((index + step) % 10000, False) for step in range(1, documents)]
        row = {
            "id": f"fox-{index:04d}",
            "question": f"Which code has {gold['title']}?",
            "answers": [gold["text"][-5:-1]],
            "documents": [gold, *others],
        }
        lines.append(json.dumps(row))
    path = Path(path)
    path.write_text("\n".join(lines) + "\n")
    return path
