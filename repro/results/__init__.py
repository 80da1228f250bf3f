"""Results: find what is stored or measured here, accept it, measure it again."""
