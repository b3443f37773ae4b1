"""What several test modules use: samples and stores, groups of ranks, sizes of tiny models."""
