"""What a person starts besides the table of times: a sweep of launch configurations, the guard, the time of Q4_K."""
