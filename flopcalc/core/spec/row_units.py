"""What a spec's rows are summed over, and the names that have values there."""

from __future__ import annotations

# What a spec's `rows = "UNIT: EXPRESSION"` is summed over, and the names that have values there.
UNITS: dict[str, tuple[str, ...]] = {
    # Of the language model, or of an encoder-decoder's encoder.
    # tiles: of its images; last: how many positions have logits, counted from the end, 0 for all; began: the context
    # that decoding started from.
    "sequence": ("n", "c", "decoding", "training", "images", "tiles", "last", "began"),
    # The same, for what compares a text with its images; they are padded to the largest of the call.
    "prompt": ("n", "c", "decoding", "training", "images", "tallest", "widest"),
    # What a mask keeps apart: a packed document, or a row's real tokens and the padding after them.
    "document": ("n", "c", "decoding", "training", "pad"),
    # Of an encoder-decoder's decoder; m: positions of its encoder's text, frames: of its audio; images, their patches,
    # and the sides of the call's largest.
    "decoder": ("n", "c", "decoding", "training", "m", "frames", "images", "patches", "tallest", "widest"),
    "image": ("t", "h", "w", "video"),  # or video (then 1); in patches
    "pair": ("t", "h", "w", "t2", "h2", "w2"),  # of different images of one sample, each pair once
    # Of audio; in the feature extractor's frames: as executed, its own, and those of the batch's longest; and how many
    # images the call has.
    "clip": ("n", "own", "longest", "images"),
    # of the model, as a whole; images may be padded to the tallest and the widest of them, or to the most tiles of one,
    # audio to the longest clip
    "call": (
        "b",
        "n",
        "c",
        "decoding",
        "training",
        "images",
        "tiles",
        "patches",
        "tallest",
        "widest",
        "most",
        "clips",
        "longest",
    ),
}
