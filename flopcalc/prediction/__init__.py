"""From counts to seconds, bytes and money: predict a step, its memory, and the layout of a training run."""
