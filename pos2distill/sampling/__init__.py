"""Generation engines, the judge of what they give, and the teacher stage."""
