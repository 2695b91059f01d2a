"""The model of a step without running one: memory, operators and collectives of a layout, in closed form."""
