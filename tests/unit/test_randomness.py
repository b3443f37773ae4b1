from pos2distill.randomness import derive_generator, derive_seed


def test_seeds_are_pinned() -> None:
    """Changing these values changes every result."""
    assert derive_seed(0, "sample", "fox-0001", 4, 2) == 4770480600423571605
    assert derive_generator(0, "epoch", 1).permutation(6).tolist() == [5, 2, 3, 4, 0, 1]


def test_seeds_fit_signed_64_bits_and_differ_by_every_argument() -> None:
    seeds = [derive_seed(seed, what, key) for seed in range(10) for what in "ab" for key in ("x", "y", 1, 2)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_keys_are_kept_apart() -> None:
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c") != derive_seed(0, "a", "b", "c")
