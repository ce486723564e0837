"""Reward functions of the tests of GRPO."""


def letter(completions, **_):
    """Returns the share of the letter a in each completion."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def wanted(prompts, completions, wish):
    """Returns how often a column's value is in each completion; a conversation's completion is a message."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    assert len(prompts) == len(texts) == len(wish)
    return [float(text.count(value)) for text, value in zip(texts, wish, strict=True)]


def some(completions):
    """Returns no reward for every third completion."""
    return [None if place % 3 == 0 else float(len(text)) for place, text in enumerate(completions)]


def too_few(completions):
    return [1.0]


def words(completions):
    return ["good"] * len(completions)


def nothing(completions):
    return [0.0] * len(completions)


def lacking(completions, target):
    return [0.0] * len(completions)
