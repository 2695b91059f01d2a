"""An optimizer step: micro-batches, losses, gradients, guard and optimizer, from the engine downwards."""
