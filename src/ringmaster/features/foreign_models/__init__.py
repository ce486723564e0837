"""Models of other programs, which come from there or leave for there.

They are checkpoints of other trainers, GGUF files, folders of inference engines, and repositories of a hub.
"""

from enum import StrEnum


class GgufType(StrEnum):
    """The types of the matrices of a GGUF file, whose vectors are float32; q8_0 has 8 bits, scaled in blocks of 32."""

    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
