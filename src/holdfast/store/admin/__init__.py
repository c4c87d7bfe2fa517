"""Administration of whole stores: copy, move, routing of universes, new generations."""
