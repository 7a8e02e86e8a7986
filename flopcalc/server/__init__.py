"""A model behind a serving engine: what fits, how long requests wait, what tokens cost."""
