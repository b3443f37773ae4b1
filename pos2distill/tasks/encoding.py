"""Text to token ids, without special tokens."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import fastokens
import numpy as np

from pos2distill.records import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# White space of all kinds, numbers, punctuation, contractions, scripts, letters composed and decomposed, emoji.
_TRIAL = (
    "  It's 1984, isn't it?\r\n\r\n\tDocument [12](Title: A) x=3.14e-5;\n \n  Ünïcode e\u0301 ﬁ Ⅷ ½ 中文、日本語 "
    "한국어 русский العربية עברית हिन्दी ไทย 🙂👩‍👩‍👧 \u200b\u00a0\u2028<b>&amp;</b> HTTPServer snake_case 'LL 've\n\n\n"
)


def text_encoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], Tokens]:
    """The token ids (T,) of a whole text with no special tokens around it: `tokenizer(text, add_special_tokens=False)`.

    Uses fastokens, which is many times as fast, if it can read the tokenizer and gives the same ids for a trial text
    (byte-level BPE, which nearly all models have today; `benchmarks/pipeline`). Otherwise uses the tokenizer itself.
    """

    def encode(text: str) -> Tokens:
        encoded: Any = tokenizer(text, add_special_tokens=False)
        return np.asarray(encoded["input_ids"], np.int32)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    # BPE dropout is random, so a comparison of two encoders would mean nothing.
    if backend is None or getattr(backend.model, "dropout", None):
        return encode
    try:
        fast = fastokens.Tokenizer.from_json_str(backend.to_str())
    except ValueError:  # a kind of tokenizer that it does not know
        return encode
    fast.no_truncation()  # which a tokenizer's file may ask for, and transformers does not do

    def encode_fast(text: str) -> Tokens:
        try:
            ids, _ = fast.encode_batch_flat([text])
        except ValueError:  # a byte that the vocabulary lacks
            return encode(text)
        return np.frombuffer(ids, np.int32)

    # With the tokens added to the vocabulary, which a text may contain, as a chat template does.
    trial = _TRIAL + " a\n".join(["", *tokenizer.get_added_vocab(), ""]) + _TRIAL
    return encode_fast if np.array_equal(encode(trial), encode_fast(trial)) else encode
