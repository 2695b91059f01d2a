"""What a run did and why one failed, read from what it left."""
