"""Context parallelism: a sequence sharded over ranks."""
