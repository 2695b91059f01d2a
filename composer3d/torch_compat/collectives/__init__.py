"""Process groups, collectives and messages between ranks, observed or replaced."""
