"""From the sample store to a distilled checkpoint: rows, strategies, the loop."""
