"""One optimizer step of a rank of a world that is not there: composed, run on tensors without values, written down."""
