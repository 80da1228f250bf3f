"""What measurements say: quantities with intervals, claims with verdicts, how much is covered."""
