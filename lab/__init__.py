"""What only a checkout can use: recorders of truth and operators, witnesses of published code, blind rounds."""
