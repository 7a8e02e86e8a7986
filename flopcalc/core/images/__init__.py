"""Images and videos: from pixels to grids of patches, as processors and pipelines make them."""
