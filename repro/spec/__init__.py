"""What can be asked: recipes, specs of tables, profiles, and the jobs that they lead to."""
