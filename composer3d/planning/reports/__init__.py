"""A plan for its readers: JSON, a screen, a page, and the difference between two."""
