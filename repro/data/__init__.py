"""Named texts and tasks."""
