"""What measurements say: verdicts on claims, how much is measured."""
