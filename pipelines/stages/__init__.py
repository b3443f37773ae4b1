"""The stages of a study, one file each."""
