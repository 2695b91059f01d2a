"""Launch scripts of a shell, read and never run: their words, what variables hold, which commands run, and flags.

A text is split into tokens, whose values expand to pieces; control flow says which commands are certain, and the flags
of the one that has most become leaves.
"""
