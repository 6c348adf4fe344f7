"""Step times and savings of strategies, measured in turns."""
