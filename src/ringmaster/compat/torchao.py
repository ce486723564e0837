"""Private names of torchao, and how it is imported. Importing this imports no torchao."""

import logging
from typing import Any


def quieted() -> None:
    """Has torchao log errors alone.

    Its first import warns about each compiled library that does not load, such as those of GPUs on a CPU.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)


def float8_linear() -> Any:
    """Returns the class of linear layers that multiply in fp8, which `convert_to_float8_training` makes.

    That function makes no subclass, and the class casts inputs to the autocast dtype of GPUs on every device.
    """
    quieted()
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear
