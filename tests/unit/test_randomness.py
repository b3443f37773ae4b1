from pos2distill.randomness import derive_generator, derive_seed


def test_derive_seed_is_pinned() -> None:
    """Changing these values changes every result."""
    assert derive_seed(0, "sample", "fox-0001", 4, 2) == 4770480600423571605
    assert derive_generator(0, "epoch", 1).permutation(6).tolist() == [5, 2, 3, 4, 0, 1]


def test_derive_seed_fits_63_bits_and_depends_on_every_argument() -> None:
    seeds = [derive_seed(seed, what, key) for seed in range(10) for what in "ab" for key in ("x", "y", 1, 2)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derive_seed_separates_keys() -> None:
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c") != derive_seed(0, "a", "b", "c")
