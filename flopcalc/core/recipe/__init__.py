"""What trains, what is recomputed, what is clipped."""
