"""What can be asked: tables, figures, claims, and the scales that they are measured at."""
