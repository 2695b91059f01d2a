"""Loss, optimizer and learning rate of a run, by step."""
