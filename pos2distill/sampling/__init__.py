"""Generation engines, post-processing of their responses, and the teacher's hidden states."""
