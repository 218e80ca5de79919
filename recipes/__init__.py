"""What is learned: one folder a recipe."""
