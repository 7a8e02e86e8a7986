"""What a step is asked to do: batches, lengths, images, and their sums."""
