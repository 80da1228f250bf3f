"""The timer, its peers, and the kernel times."""
