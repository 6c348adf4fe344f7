"""The command curry-train: one file for each command."""
