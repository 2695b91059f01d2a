"""Functions of torch on sharded tensors: dims, shapes, operands and results of each."""
