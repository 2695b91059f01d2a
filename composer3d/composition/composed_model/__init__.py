"""A composed model in a loop's hands: its hooks and spans, its copies, and what a loop may not do with it."""
