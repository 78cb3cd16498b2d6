"""Graph passes: each one a frozen value that turns a legal TrainingGraph into the next."""
