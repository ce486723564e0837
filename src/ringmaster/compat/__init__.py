"""Private and undocumented names of other libraries: a module a library, and nowhere else.

Each entry says why it is needed and what breaks without it, and has a test in tests/unit/compat that fails where the
library changes it. The modules import their library, so each may be imported only where the library itself may be.
"""
