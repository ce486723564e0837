"""Conversations with images: the kind of data `image-text`, and what models of images and text need in training."""
