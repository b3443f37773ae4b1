"""From the sample store to a distilled checkpoint: rows, steppers, the loop."""
