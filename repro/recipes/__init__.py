"""Recipes: from text to the steps that make a model low-bit, and back."""
