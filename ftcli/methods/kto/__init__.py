"""Learning from single answers that are called good or bad: KTO and unpaired APO."""
