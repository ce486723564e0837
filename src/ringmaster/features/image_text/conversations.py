"""Conversations whose messages have images: which images they are, and where they are in the text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringmaster.techniques.data.chat_template import CONTENT, Message
from ringmaster.techniques.data.sources.chat import ROLES, messages_of, with_system

MARK = "\ue000"
"""Stands for an image in the text of a message, which has no characters of private use."""
PLACE = "<image>"
"""The text that stands for an image where a row has a column of images, as in LLaVA's files."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""The types of the parts of a message that are images."""
KEYS_OF_IMAGES = ("image", "path", "url", "image_url", "bytes")
"""The keys of such a part for the image."""
MEDIA_PARTS = ("video", "audio", "input_audio", "input_video")


def images_in(value: Any) -> list[Any]:
    """Returns the images of a column: of a list, or a single one; a text may be the JSON of a list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None:
        return []
    return [*value] if isinstance(value, (list, tuple)) else [value]


def at_paths(image: Any, folder: Path | None) -> Any:
    """Returns an image with its path behind a folder, where it is given by a path that is no URL."""
    if isinstance(image, Mapping) and image.get("bytes") is None and isinstance(image.get("path"), str):
        image = image["path"]
    if isinstance(image, str) and folder is not None and "://" not in image:
        return str(folder / image)
    return image


def conversation_of(row: Mapping[str, Any], *, roles: Any = ()) -> tuple[list[Message], list[Any]]:
    """Returns the messages of a row, and their images in the order of the text.

    A message with images has a list of parts as its content, {"type": "image"} for each image. An image is what its
    part has under `image`, `path` or `url`, or else the next one of the row's images. Where messages have no place for
    an image, all images come before the first message of the user's, as in TRL.

    row: with the roles messages, system and images. roles: as of `messages_of`.

    Raises ValueError where messages are wrong, or have more or fewer places than there are images.
    """
    given, images = _parsed(row["messages"]), images_in(row["images"])
    row_images: list[Any] = []
    marked = [_with_marks(each, row_images, has_images=bool(images)) for each in given]
    if images and not row_images:
        marked = _images_first(marked, len(images))
        row_images = [None] * len(images)
    num_places = sum(each is None for each in row_images)
    if num_places != len(images):
        raise ValueError(
            f"the messages have {num_places} places for images, and the row has {len(images)} images. To fix: give one "
            'part {"type": "image"} for each image'
        )
    waiting = iter(images)
    row_images = [next(waiting) if each is None else each for each in row_images]
    messages = with_system(messages_of(marked, roles=roles), row["system"])
    if not row_images:
        raise ValueError(
            "it has no image, and a model's part for images would then have no gradient on some devices. To fix: "
            "remove the row, or train on texts in a job of kind chat"
        )
    return [_in_parts(message) for message in messages], row_images


def _parsed(value: Any) -> Any:
    """Messages, of which a table may have the JSON; those that are wrong stay as they are."""
    if isinstance(value, str):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    return value if isinstance(value, list) else messages_of(value)


def _with_marks(message: Any, row_images: list[Any], *, has_images: bool) -> Any:
    """A message with marks for its images, which are added to `row_images`; None for one of the row's own."""
    if not isinstance(message, Mapping):
        return message
    key = "value" if "from" in message and "value" in message else CONTENT
    content = message.get(key)
    if isinstance(content, str) and has_images and PLACE in content:
        row_images += [None] * content.count(PLACE)
        return {**message, key: content.replace(PLACE, MARK)}
    if not isinstance(content, list):
        return message
    return {**message, key: [*_marked_parts(content, row_images)]}


def _marked_parts(parts: Sequence[Any], row_images: list[Any]) -> Iterator[Any]:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in MEDIA_PARTS:
            raise ValueError(f"it has a part of type {kind!r}, and only images and texts are read. To fix: remove it")
        if kind not in IMAGE_PARTS:
            yield part
            continue
        image = next((part[key] for key in KEYS_OF_IMAGES if part.get(key) is not None), None)
        if isinstance(image, Mapping) and "url" in image:  # as in OpenAI's format
            image = image["url"]
        row_images.append(image)
        yield {"type": "text", "text": MARK}


def _images_first(messages: Sequence[Any], number: int) -> list[Any]:
    """Messages with marks of images before the content of the first one that is the user's."""
    result = [*messages]
    for place, message in enumerate(result):
        if not isinstance(message, Mapping):
            continue
        key = "value" if "from" in message and "value" in message else CONTENT
        name = message.get("from" if key == "value" else "role")
        if isinstance(name, str) and ROLES.get(name.strip().lower()) == "user" and message.get(key):
            content, marks = message[key], MARK * number
            first = [{"type": "text", "text": marks}]
            result[place] = {**message, key: [*first, *content] if isinstance(content, list) else f"{marks}{content}"}
            break
    return result


def _in_parts(message: Message) -> Message:
    """A message with a list of texts and images in place of a text with marks."""
    content = message.get(CONTENT)
    if not isinstance(content, str) or MARK not in content:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, CONTENT: parts}
