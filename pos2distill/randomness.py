"""Randomness as a pure function of (seed, purpose, keys): never of worker order, batch cut or clock."""

import hashlib

import numpy as np


def derive_seed(seed: int, purpose: str, *keys: str | int) -> int:
    """A 63-bit seed for one decision.

    The first 8 bytes of SHA-256 over the seed, the purpose and the keys (an example id, an epoch, …), so the same
    decision gets the same seed on any machine, in any order.
    """
    # A separator keeps the keys ("a", "bc") and ("ab", "c") apart.
    text = "\x1f".join([str(seed), purpose, *map(str, keys)])
    # The shift leaves 63 bits, which fit into the signed 64-bit column `seed` of the prompts.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derive_generator(seed: int, purpose: str, *keys: str | int) -> np.random.Generator:
    """A NumPy generator that starts from `derive_seed` of the same arguments."""
    # PCG64 is named, because NumPy may give `default_rng` another generator in a later version.
    return np.random.Generator(np.random.PCG64(derive_seed(seed, purpose, *keys)))
