"""Trainers: TRL's, with our loss, our checkpoints and no printing of their own."""
