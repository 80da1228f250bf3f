"""What is stored: jobs by the hash of their inputs, observations, result rows, where each comes from."""
