"""Reward functions of grpo.yaml. Each takes what it needs of prompts, completions and the columns of the data."""


def letter(completions: list[str], letter: list[str]) -> list[float]:
    """Returns the share of each completion's characters that are the letter that its row asks for."""
    return [text.count(wanted) / max(len(text), 1) for text, wanted in zip(completions, letter, strict=True)]


def lower_case(completions: list[str]) -> list[float]:
    """Returns 1 for completions without capital letters."""
    return [float(text == text.lower()) for text in completions]
