"""Conversations with images: the kind of data `image-text`, and what models of images and text need in training."""

DATA_SOURCES = {
    "image-text": "ringmaster.features.image_text.data:ImageText",
    "image-preference": "ringmaster.features.image_text.data:ImagePreference",
}
