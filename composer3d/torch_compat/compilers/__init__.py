"""torch.compile, captured graphs and graph passes."""
