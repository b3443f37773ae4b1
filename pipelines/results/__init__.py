"""What is made of finished stages: reports, comparisons, exports, and the gate."""
