"""The torch side: a step of a real model goes in, what it executed comes out."""
